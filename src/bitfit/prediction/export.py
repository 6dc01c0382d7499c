"""Export: a delta merged into its base as a folder that transformers loads, with a model card."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from ..bank.lanes import lane_of_delta
from ..delta.delta import Delta, write_entries
from ..delta.fold import fold as folded
from ..delta.meta import HEAD_OF_TEXT, Meta
from ..errors import DeltaError, UsageError, WriteError
from ..files import writing_folder
from ..model.anatomy import HEAD, PAIR
from ..model.architectures import architecture
from ..model.base import Base
from ..model.grafts import GRAFTS, Target
from ..model.injection import by_place, target_of
from ..model.task_model import Model
from ..tasks import Task
from . import modeling_bitfit
from .card import Exported, card
from .pair_split import joint_length, split_settings

CODE = Path(modeling_bitfit.__file__)


def export(delta: Delta, base: Base, folder: str | Path, fold: bool = False) -> Path:
    """Write the merged model, its tokenizer and a card, atomically; the base does not change.

    The folder loads as a stock class of transformers if one computes the same. Otherwise it contains modeling code,
    which transformers runs with trust_remote_code=True and refuses to load without.

    With `fold` the biases whose effect others can take over keep the base's values.
    """
    target = Path(folder)
    require_cut_texts(delta)
    task = Task.of_delta(delta)
    model = Model(base, task.outputs, delta.meta.pool)
    lane_of_delta(model, delta)  # for its checks
    if fold:
        delta = folded(delta, model)
    with writing_folder(target) as temporary:
        try:
            exported = _save(delta, base, model, task, temporary)
        except SafetensorError as error:
            raise WriteError(f"{target}: cannot be written ({error})") from error
        _tokenizer(base, delta.meta).save_pretrained(temporary)
        (temporary / "README.md").write_text(card(delta, base, task, exported), encoding="utf-8")
    return target


def require_cut_texts(delta: Delta) -> None:
    """Refuse a delta that does not simply cut long texts: the exported model would cut them."""
    if delta.meta.long != HEAD_OF_TEXT:
        what = f"the delta was trained with --long {delta.meta.long}, which transformers does not offer"
        raise UsageError(f"{what}; use bitfit predict or serve, or train with --long head")


def _tokenizer(base: Base, meta: Meta) -> Any:
    # A generic tokenizer does not name the segment ids among its outputs, and a pair without them is another input.
    tokenizer = copy.deepcopy(base.tokenizer)
    # Where truncation=True cuts, and at which end.
    tokenizer.model_max_length = joint_length(meta.max_length) if meta.pool == PAIR else meta.max_length
    tokenizer.truncation_side = "right"
    if base.segments and "token_type_ids" not in tokenizer.model_input_names:
        tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # saved only if it is an argument
    return tokenizer


def _save(delta: Delta, base: Base, model: Model, task: Task, folder: Path) -> Exported:
    """Write configuration and weights; returns how the model differs from the stock class, for the card."""
    head = head_tensors(delta, task)
    merged = _stock_model(base, model, task) or copy.deepcopy(base.encoder)
    stock = stock_class(base, model, task) is not None
    encoder = merged.base_model if stock else merged
    assert isinstance(encoder, nn.Module)
    absent_biases = base.target.lacking
    biases = {name: absent_biases[name] for name in delta.entries if name in absent_biases}
    switches = _make_room(merged, encoder, biases)
    parameters = dict(encoder.named_parameters())
    outside = {name: torch.zeros(shape) for name, shape in biases.items() if name not in parameters}
    with torch.no_grad():
        for name, (index, values) in delta.entries.items():
            target = parameters.get(name, outside.get(name))
            if target is not None:  # a class for tokens has no pooler, which it would never call
                write_entries(target, index, values)
        grafts = {name: tensor for name, tensor in delta.grafts(base).items() if name not in absent_biases}
        adapters = _merge(target_of(encoder, base.config.model_type, base.anatomy), grafts)
    if stock:
        for name, value in renamed(head, merged, task).items():
            owner, _, attribute = name.rpartition(".")
            merged.get_submodule(owner)._parameters[attribute] = nn.Parameter(value)
    custom_code = bool(outside or adapters) or not stock
    exported = Exported(tuple(biases), switches, tuple(outside), tuple(adapters), custom_code)
    made: Any = _custom_model(base, model, task, merged, stock, head, outside, adapters) if custom_code else merged
    if model.pool == PAIR:
        # The tokenizer that answers is not the one that is saved: it stores where it cut last.
        made.config.pair = split_settings(delta, base, task, _tokenizer(base, delta.meta))
    _name_labels(made.config, task)
    made.save_pretrained(folder)
    if exported.custom_code:
        shutil.copyfile(CODE, folder / CODE.name)
    return exported


def _custom_model(
    base: Base,
    model: Model,
    task: Task,
    merged: nn.Module,
    stock: bool,
    head: dict[str, Tensor],
    outside: dict[str, Tensor],
    adapters: dict[str, Tensor],
) -> Any:
    """The model as a class of the modeling code that goes into the folder."""
    name = task.transformers_class.replace("AutoModel", "Bitfit")
    inner: Any = merged.config
    settings = inner.to_dict()
    settings.pop("_name_or_path", None)  # a folder of this machine
    config = modeling_bitfit.BitfitConfig(
        encoder_config=settings,
        pool="cls" if stock and not task.by_token else model.pool,
        width=base.width,
        segments=base.segments,
        injected=list(outside),
        adapters=_widths(adapters),
        activation=getattr(base.config, architecture(base.config.model_type).activation, "gelu"),
        num_labels=task.outputs,
        auto_map={
            "AutoConfig": f"{CODE.stem}.BitfitConfig",
            task.transformers_class: f"{CODE.stem}.{name}",
        },
    )
    with torch.device("meta"):
        made = getattr(modeling_bitfit, name)(config)
    if config.pool == "cls":
        made.model = merged
    else:
        made.model = merged.base_model if stock else merged
        for form in ("weight", "bias"):
            setattr(made.classifier, form, nn.Parameter(head[f"classifier.{form}"]))
    for name, value in outside.items():
        made.encoder.get_submodule(name.removesuffix(".bias")).register_parameter("injected_bias", nn.Parameter(value))
    modeling_bitfit.add_adapters(made.encoder, config)
    for name, value in adapters.items():
        owner, _, attribute = name.rpartition(".")
        setattr(made.encoder.get_submodule(owner), attribute, nn.Parameter(value))
    return made


def _widths(adapters: dict[str, Tensor]) -> dict[str, int]:
    """Module -> width of the adapter on its outputs."""
    end = ".adapter_down.bias"
    return {name.removesuffix(end): len(value) for name, value in adapters.items() if name.endswith(end)}


def _merge(target: Target, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge grafts into the matrices beside them; returns the tensors of adapters, which cannot be merged."""
    adapters: dict[str, Tensor] = {}
    for place, roles in by_place(tensors).items():
        change = GRAFTS[place.graft].merged({role: tensors[name] for role, name in roles.items()})
        if change is not None:
            weight = target.encoder.get_submodule(place.module).get_parameter("weight")
            matrix = weight if target.architecture.output_axis == 0 else weight.t()
            matrix[target.columns(place)] += change
        elif place.graft == "adapter":
            adapters |= {name: tensors[name] for name in roles.values()}
        else:
            raise DeltaError(f"a delta with {place.graft} parameters cannot be exported; use bitfit predict instead")
    return adapters


