"""The grid of a study: its trials, as a pure function of the study and the user's settings. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, product
from typing import Any

from ..model.language import asks_for_nothing
from .spec import Method, Protocol, Study

WIDENINGS = 2  # how often a cell whose best rate is its smallest or largest tries a further one
WIDER = 3  # the least factor between that rate and the further one
DefaultRates = Callable[[Method], tuple[float, ...]]
"""The default rates of a method on a base."""


@dataclass(frozen=True)
class Settings:
    """The settings of a study that a user changed; None keeps the value of the paper."""

    tasks: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: int | None = None
    epochs: int | None = None
    train_size: int | None = None
    dev_size: int | None = None
    max_length: int | None = None
    lr: tuple[float, ...] | str | None = None  # "paper", "auto" (the defaults for the base and selection), or rates
    batch: tuple[int, ...] | None = None
    evals_per_epoch: int | None = None
    search: str | None = None

    def frame(self, protocol: Protocol) -> dict[str, Any]:
        """The settings that decide how each cell is trained, as opposed to which cells there are."""
        return {
            "epochs": self.epochs or protocol.epochs,
            "evals_per_epoch": self.evals_per_epoch or protocol.evals_per_epoch,
            "max_length": self.max_length or protocol.max_length,
            "train_size": self.train_size,
            "dev_size": self.dev_size,
        }

    def words(self) -> list[str]:
        """The settings as options of the command line."""
        shown = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "methods":
                for name in value or ():
                    shown += ["--method", name]
            elif value is not None:
                text = ",".join(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
                shown += [f"--{entry.name.replace('_', '-')}", text]
        return shown


@dataclass(frozen=True)
class Point:
    """The coordinates of one trial in a study's grid."""

    method: str
    task: str
    size: int | None
    lr: float
    batch: int
    seed: int

    @property
    def cell(self) -> tuple[str, str, int | None]:
        """Method, task and size: the points of a cell make one number of a table."""
        return self.method, self.task, self.size


def methods(study: Study, settings: Settings) -> tuple[Method, ...]:
    """The methods to run."""
    wanted = settings.methods
    if wanted is None:
        return study.methods
    return tuple(method for method in study.methods if method.name in wanted)


def tasks_and_sizes(study: Study, settings: Settings) -> list[tuple[str, int | None]]:
    """The pairs of a task and a training size, in the order they are run; views have no trials of their own."""
    pairs: list[tuple[str, int | None]] = []
    for task in settings.tasks or study.tasks:
        if task not in study.views:
            pairs += [(task, size) for size in _sizes(study, settings, task)]
    return pairs


def _sizes(study: Study, settings: Settings, task: str) -> list[int | None]:
    most = settings.train_size
    sizes = study.task_sizes(task)
    if most is None:
        return list(sizes)
    limited = [size if size is not None and size <= most else most for size in sizes]
    return list(dict.fromkeys(limited))


def rates(
    study: Study, settings: Settings, method: Method, task: str, base: str, defaults: DefaultRates
) -> tuple[float, ...]:
    """The rates of a method: the paper's on the paper's bases, else the defaults for the selection and the base.

    A head alone is solved, not trained in steps, so one rate is enough.
    """
    if isinstance(settings.lr, tuple):
        tried = settings.lr
    elif not method.fixed and _takes_default_rates(study, settings, base):
        tried = defaults(method)
    else:
        tried = method.rates_by_task.get(task, method.rates)
    return tried[:1] if is_solved(method) else tried


def is_solved(method: Method) -> bool:
    """Whether a method trains only the head, which a study solves by convex optimisation: it has no rate."""
    return method.head == "full" and asks_for_nothing(method.select)


def tries_default_rates(study: Study, settings: Settings, base: str) -> bool:
    """Whether some method is tried at the default rates for the base and its selection, not at those of the study."""
    all_fixed = all(method.fixed for method in methods(study, settings))
    return not all_fixed and _takes_default_rates(study, settings, base)


def _takes_default_rates(study: Study, settings: Settings, base: str) -> bool:
    return settings.lr == "auto" or (settings.lr is None and base not in study.protocol.bases)


def search(study: Study, settings: Settings, base: str, defaults: DefaultRates) -> list[Point]:
    """The first stage: every rate and batch size, on the first seed or on all of them."""
    all_seeds = (settings.search or study.protocol.search) == "all"
    points = []
    for task, size in tasks_and_sizes(study, settings):
        for method in methods(study, settings):
            tried = rates(study, settings, method, task, base, defaults)
            batches = settings.batch or study.protocol.batch
            only_one = len(tried) * len(batches) == 1
            seeds = rounds(study, settings, task) if all_seeds or only_one else 1
            for batch, lr, seed in product(batches, tried, range(seeds)):
                points.append(Point(method.name, task, size, lr, batch, seed))
    return points


def widen(
    study: Study,
    settings: Settings,
    base: str,
    scores: Mapping[Point, float | None],
    losses: Mapping[Point, float] | None = None,
) -> list[Point]:
    """For each cell whose best rate is the smallest or largest it tried, one rate further out.

    Rates that a user names, the paper's rates on the paper's base and rates that the study fixes are not widened.
    """
    if not _takes_default_rates(study, settings, base):
        return []
    points = []
    for of_cell in by_cell(scores).values():
        method = study.method(of_cell[0].method)
        best = choose({point: scores[point] for point in of_cell}, losses)
        tried = sorted({point.lr for point in of_cell})
        if best is None or method.fixed:
            continue
        rate = wider_rate(tried, best[0])
        if rate is None:
            continue
        seeds = sorted({point.seed for point in of_cell if point.lr == best[0]})
        name, task, size = of_cell[0].cell
        points += [Point(name, task, size, rate, best[1], seed) for seed in seeds]
    return points


