"""Running a study: what is missing, in bank passes that survive a kill, each trial's result written once."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import DataError, Interrupted, SelectionError, UsageError, suggest
from ..model.audit import count
from ..model.base import Base, load_base
from ..model.resolution import resolve
from ..training.checkpoint import SECONDS, Store
from ..training.loop import Job, Runner, Watch
from ..training.plan import Plan, Trial, default_rates
from ..training.resolved import Resolved, passes, resolve_trials
from ..training.run import Outcome, prepare, run_pass, tested
from . import data as data_of
from . import grid
from .grid import Point, Settings
from .spec import Method, Study
from .store import Result, Results, key_of, peak_memory, reset_peak, standings

LOSS_POINTS = 120  # of a trial's training loss that its result keeps
SPEED_FILES = 200
PRODUCTS = 0.5  # of the speed of a matrix product alone that a whole step reaches
Say = Callable[[str], None]
Progress = Callable[[float], None]  # the work done of the pass that is under way
Meter = Callable[[float, float], None]  # the work done and the work to do


@dataclass(frozen=True)
class Opening:
    """What it takes to open the data of a task and the base: plain values, so that another process can do the same."""

    base: str | None
    task: str
    data: str | None
    split: str
    size: int | None
    dev_size: int | None
    max_length: int


@dataclass(frozen=True)
class Pass:
    """Trials that train together, and where their checkpoints are."""

    opening: Opening
    points: tuple[Point, ...]
    trials: tuple[Trial, ...]
    keys: tuple[str, ...]
    folder: Path
    work: float  # floating-point operations, for progress
    memory: float
    threads: int | None
    seconds: float = SECONDS  # between checkpoints


Engine = Callable[[Sequence[Pass], Progress], Iterator[tuple[Pass, list[Result]]]]


@lru_cache(maxsize=1)
def open_base(spec: str | None) -> Base:
    """The base, loaded once per process."""
    return load_base(spec)


@lru_cache(maxsize=1)
def open_job(opening: Opening) -> tuple[Job, Trial, str]:
    """The data of a task, encoded once for all trials on it, a trial to make others from, and the data's digest."""
    found, metric = data_of.dataset(opening.task, opening.data, opening.split, opening.size, opening.dev_size)
    base = open_base(opening.base)
    length = min(opening.max_length, base.max_length)
    asked = Plan(metric=metric, max_length=length, lr=1e-3)
    job, trials = prepare(found, base, asked, lambda _: None)
    return job, trials[0].trial, data_of.fingerprint(found)


# ---- one pass


def perform(work: Pass, watch: Watch) -> list[Result]:
    """Train one pass from wherever its last checkpoint stands, and say what became of each trial."""
    torch.set_num_threads(work.threads or torch.get_num_threads())
    job, _, _ = open_job(work.opening)
    store = Store(work.folder, " ".join(work.keys), work.seconds)
    reset_peak()
    began = time.monotonic()
    job.stop.requested = False
    with job.stop.listening(), torch.random.fork_rng(devices=[]):
        outcomes = run_pass(job, resolve_trials(job.base, work.trials), 0, store, watch, lambda _: None)
        outcomes = [tested(job, outcome) for outcome in outcomes]
    share = 1 / len(outcomes)
    cost = {"seconds": (time.monotonic() - began) * share, "memory": peak_memory(), "work": work.work * share}
    return [
        record(outcome, key, job.base.name, work.opening.task, len(job.train), _facts(job, outcome, cost))
        for outcome, key in zip(outcomes, work.keys, strict=True)
    ]


def _facts(job: Job, outcome: Outcome, cost: dict[str, float]) -> dict[str, Any]:
    dataset = job.dataset
    parts = {"train": dataset.train, "dev": dataset.dev, "test": dataset.test}
    scored = dataset.test if dataset.test is not None else dataset.dev
    return {
        "rows": {name: len(part) for name, part in parts.items() if part is not None},
        "majority": job.task.baseline(dataset.train, scored),
        "cost": cost,
    }