def _make_room(merged: Any, encoder: nn.Module, biases: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Add parameters for injected biases where a setting of the model's class does; returns these settings."""
    prefix = "" if encoder is merged else merged.base_model_prefix + "."
    wanted = {prefix + name for name in biases}
    switches = []
    for name in architecture(merged.config.model_type).switches:
        off = getattr(merged.config, name, None) is False
        if off and biases and wanted & _stock_shapes(merged, name).keys():
            switches.append(name)
    if not switches:
        return ()
    parameters = dict(merged.named_parameters())
    for name, shape in _stock_shapes(merged, *switches).items():
        if name not in parameters:  # a setting may add more biases than the delta injects; those stay zero
            merged.get_submodule(name.removesuffix(".bias")).register_parameter(
                "bias", nn.Parameter(torch.zeros(shape))
            )
    for name in switches:
        setattr(merged.config, name, True)
    return tuple(switches)


def _stock_shapes(merged: Any, *switches: str) -> dict[str, tuple[int, ...]]:
    config = copy.deepcopy(merged.config)
    for name in switches:
        setattr(config, name, True)
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in type(merged)(config).named_parameters()}


def stock_class(base: Base, model: Model, task: Task) -> str | None:
    """The class of transformers that computes the merged model; None if there is none."""
    name = task.transformers_class
    if model.pool == "cls":
        return name
    if model.pool in ("mean", PAIR) or type(base.config) not in getattr(transformers, name)._model_mapping:
        return None
    merged = empty_task_model(base, name, task.outputs)
    return name if len(linears(merged, task.outputs)) == 1 and _fits(base, merged) else None


