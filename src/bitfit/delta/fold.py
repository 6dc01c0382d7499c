"""Folding: a delta without the biases that its others can stand for, with the same predictions and a third smaller.

In a post-LN encoder at rest b_k shifts all scores of a query alike and softmax ignores that; what b_v adds passes the
attention unchanged and b_m1 can add it; what a LayerNorm's bias adds is met by the next linear layers and by the
residual, whose biases can add it. A folded lane wears the base's own values in those places. In training dropout
stands between, so only finished deltas fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from torch import Tensor

from ..arrays import Tensors
from ..errors import UsageError
from ..model.architectures import architecture
from ..model.base import Base
from ..model.task_model import Model
from .delta import INDEX, VALUE, Delta, write_entries

Route = Mapping[str, Callable[[Tensor], Tensor]]
"""Where a bias can go: the biases that stand for it, and what a change of it adds to each."""


def why_not(base: Base) -> str | None:
    """Why the biases of a base do not fold; None if they do."""
    return architecture(base.config.model_type).no_fold


def fold(delta: Delta, model: Model) -> Delta:
    """The delta in its smallest form of the same predictions; UsageError where biases do not fold."""
    if reason := why_not(model.base):
        raise UsageError(f"{model.base.name}: the biases of this architecture do not fold: {reason}")
    if any(name not in model.base.parameters for name in delta.entries):
        raise UsageError("a delta that adds parameters (--inject) does not fold: its biases pass through them")
    delta.check(model.base)
    folded = _Folding(delta, model).tensors()
    return replace(delta, tensors=folded, meta=replace(delta.meta, folded=True))


def serving_form(delta: Delta, model: Model) -> Delta:
    """The delta as a bank serves it: folded where that holds."""
    if why_not(model.base) or any(name not in model.base.parameters for name in delta.entries):
        return delta
    return fold(delta, model)


class _Folding:
    """One delta on its way to a smaller one."""

    def __init__(self, delta: Delta, model: Model) -> None:
        self.delta, self.model = delta, model
        self.entries = delta.entries
        self.names = {(site.term, site.layer): site.name for site in model.anatomy.sites}

    def tensors(self) -> Tensors:
        """What the delta needs to hold."""
        dropped = {self.names["b_k", layer] for layer in range(self.model.anatomy.layers)}
        added: dict[str, Tensor] = {}
        for group in self._groups():
            for source in self._cheapest(group):
                dropped.add(source)
                change = self._whole(source) - self._base(source)
                for target, add in group[source].items():
                    added[target] = added.get(target, self._whole(target)) + add(change)
        gone = {name + end for name in dropped | added.keys() for end in ("", INDEX, VALUE)}
        kept = {name: array for name, array in self.delta.tensors.items() if name not in gone}
        return kept | {name: value.numpy() for name, value in added.items()}

    def _groups(self) -> Iterator[dict[str, Route]]:
        """Biases that can go to the same places, so that it pays to move them together."""
        stream = self._embedding()
        for layer in range(self.model.anatomy.layers):
            q, v, m1, m2, m3 = (self.names[f"b_{place}", layer] for place in ("q", "v", "m1", "m2", "m3"))
            by = {place: self._product(f"W_{place}", layer) for place in ("q", "v", "m1", "m2")}
            before: Route = {q: by["q"], m1: lambda x, by=by: x + by["m1"](by["v"](x))}  # type: ignore[misc]
            yield {**{name: _after(first, before) for name, first in stream.items()}, v: {m1: by["m1"]}}
            yield {self.names["b_LN1", layer]: {m2: by["m2"], m3: _same}}
            stream = {self.names["b_LN2", layer]: _same}
        if self.model.pool == "cls" and ("b_pool", None) in self.names:
            reader = {self.names["b_pool", None]: self._product("W_pool", None)}
            yield dict.fromkeys(stream, reader)

    def _embedding(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """The biases that shift what the first layer reads, and by how much."""
        bias = self.names["b_emb", None]
        inputs = architecture(self.model.base.config.model_type).inputs
        if inputs["b_project"] not in self.model.anatomy.shapes:
            return {bias: _same}
        return {bias: lambda x: self._whole(inputs["W_project"]) @ x, inputs["b_project"]: _same}

    def _product(self, term: str, layer: int | None) -> Callable[[Tensor], Tensor]:
        return lambda x: self._whole(self.names[term, layer]) @ x

    def _cheapest(self, group: Mapping[str, Route]) -> tuple[str, ...]:
        """Which biases of a group to move, so that the delta holds the fewest numbers."""
        movable = [name for name in group if name in self.delta.tensors]
        choices = [chosen for count in range(len(movable) + 1) for chosen in combinations(movable, count)]
        return min(choices, key=lambda chosen: self._cost(group, movable, chosen))

    def _cost(self, group: Mapping[str, Route], movable: list[str], chosen: tuple[str, ...]) -> int:
        targets = {target for name in chosen for target in group[name]}
        held = {*movable, *(target for route in group.values() for target in route if target in self.entries)}
        return sum(self._base(t).numel() for t in targets) + sum(
            self.entries[name][1].size for name in held - targets - set(chosen)
        )

    def _base(self, name: str) -> Tensor:
        return self.model.original(name).detach().cpu()

    def _whole(self, name: str) -> Tensor:
        """A tensor of the base as the delta has it."""
        if name not in self.entries:
            return self._base(name)
        tensor = self._base(name).clone()
        write_entries(tensor, *self.entries[name])
        return tensor


def _same(x: Tensor) -> Tensor:
    return x


def _after(first: Callable[[Tensor], Tensor], route: Route) -> Route:
    return {target: lambda x, add=add: add(first(x)) for target, add in route.items()}  # type: ignore[misc]
