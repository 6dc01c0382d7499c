"""One pass of a study: its data is opened, its trials are trained together, each becomes a result."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data.sources import Source
from ..model.base import Base, load_base
from ..training.checkpoint import SECONDS, Store
from ..training.compute import threads
from ..training.history import History
from ..training.job import Job, open_job
from ..training.loop import Runner, Watch
from ..training.one_pass import run_pass
from ..training.outcome import Outcome
from ..training.plan import Trial
from ..training.resolved import resolve_trials
from . import data as study_data
from .data import Opening
from .examples import Rows
from .grid import Point
from .store import Result, StoredPass, peak_memory, reset_peak
from .stored import StoredCheckpoints

LOSS_POINTS = 120  # points of the training loss that a result keeps
KEPT_TOKENS = 50_000_000  # encoded data that a process keeps; about 800 MB, and as much again for its texts
Progress = Callable[[float], None]
"""Called with the work done in the current pass."""


@dataclass(frozen=True)
class Pass:
    """Trials that train together, and the folder of their checkpoints."""

    opening: Opening
    points: tuple[Point, ...]
    trials: tuple[Trial, ...]
    keys: tuple[str, ...]
    folder: Path
    work: float  # floating-point operations, for progress
    memory: float  # bytes, an estimate
    threads: int | None
    seconds: float = SECONDS  # between checkpoints
    stored: StoredPass | None = None  # its checkpoints and results in a storage, if there is one
    fingerprint: str | None = None  # of the base, if it is known


Engine = Callable[[Sequence[Pass], Progress], Iterator[tuple[Pass, list[Result]]]]
"""Trains passes in any order and yields each with its results."""


# ---- the data of the tasks, opened once


@dataclass(frozen=True, eq=False)
class Opened:
    """The encoded data of a task, and the digest of its rows."""

    job: Job
    digest: str

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return len(self.job.train.rows.ids) + len(self.job.dev.rows.ids)


class Workspace:
    """A base and the data of a study's tasks on it. Each task is read and encoded once for all stages of a study.

    Above KEPT_TOKENS the least recently used data is dropped; it is encoded again when it is needed again.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self._sources: dict[tuple[str, str | None], Source] = {}
        self._opened: dict[Opening, Opened] = {}

    def open(self, opening: Opening) -> Opened:
        """The data of a task, encoded for the base."""
        opened = self._opened.pop(opening, None) or self._open(opening)
        self._opened[opening] = opened  # the last one is the most recently used
        while len(self._opened) > 1 and sum(each.tokens for each in self._opened.values()) > KEPT_TOKENS:
            least_recent = next(iter(self._opened))
            del self._opened[least_recent]
        return opened

    def keep_only(self, opening: Opening) -> None:
        """Forget the data of all other tasks."""
        self._opened = {known: opened for known, opened in self._opened.items() if known == opening}
        self._sources = {key: source for key, source in self._sources.items() if key[0] == opening.task}

    def know_fingerprint(self, fingerprint: str | None) -> None:
        """Set the fingerprint of the base, so that this process need not read all weights to compute it."""
        if self.base.known_fingerprint is None:
            self.base = replace(self.base, known_fingerprint=fingerprint)

    def _open(self, opening: Opening) -> Opened:
        key = opening.task, opening.data
        if key not in self._sources:
            self._sources[key] = study_data.read(opening.task, opening.data)
        source = self._sources[key]
        dataset = study_data.dataset(source, opening)
        length = min(opening.max_length, self.base.max_length)
        job = open_job(dataset, self.base, lambda _: None, named=source.follows, max_length=length)
        return Opened(job, study_data.fingerprint(dataset))


@lru_cache(maxsize=1)
def workspace(base: str | None) -> Workspace:
    """The workspace on a base, one at a time per process."""
    return Workspace(load_base(base))


# ---- one pass


def perform(work: Pass, watch: Watch) -> list[Result]:
    """Train one pass from its last checkpoint on; the results of its trials."""
    job = workspace(work.opening.base).open(work.opening).job
    results = [result for result, _ in perform_on(job, work, watch)]
    if work.stored is not None:
        work.stored.finished(results)
    return results