def record(outcome: Outcome, key: str, base: str, task: str, rows: int, facts: dict[str, Any]) -> Result:
    """An outcome as a result: small, plain, with its history thinned; `facts` are what all trials on the data share."""
    meta = outcome.delta.meta if outcome.delta is not None else None
    best_step = meta.trial.best_step if meta is not None and meta.trial is not None else 0
    steps = math.ceil(rows / outcome.trial.batch)
    return Result(
        key=key,
        status=outcome.status,
        base=base,
        task=task,
        metric=outcome.trial.metric,
        trial=asdict(outcome.trial),
        scores=_rounded(outcome),
        trained=meta.trained if meta is not None else 0,
        total=meta.total if meta is not None else 0,
        best_epoch=best_step / steps,
        change=_rounded_map(meta.change) if meta is not None else {},
        loss=_losses(outcome.history, steps),
        evaluations=[
            [round(line["epoch"], 3), round(line["dev_loss"], 5), round(line["dev_score"], 5)]
            for line in outcome.history
            if "dev_score" in line
        ],
        versions=versions(),
        threads=torch.get_num_threads(),
        **facts,
    )


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"bitfit": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _rounded(outcome: Outcome) -> dict[str, dict[str, list[float]]]:
    return {
        part: {name: [round(x, 5) for x in (s.value, s.low, s.high)] for name, s in table.items()}
        for part, table in outcome.scores.items()
    }


