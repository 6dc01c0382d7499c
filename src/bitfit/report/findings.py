"""The results of a study: the trials of each cell, the chosen rate, and which places are evidence. No torch.

A cell is a method on a task with a number of training rows. A place is a task (with a number of rows) on one base.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from ..study import grid
from ..study.grid import Point
from ..study.manifest import Manifest
from ..study.spec import Method, Study
from ..study.store import Result, Results, dev_losses, standings
from .histories import history
from .statistics import Summary, summary

Cell = tuple[str, str, int | None]


@dataclass(frozen=True)
class Findings:
    """The results of a study on one base, those that exist so far."""

    study: Study
    manifest: Manifest
    results: Mapping[Point, Result | None]

    @classmethod
    def of(cls, study: Study, manifest: Manifest, store: Results) -> Findings:
        """Read the results that a manifest names."""
        keys = {entry.point: entry.key for entry in manifest.points}
        results = {point: store.read(key) for point, key in keys.items()}
        return cls(study, manifest, {**results, **dict(_views(study, results))})

    @property
    def base(self) -> str:
        """The name of the base."""
        return self.manifest.base.name

    @property
    def history(self) -> str:
        """A sentence on where the base comes from; empty if that is not known."""
        text = history(self.manifest.base.fingerprint)
        return f"{self.base} is {text}." if text else ""

    @property
    def parameters(self) -> int:
        """The size of the base."""
        return self.manifest.base.parameters

    @cached_property
    def cells(self) -> dict[Cell, list[Point]]:
        """The points of each cell."""
        return grid.by_cell(self.results)

    @cached_property
    def methods(self) -> list[str]:
        """The methods that were run, in the study's order."""
        ran = {method for method, _, _ in self.cells}
        return [method.name for method in self.study.methods if method.name in ran]

    @cached_property
    def tasks(self) -> list[str]:
        """Tasks in the order they were run."""
        return list(dict.fromkeys(task for _, task, _ in self.cells))

    @cached_property
    def trained_tasks(self) -> list[str]:
        """Tasks that were trained. A view of another task scores the same trials, so it is not further evidence."""
        return [task for task in self.tasks if task not in self.study.views]

    @cached_property
    def trials(self) -> dict[Point, Result | None]:
        """The trials, each once."""
        return {point: result for point, result in self.results.items() if point.task not in self.study.views}

    @property
    def done(self) -> list[Result]:
        """The results that exist."""
        return [result for result in self.results.values() if result is not None]

    # ---- places

    def sizes(self, task: str) -> list[int | None]:
        """Training sizes of a task, smallest first; None is all rows."""
        sizes = {size for _, other, size in self.cells if other == task}
        return sorted(sizes, key=lambda size: math.inf if size is None else size)

    def size(self, task: str) -> int | None:
        """The largest training size of a task: that of tables without sizes."""
        return self.sizes(task)[-1]

    def rows(self, task: str, size: int | None) -> int:
        """The number of training rows, if it is known."""
        result = self._any_result.get((task, size))
        return result.rows["train"] if result else size or 0

    def test_rows(self, task: str, size: int | None) -> int:
        """The number of rows that a place is scored on; 0 if it is not known."""
        result = self._any_result.get((task, size))
        return result.rows.get(self.part(result), 0) if result else 0

    def metric(self, task: str, size: int | None) -> str:
        """The metric of a place."""
        result = self._any_result.get((task, size))
        return result.metric if result else ""

    def majority(self, task: str, size: int | None) -> float:
        """The score of always answering the majority class, in points."""
        result = self._any_result.get((task, size))
        return 100 * result.majority if result else 0.0

    @cached_property
    def _any_result(self) -> dict[tuple[str, int | None], Result]:
        """One result of each place, for what all results of a place share."""
        first: dict[tuple[str, int | None], Result] = {}
        for point, result in self.results.items():
            if result is not None and result.status == "done":
                first.setdefault((point.task, point.size), result)
        return first

    @cached_property
    def without_evidence(self) -> set[tuple[str, int | None]]:
        """Places where the methods, averaged, do not beat the majority class beyond their interval.

        The average is over all methods that train a pre-trained base, so that no difference between two of them
        decides whether their place counts.
        """
        places = dict.fromkeys((task, size) for _, task, size in self.cells)
        return {place for place in places if not self._beats_majority(*place)}

    def _beats_majority(self, task: str, size: int | None) -> bool:
        lows = []
        for name in self.methods:
            if self._trains(self.study.method(name)):
                lows += [self.lower_end(result) for result in self.chosen((name, task, size)).values()]
        if not lows:
            for name in self.methods:
                lows += [self.lower_end(result) for result in self.chosen((name, task, size)).values()]
        return bool(lows) and statistics.fmean(lows) > self.majority(task, size)

    def _trains(self, method: Method) -> bool:
        """Whether a method trains part of a pre-trained encoder."""
        counts = self.manifest.audit.get(method.name, {})
        trained = sum(counts.get(part, 0) for part in ("encoder", "embedding", "pooler"))
        return method.init == "keep" and (trained > 0 or not counts)

    def lower_end(self, result: Result) -> float:
        """The lower end of a score's interval over the test rows, in points."""
        table = result.scores.get(self.part(result), {})
        return 100 * (table[result.metric][1] if result.metric in table else result.majority)

    def places(self, tasks: Sequence[str] = ()) -> Iterator[tuple[str, int | None]]:
        """The places that count as evidence."""
        for task in tasks or self.trained_tasks:
            if task not in self.trained_tasks:
                continue
            for size in self.sizes(task):
                if (task, size) not in self.without_evidence:
                    yield task, size

    # ---- cells

    @cached_property
    def choices(self) -> dict[Cell, tuple[float, int] | None]:
        """The rate and batch size with the best dev scores of each cell."""
        choices = {}
        for cell, points in self.cells.items():
            choices[cell] = self.choice(points)
        return choices

    def choice(self, points: Sequence[Point]) -> tuple[float, int] | None:
        """The rate and batch size that dev chooses from some points of a cell."""
        return grid.choose({point: self._standings[point] for point in points}, self._dev_losses)

    @cached_property
    def _standings(self) -> dict[Point, float | None]:
        return standings(self.results)

    @cached_property
    def _dev_losses(self) -> dict[Point, float]:
        return dev_losses(self.results)

    def at_edge(self, cell: Cell) -> bool:
        """Whether a cell chose the smallest or largest rate it tried, so that a better one may exist.

        The rates of a row that the paper prints belong to its protocol and have no edge, where the study fixes them; a
        head that is solved has no rate.
        """
        best = self.choices.get(cell)
        tried = sorted({point.lr for point in self.cells.get(cell, ())})
        if best is None or self._as_published(cell, tried) or grid.is_solved(self.study.method(cell[0])):
            return False
        return best[0] in (tried[0], tried[-1])

    def _as_published(self, cell: Cell, tried: Sequence[float]) -> bool:
        method = self.study.method(cell[0])
        published = sorted(method.rates_by_task.get(cell[1], method.rates))
        if self.manifest.published or (method.fixed and self.study.prints(method.name)):
            return True
        same_rates = len(published) == len(tried) and all(map(math.isclose, published, tried))
        return same_rates and self.base in self.paper_bases

    @cached_property
    def paper_bases(self) -> set[str]:
        """The bases of the paper, as hub ids; a folder of that name may hold another base."""
        return set(self.study.protocol.bases)

    def chosen(self, cell: Cell) -> dict[int, Result]:
        """The trials of a cell at its chosen rate, by seed; if all diverged, the diverged ones."""
        best = self.choices.get(cell)
        by_seed = {}
        for point in self.cells.get(cell, ()):
            result = self.results[point]
            if result is not None and best in (None, (point.lr, point.batch)):
                by_seed[point.seed] = result
        return by_seed

    def at(self, cell: Cell, rate: float | None) -> dict[int, Result]:
        """The trials of a cell at one rate, with any batch size; without a rate, at the chosen one."""
        if rate is None:
            return self.chosen(cell)
        by_seed = {}
        for point in self.cells.get(cell, ()):
            result = self.results[point]
            if result is not None and math.isclose(point.lr, rate):
                by_seed[point.seed] = result
        return by_seed

    def scores(self, cell: Cell, rate: float | None = None, metric: str | None = None) -> list[float]:
        """Scores in points over the seeds."""
        return [self.points(result, metric) for _, result in sorted(self.at(cell, rate).items())]

    def part(self, result: Result) -> str:
        """The split a trial is judged on."""
        return judged_part(result)

    def points(self, result: Result, metric: str | None = None) -> float:
        """A trial's score in points; a run that diverged scores as the majority class."""
        table = result.scores.get(self.part(result), {})
        name = metric if metric is not None and metric in table else result.metric
        return 100 * (table[name][0] if name in table else result.majority)

    def summary(self, cell: Cell, rate: float | None = None) -> Summary | None:
        """Mean and spread of a cell."""
        values = self.scores(cell, rate)
        return summary(values) if values else None

    def failed(self, result: Result) -> bool:
        """Whether a run collapsed: it diverged, or ended no better than the majority class."""
        return result.status == "diverged" or self.points(result) <= 100 * result.majority + 1e-9

    def beats_majority(self, result: Result) -> bool:
        """Whether a run beat the majority class beyond its interval."""
        return self.lower_end(result) > 100 * result.majority

    def row_variance(self, result: Result, metric: str | None = None) -> float:
        """The variance of a score over its test rows, in points squared, from its 95% interval."""
        table = result.scores.get(self.part(result), {})
        name = metric if metric is not None and metric in table else result.metric
        if name not in table:
            return 0.0
        _, low, high = table[name]
        return (100 * (high - low) / (2 * 1.96)) ** 2

    # ---- the paper's numbers

    def comparable(self, task: str) -> bool:
        """Whether the paper's number for a task can be compared with ours: on its base, with all of its data."""
        if self.base not in self.paper_bases:
            return False
        frames = self.manifest.frames(task)
        return all(frame.train_size is None and frame.dev_size is None for frame in frames)

    def published_score(self, cell: Cell) -> float | None:
        """The paper's score of a cell; None if there is none that can be compared with ours."""
        method, task, _ = cell
        if not self.comparable(task):
            return None
        best = self.choices.get(cell)
        chosen_rate = None if best is None else best[0]
        for table in self.study.tables:
            if task not in table.columns:
                continue
            column = table.columns.index(task)
            for row in table.rows:
                is_ours = row.method == method and row.base in ("", self.base) and row.rate in (None, chosen_rate)
                if is_ours and row.values:
                    number = row.numbers[column]
                    if number is not None:
                        return number.value
        return None

    # ---- what differs from the paper

    @cached_property
    def differences(self) -> list[str]:
        """Sentences on what differs from the paper's protocol, with the tasks or methods if it is not all of them."""
        cells = list(chain.from_iterable(run.cells for run in self.manifest.runs))
        ran = list(dict.fromkeys(task for _, task in cells))
        affected: dict[str, list[tuple[str, str]]] = {}  # difference -> its methods and tasks
        for run in self.manifest.runs:
            for text in run.differences:
                affected.setdefault(text, []).extend(run.cells)
        sentences = []
        if set(ran) != set(self.study.trained_tasks):
            sentences.append(f"Tasks: {', '.join(ran)} instead of {', '.join(self.study.tasks)}.")
        for text, pairs in affected.items():
            affected_tasks = {task for _, task in pairs}
            tasks = [task for task in ran if task in affected_tasks]
            on_tasks = "" if tasks == ran else f"On {', '.join(tasks)}: "
            some = [method for method, _ in pairs]
            every = [method for method, task in cells if task in tasks]
            sentences.append(f"{on_tasks}{text.removesuffix('.')}{_named(some, every)}.")
        for name, view in self.study.views.items():
            if view.of in self.tasks and name not in self.tasks:
                sentences.append(f"{name} is not scored: the data of {view.of} has no part {view.part}.")
        untested = [task for task in self.trained_tasks if not self._tested(task)]
        if untested:
            sentences.append(f"{', '.join(untested)}: scored on the dev rows that chose the rate too.")
        return sentences

    def _tested(self, task: str) -> bool:
        done = [result for result in self.done if result.task == task and result.status == "done"]
        return not done or any("test" in result.scores for result in done)


def judged_part(result: Result) -> str:
    """The split a trial is judged on: test, which no choice depends on; dev if there is no test."""
    return "test" if "test" in result.scores else "dev"


def _named(some: Sequence[str], every: Sequence[str]) -> str:
    """Some of the methods that were run, in brackets: by name, or all but the others if these are fewer."""
    named = dict.fromkeys(some)
    others = [name for name in dict.fromkeys(every) if name not in named]
    if not others:
        return ""
    if len(named) <= len(others):
        return f" ({'; '.join(named)})"
    return f" (all but {'; '.join(others)})"


def _views(study: Study, results: Mapping[Point, Result | None]) -> Iterator[tuple[Point, Result]]:
    """The trials of a task once more for each of its views, scored on the view's part."""
    for name, view in study.views.items():
        for point, result in results.items():
            if result is not None and point.task == view.of and view.part in result.scores:
                scores = {**result.scores, "dev": result.scores[view.part], "test": result.scores[view.part]}
                yield replace(point, task=name), replace(result, task=name, scores=scores)
