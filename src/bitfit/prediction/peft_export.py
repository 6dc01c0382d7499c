"""Export for PEFT: a delta of LoRA pairs or biases as a folder that `PeftModel.from_pretrained` loads.

A delta with pairs becomes a LoRA folder, any other a BEFT folder. What neither method can represent, such as changes of
the head, of LayerNorms and of a pooler, is saved as entire modules (`modules_to_save`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from ..bank.lanes import lane_of_delta
from ..delta.delta import Delta, write_entries
from ..delta.peft_folder import CONFIG, PREFIX, WEIGHTS
from ..delta.safefile import ENTRY
from ..errors import DeltaError
from ..files import writing_folder
from ..model.anatomy import PAIR
from ..model.base import Base
from ..model.grafts import Place, Target
from ..model.injection import by_place
from ..model.task_model import Model
from ..tasks import Task
from .card import peft_card
from .export import empty_task_model, head_tensors, renamed, require_cut_texts, stock_class

TASK_TYPES = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
INSTEAD = "bitfit export without --peft writes a transformers folder"


def export_peft(delta: Delta, base: Base, folder: str | Path) -> Path:
    """Write the delta as a PEFT folder with a model card, atomically; DeltaError if PEFT cannot represent it."""
    target = Path(folder)
    require_cut_texts(delta)
    task = Task.of_delta(delta)
    model = Model(base, task.outputs, delta.meta.pool)
    lane_of_delta(model, delta)
    _require_class(base, model, task)
    with torch.no_grad():
        adapter = _Adapter.of(delta, base, model, task)
    with writing_folder(target) as temporary:
        metadata = {"format": "pt", ENTRY: json.dumps(delta.meta.table(), sort_keys=True)}
        save_file(adapter.tensors, temporary / WEIGHTS, metadata=metadata)
        text = json.dumps(adapter.config(delta, base, task), indent=2, sort_keys=True)
        (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(peft_card(delta, base, task), encoding="utf-8")
    return target


def _require_class(base: Base, model: Model, task: Task) -> None:
    if task.transformers_class not in TASK_TYPES:
        raise DeltaError(f"PEFT has no task type for {task.kind}; {INSTEAD}")
    if model.pool == "mean":
        raise DeltaError(f"PEFT has no head on mean-pooled states; train with --pool cls, or use: {INSTEAD}")
    if model.pool == PAIR:
        raise DeltaError(
            f"PEFT has no head on two texts that are encoded apart; train with --pool cls, or use: {INSTEAD}"
        )
    if stock_class(base, model, task) is None:
        kind = f"{task.transformers_class} of {base.config.model_type}"
        raise DeltaError(f"the head of {kind} differs from this delta's head; {INSTEAD}")


@dataclass
class _Adapter:
    """The contents of the folder, by the names of the class that PEFT wraps."""

    prefix: str  # of the encoder's names
    tensors: dict[str, Tensor] = field(default_factory=dict)  # as PEFT saves them
    ranks: dict[str, int] = field(default_factory=dict)  # of LoRA, by module
    alphas: dict[str, float] = field(default_factory=dict)
    biased: list[str] = field(default_factory=list)  # modules that BEFT adds a vector to
    saved_modules: list[str] = field(default_factory=list)  # modules with all of their parameters
    biases: bool = False  # whether biases of the base are saved beside LoRA

    @classmethod
    def of(cls, delta: Delta, base: Base, model: Model, task: Task) -> _Adapter:
        """The delta as PEFT would have saved it."""
        tokens = model.pool == "tokens"
        wrapped = empty_task_model(base, task.transformers_class, task.outputs) if tokens else model.head_model
        adapter = cls(f"{wrapped.base_model_prefix}.")
        grafts = delta.grafts(base)
        pairs = {name: tensor for name, tensor in grafts.items() if name not in base.target.lacking}
        vectors = {name: tensor for name, tensor in grafts.items() if name in base.target.lacking}
        adapter.add_pairs(base.target, pairs)
        adapter.add_vectors(base, vectors)
        adapter.add_changes(base, _changed(delta, base))
        adapter.add_head(renamed(head_tensors(delta, task), wrapped, task))
        if not adapter.ranks and not adapter.biased:
            adapter.add_nothing(base)
        return adapter

    def add_pairs(self, target: Target, tensors: Mapping[str, Tensor]) -> None:
        """Add LoRA pairs; pairs beside parts of one matrix become one pair, whose rank is the sum of theirs."""
        modules: defaultdict[str, list[tuple[Place, dict[str, Tensor]]]] = defaultdict(list)
        for place, roles in by_place(tensors).items():
            if place.graft != "lora":
                raise DeltaError(f"the delta has {place.graft} parameters, which PEFT cannot represent; {INSTEAD}")
            modules[place.module].append((place, {role: tensors[name] for role, name in roles.items()}))
        for module, pairs in modules.items():
            self._add_pair(target, module, pairs)

    def _add_pair(self, target: Target, module: str, pairs: list[tuple[Place, dict[str, Tensor]]]) -> None:
        scales = [float(roles["scale"]) if "scale" in roles else 1.0 for _, roles in pairs]
        # PEFT has one scale per module; if the pairs differ, each puts its scale into B.
        scale = scales[0] if len(set(scales)) == 1 else 1.0
        downs = []
        ups = []
        for (place, roles), pair_scale in zip(pairs, scales, strict=True):
            downs.append(roles["A"])
            ups.append(_in_rows(target, place, roles["B"] * (pair_scale / scale)))
        name = self.prefix + module
        rank = sum(len(down) for down in downs)
        self._put(f"{name}.lora_A.weight", torch.cat(downs))
        self._put(f"{name}.lora_B.weight", torch.cat(ups, 1))
        self.ranks[name] = rank
        self.alphas[name] = scale * rank

    def add_vectors(self, base: Base, tensors: Mapping[str, Tensor]) -> None:
        """Add biases of layers that have none."""
        for name, value in tensors.items():
            module = name.removesuffix(".bias")
            if self.ranks or not isinstance(base.encoder.get_submodule(module), nn.Linear):
                raise DeltaError(f"PEFT cannot represent the injected {name} of this delta; {INSTEAD}")
            self._add_vector(module, value)

    def _add_vector(self, module: str, value: Tensor) -> None:
        self.biased.append(self.prefix + module)
        self._put(f"{self.prefix}{module}.beft_bias", value.reshape(1, -1))

    def add_changes(self, base: Base, changed: Mapping[str, Tensor]) -> None:
        """Add changed parameters of the base: biases alone where PEFT can, else all parameters of their modules."""
        modules: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, value in changed.items():
            module, _, leaf = name.rpartition(".")
            modules[module][leaf] = value
        for module, leaves in modules.items():
            only_bias = set(leaves) == {"bias"}
            owner = base.encoder.get_submodule(module)
            if only_bias and self.ranks:
                inner = ".base_layer" if self.prefix + module in self.ranks else ""
                self._put(f"{self.prefix}{module}{inner}.bias", leaves["bias"])
                self.biases = True
            elif only_bias and isinstance(owner, nn.Linear):
                self._add_vector(module, leaves["bias"] - base.parameters[f"{module}.bias"].cpu())
            elif self.prefix + module in (*self.ranks, *self.biased):
                raise DeltaError(f"PEFT cannot replace the matrix of {module}, which has an adapter; {INSTEAD}")
            else:
                originals = {name: parameter.cpu() for name, parameter in owner.named_parameters()}
                self._add_module(self.prefix + module, originals | leaves)

    def add_head(self, head: Mapping[str, Tensor]) -> None:
        """Add all modules of the head."""
        modules: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, value in head.items():
            module, _, leaf = name.partition(".")
            modules[module][leaf] = value
        for module, leaves in modules.items():
            self._add_module(module, leaves)

    def _add_module(self, module: str, leaves: Mapping[str, Tensor]) -> None:
        self.saved_modules.append(module)
        for leaf, value in leaves.items():
            self._put(f"{module}.{leaf}", value)

    def add_nothing(self, base: Base) -> None:
        """Add a vector of zeros: a BEFT folder needs at least one adapted layer."""
        taken = set(self.saved_modules)
        reason = f"PEFT adapts nn.Linear layers only, and {base.config.model_type} has none"
        for site in base.anatomy.sites:
            module = site.name.removesuffix(".weight")
            inside = site.layer is not None and module != site.name
            if not inside or not isinstance(base.encoder.get_submodule(module), nn.Linear):
                continue
            if self.prefix + module not in taken:
                self._add_vector(module, torch.zeros(site.shape[0]))
                return
            reason = "the delta changes the matrices of all nn.Linear layers, which leaves none for PEFT to adapt"
        raise DeltaError(f"{reason}; {INSTEAD}")

    def _put(self, name: str, value: Tensor) -> None:
        self.tensors[PREFIX + name] = value.detach().cpu().clone().contiguous()

    def config(self, delta: Delta, base: Base, task: Task) -> dict[str, Any]:
        """The content of adapter_config.json."""
        common = {
            "base_model_name_or_path": delta.meta.hub_base or base.name,
            "inference_mode": True,
            "modules_to_save": self.saved_modules,
            **_task_type(base, task),
        }
        if not self.ranks:
            return {**common, "peft_type": "BEFT", "target_modules": self.biased}
        rank = _most_common(self.ranks.values())
        alpha = _most_common(self.alphas.values())
        return {
            **common,
            "peft_type": "LORA",
            "target_modules": list(self.ranks),
            "r": rank,
            "lora_alpha": _number(alpha),
            "lora_dropout": 0.0,
            "bias": "all" if self.biases else "none",
            "fan_in_fan_out": base.target.architecture.output_axis == 1,
            "rank_pattern": {name: other for name, other in self.ranks.items() if other != rank},
            "alpha_pattern": {name: _number(other) for name, other in self.alphas.items() if other != alpha},
        }


def _task_type(base: Base, task: Task) -> dict[str, Any]:
    """The settings for the task type; no type where PEFT's class for it drops the segment ids that the delta needs."""
    if task.form != "windows" or not base.segments:
        return {"task_type": TASK_TYPES[task.transformers_class]}
    wrapped = getattr(transformers, task.transformers_class)._model_mapping[type(base.config)]
    mapping = {"base_model_class": wrapped.__name__, "parent_library": wrapped.__module__}
    return {"task_type": None, "auto_mapping": mapping}


def _in_rows(target: Target, place: Place, up: Tensor) -> Tensor:
    """B for all outputs of a module: zero outside those that the pair changes."""
    columns = target.columns(place)
    if columns.stop is None:
        return up
    outputs = target.encoder.get_submodule(place.module).get_parameter("weight").shape[target.architecture.output_axis]
    full = up.new_zeros(outputs, up.shape[1])
    full[columns] = up
    return full


def _changed(delta: Delta, base: Base) -> dict[str, Tensor]:
    """The parameters of the base that the delta changes, with all their values."""
    changed = {}
    for name, (index, values) in delta.entries.items():
        if name in base.parameters:
            changed[name] = base.parameters[name].detach().cpu().clone()
            write_entries(changed[name], index, values)
    return changed


def _most_common(values: Iterable[Any]) -> Any:
    listed = list(values)
    return max(listed, key=listed.count)


def _number(value: float) -> float | int:
    """A number as PEFT writes it: an integer if it is one."""
    return int(value) if value == int(value) else value
