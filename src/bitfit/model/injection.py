"""Injection: the grafts that the text of --inject adds to an encoder, and their hooks on the stock model.

b_v + b_m1                     biases for layers that have none
lora(W_q + W_v, 8)             a low-rank pair beside each of these matrices
adapter(64) + lora(W_q, 4)     several at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SelectionError
from .anatomy import Anatomy
from .architectures import architecture
from .grafts import GRAFTS, Graft, Place, Shape, Target
from .language import parse_inject

Activation = Callable[[Tensor], Tensor]


def target_of(encoder: nn.Module, model_type: str, sites: Anatomy) -> Target:
    """The target of grafts on an encoder; `sites` are those of the base."""
    return Target(encoder, architecture(model_type), sites, absent_biases(encoder))


def absent_biases(encoder: nn.Module) -> dict[str, Shape]:
    """Name -> shape of every bias that a linear or norm layer of the encoder could have but does not."""
    absent: dict[str, Shape] = {}
    for path, module in encoder.named_modules():
        outputs = _outputs_without_bias(module)
        if outputs:
            absent[f"{path}.bias"] = (outputs,)
    return absent


def _outputs_without_bias(module: nn.Module) -> int:
    """The number of outputs of a linear or norm layer without a bias; 0 for any other module."""
    parameters = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if isinstance(module, nn.Linear):
        return 0 if "bias" in parameters else module.out_features
    # Every architecture defines another RMSNorm class, so a norm is recognised by having a gamma and an epsilon.
    has_epsilon = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    if not has_epsilon or set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
        return 0
    return len(parameters["weight"])


def grow(target: Target, text: str) -> Anatomy:
    """The sites of a base together with those that the text of --inject adds."""
    sites = list(target.anatomy.sites)
    constants: list[tuple[str, float]] = []
    for call in parse_inject(text):
        try:
            insertion = GRAFTS[call.word].insert(target, call.arguments)
        except SelectionError as reason:
            raise SelectionError(f"--inject {text}: {reason}") from None
        sites += insertion.sites
        constants += insertion.constants
    names = [site.name for site in sites if site.graft not in (None, "bias")]
    if len(set(names)) < len(names):
        raise SelectionError(f"--inject {text}: a module can have only one graft of each kind.")
    return replace(target.anatomy, sites=tuple(sites), constants=tuple(constants))


@lru_cache(maxsize=1 << 14)
def locate(name: str) -> tuple[Place, str] | None:
    """Where the graft of a tensor is attached, and the role of the tensor, by its name; None if no graft has it."""
    for word in reversed(list(GRAFTS)):  # biases last: a graft may have tensors whose names end in .bias
        location = GRAFTS[word].locate(name)
        if location is not None:
            return location
    return None


def by_place(names: Iterable[str]) -> dict[Place, dict[str, str]]:
    """The grafts that tensors belong to: where a graft is attached -> role of a tensor -> name of the tensor.

    In the order of GRAFTS, so that an adapter comes after everything else that changes the outputs of its module.
    """
    grafts: dict[Place, dict[str, str]] = {}
    for name in names:
        location = locate(name)
        assert location is not None, name
        place, role = location
        grafts.setdefault(place, {})[role] = name
    order = list(GRAFTS)
    return dict(sorted(grafts.items(), key=lambda graft: order.index(graft[0].graft)))


def problem(target: Target, shapes: Mapping[str, Shape]) -> str | None:
    """Why tensors that the base does not have are not grafts that fit it; None if they are.

    Only names and shapes are used: the tensors may come from an untrusted file.
    """
    for name in shapes:
        if locate(name) is None:
            return f"the delta changes {name}, which the base does not have"
    for place, roles in by_place(shapes).items():
        by_role = {role: shapes[name] for role, name in roles.items()}
        reason = GRAFTS[place.graft].problem(target, place, by_role)
        if reason:
            return reason
    return None


def activation_of(config: Any) -> Activation:
    """The activation of a base's feed-forward layers."""
    from transformers.activations import ACT2FN

    name = getattr(config, architecture(config.model_type).activation, "gelu")
    activation: Activation = ACT2FN[name]
    return activation


def attach(target: Target, tensors: Mapping[str, Tensor], activation: Activation) -> Callable[[], None]:
    """Hook grafts onto the modules of an encoder; the returned function removes them."""
    handles = []
    for place, roles in by_place(tensors).items():
        stacked = {role: tensors[name].unsqueeze(0) for role, name in roles.items()}
        hook = _hook(GRAFTS[place.graft], stacked, activation, target.columns(place))
        handles.append(target.encoder.get_submodule(place.module).register_forward_hook(hook))

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


def _hook(
    graft: Graft, tensors: Mapping[str, Tensor], activation: Activation, columns: slice
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        source = out[..., columns] if graft.reads_output else inputs[0]
        change = graft.forward(source.reshape(1, -1, source.shape[-1]), tensors, activation)
        if change.shape[1] == 1:
            change = change.view(-1)
        else:
            change = change.reshape(*out.shape[:-1], -1)
        if columns.stop is not None:
            change = F.pad(change, (columns.start, out.shape[-1] - columns.stop))
        return out + change

    return add