def wider_rate(tried: Sequence[float], best: float) -> float | None:
    """The next rate beyond `best`, if that is the smallest or largest of several; else None."""
    rates = sorted(tried)
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    if best == rates[-1]:
        further = rates[-1] * max(WIDER, rates[-1] / rates[-2])
    else:
        further = rates[0] / max(WIDER, rates[1] / rates[0])
    return float(f"{further:.2g}")


def repeat(
    study: Study,
    settings: Settings,
    scores: Mapping[Point, float | None],
    losses: Mapping[Point, float] | None = None,
) -> list[Point]:
    """The second stage: the other seeds of each cell, at the rate and batch size with the best score."""
    points = []
    for of_cell in by_cell(scores).values():
        best = choose({point: scores[point] for point in of_cell}, losses)
        if best is None:
            continue
        method, task, size = of_cell[0].cell
        done = {point.seed for point in of_cell if (point.lr, point.batch) == best}
        wanted = set(range(rounds(study, settings, task))) - done
        points += [Point(method, task, size, *best, seed) for seed in sorted(wanted)]
    return points


def rounds(study: Study, settings: Settings, task: str) -> int:
    """How many seeds a task gets."""
    return settings.seeds or study.rounds(task)


def by_cell(points: Iterable[Point]) -> dict[tuple[str, str, int | None], list[Point]]:
    """Points by the cell they belong to, in order."""
    cells: dict[tuple[str, str, int | None], list[Point]] = {}
    for point in points:
        cells.setdefault(point.cell, []).append(point)
    return cells


Pair = tuple[float, int]
"""A rate and a batch size."""


def choose(scores: Mapping[Point, float | None], losses: Mapping[Point, float] | None = None) -> Pair | None:
    """The rate and batch size of a cell with the best mean score over the seeds that all of them have.

    Of equal ones the dev loss decides, where it is known of all, then the rate nearest to the middle of those tried.
    """
    by_pair: dict[Pair, list[Point]] = {}
    for point, score in scores.items():
        if score is not None:
            by_pair.setdefault((point.lr, point.batch), []).append(point)
    if not by_pair:
        return None
    compared = _on_shared_seeds(by_pair)
    known = {point: score for point, score in scores.items() if score is not None}
    best = _largest({pair: _mean(points, known) for pair, points in compared.items()})
    equal = chain.from_iterable(compared[pair] for pair in best)
    if losses is not None and all(point in losses for point in equal):
        best = _largest({pair: -_mean(compared[pair], losses) for pair in best})
    return _nearest_to_middle(best, by_pair)


def _on_shared_seeds(by_pair: Mapping[Pair, list[Point]]) -> dict[Pair, list[Point]]:
    """The points of each pair on the seeds that all pairs have; all points where there is no such seed."""
    shared = set.intersection(*map(_seeds_of, by_pair.values()))
    if not shared:
        return dict(by_pair)
    kept = {}
    for pair, points in by_pair.items():
        kept[pair] = [point for point in points if point.seed in shared]
    return kept


def _seeds_of(points: Sequence[Point]) -> set[int]:
    return {point.seed for point in points}


def _mean(points: Sequence[Point], values: Mapping[Point, float]) -> float:
    return math.fsum(values[point] for point in points) / len(points)


def _largest(values: Mapping[Pair, float]) -> list[Pair]:
    """The pairs with the largest value."""
    most = max(values.values())
    return [pair for pair, value in values.items() if math.isclose(value, most)]


def _nearest_to_middle(pairs: Sequence[Pair], tried: Iterable[Pair]) -> Pair:
    """The pair whose rate is nearest to the middle of the rates that were tried, counted in steps; of two the first."""
    rates = sorted({rate for rate, _ in tried})
    middle = (len(rates) - 1) / 2
    return min(pairs, key=lambda pair: abs(rates.index(pair[0]) - middle))


def differences(study: Study, settings: Settings, base: str, name: str) -> list[str]:
    """How a run on `base`, shown as `name`, differs from the paper's protocol, one sentence each."""
    protocol = study.protocol
    changed = []
    if base not in protocol.bases and study.of_a_paper:
        changed.append(f"The base is {name}, the paper's {protocol.model}.")
    pairs: Sequence[tuple[str, Any, Any]] = (
        ("epochs", settings.epochs, protocol.epochs),
        ("batch sizes", settings.batch, protocol.batch),
        ("evaluations per epoch", settings.evals_per_epoch, protocol.evals_per_epoch),
        ("maximum length", settings.max_length, protocol.max_length),
        ("seeds", settings.seeds, protocol.rounds),
        ("rate search", settings.search, protocol.search),
    )
    for what, setting, published in pairs:
        if setting is not None and setting != published:
            changed.append(f"{what.capitalize()}: {_several(setting)} instead of {_several(published)}.")
    if settings.train_size is not None:
        changed.append(f"At most {settings.train_size:,} training rows.")
    if settings.dev_size is not None:
        changed.append(f"At most {settings.dev_size:,} rows of the dev and test parts are scored.")
    if isinstance(settings.lr, tuple):
        changed.append(f"Rates: {_several(settings.lr)}.")
    elif tries_default_rates(study, settings, base):
        whose = "the paper's" if study.of_a_paper else "the study's"
        changed.append(f"Rates are the defaults for the base and the selection, not {whose}.")
    return changed


def _several(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
