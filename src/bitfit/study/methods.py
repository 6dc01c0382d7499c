"""Which methods are compared, and how much of the comparison fits a budget. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from ..errors import BitfitError, UsageError, suggest
from ..training.plan import DEVICES
from .grid import WIDENINGS, WIDER
from .spec import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("bitfit", "bias", (), family="BitFit"),
        Method("b_m2+b_q", "b_m2 + b_q", (), family="b_m2, b_q"),
        Method("layernorm", "layernorm", (), family="LayerNorm"),
        Method("lora", "injected", (), inject="lora(W_q + W_v, 8)", family="LoRA"),
        Method("adapters", "injected + layernorm", (), inject="adapter(64)", family="Adapters"),
        Method("diff-pruning", "diff_pruning(all, 0.5%)", (), family="Diff-Pruning"),
        Method("autofreeze", "bias", (), autofreeze=True, family="AutoFreeze"),
        Method("head", "none", (), family="Frozen"),
        Method("full", "all", (), family="Full"),
    )
}
"""The methods that have a name, and that are compared by default. All get rates by what they train and by the base."""
SEEDS = 3
RATES = 3
LEAST_SEEDS = 2  # a budget leaves at least so many seeds and training rows
LEAST_ROWS = 100


@dataclass(frozen=True)
class Extent:
    """How much is compared: seeds, rates of each method, rounds of further rates, training rows and dev rows."""

    seeds: int
    rates: int
    widenings: int
    rows: int
    dev_rows: int

    @property
    def trials(self) -> float:
        """The trials of a method: its rates on the first seed, half of the possible further ones, other seeds."""
        return self.rates + self.widenings / 2 + self.seeds - 1


class CompareOptions(TypedDict, total=False):
    """The keyword arguments of `bitfit.compare`: the fields of ComparePlan. A test compares them."""

    methods: Sequence[str] | str | None
    seeds: int
    rates: int
    epochs: int | None
    budget: float | str | None
    train_size: int | None
    max_length: int | None
    metric: str | None
    positive: str | None
    task: str | None
    text: str | None
    text_pair: str | None
    label: str | None
    separator: str | None
    data: str | None
    encoding: str | None
    threads: int | None
    device: str


@dataclass(frozen=True)
class ComparePlan:
    """What a user asks of a comparison."""

    methods: Sequence[str] | str | None = None
    seeds: int = SEEDS
    rates: int = RATES
    epochs: int | None = None
    budget: float | str | None = None
    train_size: int | None = None
    max_length: int | None = None
    metric: str | None = None
    positive: str | None = None
    task: str | None = None
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    separator: str | None = None
    data: str | None = None
    encoding: str | None = None
    threads: int | None = None
    device: str = "auto"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ComparePlan:
        """What keyword arguments ask for; UsageError with a suggestion for an unknown one."""
        known = [entry.name for entry in fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f'compare has no option "{name}".{suggest(name, known)}')
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("seeds", "rates", "epochs", "train_size", "max_length", "threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be a whole number of at least 1")
        if self.device not in DEVICES:
            raise UsageError(f'--device: no "{self.device}".{suggest(str(self.device), DEVICES)}')
        self.chosen_methods  # noqa: B018  a wrong name must not cost the loading of a base
        self.budget_seconds  # noqa: B018

    @property
    def chosen_methods(self) -> tuple[Method, ...]:
        """The methods that are compared, in the order of the plan."""
        if self.methods is None:
            return tuple(METHODS.values())
        if isinstance(self.methods, str):
            names = method_names(self.methods)
        else:
            names = [str(name).strip() for name in self.methods]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f'--methods: "{name}" is given twice; remove one')
        if len(names) < 2:
            raise UsageError("--methods: at least two are needed to compare")
        return tuple(_method(name) for name in names)

    @property
    def budget_seconds(self) -> float | None:
        """The budget in seconds."""
        return None if self.budget is None else duration(self.budget)


def method_names(text: str) -> list[str]:
    """Names and selections, separated by commas outside of parentheses."""
    names = re.split(r",(?![^()]*\))", text)
    return [name.strip() for name in names if name.strip()]


def _method(name: str) -> Method:
    """The method of a name; a graft such as lora(W_q, 4), or a selection, as a method."""
    if name in METHODS:
        return METHODS[name]
    for known in (METHODS["lora"], METHODS["adapters"]):
        if name.startswith(known.inject.partition("(")[0] + "("):
            return _grafted(name, known)
    try:
        return Method(name, name, ())
    except ValueError as error:
        raise unknown_method(name, str(error)) from error


def _grafted(name: str, known: Method) -> Method:
    """A method with another graft of the same kind."""
    try:
        return replace(known, name=name, inject=name)
    except (ValueError, BitfitError) as error:
        raise UsageError(f"--methods: {error}") from error


def unknown_method(name: str, why: str) -> UsageError:
    """The error for a name that is neither a method nor a selection."""
    known = suggest(name, [*METHODS])
    reason = why.removeprefix(f"select = {name!r}: ").partition(" Known: ")[0].rstrip(".")
    return UsageError(f'--methods: no method "{name}".{known} It is no selection either ({reason}).')


def duration(value: float | str) -> float:
    """Seconds of a duration such as 90, 90s, 10m or 2h."""
    text = str(value).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--budget {text}: must be a duration such as 90s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


# ---- how much fits


def full_extent(plan: ComparePlan, rows: int, dev_rows: int) -> Extent:
    """The extent without a budget. A single rate has no edges, so it is not widened."""
    return Extent(plan.seeds, plan.rates, WIDENINGS if plan.rates > 1 else 0, rows, dev_rows)


def fit_extent(most: Extent, budget: float, cost: Callable[[Extent], float]) -> Extent:
    """The largest extent whose cost is within the budget; the smallest one if none is.

    Seeds are cut first, to two, then further rates, then rates, to one, then rows.
    """
    extent = most
    while cost(extent) > budget:
        if extent.seeds > LEAST_SEEDS:
            extent = replace(extent, seeds=extent.seeds - 1)
        elif extent.widenings:
            extent = replace(extent, widenings=extent.widenings - 1)
        elif extent.rates > 1:
            extent = replace(extent, rates=extent.rates - 1)
        elif extent.rows > LEAST_ROWS:
            rows = max(LEAST_ROWS, extent.rows // 2)
            extent = replace(extent, rows=rows, dev_rows=min(extent.dev_rows, rows))
        else:
            break
    return extent


def spaced_rates(defaults: Sequence[float], count: int) -> tuple[float, ...]:
    """`count` rates around the largest default, each three times the one before.

    A default grid is fine and ends where longer trainings diverge. In a comparison most methods were best at its end.
    """
    middle = max(defaults)
    powers = range(-(count // 2), count - count // 2)
    return tuple(float(f"{middle * WIDER**power:.2g}") for power in powers)
