"""Folding: remove biases whose effect other biases can take over.

Predictions stay the same; the delta is a third smaller.
In a post-LN encoder without dropout:
* b_k shifts all scores of a query by the same number, which softmax ignores.
* What b_v adds passes the attention unchanged, so b_m1 can add it.
* What a LayerNorm's bias adds reaches the next linear layers and the residual, whose biases can add it.
A folded delta keeps the base's values of the removed biases. Dropout breaks these equalities, so only finished deltas
are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations

from torch import Tensor

from ..arrays import Tensors
from ..errors import UsageError
from ..model.architectures import architecture
from ..model.base import Base
from ..model.task_model import Model
from .delta import INDEX, VALUE, Delta, write_entries

Route = Mapping[str, Callable[[Tensor], Tensor]]
"""The biases that can take over the effect of another one, and what a change of that one adds to each of them."""


def why_not(base: Base) -> str | None:
    """Why the biases of a base cannot be folded; None if they can."""
    return architecture(base.config.model_type).no_fold


def fold(delta: Delta, model: Model) -> Delta:
    """The smallest delta with the same predictions; UsageError if the biases of the base do not fold."""
    if reason := why_not(model.base):
        raise UsageError(f"{model.base.name}: the biases of this architecture cannot be folded: {reason}")
    if any(name not in model.base.parameters for name in delta.entries):
        raise UsageError("a delta that adds parameters (--inject) cannot be folded: its biases pass through them")
    delta.check(model.base)
    folded = _Folding(delta, model).tensors()
    return replace(delta, tensors=folded, meta=replace(delta.meta, folded=True))


def serving_form(delta: Delta, model: Model) -> Delta:
    """The delta as a bank serves it: folded, if its base allows it."""
    if why_not(model.base) or any(name not in model.base.parameters for name in delta.entries):
        return delta
    return fold(delta, model)


class _Folding:
    """The computation of one folded delta."""

    def __init__(self, delta: Delta, model: Model) -> None:
        self.delta = delta
        self.model = model
        self.entries = delta.entries
        self.names = {(site.term, site.layer): site.name for site in model.anatomy.sites}

    def tensors(self) -> Tensors:
        """The tensors of the folded delta: without the biases that were moved, and with their changed targets."""
        dropped = {self.names["b_k", layer] for layer in range(self.model.anatomy.layers)}
        changed: dict[str, Tensor] = {}
        for group in self._groups():
            for source in self._cheapest(group):
                dropped.add(source)
                change = self._value(source) - self._base(source)
                for target, add in group[source].items():
                    changed[target] = changed.get(target, self._value(target)) + add(change)
        tensors = {}
        for name, array in self.delta.tensors.items():
            parameter = name.removesuffix(INDEX).removesuffix(VALUE)
            if parameter not in dropped and parameter not in changed:
                tensors[name] = array
        for name, value in changed.items():
            tensors[name] = value.numpy()
        return tensors

    def _groups(self) -> Iterator[dict[str, Route]]:
        """Groups of biases that can be moved, each with its route. The biases of a group have targets in common.

        A target is stored once however many biases are moved to it, so a group is decided on as one.
        """
        inputs = self._embedding()  # biases that shift the input of the layer, and by how much
        for layer in range(self.model.anatomy.layers):
            times_q = self._product("W_q", layer)
            times_v = self._product("W_v", layer)
            times_m1 = self._product("W_m1", layer)
            b_q = self.names["b_q", layer]
            b_m1 = self.names["b_m1", layer]
            # A shift of the input shifts queries, keys and values. b_q can shift the queries; softmax ignores the keys'
            # shift; that of the values comes out of m1, where the residual adds the shift itself.
            from_input: Route = {b_q: times_q, b_m1: _residual(times_v, times_m1)}
            group: dict[str, Route] = {name: _after(shift, from_input) for name, shift in inputs.items()}
            group[self.names["b_v", layer]] = {b_m1: times_m1}
            yield group

            # The output of LN1 goes into m2, and by the residual to the output of m3.
            b_m2 = self.names["b_m2", layer]
            b_m3 = self.names["b_m3", layer]
            yield {self.names["b_LN1", layer]: {b_m2: self._product("W_m2", layer), b_m3: _same}}

            inputs = {self.names["b_LN2", layer]: _same}
        if self.model.pool == "cls" and ("b_pool", None) in self.names:
            to_pooler: Route = {self.names["b_pool", None]: self._product("W_pool", None)}
            yield dict.fromkeys(inputs, to_pooler)

    def _embedding(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """The biases that shift the input of the first layer, and by how much."""
        bias = self.names["b_emb", None]
        inputs = architecture(self.model.base.config.model_type).inputs
        if inputs["b_project"] not in self.model.anatomy.shapes:
            return {bias: _same}
        return {bias: lambda x: self._value(inputs["W_project"]) @ x, inputs["b_project"]: _same}

    def _product(self, term: str, layer: int | None) -> Callable[[Tensor], Tensor]:
        """Multiplication with a matrix, as the delta has it."""
        return lambda x: self._value(self.names[term, layer]) @ x

    def _cheapest(self, group: Mapping[str, Route]) -> tuple[str, ...]:
        """The biases of a group to move, so that the delta holds the fewest numbers."""
        movable = [name for name in group if name in self.delta.tensors]
        choices = chain.from_iterable(combinations(movable, count) for count in range(len(movable) + 1))
        return min(choices, key=lambda chosen: self._cost(group, movable, chosen))

    def _cost(self, group: Mapping[str, Route], movable: list[str], chosen: tuple[str, ...]) -> int:
        """The numbers that the delta must hold for this group if the chosen biases are moved."""
        targets = set(chain.from_iterable(group[name] for name in chosen))
        reachable = chain.from_iterable(group.values())
        stored = {*movable, *(name for name in reachable if name in self.entries)}
        rest = stored - targets - set(chosen)
        return sum(self._base(name).numel() for name in targets) + sum(self.entries[name][1].size for name in rest)

    def _base(self, name: str) -> Tensor:
        return self.model.original(name).detach().cpu()

    def _value(self, name: str) -> Tensor:
        """A tensor of the base with the entries of the delta written into it."""
        if name not in self.entries:
            return self._base(name)
        tensor = self._base(name).clone()
        write_entries(tensor, *self.entries[name])
        return tensor


def _same(x: Tensor) -> Tensor:
    return x


def _residual(times_v: Callable[[Tensor], Tensor], times_m1: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + times_m1(times_v(x))


def _after(first: Callable[[Tensor], Tensor], route: Route) -> Route:
    """The route of a bias that is transformed by `first` before it takes `route`."""
    return {target: _composed(first, add) for target, add in route.items()}


def _composed(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))
