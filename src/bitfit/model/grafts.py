"""Injection: biases for the layers that have none, such as Llama's. They start at zero, which changes nothing.

An injected bias is added to what its layer gives, be that a linear layer, a LayerNorm or an RMSNorm, and goes by the
name that the parameter would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from ..errors import SelectionError
from .anatomy import Anatomy, anatomy
from .language import select
from .selection import overlap

NONE = "none"
"""The text that injects nothing."""


def slots(encoder: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every bias that a linear or norm layer of the encoder could have and has not."""
    found = {f"{path}.bias": _outputs(module) for path, module in encoder.named_modules()}
    return {name: (outputs,) for name, outputs in found.items() if outputs}


def _outputs(module: nn.Module) -> int:
    """How many outputs a linear or norm layer without a bias has; 0: it is no such layer."""
    own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if isinstance(module, nn.Linear):
        return 0 if "bias" in own else module.out_features
    # Every architecture has an RMSNorm class of its own, so a norm is known by its form: a gamma and an epsilon.
    normal = hasattr(module, "eps") or hasattr(module, "variance_epsilon")
    return len(own["weight"]) if normal and set(own) == {"weight"} and own["weight"].dim() == 1 else 0


def grow(model_type: str, base: Anatomy, lacking: Mapping[str, tuple[int, ...]], text: str) -> Anatomy:
    """The sites of a base together with those of the lacking biases that a text names."""
    full = anatomy(model_type, {**base.shapes, **lacking})
    chosen = select(full, text)
    named = [site for site in full.sites if overlap(site, chosen)]
    for site in named:
        if not site.term.startswith("b_"):
            raise SelectionError(f"--inject {text}: only biases can be injected; {site.term} is not a bias.")
        if overlap(site, chosen) < site.size:
            raise SelectionError(f"--inject {text}: a bias is injected whole or not at all.")
    added = tuple(replace(site, graft="bias") for site in named if site.name in lacking)
    if not added and text.strip() != NONE:
        raise SelectionError(f"--inject {text}: this base has these biases already; --select trains them.")
    return replace(base, sites=base.sites + added, layers=full.layers)


def put(module: nn.Module, bias: Tensor) -> Callable[[], None]:
    """Add a bias to what a layer gives; the answer undoes it."""

    def add(_: nn.Module, __: object, out: Tensor) -> Tensor:
        return out + bias

    return module.register_forward_hook(add).remove


def layer_of(encoder: nn.Module, name: str) -> nn.Module:
    """The layer that an injected bias belongs to."""
    return encoder.get_submodule(name.rpartition(".")[0])
