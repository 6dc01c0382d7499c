"""What a study's results say: the trials of each cell, the chosen rate, and quantities of a trial. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..study import grid
from ..study.grid import MISMATCHED, Point
from ..study.spec import Study
from ..study.store import Result, Results, point_of, standings
from .statistics import Summary, standard_deviation, summary

OTHER_DEV = "dev_mismatched"
Cell = tuple[str, str, int | None]


@dataclass(frozen=True)
class Findings:
    """The results of a study on one base, as far as they are there."""

    study: Study
    manifest: Mapping[str, Any]
    results: Mapping[Point, Result | None]

    @classmethod
    def of(cls, study: Study, manifest: Mapping[str, Any], store: Results) -> Findings:
        """What a manifest names, read."""
        keys = {point_of(table): str(table["key"]) for table in manifest["points"]}
        found = {point: store.read(key) for point, key in keys.items()}
        return cls(study, manifest, {**found, **dict(_mismatched(found))})

    @property
    def base(self) -> str:
        """The name of the base."""
        return str(self.manifest["base"]["name"])

    @cached_property
    def cells(self) -> dict[Cell, list[Point]]:
        """The points of each cell."""
        return grid.by_cell(self.results)

    @cached_property
    def methods(self) -> list[str]:
        """Methods in the study's order, as far as they were run."""
        seen = {method for method, _, _ in self.cells}
        return [method.name for method in self.study.methods if method.name in seen]

    @cached_property
    def tasks(self) -> list[str]:
        """Tasks in the order they were run."""
        return list(dict.fromkeys(task for _, task, _ in self.cells))

    @cached_property
    def own(self) -> list[str]:
        """Tasks with trials of their own; mismatched MNLI is scored by those of mnli."""
        return [task for task in self.tasks if task != MISMATCHED]

    @cached_property
    def trials(self) -> dict[Point, Result | None]:
        """The trials, each once."""
        return {point: result for point, result in self.results.items() if point.task != MISMATCHED}

    @cached_property
    def differences(self) -> list[str]:
        """What differs from the paper's protocol; what does so for some tasks or methods, with their names."""
        said: dict[str, list[tuple[str, str]]] = {}
        for run in self.manifest["runs"]:
            for text in run["differences"]:
                said.setdefault(text, []).extend((m, t) for m in run["methods"] for t in run["frames"])
        untested = [task for task in self.own if self.part == "test" and not self._tested(task)]
        ran = list(dict.fromkeys(task for run in self.manifest["runs"] for task in run["frames"]))
        cells = [(m, t) for run in self.manifest["runs"] for m in run["methods"] for t in run["frames"]]
        found = []
        if set(ran) != set(self.study.tasks) - {MISMATCHED}:
            found.append(f"Tasks: {', '.join(ran)} instead of {', '.join(self.study.tasks)}.")
        for text, own in said.items():
            on = [task for task in ran if any(task == t for _, t in own)]
            where = "" if on == ran else f"On {', '.join(on)}: "
            whose = _named([m for m, _ in own], [m for m, t in cells if t in on])
            found.append(f"{where}{text.removesuffix('.')}{whose}.")
        if untested:
            found.append(f"{', '.join(untested)}: no labelled test part; scored on dev, which chose the rate too.")
        return found

    def _tested(self, task: str) -> bool:
        done = [result for result in self.done if result.task == task and result.status == "done"]
        return not done or any(result.score("test") is not None for result in done)

    def sizes(self, task: str) -> list[int | None]:
        """Training sizes of a task, smallest first; None is all rows."""
        found = dict.fromkeys(size for _, own, size in self.cells if own == task)
        return sorted(found, key=lambda size: math.inf if size is None else size)

    def size(self, task: str) -> int | None:
        """The largest training size of a task: that of tables without sizes."""
        return self.sizes(task)[-1]

    def rows(self, task: str, size: int | None) -> int:
        """How many rows were trained on, where that is known."""
        found = self._first.get((task, size))
        return found.rows["train"] if found else size or 0

    @cached_property
    def _first(self) -> dict[tuple[str, int | None], Result]:
        """Any result of each place, for what all of them share."""
        return {(p.task, p.size): r for p, r in reversed(list(self.results.items())) if r is not None}

    @property
    def part(self) -> str:
        """Which part the study scores."""
        return "dev" if self.manifest["split"] == "dev" else "test"

    @cached_property
    def choices(self) -> dict[Cell, tuple[float, int] | None]:
        """The rate and batch size each cell chose by its dev scores."""
        scores = standings(self.results)
        return {cell: grid.choose({point: scores[point] for point in points}) for cell, points in self.cells.items()}

    def chosen(self, cell: Cell) -> dict[int, Result]:
        """The trials of a cell at its chosen rate, by seed; if all diverged, the diverged ones."""
        best = self.choices.get(cell)
        found = {p: r for p in self.cells.get(cell, ()) if (r := self.results[p]) is not None}
        if best is None:
            return {point.seed: result for point, result in found.items()}
        return {point.seed: result for point, result in found.items() if (point.lr, point.batch) == best}

    def at(self, cell: Cell, rate: float | None) -> dict[int, Result]:
        """The trials of a cell at one rate, whatever the batch; at the chosen one without a rate."""
        if rate is None:
            return self.chosen(cell)
        points = self.cells.get(cell, ())
        return {p.seed: r for p in points if math.isclose(p.lr, rate) and (r := self.results[p]) is not None}

    def scores(self, cell: Cell, rate: float | None = None, metric: str | None = None) -> list[float]:
        """Scores in points over the seeds; a run that failed counts as always answering the majority class."""
        return [self.points(result, metric) for _, result in sorted(self.at(cell, rate).items())]

    def points(self, result: Result, metric: str | None = None) -> float:
        """A trial's score in points."""
        known = metric if metric in result.scores.get("dev", {}) else None
        found = result.score(self.part, known)
        if found is None:
            found = result.score("dev", known)
        return 100 * (result.majority if found is None else found)

    def summary(self, cell: Cell, rate: float | None = None) -> Summary | None:
        """Mean and spread of a cell."""
        values = self.scores(cell, rate)
        return summary(values) if values else None

    def failed(self, result: Result) -> bool:
        """Whether a run collapsed: it diverged, or ended no better than the majority class."""
        return result.status == "diverged" or self.points(result) <= 100 * result.majority + 1e-9

    @cached_property
    def silent(self) -> set[tuple[str, int | None]]:
        """Places where even full fine-tuning (or else the best method) does not beat the majority class."""
        found = set()
        for task, size in dict.fromkeys((task, size) for _, task, size in self.cells):
            full = [m.name for m in self.study.methods if m.select == "all"]
            means = self._means(full, task, size)[:1] or self._means(self.methods, task, size)
            if means and max(means) <= 100 * self.majority(task, size):
                found.add((task, size))
        return found

    def _means(self, names: Sequence[str], task: str, size: int | None) -> list[float]:
        return [found.mean for name in names if (found := self.summary((name, task, size))) is not None]

    def majority(self, task: str, size: int | None) -> float:
        """What always answering the majority class scores."""
        found = self._first.get((task, size))
        return found.majority if found else 0.0

    @property
    def done(self) -> list[Result]:
        """The results that are there."""
        return [result for result in self.results.values() if result is not None]

    def blocks(self, tasks: Sequence[str] = ()) -> Iterator[tuple[str, int | None]]:
        """The places that count as evidence."""
        for task in tasks or self.own:
            if task in self.own:
                yield from ((task, size) for size in self.sizes(task) if (task, size) not in self.silent)

    def quantity(self, name: str, cell: Cell) -> dict[int, float]:
        """A quantity of each seed of a cell, in points (epochs in epochs)."""
        chosen = self.chosen(cell)
        if name in ("spread", "failed"):
            return self._over_seeds(name, chosen)
        measure = self.points if name == "score" else _QUANTITIES[name]
        found = {seed: measure(result) for seed, result in chosen.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def _over_seeds(self, name: str, chosen: Mapping[int, Result]) -> dict[int, float]:
        if name == "failed":
            return {0: 100 * sum(map(self.failed, chosen.values())) / len(chosen)} if len(chosen) > 1 else {}
        values = [self.points(result) for result in chosen.values()]
        return {0: standard_deviation(values)} if len(values) > 1 else {}


def _named(some: Sequence[str], every: Sequence[str]) -> str:
    """Which methods of those that were run, in as few words as it takes."""
    own, others = dict.fromkeys(some), [name for name in dict.fromkeys(every) if name not in some]
    if not others:
        return ""
    return f" ({'; '.join(own)})" if len(own) <= len(others) else f" (all but {'; '.join(others)})"


def _mismatched(found: Mapping[Point, Result | None]) -> Iterator[tuple[Point, Result]]:
    """MNLI's trials once more, as those of its mismatched dev set."""
    for point, result in found.items():
        if point.task == "mnli" and result is not None and OTHER_DEV in result.scores:
            scores = {**result.scores, "dev": result.scores[OTHER_DEV]}
            yield replace(point, task=MISMATCHED), replace(result, task=MISMATCHED, scores=scores)


def gap(result: Result) -> float | None:
    """Train score minus dev score of the kept checkpoint, in points."""
    train, dev = result.score("train"), result.score("dev")
    return None if train is None or dev is None else 100 * (train - dev)


def fall(result: Result) -> float | None:
    """How far the dev score fell from its best to the end of training, in points."""
    curve = [score for _, _, score in result.evaluations]
    return 100 * (max(curve) - curve[-1]) if curve else None


def area(result: Result) -> float | None:
    """How gently the training loss falls: its mean over training as a share of its start, in points."""
    losses = [loss for _, loss in result.loss]
    return 100 * math.fsum(losses) / len(losses) / losses[0] if losses and losses[0] > 0 else None


def moved(result: Result, terms: Sequence[str] = ()) -> float | None:
    """Mean absolute change of what moved (or of some terms), over terms and layers."""
    names = terms or [name for name, values in result.change.items() if any(values)]
    values = [v for name in names for v in result.change.get(name, ()) if v is not None]
    return math.fsum(values) / len(values) if values else None


def _epochs(result: Result) -> float | None:
    return result.best_epoch or None


_QUANTITIES: dict[str, Callable[[Result], float | None]] = {"gap": gap, "fall": fall, "area": area, "epochs": _epochs}