def perform_on(job: Job, work: Pass, watch: Watch, gap: bool = True) -> list[tuple[Result, Outcome]]:
    """Train one pass on data that is open; the results of its trials, each with the outcome that it records.

    With `gap` training rows are scored too.
    """
    store = _checkpoints(work)
    reset_peak()
    job.stop.requested = False
    with threads(work.threads), job.stop.listening(), torch.random.fork_rng(devices=[]):
        trials = resolve_trials(job.base, work.trials)
        scored = {"train": job.train_sample, **job.tests} if gap else job.tests
        cost: dict[str, float] = {}

        def take_time() -> None:
            seconds, cpu = store.spent
            cost["seconds"] = seconds / len(trials)
            cost["cpu"] = cpu / len(trials)

        outcomes = run_pass(
            job, trials, 0, store, watch, lambda _: None, scored, solve_frozen=True, after_training=take_time
        )
        cost |= {"memory": peak_memory(), "work": work.work / len(trials), "lanes": len(trials)}
        facts = _facts(job, cost)
        results = []
        for outcome, key in zip(outcomes, work.keys, strict=True):
            more = {**facts, "examples": _examples(job, outcome)}
            result = record(outcome, key, job.base.name, work.opening.task, len(job.train), more)
            results.append((result, outcome))
    return results


def _checkpoints(work: Pass) -> Store:
    key = " ".join(work.keys)
    if work.stored is None:
        return Store(work.folder, key, work.seconds)
    return StoredCheckpoints(work.stored, work.folder, key, work.seconds)


def _examples(job: Job, outcome: Outcome) -> dict[str, str]:
    """The result of each test row, encoded."""
    if job.dataset.test is None or "test" not in outcome.predictions:
        return {}
    form, first, second = job.task.by_row(outcome.predictions["test"], job.dataset.test)
    return {"test": Rows.of(form, first, second).encode()}


def _facts(job: Job, cost: dict[str, float]) -> dict[str, Any]:
    """What the results of all trials of a pass share."""
    dataset = job.dataset
    rows = {"train": len(dataset.train), "dev": len(dataset.dev)}
    if dataset.test is not None:
        rows["test"] = len(dataset.test)
    scored = dataset.dev if dataset.test is None else dataset.test
    return {"rows": rows, "majority": job.task.baseline(dataset.train, scored), "cost": cost}


def local(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
    """The default engine: one pass after the other, in this process."""
    for work in works:
        yield work, perform(work, partial(_watch, work, progress))


def _watch(work: Pass, progress: Progress, number: int, step: int, total: int, runners: list[Runner]) -> None:
    progress(work.work * step / total)


# ---- an outcome as a result


def record(outcome: Outcome, key: str, base: str, task: str, rows: int, facts: dict[str, Any]) -> Result:
    """An outcome as a result of plain values; `rows` is the number of token rows that are trained on.

    `facts` are the fields of the result that the outcome does not have.
    """
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
        scores=_rounded_scores(outcome),
        trained=meta.trained if meta is not None else 0,
        total=meta.total if meta is not None else 0,
        best_epoch=best_step / steps,
        change=_rounded_map(meta.change) if meta is not None else {},
        loss=_losses(outcome.history, steps),
        evaluations=_evaluations(outcome.history),
        versions=versions(),
        threads=torch.get_num_threads(),
        **facts,
    )


def versions() -> dict[str, str]:
    """The versions that the numbers were made with."""
    return {"bitfit": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _rounded_scores(outcome: Outcome) -> dict[str, dict[str, list[float]]]:
    rounded: dict[str, dict[str, list[float]]] = {}
    for part, scores in outcome.scores.items():
        rounded[part] = {}
        for metric, score in scores.items():
            rounded[part][metric] = [round(number, 5) for number in (score.value, score.low, score.high)]
    return rounded


def _rounded_map(change: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    return {term: list(map(_rounded, values)) for term, values in change.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _losses(history: History, steps: int) -> list[list[float]]:
    """Epoch and mean loss at no more than LOSS_POINTS points."""
    width = math.ceil(len(history.losses) / LOSS_POINTS) or 1
    points = []
    for start in range(0, len(history.losses), width):
        chunk = history.losses[start : start + width]
        mean = sum(point.loss for point in chunk) / len(chunk)
        points.append([round(chunk[-1].step / steps, 4), round(mean, 5)])
    return points


def _evaluations(history: History) -> list[list[float]]:
    """Epoch, dev loss and dev score of every evaluation."""
    points = []
    for evaluation in history.evaluations:
        points.append([round(evaluation.epoch, 3), round(evaluation.dev_loss, 5), round(evaluation.dev_score, 5)])
    return points
