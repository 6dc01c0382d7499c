"""Running a study: the trials that are missing, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby

import torch

from ..delta.meta import trial_table
from ..errors import DataError, Interrupted, SelectionError, UsageError, suggest
from ..model.audit import count
from ..model.base import Base
from ..model.resolution import resolve, resolve_pool
from ..terminal.progress import Say, counted
from ..training.checkpoint import SECONDS
from ..training.job import Job
from ..training.plan import Trial, default_rates
from ..training.resolved import Resolved, passes, resolve_trials
from . import forecast, grid
from .data import Opening
from .grid import Point, Settings
from .manifest import BaseFacts, Entry, Frame, Manifest, RunFacts
from .passes import Engine, Opened, Pass, versions, workspace
from .spec import Method, Study
from .store import Result, Results, dev_losses, key_of, standings

Meter = Callable[[float, float], None]
"""Called with the work done and the total work."""


@dataclass
class Campaign:
    """A study on one base with its settings, and the folder of its results."""

    study: Study
    base: str | None
    settings: Settings
    data: str | None
    results: Results
    threads: int | None = None
    lanes: int | None = None
    checkpoint_seconds: float = SECONDS
    skipped: dict[str, str] = field(default_factory=dict)  # task or method -> why
    keys: dict[Point, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # of each task's data
    folders: dict[str, str] = field(default_factory=dict)  # of tasks whose data is not in the folder `data`

    def __post_init__(self) -> None:
        known = [method.name for method in self.study.methods]
        for name in self.settings.methods or ():
            if name not in known:
                raise UsageError(f'--method: no "{name}" in {self.study.name}.{suggest(name, known)}')
        self.workspace = workspace(self.base)
        self.name = self.workspace.base.name

    # ---- which trials

    def search(self) -> list[Point]:
        """The points of the first stage."""
        return grid.search(self.study, self.settings, self.base or self.name, self._default_rates)

    def widen(self, done: Sequence[Point]) -> list[Point]:
        """Further rates for cells whose best one is the smallest or largest that was tried."""
        results = self._results_of(done)
        base = self.base or self.name
        return grid.widen(self.study, self.settings, base, standings(results), dev_losses(results))

    def repeat(self, done: Sequence[Point]) -> list[Point]:
        """The other seeds of each cell, once its rate is chosen."""
        results = self._results_of(done)
        return grid.repeat(self.study, self.settings, standings(results), dev_losses(results))

    def _results_of(self, points: Sequence[Point]) -> dict[Point, Result | None]:
        return {point: self.results.read(self.keys[point]) for point in points if point in self.keys}

    def _default_rates(self, method: Method) -> tuple[float, ...]:
        base = self.workspace.base
        try:
            return default_rates(resolve(base, method.select, inject=method.inject).selection, base.width)
        except SelectionError:  # the base has no such term; `plan` says so
            return method.rates[:1]

    # ---- which passes

    def plan(self, points: Sequence[Point]) -> list[Pass]:
        """The passes that have trials without a result, task by task; sets the keys of all points."""
        by_opening: dict[Opening, list[Point]] = {}
        for point in points:
            by_opening.setdefault(self._opening(point), []).append(point)
        works: list[Pass] = []
        for opening, points_of_opening in by_opening.items():
            try:
                works += self._passes(opening, points_of_opening)
            except DataError as error:
                self.skipped[opening.task] = str(error)
        if not self.keys:
            raise DataError("; ".join(self.skipped.values()) or f"{self.study.name}: nothing to run")
        return works

    def _opening(self, point: Point) -> Opening:
        """The data of a point. Rows that are drawn are drawn anew for every seed."""
        protocol, settings = self.study.protocol, self.settings
        drawn = protocol.split == "holdout" or point.size is not None
        views = [view.part for view in self.study.views.values() if view.of == point.task]
        return Opening(
            base=self.base,
            task=point.task,
            data=self.folders.get(point.task, self.data),
            split=protocol.split,
            size=point.size,
            dev_size=settings.dev_size,
            max_length=settings.max_length or protocol.max_length,
            seed=point.seed if drawn else 0,
            test_part=protocol.test_part.get(point.task, ""),
            more_parts=tuple(views),
        )

    def _passes(self, opening: Opening, points: list[Point]) -> Iterator[Pass]:
        """The passes over one opened data set that have trials without a result."""
        opened = self.workspace.open(opening)
        self.digests.setdefault(opening.task, opened.digest[:12])  # of its first size
        trials = self._resolved(opened, points)
        resolved = [each for each, _ in trials.values()]
        point_of = {trial: point for trial, (_, point) in trials.items()}
        for group in passes(resolved, self.lanes):
            missing = [each for each in group if not self.results.has(self.keys[point_of[each.trial]])]
            if missing:
                yield self._pass(opening, opened.job, missing, point_of)

    def _resolved(self, opened: Opened, points: list[Point]) -> dict[Trial, tuple[Resolved, Point]]:
        """The trials of these points, each with the first of its points; sets the keys of all points.

        Methods that are equal on this base share a trial. A method that the base has no parameters for is skipped.
        """
        job = opened.job
        trials: dict[Trial, tuple[Resolved, Point]] = {}
        for name, of_method in groupby(points, key=lambda point: point.method):
            wanted = {point: self._trial(job, point) for point in of_method}
            try:
                resolved = resolve_trials(job.base, wanted.values())
            except SelectionError as error:
                self.skipped[name] = str(error)
                continue
            for point, each in zip(wanted, resolved, strict=True):
                self.keys[point] = key_of(trial_table(each.trial), opened.digest, job.base.fingerprint)
                trials.setdefault(each.trial, (each, point))
        return trials

    def _trial(self, job: Job, point: Point) -> Trial:
        protocol, settings = self.study.protocol, self.settings
        method = self.study.method(point.method)
        return Trial(
            select=method.select,
            inject=method.inject,
            head=method.head,
            init=method.init,
            pool=resolve_pool(job.base, job.task.pool("auto")),
            lr=point.lr,
            batch=point.batch,
            seed=point.seed,
            epochs=method.epochs_times * (settings.epochs or protocol.epochs),
            evals_per_epoch=settings.evals_per_epoch or protocol.evals_per_epoch,
            schedule=protocol.schedule,
            weight_decay=protocol.weight_decay,
            clip=protocol.clip,
            max_length=job.encoder.max_length,
            stride=job.encoder.stride,
            train_size=len(job.train.examples),
            data_seed=0,
            protocol="published",  # the split of the study is part of the data's digest
            metric=job.task.metric,
            prefix_dropout=False,
            dropout=method.dropout,
            autofreeze=method.autofreeze,
        )

    def _pass(self, opening: Opening, job: Job, group: list[Resolved], point_of: dict[Trial, Point]) -> Pass:
        trials = tuple(resolved.trial for resolved in group)
        points = tuple(point_of[trial] for trial in trials)
        keys = tuple(self.keys[point] for point in points)
        folder = self.results.pass_folder(self.study.name, self.name, keys)
        work = sum(forecast.trial_work(job, resolved) for resolved in group)
        memory = forecast.memory(job, group)
        stored = self.results.stored_pass(folder)
        return Pass(opening, points, trials, keys, folder, work, memory, self.threads, self.checkpoint_seconds, stored)

    # ---- the manifest

    def describe(self, command: Sequence[str]) -> Manifest:
        """The manifest: which trials are this study's on this base, and how it was run."""
        ran = [method for method in grid.methods(self.study, self.settings) if method.name not in self.skipped]
        frame = self.settings.frame(self.study.protocol)
        differences = grid.differences(self.study, self.settings, self.base or self.name, self.name)
        run = RunFacts(
            command=tuple(command),
            methods=tuple(method.name for method in ran),
            frames={task: Frame(**frame, data=data) for task, data in self.digests.items()},
            differences=(*differences, *self._base_differences()),
        )
        entries = tuple(Entry(**asdict(point), key=key) for point, key in self.keys.items())
        threads = self.threads or torch.get_num_threads()
        manifest = about(self.study, self.workspace.base, ran, run, threads)
        return replace(manifest, skipped=self.skipped, points=entries)

    def _base_differences(self) -> list[str]:
        """How the base differs in kind from the paper's, where it is another one."""
        base = self.workspace.base
        if not self.study.of_a_paper or {self.base, self.name} & set(self.study.protocol.bases):
            return []
        differences = []
        if base.pooling == "mean":
            differences.append("The base was trained further to give sentence embeddings.")
        if resolve_pool(base, "auto") == "mean":
            differences.append("The head sees the mean of all tokens; the paper's sees the first token.")
        if base.tokenizer.tokenize("A") == base.tokenizer.tokenize("a") and self.study.protocol.cased != "no":
            differences.append("The tokenizer is uncased.")
        return differences


