"""Import: a LoRA or BEFT folder of PEFT as an ordinary delta with the same outputs.

A pair beside a matrix of a layer stays a pair. Beside a matrix outside the layers (a pooler, a head) it is merged into
that matrix, and the delta holds the merged matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .. import __version__
from ..arrays import Array, Tensors
from ..bank.lanes import lane_of_delta
from ..data.examples import Columns
from ..delta.change import change_map
from ..delta.delta import INDEX, VALUE, Delta
from ..delta.hub import local_folder
from ..delta.meta import HUB_ID, Meta
from ..delta.peft_folder import CONFIG, WEIGHTS, PeftFolder, read_folder
from ..errors import DeltaError, ModelError, UsageError
from ..model.anatomy import HEAD, Site, anatomy
from ..model.base import Base, load_base
from ..model.expression import expression
from ..model.grafts import NONE, Place, Target
from ..model.lora import LORA
from ..model.task_model import Model
from ..tasks import Task
from .export import empty_task_model, stock_class

KINDS = {"SEQ_CLS": "classification", "TOKEN_CLS": "tagging", "QUESTION_ANS": "answering"}
CLASSES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
LONGEST = 512  # the default maximum length in tokens; PEFT does not save one
UNKNOWN_OUTPUTS = 1_000_003  # a placeholder for the number of outputs, which no real layer has


def import_peft(
    folder: str | Path,
    base: Base | str | None = None,
    *,
    task: str | None = None,
    labels: Sequence[str] | None = None,
    max_length: int | None = None,
    pairs: bool = False,
) -> Delta:
    """A PEFT folder, local or `hf:owner/name` on the hub, as a delta with the same outputs.

    PEFT saves neither the names of the classes nor how texts are read. `labels` names the classes (by default the
    base's configuration does, or they are LABEL_0, LABEL_1, ...), `pairs` says that an input is two texts, and
    `max_length` where texts are cut (by default 512 tokens, or the base's limit). `task` overrides the kind of task
    that the folder's task type stands for. A folder that bitfit exported contains all of this.
    """
    adapter = read_folder(local_folder(folder, (CONFIG, WEIGHTS)))
    base = base if isinstance(base, Base) else _base_of(adapter, base)
    requested = task or (adapter.origin.task if adapter.origin is not None else None)
    kind = _kind(adapter, requested)
    names = _Names.of(adapter, base, kind)
    outputs = _outputs(adapter, base, names)
    if outputs == 1 and not requested:
        kind = "regression"
    imported_task = _task(adapter, base, kind, labels, outputs)
    model = Model(base, outputs, "tokens" if imported_task.by_token else "cls")
    if stock_class(base, model, imported_task) is None:
        raise DeltaError(
            f"{adapter.path}: the head of {names.class_name} of {base.config.model_type} is more than one linear layer "
            "on the states of the tokens, which a delta cannot represent"
        )
    importing = _Import(adapter, base, names, model)
    importing.check_shapes()
    tensors = importing.tensors()
    delta = Delta(tensors, importing.meta(imported_task, tensors, max_length, pairs))
    lane_of_delta(model, delta)  # makes every check that a trained delta passes
    return delta


def _base_of(adapter: PeftFolder, spec: str | None) -> Base:
    """The base that the user names, else the hub id in the folder. A path in the folder's settings is not used."""
    if spec is not None:
        return load_base(spec)
    settings = adapter.settings
    name = settings.base_model_name_or_path or ""
    if not HUB_ID.fullmatch(name) or Path(name).exists():
        raise ModelError(f"{adapter.path / CONFIG}: its base {name[:80]!r} is not a hub id; pass --base FOLDER")
    revision = settings.revision or "main"
    if revision != "main":
        raise ModelError(
            f"{adapter.path / CONFIG}: trained on revision {revision[:80]!r} of {name}; download that revision and "
            "pass --base FOLDER"
        )
    return load_base(name)


def _kind(adapter: PeftFolder, requested: str | None) -> str:
    """The requested kind of task, else the kind that the task type or the class of the base model stands for."""
    settings = adapter.settings
    declared = settings.task_type
    if declared is None:
        of_class = str((settings.auto_mapping or {}).get("base_model_class", ""))
        declared = next((kind for end, kind in CLASSES.items() if of_class.endswith(end)), None)
    kind = KINDS.get(declared or "")
    if kind is None and declared is not None:
        raise DeltaError(f"{adapter.path}: unknown task type {declared[:40]}; bitfit imports {', '.join(KINDS)}")
    if kind is None and requested is None:
        raise UsageError(f"{adapter.path / CONFIG}: has no task type; pass the kind of task with --task")
    by_token = {"tagging", "answering"}
    if requested is not None and kind is not None and requested != kind and {requested, kind} & by_token:
        raise UsageError(f"--task {requested}: the folder is for {kind}")
    return requested or str(kind)


@dataclass(frozen=True)
class _Names:
    """How the class of transformers that PEFT wrapped names its tensors."""

    class_name: str  # AutoModelFor...
    prefix: str  # of the names in the encoder
    final: str  # the linear layer that gives the outputs
    tokens: bool

    @classmethod
    def of(cls, adapter: PeftFolder, base: Base, kind: str) -> _Names:
        task = Task.of(kind, ("a", "b"))
        name = task.transformers_class
        if type(base.config) not in getattr(transformers, name)._model_mapping:
            raise DeltaError(f"{adapter.path}: transformers has no {name} for {base.config.model_type}")
        outputs = 2 if kind == "answering" else UNKNOWN_OUTPUTS
        wrapped = empty_task_model(base, name, outputs)
        final = [path for path, module in wrapped.named_modules() if getattr(module, "out_features", 0) == outputs]
        if len(final) != 1:
            raise DeltaError(f"{adapter.path}: {name} of {base.config.model_type} has no single output layer")
        return cls(name, f"{wrapped.base_model_prefix}.", final[0], task.by_token)

    def encoder(self, name: str) -> str | None:
        """A name of the encoder as the base has it; None for one of the head."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def head(self, name: str) -> str:
        """A name of the head as a delta has it."""
        if self.tokens and name.startswith(f"{self.final}."):
            return f"{HEAD}classifier.{name.removeprefix(self.final)[1:]}"
        return HEAD + name

    def delta(self, name: str) -> str:
        """A name as a delta has it."""
        inner = self.encoder(name)
        return self.head(name) if inner is None else inner


def _outputs(adapter: PeftFolder, base: Base, names: _Names) -> int:
    key = adapter.values.get(f"{names.final}.weight")
    if key is None:
        return int(base.config.num_labels)
    shape = adapter.shapes[key]
    if len(shape) != 2 or not 0 < shape[0] < 1 << 20:
        raise DeltaError(f"{adapter.path / WEIGHTS}: {key} has shape {shape}, which is not that of a head")
    return shape[0]


def _task(adapter: PeftFolder, base: Base, kind: str, labels: Sequence[str] | None, outputs: int) -> Task:
    origin = adapter.origin
    if kind in ("regression", "answering"):
        wanted = 1 if kind == "regression" else 2
        if labels or outputs != wanted:
            raise UsageError(f"{adapter.path}: {kind} has {wanted} outputs and no labels; the folder has {outputs}")
        return Task.of(kind, ())
    known = _labels_of(base, outputs) if origin is None else origin.labels
    named = tuple(labels or known)
    if len(named) != outputs or len(set(named)) < outputs:
        raise UsageError(f"--labels: name the folder's {outputs} classes, each once and in their order")
    return Task.of(kind, named)


def _labels_of(base: Base, outputs: int) -> tuple[str, ...]:
    """The names in the base's configuration, if it has as many."""
    named = [str(base.config.id2label[number]) for number in sorted(base.config.id2label)]
    return tuple(named) if len(named) == outputs else tuple(f"LABEL_{number}" for number in range(outputs))


@dataclass(frozen=True)
class _Import:
    """A folder, the base and a model of the folder's task."""

    adapter: PeftFolder
    base: Base
    names: _Names
    model: Model

    def check_shapes(self) -> None:
        """Refuse tensors that do not fit the model, before any of them is read."""
        adapter, names = self.adapter, self.names
        for name, key in adapter.values.items():
            self._require(key, self._shape(names.delta(name)))
        for module, key in adapter.offsets.items():
            name = names.delta(f"{module}.bias")
            shape = self._shape(name) or self.base.target.lacking.get(name)
            flat = adapter.shapes[key] == shape
            self._require(key, shape if flat or shape is None else (1, *shape))
        for module, roles in adapter.pairs.items():
            shape = self._shape(names.delta(f"{module}.weight"))
            rank = adapter.settings.rank(module)
            expected: dict[str, tuple[int, ...]] = {}
            if shape is not None and len(shape) == 2:
                inputs, outputs = self._sizes(module, shape)
                expected = {"A": (rank, inputs), "B": (outputs, rank), "bias_B": (outputs,)}
            for role, key in roles.items():
                self._require(key, expected.get(role))

    def _require(self, key: str, shape: tuple[int, ...] | None) -> None:
        where = self.adapter.path / WEIGHTS
        if shape is None:
            raise DeltaError(f"{where}: {self.base.name} has no parameter for {key}; pass the right base with --base")
        if self.adapter.shapes[key] != shape:
            raise DeltaError(
                f"{where}: {key} has shape {self.adapter.shapes[key]}, but {self.base.name} takes {shape}; "
                "pass the right base with --base"
            )

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name in self.model.head:
            return self.model.head[name]
        parameter = self.base.parameters.get(name)
        return None if parameter is None else tuple(parameter.shape)

    def _sizes(self, module: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of inputs and outputs of a matrix."""
        axis = 1 if self._transposed(module) else 0
        return shape[1 - axis], shape[axis]

    def _transposed(self, module: str) -> bool:
        """Whether the columns of a module's matrix are its outputs, as in GPT-2; those of a head never are."""
        return self.names.encoder(module) is not None and self.base.target.architecture.output_axis == 1

    def tensors(self) -> Tensors:
        """The tensors of the delta."""
        adapter, names = self.adapter, self.names
        read = adapter.load()
        tensors: Tensors = {names.delta(name): read[key] for name, key in adapter.values.items()}
        self._complete_head(tensors)
        for module, roles in adapter.pairs.items():
            scale = np.float32(adapter.settings.scale(module))
            self._add_pair(tensors, module, read[roles["A"]], read[roles["B"]], scale)
            if "bias_B" in roles:
                self._add_offset(tensors, module, scale * read[roles["bias_B"]])
        for module, key in adapter.offsets.items():
            self._add_offset(tensors, module, read[key].reshape(-1))
        if adapter.settings.task_type == "QUESTION_ANS" and self.base.segments:
            self._join_segments(tensors)
        return tensors

    def _join_segments(self, tensors: Tensors) -> None:
        """Give all segments the embedding of the first: PEFT's class for questions passes no segment ids on."""
        name = self.base.target.architecture.inputs["types"]
        before = tensors.pop(name, self.base.values(name))
        tensors[name + INDEX] = np.arange(before.shape[1], before.size, dtype=np.int64)
        tensors[name + VALUE] = np.tile(before[0], len(before) - 1)

    def _add_pair(self, tensors: Tensors, module: str, down: Array, up: Array, scale: np.float32) -> None:
        """Add a pair beside its matrix, one for each of q, k and v where these share it, or merge it."""
        inner = self.names.encoder(module)
        parts = [] if inner is None else _parts(self.base.target, inner)
        for part in parts:
            ending = f"_{part}" if part else ""
            columns = self.base.target.columns(Place("lora", str(inner), part))
            tensors[f"{inner}.lora_A{ending}"] = down
            tensors[f"{inner}.lora_B{ending}"] = up[columns]
            tensors[f"{inner}.lora_scale{ending}"] = np.array([scale], np.float32)
        if not parts:
            name = self.names.delta(f"{module}.weight")
            change = scale * (up @ down)
            before = tensors[name] if name in tensors else self.base.values(name)
            tensors[name] = before + (change.T if self._transposed(module) else change)

    def _add_offset(self, tensors: Tensors, module: str, offset: Array) -> None:
        """Add a vector to a layer's bias; a layer without one gets it."""
        name = self.names.delta(f"{module}.bias")
        if name in tensors:
            tensors[name] = tensors[name] + offset
        elif name in self.base.parameters:
            tensors[name] = self.base.values(name) + offset
        else:
            tensors[name] = offset

    def _complete_head(self, tensors: Tensors) -> None:
        """Add the tensors of the head that are not in the folder, from the base's checkpoint."""
        missing = {name for name in self.model.head if name not in tensors}
        if not missing:
            return
        checkpoint = self._checkpoint_head()
        absent = sorted(name.removeprefix(HEAD) for name in missing - checkpoint.keys())
        if absent:
            modules = sorted({name.partition(".")[0] for name in absent})
            raise DeltaError(
                f"{self.adapter.path}: neither the folder nor the base has {', '.join(absent)}, which PEFT initialises "
                f"at random; train again with modules_to_save={modules}"
            )
        tensors |= {name: checkpoint[name] for name in missing}

    def _checkpoint_head(self) -> Tensors:
        """The head in the base's checkpoint, by the delta's names; empty if it has none that fits."""
        source = self.base.config._name_or_path
        model_class = getattr(transformers, self.names.class_name)
        try:
            model, info = model_class.from_pretrained(
                source, dtype=torch.float32, local_files_only=True, output_loading_info=True, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError):  # not a checkpoint of this class
            return {}
        head: Tensors = {}
        for name, parameter in model.named_parameters():
            target = self.names.delta(name)
            fits = target in self.model.head and self.model.head[target] == tuple(parameter.shape)
            if fits and name not in info["missing_keys"]:
                head[target] = parameter.detach().numpy()
        return head

    def meta(self, task: Task, tensors: Tensors, max_length: int | None, pairs: bool) -> Meta:
        """The metadata of the delta."""
        base = self.base
        origin = self.adapter.origin
        inject = _injected(base, tensors)
        model = Model(base, task.outputs, self.model.pool, inject)
        head = sum(math.prod(shape) for shape in model.head.values())
        encoder = task.encoder(base, max_length or min(LONGEST, base.max_length))
        versions = {"bitfit": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
        answering = task.kind == "answering"
        meta = Meta(
            base=base.name,
            hub=base.hub,
            fingerprint=base.fingerprint,
            select=_selected(base, tensors, inject),
            inject=inject,
            head="full",
            init="keep",
            pool=model.pool,
            task=task.kind,
            labels=task.labels,
            center=0.0,
            spread=1.0,
            columns=Columns("question", "context", "answers") if answering else _columns(pairs),
            max_length=encoder.max_length,
            stride=encoder.stride if task.by_token else 0,
            metric=task.metric,
            metrics={},
            trained=sum(math.prod(shape) for shape in self.adapter.shapes.values()),
            total=base.anatomy.total + sum(site.size for site in model.anatomy.sites if site.graft) + head,
            change={term: tuple(row) for term, row in change_map(model, tensors).items()},
            versions=versions,
            recipe="peft",
        )
        return meta if origin is None else _with_origin(meta, origin, max_length)


def _columns(pairs: bool) -> Columns:
    return Columns("text", "text_pair" if pairs else None, "label")


def _with_origin(meta: Meta, origin: Meta, max_length: int | None) -> Meta:
    """The metadata of a folder that bitfit exported, with fields of the delta that it was made from."""
    names = ["fingerprint", "name", "columns", "trial", "recipe"]
    if max_length is None:
        names += ["max_length", "stride"]
    if (meta.task, meta.labels) == (origin.task, origin.labels):
        names += ["positive", "metric", "metrics"]
    fields: dict[str, Any] = {name: getattr(origin, name) for name in names}
    return replace(meta, **fields, trained=min(origin.trained, meta.total))


def _parts(target: Target, module: str) -> list[str]:
    """The parts of a module's matrix that a pair is added to: "" for all of it, or q, k and v; none outside layers."""
    return [part for part in ("", "q", "k", "v") if target.matrix(Place("lora", module, part)) is not None]


# ---- what was trained, in the selection language


def _injected(base: Base, tensors: Tensors) -> str:
    """The text of --inject for the grafts among a delta's tensors."""
    target = base.target
    biases = [name for name in tensors if name in target.lacking]
    texts = []
    if biases:
        full = anatomy(target.architecture, {**target.anatomy.shapes, **target.lacking})
        texts = [expression(full, [site for site in full.sites if site.name in biases])]
    matrices: dict[tuple[int, float], list[Site]] = {}
    for name, array in tensors.items():
        location = LORA.locate(name)
        if location is None:
            continue
        place, role = location
        if role != "A":
            continue
        site = target.matrix(place)
        assert site is not None
        scale = tensors[name.replace(".lora_A", ".lora_scale")][0]
        matrices.setdefault((len(array), float(scale)), []).append(site)
    for (rank, scale), sites in matrices.items():
        alpha = f"{rank * scale:.6f}".rstrip("0").rstrip(".")
        texts.append(f"lora({expression(target.anatomy, sites)}, {rank}, {alpha})")
    return " + ".join(texts) or NONE


def _selected(base: Base, tensors: Tensors, inject: str) -> str:
    """The text of --select for a delta's tensors."""
    of_base = expression(base.anatomy, [site for site in base.anatomy.sites if site.name in tensors])
    if inject == NONE:
        return of_base
    return "injected" if of_base == NONE else f"injected + {of_base}"
