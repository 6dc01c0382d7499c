"""The manifest of a study on a base: which trials belong to it, and how they were run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .grid import Point


@dataclass(frozen=True)
class BaseFacts:
    """The base that a study was run on."""

    name: str
    fingerprint: str
    layers: int = 0
    width: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class Frame:
    """How the cells of a task were trained, and a digest of its data. None: as the protocol says."""

    epochs: int | None = None
    evals_per_epoch: int | None = None
    max_length: int | None = None
    train_size: int | None = None
    dev_size: int | None = None
    data: str = ""


@dataclass(frozen=True)
class RunFacts:
    """One run: its command, what it ran, and how it differs from the paper."""

    command: tuple[str, ...]
    methods: tuple[str, ...]
    frames: Mapping[str, Frame]  # task -> how it was trained
    differences: tuple[str, ...] = ()

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Every method with every task."""
        return [(method, task) for method in self.methods for task in self.frames]


@dataclass(frozen=True)
class Entry(Point):
    """A point of the grid with the name of its result."""

    key: str

    @property
    def point(self) -> Point:
        """The point alone."""
        return Point(self.method, self.task, self.size, self.lr, self.batch, self.seed)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was run of a study on one base."""

    study: str
    base: BaseFacts
    split: str
    audit: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # method -> part of the model -> trained
    versions: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[RunFacts, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)  # task or method -> why
    threads: int = 1
    points: tuple[Entry, ...] = ()
    published: bool = False  # whether the results are the numbers printed in a paper

    def frames(self, task: str) -> list[Frame]:
        """How a task was trained, in each run that had it."""
        return [run.frames[task] for run in self.runs if task in run.frames]

    def joined(self, earlier: Manifest) -> Manifest:
        """This manifest of one run with the cells of an earlier one that it does not touch.

        A task that is now run under other conditions loses its earlier cells.
        """
        if earlier.base != self.base:
            return self
        (run,) = self.runs
        changed = set()
        for task, frame in run.frames.items():
            if any(other != frame for other in earlier.frames(task)):
                changed.add(task)
        touched = {entry.cell for entry in self.points}
        untouched = [entry for entry in earlier.points if entry.cell not in touched and entry.task not in changed]
        runs = _runs_of(earlier.runs, untouched)
        if not runs:
            return self
        tried = {*run.frames, *run.methods}
        skipped = {name: why for name, why in earlier.skipped.items() if name not in tried}
        return replace(
            self,
            points=(*untouched, *self.points),
            audit={**earlier.audit, **self.audit},
            skipped={**skipped, **self.skipped},
            runs=(*runs, run),
        )


def _runs_of(runs: tuple[RunFacts, ...], entries: list[Entry]) -> list[RunFacts]:
    """The runs that made these entries, each with the tasks that it made entries of."""
    cells = {(entry.method, entry.task) for entry in entries}
    makers = []
    for run in runs:
        frames = {}
        for task, frame in run.frames.items():
            if any((method, task) in cells for method in run.methods):
                frames[task] = frame
        if frames:
            makers.append(replace(run, frames=frames))
    return makers