def about(study: Study, base: Base, methods: Sequence[Method], run: RunFacts, threads: int) -> Manifest:
    """A manifest without points: the base, what each method trains of it, and the run."""
    audits = {}
    for method in methods:
        audit = count(base, method.select, method.head, inject=method.inject)
        trained = {part: number for part, (_, number) in audit.parts().items()}
        audits[method.name] = {**trained, "total": audit.total}
    anatomy = base.anatomy
    return Manifest(
        study=study.name,
        base=BaseFacts(base.name, base.fingerprint[:12], anatomy.layers, base.width, anatomy.total),
        split=study.protocol.split,
        audit=audits,
        versions=versions(),
        runs=(run,),
        threads=threads,
    )


def run(campaign: Campaign, engine: Engine, command: Sequence[str], say: Say, meter: Meter) -> int:
    """Run what is missing of a study, stage by stage; returns how many trials were trained."""
    results = campaign.results
    trained = 0
    with results.locked(campaign.study.name):
        results.replay()
        first = campaign.search()
        for stage in _stages(campaign, first):
            works = campaign.plan(stage)
            results.write_manifest(campaign.describe(command))
            try:
                trained += _stage(results, works, engine, say, meter)
            except Interrupted:
                raise Interrupted("stopped; the same command continues from the last checkpoint") from None
    return trained


