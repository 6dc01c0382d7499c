"""The papers' notation: every parameter of a model as a site with a term and a layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from .architectures import Architecture, architecture

if TYPE_CHECKING:  # numpy would double the time of `bitfit --help`
    from ..arrays import Array

TERMS: tuple[str, ...] = (
    *("b_q", "b_k", "b_v", "b_m1", "b_LN1", "b_m2", "b_m3", "b_LN2"),
    *("g_LN1", "g_LN2"),
    *("W_q", "W_k", "W_v", "W_m1", "W_m2", "W_m3"),
    *("b_emb", "g_emb", "W_emb", "b_pool", "W_pool"),
    *("b_other", "g_other", "W_other"),
)
"""The terms of a base, in the papers' order. Grafts add further terms."""

PARTS = ("encoder", "embedding", "pooler")
"""The parts of a model that terms are counted under."""

HEAD = "head."
"""The prefix of the names of a head's tensors."""

PAIR = "pair"  # the pool of a head that reads both texts of a pair, each encoded by itself
HEADS = ("full", "bias", "frozen")
"""Which parameters of the head train. The papers treat the head separately from the selection."""


def part_of(term: str) -> str:
    """The part of a model that a term is counted under."""
    _, _, module = term.rpartition("_")
    return {"emb": "embedding", "pool": "pooler"}.get(module, "encoder")


@dataclass(frozen=True, slots=True)
class Site:
    """A vector or matrix with its term and layer: a whole tensor, or a slice of one along `axis`."""

    term: str
    layer: int | None
    name: str
    shape: tuple[int, ...]
    axis: int = 0
    start: int = 0
    stop: int | None = None
    graft: str | None = None  # the graft that adds the tensor; None: the base has it

    @property
    def whole(self) -> bool:
        """Whether the site is its whole tensor."""
        return self.stop is None

    @property
    def size(self) -> int:
        """The number of entries of the site."""
        return math.prod(len(self.span(axis)) for axis in range(len(self.shape)))

    @property
    def part(self) -> str:
        """The part of the model that the site is counted under."""
        return part_of(self.term)

    def span(self, axis: int) -> range:
        """The indices the site occupies along one axis of its tensor."""
        if self.stop is None or axis != self.axis:
            return range(self.shape[axis])
        return range(self.start, self.stop)


@dataclass(frozen=True)
class Anatomy:
    """All sites of one model; every entry of every tensor belongs to exactly one of them."""

    family: str
    sites: tuple[Site, ...]
    layers: int
    values: Callable[[str], Array] | None = field(default=None, compare=False, repr=False)
    """The base's values of a tensor, by name; None if only the configuration is known."""
    constants: tuple[tuple[str, float], ...] = ()
    """Single numbers that grafts bring beside their sites, by name: they are saved and never train."""

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """The terms of this model, in the papers' order, followed by those of grafts."""
        present = dict.fromkeys(site.term for site in self.sites)
        known = [term for term in TERMS if term in present]
        return (*known, *(term for term in present if term not in TERMS))

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The terms that this model does not have, in the papers' order."""
        return tuple(term for term in TERMS if term not in self.terms)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {site.name: site.shape for site in self.sites}

    @cached_property
    def injected(self) -> frozenset[str]:
        """The tensors that grafts add to the base."""
        return frozenset(site.name for site in self.sites if site.graft is not None)

    @cached_property
    def total(self) -> int:
        """The number of entries of the model."""
        return sum(site.size for site in self.sites)

    def layers_below(self, names: Collection[str]) -> int:
        """The index of the first layer that uses any of these tensors; the number of layers if none does."""
        lowest = self.layers
        for site in self.sites:
            if site.name in names and site.part != "pooler":
                lowest = min(lowest, site.layer or 0)
        return lowest

    def names_below(self, layer: int) -> frozenset[str]:
        """The tensors that the layers before this one use. The embeddings count as part of layer 0."""
        below = (site for site in self.sites if site.part != "pooler" and (site.layer or 0) < layer)
        return frozenset(site.name for site in below)

    def in_layernorm(self, site: Site) -> bool:
        """Whether a site is the gamma or the bias of a LayerNorm, recognised by its weight being a vector."""
        if site.term.startswith("g_"):
            return True
        module, _, leaf = site.name.rpartition(".")
        weight = self.shapes.get(f"{module}.weight", ())
        return leaf == "bias" and len(weight) == 1


def anatomy(model_type: str | Architecture, shapes: Mapping[str, tuple[int, ...]]) -> Anatomy:
    """Name every parameter of an encoder in the papers' notation, from its parameter names and shapes."""
    row = architecture(model_type) if isinstance(model_type, str) else model_type
    layers = _layers(row, shapes)
    sites: list[Site] = []
    for name, shape in shapes.items():
        sites.extend(_sites(row, name, tuple(shape), layers))
    return Anatomy(row.name, tuple(sites), len(layers))


def _split(row: Architecture, name: str) -> tuple[tuple[int, ...], str]:
    """The numbers of the layer a name is in (none: outside the layers), and the rest of the name."""
    match = re.fullmatch(row.layer, name)
    if match is None:
        return (), name
    *numbers, rest = match.groups()
    return tuple(int(number) for number in numbers), rest


def _layers(row: Architecture, names: Mapping[str, object]) -> dict[tuple[int, ...], int]:
    """Number the layers one after the other: ALBERT counts groups and layers within them."""
    numbers = {_split(row, name)[0] for name in names} - {()}
    return {key: layer for layer, key in enumerate(sorted(numbers))}


def _sites(
    row: Architecture, name: str, shape: tuple[int, ...], layers: Mapping[tuple[int, ...], int]
) -> Iterator[Site]:
    """The sites of one tensor: one, or one per term if several share it."""
    numbers, rest = _split(row, name)
    layer = layers.get(numbers)
    modules = row.inside if numbers else row.outside
    axis = row.output_axis if len(shape) > 1 else 0
    outputs = shape[axis] if shape else 1
    module = rest.rpartition(".")[0]
    terms = _terms(modules.get(module, "other"), name, len(shape), outputs)
    if len(terms) == 1:
        yield Site(terms[0], layer, name, shape)
        return
    width = outputs // len(terms)
    for i, term in enumerate(terms):
        yield Site(term, layer, name, shape, axis, i * width, (i + 1) * width)


def _terms(modules: str, name: str, axes: int, outputs: int) -> list[str]:
    """The terms of a tensor; `modules` is the papers' name of its module, or several. Without a term: *_other."""
    leaf = name.rpartition(".")[2]
    letter = "W"
    if axes == 1:
        letter = {"bias": "b", "weight": "g"}.get(leaf, "W")
    terms = [f"{letter}_{module}" for module in modules.split()]
    # A module may have other parameters than its weight and its bias, such as a scale; the papers have no term for it.
    named = set(terms) <= set(TERMS) and (leaf == "weight" or letter == "b")
    divisible = outputs % len(terms) == 0
    return terms if named and divisible else [f"{letter}_other"]
