"""What to train: a trial is one training with all that decides it; a plan is a grid of trials as a user asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .bank import HEADS
from .base import Base
from .errors import UsageError, suggest
from .selection import check, parse_init
from .tasks import Task

NARROW = 512  # up to this width the larger rates won on real tasks (LOG.md)


@dataclass(frozen=True)
class Trial:
    """One training, with everything that decides its outcome except the data and the base."""

    select: str
    head: str
    init: str
    pool: str
    lr: float
    batch: int
    seed: int
    epochs: int
    evals_per_epoch: int
    schedule: str
    weight_decay: float
    clip: float
    max_length: int
    train_size: int | None
    metric: str


@dataclass(frozen=True)
class Plan:
    """What a user asks of `train`: several rates, batch sizes or seeds make a grid of trials."""

    select: str = "bias"
    head: str = "full"
    init: str = "keep"
    pool: str = "auto"
    lr: Sequence[float] | float | None = None  # None: what suits the selection
    batch: Sequence[int] | int = 8
    seed: Sequence[int] | int = 0
    epochs: int = 5
    evals_per_epoch: int = 2
    schedule: str = "constant"
    weight_decay: float = 0.0
    clip: float = 1.0
    max_length: int | None = None
    train_size: int | None = None
    metric: str | None = None
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    lanes: int | None = None
    threads: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("head", HEADS),
            ("pool", ("auto", "cls", "mean")),
            ("schedule", ("constant", "linear")),
            ("device", ("auto", "cpu", "cuda", "mps")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f'--{name}: no "{value}".{suggest(str(value), allowed)}')
        check(self.select)
        parse_init(self.init)
        for name in ("epochs", "evals_per_epoch", "batch", "train_size", "lanes", "threads"):
            _require(name, getattr(self, name), lambda n: n >= 1, "a whole number of at least 1")
        _require("lr", self.lr, lambda n: n > 0 and math.isfinite(n), "a number above 0")
        _require("seed", self.seed, lambda n: 0 <= n < 1 << 32, "a whole number from 0")
        _require("weight_decay", self.weight_decay, lambda n: 0 <= n < math.inf, "a number of at least 0")
        _require("clip", self.clip, lambda n: 0 <= n < math.inf, "a number of at least 0 (0: no clipping)")

    def trials(self, base: Base, task: Task, max_length: int, pool: str) -> list[Trial]:
        """The grid, in the order batch, rate, seed."""
        rates = _several(self.lr) if self.lr is not None else default_rates(self.select, base.width)
        shared = {name: getattr(self, name) for name in _SHARED}
        shared |= {"pool": pool, "max_length": max_length, "metric": task.metric}
        return [
            Trial(lr=float(lr), batch=batch, seed=seed, **shared)
            for batch in _several(self.batch)
            for lr in rates
            for seed in _several(self.seed)
        ]


_SHARED = {f.name for f in fields(Trial)} & {f.name for f in fields(Plan)} - {"lr", "batch", "seed"}


def default_rates(selection: str, width: int) -> tuple[float, ...]:
    """Learning rates that suit a selection: the papers' grids, moved up for narrow models."""
    words = selection.replace("(", " ").split()
    if words == ["none"]:
        return (1e-3, 4e-3, 1e-2)
    if "random" in words or "rowcol" in words:
        return (5e-4, 1e-3, 2e-3, 5e-3)
    if words[:1] == ["all"] or any(word.startswith("W_") for word in words):
        return (2e-5, 5e-5, 1e-4) if width <= NARROW else (1e-5, 2e-5, 3e-5, 5e-5)
    return (4e-4, 1e-3, 2e-3, 4e-3) if width <= NARROW else (1e-4, 4e-4, 7e-4, 1e-3)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)


def _require(name: str, value: Any, good: Callable[[Any], bool], what: str) -> None:
    if value is None:
        return
    if not _several(value) or not all(good(item) for item in _several(value)):
        raise UsageError(f"--{name.replace('_', '-')} {value}: must be {what}")