def _rounded_map(change: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    return {term: [None if x is None else float(f"{x:.4g}") for x in values] for term, values in change.items()}


def _losses(history: list[dict[str, Any]], steps: int) -> list[list[float]]:
    lines = [(line["step"], line["loss"]) for line in history if "loss" in line]
    width = math.ceil(len(lines) / LOSS_POINTS) or 1
    chunks = [lines[i : i + width] for i in range(0, len(lines), width)]
    return [[round(c[-1][0] / steps, 4), round(sum(loss for _, loss in c) / len(c), 5)] for c in chunks]


def local(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
    """The default engine: one pass after the other, in this process."""
    for work in works:
        yield work, perform(work, partial(_watch, work, progress))


def _watch(work: Pass, progress: Progress, part: int, step: int, total: int, runners: list[Runner]) -> None:
    progress(work.work * step / total)


# ---- the whole study


@dataclass
class Campaign:
    """A study on one base with its settings, and the folder its results go to."""

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

    def __post_init__(self) -> None:
        known = [method.name for method in self.study.methods]
        for name in self.settings.methods or ():
            if name not in known:
                raise UsageError(f'--methods: no "{name}" in {self.study.name}.{suggest(name, known)}')
        self.name = open_base(self.base).name

    def plan(self, points: Sequence[Point]) -> list[Pass]:
        """The passes that are missing, place by place, and the keys of all points."""
        places: dict[tuple[str, int | None], list[Point]] = {}
        for point in points:
            places.setdefault((point.task, point.size), []).append(point)
        found: list[Pass] = []
        for (task, size), own in places.items():
            try:
                found += self._passes(self._opening(task, size), own)
            except DataError as error:
                self.skipped[task] = str(error)
        if not self.keys:
            raise DataError("; ".join(self.skipped.values()) or f"{self.study.name}: nothing to run")
        return found

    def _opening(self, task: str, size: int | None) -> Opening:
        protocol, settings = self.study.protocol, self.settings
        length = settings.max_length or protocol.max_length
        return Opening(self.base, task, self.data, protocol.split, size, settings.dev_size, length)

    def _passes(self, opening: Opening, points: list[Point]) -> Iterator[Pass]:
        job, template, data = open_job(opening)
        self.digests.setdefault(opening.task, data[:12])  # of its first size
        where: dict[Trial, Point] = {}  # methods that are equal on this base share a trial
        trials: list[Resolved] = []
        for name, of_method in groupby(points, key=lambda point: point.method):
            method = self.study.method(name)
            wanted = {point: self._trial(template, method, point, len(job.train.examples)) for point in of_method}
            try:
                resolved = resolve_trials(job.base, wanted.values())
            except SelectionError as error:
                self.skipped[name] = str(error)
                continue
            trials += [found for found in resolved if found.trial not in where]
            for point, trial in wanted.items():
                self.keys[point] = key_of(asdict(trial), data, job.base.fingerprint)
                where.setdefault(trial, point)
        for group in passes(trials, self.lanes):
            missing = [found for found in group if not self.results.has(self.keys[where[found.trial]])]
            if missing:
                yield self._pass(opening, job, missing, where)

    def _trial(self, template: Trial, method: Method, point: Point, rows: int) -> Trial:
        protocol, settings = self.study.protocol, self.settings
        return replace(
            template,
            select=method.select,
            head=method.head,
            init=method.init,
            dropout=method.dropout,
            lr=point.lr,
            batch=point.batch,
            seed=point.seed,
            epochs=settings.epochs or protocol.epochs,
            evals_per_epoch=settings.evals_per_epoch or protocol.evals_per_epoch,
            schedule=protocol.schedule,
            weight_decay=protocol.weight_decay,
            clip=protocol.clip,
            train_size=rows,
        )

    def _pass(self, opening: Opening, job: Job, group: list[Resolved], where: dict[Trial, Point]) -> Pass:
        trials = tuple(resolved.trial for resolved in group)
        points = tuple(where[trial] for trial in trials)
        keys = tuple(self.keys[point] for point in points)
        folder = self.results.pass_folder(self.study.name, self.name, keys)
        total = sum(_work(job, resolved) for resolved in group)
        memory = _memory(job, group)
        return Pass(opening, points, trials, keys, folder, total, memory, self.threads, self.checkpoint_seconds)

    def search(self) -> list[Point]:
        """The points of the first stage."""
        return grid.search(self.study, self.settings, self.base or self.name, self._suiting)

    def _suiting(self, method: Method) -> tuple[float, ...]:
        base = open_base(self.base)
        try:
            return default_rates(resolve(base, method.select).selection, base.width)
        except SelectionError:  # the base has no such term; `plan` says so
            return method.rates[:1]

    def repeat(self, first: Sequence[Point]) -> list[Point]:
        """The points of the second stage, once the first is done."""
        found = {point: self.results.read(self.keys[point]) for point in first if point in self.keys}
        return grid.repeat(self.study, self.settings, standings(found))

    def describe(self, command: Sequence[str]) -> dict[str, Any]:
        """The manifest: which trials are this study's on this base, and how it was run."""
        base = open_base(self.base)
        ran = [method for method in grid.methods(self.study, self.settings) if method.name not in self.skipped]
        return {
            **about(self.study, base, ran),
            "runs": [
                {
                    "command": list(command),
                    "methods": [method.name for method in ran],
                    "frames": {
                        task: {**self.settings.frame(self.study.protocol), "data": data}
                        for task, data in self.digests.items()
                    },
                    "differences": grid.differences(self.study, self.settings, self.base or self.name, self.name),
                }
            ],
            "skipped": self.skipped,
            "threads": self.threads or torch.get_num_threads(),
            "points": [{**asdict(point), "key": key} for point, key in self.keys.items()],
        }


def about(study: Study, base: Base, methods: Sequence[Method]) -> dict[str, Any]:
    """What a manifest says of the base and of what each method trains of it."""
    audits = {}
    for method in methods:
        found = count(base, method.select, method.head)
        parts = {part: trained for part, (_, trained) in found.parts().items()}
        audits[method.name] = {**parts, "total": found.total}
    return {
        "study": study.name,
        "base": {
            "name": base.name,
            "fingerprint": base.fingerprint[:12],
            "layers": base.anatomy.layers,
            "width": base.width,
            "parameters": base.anatomy.total,
        },
        "split": study.protocol.split,
        "audit": audits,
        "versions": versions(),
    }


def _work(job: Job, resolved: Resolved) -> float:
    """Floating-point operations of a trial."""
    trial, what = resolved.trial, resolved.resolution
    layers = sum(site.size for site in job.base.anatomy.sites if site.layer is not None)
    effort = grid.Effort.of(what.selection, what.depth, job.base.anatomy.layers)
    tokens, dev_tokens = len(job.train.rows.ids), len(job.dev.rows.ids)
    return grid.work(effort, layers, tokens, dev_tokens, trial.epochs, trial.evals_per_epoch)


def _memory(job: Job, group: list[Resolved]) -> float:
    """About how much memory a pass holds: the base, five numbers per trained entry, activations of a step."""
    base, config = job.base, job.base.config
    trained = sum(resolved.resolution.selection.count for resolved in group)
    tokens = len(group) * group[0].trial.batch * len(job.train.rows.ids) / max(1, len(job.train))
    wide = int(getattr(config, "intermediate_size", 4 * base.width))
    return 4.0 * (base.anatomy.total + 5 * trained + tokens * base.anatomy.layers * (12 * base.width + 3 * wide))


def run(campaign: Campaign, engine: Engine, command: Sequence[str], say: Say, meter: Meter) -> int:
    """Run what is missing of a study, stage by stage; how many trials were trained."""
    results, trained = campaign.results, 0
    with results.locked(campaign.study.name):
        results.replay()
        first = campaign.search()
        for stage in (1, 2):
            works = campaign.plan(first if stage == 1 else campaign.repeat(first))
            results.write_manifest(campaign.describe(command))
            try:
                trained += _stage(results, works, engine, say, meter)
            except Interrupted:
                raise Interrupted("stopped; the same command goes on from the last checkpoint") from None
    return trained


def _stage(results: Results, works: Sequence[Pass], engine: Engine, say: Say, meter: Meter) -> int:
    total, done = sum(work.work for work in works), [0.0]
    trained = 0
    for work, found in engine(works, lambda part: meter(sum(done) + part, total)):
        results.commit(work.folder, found)
        done.append(work.work)
        trained += len(found)
        meter(sum(done), total)
        say(_told(work, found))
    return trained


def dry_run(campaign: Campaign) -> list[Pass]:
    """The passes that would run; which rate the second stage takes is not known, but all of a cell cost the same."""
    campaign.results.replay()
    first = campaign.search()
    works = campaign.plan(first)
    found = {point: campaign.results.read(campaign.keys[point]) for point in first if point in campaign.keys}
    scores = {point: (result and result.score("dev")) or 0.0 for point, result in found.items()}
    return works + campaign.plan(grid.repeat(campaign.study, campaign.settings, scores))


def _told(work: Pass, found: list[Result]) -> str:
    where = work.opening.task + (f" ({work.opening.size:,} rows)" if work.opening.size else "")
    best = max((score for result in found if (score := result.score("dev")) is not None), default=None)
    names = ", ".join(dict.fromkeys(point.method for point in work.points))
    lost = sum(result.status == "diverged" for result in found)
    shown = "all diverged" if best is None else f"best dev {100 * best:.1f}" + (f", {lost} diverged" if lost else "")
    took = sum(result.cost["seconds"] for result in found)
    return f"{where}: {names}: {len(found)} trials, {shown}, {took:.0f} s"


def speed(results: Results) -> float:
    """Work per second that training reaches here: by what was trained before, or else by a matrix product."""
    known = [
        result.cost
        for path in sorted(results.trials.glob("*.json"))[:SPEED_FILES]
        if (result := results.read(path.stem))
    ]
    seconds = sum(cost.get("seconds", 0.0) for cost in known)
    if seconds > 0:
        return sum(cost.get("work", 0.0) for cost in known) / seconds
    a, b, best = torch.randn(256, 384), torch.randn(384, 1536), math.inf
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return PRODUCTS * 2 * 256 * 384 * 1536 / best
