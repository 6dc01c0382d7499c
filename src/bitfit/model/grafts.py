"""Grafts: parameters that a lane adds to the base, such as a bias, a low-rank pair or a bottleneck.

A graft is a set of tensors beside one module of the encoder, and a formula for what they add to the module's outputs.
Its tensors are sites with new terms: they are selected, counted, saved and served by name like any other. The formula
runs as a hook on the stock model, and for many lanes at once on packed rows. A package adds a graft with an entry point
of the group "bitfit.grafts".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from ..plugins import Registry
from .anatomy import Anatomy, Site
from .architectures import Architecture

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

NONE = "none"
"""The text of --inject that adds nothing."""

Shape = tuple[int, ...]


def injects(text: str) -> bool:
    """Whether the text of --inject adds parameters. The text is not parsed: it may come from an untrusted file."""
    return text.strip() != NONE


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graft is attached: the kind of graft, the module, and the outputs of the module that it changes."""

    graft: str
    module: str
    part: str = ""  # "q", "k" or "v" of a module that computes all three; "": all outputs


@dataclass(frozen=True, eq=False)
class Target:
    """The encoder that grafts are added to."""

    encoder: nn.Module
    architecture: Architecture
    anatomy: Anatomy
    lacking: Mapping[str, Shape]  # the biases, by name, that linear and norm layers could have but do not

    @cached_property
    def _matrices(self) -> dict[tuple[str, str], Site]:
        matrices: dict[tuple[str, str], Site] = {}
        for site in self.anatomy.sites:
            module, _, leaf = site.name.rpartition(".")
            if leaf == "weight" and site.layer is not None and len(site.shape) == 2:
                matrices[module, "" if site.whole else site.term.removeprefix("W_")] = site
        return matrices

    def matrix(self, place: Place) -> Site | None:
        """The weight matrix inside a layer that a graft is attached to; None if there is no such matrix."""
        return self._matrices.get((place.module, place.part))

    def sizes(self, site: Site) -> tuple[int, int]:
        """The numbers of inputs and outputs of a matrix."""
        axis = self.architecture.output_axis
        return len(site.span(1 - axis)), len(site.span(axis))

    def columns(self, place: Place) -> slice:
        """The outputs of its module that a graft changes."""
        site = self.matrix(place)
        return slice(None) if site is None or site.stop is None else slice(site.start, site.stop)


@dataclass(frozen=True)
class Insertion:
    """What a call such as `lora(W_q, 8)` adds: sites, and constants that are saved with them and never train."""

    sites: tuple[Site, ...]
    constants: tuple[tuple[str, float], ...] = ()


class Graft(Protocol):
    """A way to add parameters. Only `forward`, `backward` and `merged` see values; the others see names and shapes."""

    example: str
    """A text of --inject that adds the graft. The contract tests run it on every architecture."""
    terms: Sequence[str]
    """The terms that the graft adds to those of the papers."""
    reads_output: bool
    """Whether the formula reads the module's output; otherwise it reads its input."""
    packed: bool
    """Whether the formula may run on packed rows; if not, a bank with this graft takes the stock path."""

    def insert(self, target: Target, arguments: Sequence[str]) -> Insertion:
        """The sites that these arguments name on an encoder; SelectionError if they name none."""
        ...

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse arguments that no encoder could understand, with a SelectionError."""
        ...

    def locate(self, name: str) -> tuple[Place, str] | None:
        """Where the graft of a tensor is attached, and the tensor's role; None if the name is not of this graft."""
        ...

    def problem(self, target: Target, place: Place, shapes: Mapping[str, Shape]) -> str | None:
        """Why tensors of these roles and shapes, perhaps from an untrusted file, do not fit; None if they do."""
        ...

    def start(self, site: Site, generator: torch.Generator) -> Tensor | None:
        """The start values of a site, with which the graft changes nothing; None: zeros that need not be saved."""
        ...

    def forward(self, x: Tensor, tensors: Mapping[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
        """What is added to the outputs of rows `x` [lanes, rows, n]; the first axis of the tensors is the lane too.

        Returns [lanes, rows, outputs], or [lanes, 1, outputs] if it is the same for all rows of a lane.
        """
        ...

    def backward(
        self, x: Tensor, tensors: Mapping[str, Tensor], above: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The gradients of `x` and of the tensors by role, from the gradient `above` of the result; None: autograd."""
        ...

    def merged(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The change [outputs, inputs] of the module's matrix with the same effect; None if no matrix has it."""
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
    return list(chain.from_iterable(graft.terms for graft in GRAFTS.values()))