def _stock_model(base: Base, model: Model, task: Task) -> nn.Module | None:
    """A model of the stock class with the base's weights; None if there is no such class."""
    name = stock_class(base, model, task)
    if name is None:
        return None
    if model.pool == "cls":
        return copy.deepcopy(model.head_model)
    merged = empty_task_model(base, name, task.outputs).to_empty(device="cpu")
    merged.base_model.load_state_dict(base.encoder.state_dict(), strict=False)  # type: ignore[union-attr]
    return merged


def empty_task_model(base: Base, name: str, outputs: int) -> nn.Module:
    """A model of a class of transformers without weights."""
    config = copy.deepcopy(base.config)
    config.num_labels = outputs
    with torch.device("meta"):
        return getattr(transformers, name).from_config(config)  # type: ignore[no-any-return]


def _fits(base: Base, merged: nn.Module) -> bool:
    wanted = merged.base_model.state_dict()  # type: ignore[union-attr]
    return wanted.keys() <= base.encoder.state_dict().keys() and not base.missing & wanted.keys()


def linears(merged: nn.Module, outputs: int) -> list[str]:
    """The linear layers outside the encoder with this number of outputs; none if the head has other layers too."""
    prefix = str(merged.base_model_prefix) + "."
    head = {}
    for name, module in merged.named_modules():
        if module._parameters and not f"{name}.".startswith(prefix):
            head[name] = module
    fitting = [name for name, m in head.items() if isinstance(m, nn.Linear) and m.out_features == outputs]
    return fitting if len(fitting) == len(head) else []


def head_tensors(delta: Delta, task: Task) -> dict[str, Tensor]:
    """The head's tensors, without their prefix; its outputs are on the scale of the labels."""
    head = {name.removeprefix(HEAD): torch.from_numpy(np.array(v)) for name, v in delta.head.items()}
    return _on_label_scale(head, task)


def renamed(head: dict[str, Tensor], merged: nn.Module, task: Task) -> dict[str, Tensor]:
    """The head's tensors by the names that a class of transformers gives them."""
    if not task.by_token:
        return head
    name = linears(merged, task.outputs)[0]
    return {f"{name}.{form}": head[f"classifier.{form}"] for form in ("weight", "bias")}


def _on_label_scale(head: dict[str, Tensor], task: Task) -> dict[str, Tensor]:
    # Regression was trained on standardised labels; the last linear layer is scaled and shifted instead.
    if (task.center, task.spread) == (0.0, 1.0):
        return head
    final = [name for name in head if name.endswith("weight") and head[name].shape[0] == 1][-1].removesuffix("weight")
    if final + "bias" not in head:
        raise DeltaError("this architecture's head has no bias for the labels' mean; use bitfit predict instead")
    scaled = {final + "weight": head[final + "weight"] * task.spread}
    scaled[final + "bias"] = head[final + "bias"] * task.spread + task.center
    return {**head, **scaled}


def _name_labels(config: Any, task: Task) -> None:
    config.num_labels = task.outputs
    if task.problem_type is not None:
        config.problem_type = task.problem_type
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {label: number for number, label in enumerate(task.labels)}