def _stages(campaign: Campaign, points: list[Point]) -> Iterator[list[Point]]:
    """The search, at most two rounds of wider rates for cells whose best is at an edge, then the other seeds.

    Each stage needs the results of those before it.
    """
    yield points
    for _ in range(grid.WIDENINGS):
        wider = campaign.widen(points)
        if wider:
            points = [*points, *wider]
            yield wider
    yield campaign.repeat(points)


def _stage(results: Results, works: Sequence[Pass], engine: Engine, say: Say, meter: Meter) -> int:
    """Train the passes of a stage and store their results; returns how many trials were trained."""
    total = sum(work.work for work in works)
    done, trained = 0.0, 0

    def progress(work_done: float) -> None:
        meter(done + work_done, total)

    for work, finished in engine(works, progress):
        results.commit(work.folder, finished)
        done += work.work
        trained += len(finished)
        meter(done, total)
        say(_summary(work, finished))
    return trained


def dry_run(campaign: Campaign) -> list[Pass]:
    """The passes that would run, as far as it is known.

    A cell of which every rate has a result is widened and repeated as in a run. The rate that another will choose is
    not known, but all rates of a cell cost the same.
    """
    campaign.results.replay()
    points = campaign.search()
    works = campaign.plan(points)
    for _ in range(grid.WIDENINGS):
        wider = campaign.widen(_of_done_cells(campaign, points))
        if wider:
            works += campaign.plan(wider)
            points = [*points, *wider]
    done = _of_done_cells(campaign, points)
    others = {point for point in points if point in campaign.keys} - set(done)
    scores = {point: 0.0 for point in points if point in others}
    repeated = [*campaign.repeat(done), *grid.repeat(campaign.study, campaign.settings, scores)]
    return works + campaign.plan(repeated)


def _of_done_cells(campaign: Campaign, points: Sequence[Point]) -> list[Point]:
    """The points of the cells that have a result for each of theirs."""
    known = [point for point in points if point in campaign.keys]
    missing = {point.cell for point in known if not campaign.results.has(campaign.keys[point])}
    return [point for point in known if point.cell not in missing]


def _summary(work: Pass, results: list[Result]) -> str:
    """One line on a finished pass."""
    task = work.opening.task
    if work.opening.size:
        task += f" ({work.opening.size:,} rows)"
    names = ", ".join(dict.fromkeys(point.method for point in work.points))
    scores = [score for result in results if (score := result.score("dev")) is not None]
    diverged = sum(result.status == "diverged" for result in results)
    shown = f"best dev {100 * max(scores):.1f}" if scores else "all diverged"
    if scores and diverged:
        shown += f", {diverged} diverged"
    seconds = sum(result.cost["seconds"] for result in results)
    return f"{task}: {names}: {counted(len(results), 'trial')}, {shown}, {seconds:.0f} s"
