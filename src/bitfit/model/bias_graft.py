"""Injected biases: for linear and norm layers that have none, such as Llama's. They start at zero.

An injected bias has the name that the parameter of the layer would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import SelectionError
from .anatomy import Site, anatomy
from .grafts import Insertion, Place, Shape, Target
from .language import check, select
from .selection import overlap

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Bias:
    """A vector added to the outputs of a layer that has no bias."""

    example = "bias"
    terms: Sequence[str] = ()
    reads_output = True
    packed = False  # every linear layer of the architectures of the packed path has a bias

    def insert(self, target: Target, arguments: Sequence[str]) -> Insertion:
        """The biases that a selection names and the base does not have."""
        (text,) = arguments
        full = anatomy(target.architecture, {**target.anatomy.shapes, **target.lacking})
        chosen = select(full, text)
        added = []
        for site in full.sites:
            selected = overlap(site, chosen)
            if not selected:
                continue
            if not site.term.startswith("b_"):
                raise SelectionError(f"only biases can be injected; {site.term} is not a bias.")
            if selected < site.size:
                raise SelectionError(
                    f"a bias must be injected with all of its {site.size:,} entries, not {selected:,}."
                )
            if site.name in target.lacking:
                added.append(replace(site, graft="bias"))
        if not added:
            raise SelectionError("this base has these biases already; train them with --select.")
        return Insertion(tuple(added))

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse a text that is not a selection."""
        for text in arguments:
            check(text)

    def locate(self, name: str) -> tuple[Place, str] | None:
        """Names end in .bias."""
        module, _, leaf = name.rpartition(".")
        return (Place("bias", module), leaf) if leaf == "bias" and module else None

    def problem(self, target: Target, place: Place, shapes: Mapping[str, Shape]) -> str | None:
        """A bias fits a layer with as many outputs and no bias."""
        name = f"{place.module}.bias"
        if name not in target.lacking:
            return f"the delta changes {name}, which the base does not have"
        if shapes["bias"] != target.lacking[name]:
            return f"the delta's {name} has shape {shapes['bias']}, its layer has {target.lacking[name][0]} outputs"
        return None

    def start(self, site: Site, generator: torch.Generator) -> Tensor | None:
        """None: entries that are not saved are zero."""
        return None

    def forward(self, x: Tensor, tensors: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """The bias, the same for all rows."""
        return tensors["bias"].unsqueeze(1)

    def backward(
        self, x: Tensor, tensors: Mapping[str, Tensor], above: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Left to autograd."""
        return None

    def merged(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """None: no matrix has the effect of a bias."""
        return None


BIAS = Bias()
