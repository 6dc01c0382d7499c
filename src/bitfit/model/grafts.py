"""Grafts: parameters that a base lacks and a lane brings, such as a bias, a low-rank pair or a bottleneck.

A graft is a set of tensors beside one module of the encoder and one formula that says what they add to its outputs.
Its tensors are sites with terms of their own: they are selected, counted, saved and served by name like any other. The
formula serves every path: as a hook on the stock model, and for many lanes at once on packed rows. A package adds a
graft with an entry point of the group "bitfit.grafts".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from ..plugins import Registry
from .anatomy import Anatomy, Site
from .architectures import Architecture

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

NONE = "none"
"""The text that injects nothing."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graft sits: beside which module, and on which part of its outputs ("": all of them)."""

    graft: str
    module: str
    part: str = ""


@dataclass(frozen=True, eq=False)
class Target:
    """The encoder that grafts are added to."""

    encoder: nn.Module
    architecture: Architecture
    anatomy: Anatomy
    lacking: Mapping[str, Shape]  # biases that linear and norm layers could have and have not

    @cached_property
    def _matrices(self) -> dict[tuple[str, str], Site]:
        matrices: dict[tuple[str, str], Site] = {}
        for site in self.anatomy.sites:
            module, _, leaf = site.name.rpartition(".")
            if leaf == "weight" and site.layer is not None and len(site.shape) == 2:
                matrices[module, "" if site.whole else site.term.removeprefix("W_")] = site
        return matrices

    def matrix(self, place: Place) -> Site | None:
        """The weight matrix inside a layer that a place refers to; None if there is no such matrix."""
        return self._matrices.get((place.module, place.part))

    def sizes(self, site: Site) -> tuple[int, int]:
        """Inputs and outputs of a matrix."""
        axis = self.architecture.output_axis
        return len(site.span(1 - axis)), len(site.span(axis))

    def columns(self, place: Place) -> slice:
        """The outputs of its module that a graft changes."""
        site = self.matrix(place)
        return slice(None) if site is None or site.stop is None else slice(site.start, site.stop)


@dataclass(frozen=True)
class Insertion:
    """What one text such as `lora(W_q, 8)` adds: sites, and constants that are saved with them and never train."""

    sites: tuple[Site, ...]
    constants: tuple[tuple[str, float], ...] = ()


class Graft(Protocol):
    """One way to add parameters. Every method but `forward` looks at names and shapes alone."""

    terms: Sequence[str]
    """The terms of its sites; those of a bias are the papers' own."""
    reads_output: bool
    """Whether the formula reads what the module gives; else it reads what the module is given."""
    packed: bool
    """Whether the formula may run on packed rows; if not, a bank with this graft takes the stock path."""

    def insert(self, target: Target, arguments: Sequence[str]) -> Insertion:
        """The sites that these arguments mean on an encoder; SelectionError if they mean none."""
        ...

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse arguments that no encoder could understand, with a SelectionError."""
        ...

    def locate(self, name: str) -> tuple[Place, str] | None:
        """The place and the role of a tensor by its name; None if the name is not of this graft."""
        ...

    def problem(self, target: Target, place: Place, shapes: Mapping[str, Shape]) -> str | None:
        """Why tensors of these roles and shapes, perhaps a stranger's, do not fit there; None if they do."""
        ...

    def start(self, site: Site, generator: torch.Generator) -> Tensor | None:
        """What a site starts from, so that the graft changes nothing; None: zeros that need not be saved."""
        ...

    def forward(self, x: Tensor, tensors: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """What is added to the outputs of rows `x` [lanes, rows, n]; tensors have lanes in front as well.

        The answer is [lanes, rows, outputs], or [lanes, 1, outputs] if it is the same for all rows of a lane.
        """
        ...

    def backward(
        self, x: Tensor, tensors: Mapping[str, Tensor], above: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The gradients of `x` and of the tensors by role, from that of the answer; None leaves it to autograd."""
        ...

    def merged(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The change [outputs, inputs] of the module's matrix with the same effect; None if there is none."""
        ...


GRAFTS: Registry[Graft] = Registry(
    "bitfit.grafts",
    {
        "bias": "bitfit.model.bias_graft:BIAS",
        "lora": "bitfit.model.lora:LORA",
        "adapter": "bitfit.model.adapters:ADAPTER",
    },
)


def graft_terms() -> list[str]:
    """The terms of all grafts."""
    return [term for graft in GRAFTS.values() for term in graft.terms]
