"""What can be compared between two methods: each quantity is one value, and a new one is one more value.

Most are a number of each trial. Those over seeds need several trials of a cell and give one number for all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..study.store import Result
from .findings import Cell, Findings, judged_part

CLOSE = 0.01  # an evaluation this close to the best score counts as converged
WINDOWS = 5  # parts that a curve of evaluations is divided into
PER_WINDOW = 2  # evaluations that each half of a window needs at least


@dataclass(frozen=True)
class Quantity:
    """A number of a trial (`of_trial`) or of all seeds of a cell (`of_cell`), its words and its unit."""

    name: str
    words: str  # as in "WORDS of BitFit"; empty for the score
    unit: str
    of_trial: Callable[[Result], float | None] | None = None
    of_cell: Callable[[Findings, Sequence[Result]], float | None] | None = None
    missing: str = ""  # why a claim is open where no place has the quantity, if there is more to say than that
    of_learning: bool = False  # whether it says nothing of a method that did not learn the task
    most: Callable[[Result], float] | None = None  # the largest value that a trial can have

    def by_seed(self, findings: Findings, cell: Cell) -> dict[int, float]:
        """The quantity of each seed of a cell; one over all seeds counts as that of seed 0."""
        chosen = findings.chosen(cell)
        if self.of_cell is not None:
            value = self.of_cell(findings, list(chosen.values())) if chosen else None
            return {} if value is None else {0: value}
        values = {}
        for seed, result in chosen.items():
            value = findings.points(result) if self.of_trial is None else self.of_trial(result)
            if value is not None:
                values[seed] = value
        return values


def gap(result: Result) -> float | None:
    """Train score minus test score of the kept checkpoint, in points.

    Dev chose the checkpoint and the rate, so its score is too good; it is taken only where there is no test.
    """
    train, test = result.score("train"), result.score(judged_part(result))
    return None if train is None or test is None else 100 * (train - test)


def _train_error(result: Result) -> float | None:
    """How far the train score of the kept checkpoint is below 100."""
    train = result.score("train")
    return None if train is None else 100 * (1 - train)


def late_fall(result: Result) -> float | None:
    """How far the dev score falls from its best fifth to the last fifth of training, in points.

    Every other evaluation finds the best fifth and the rest measures it, so that noise alone does not look like a
    fall. None where there are too few evaluations.
    """
    curve = [score for _, _, score in result.evaluations]
    finding, measuring = curve[0::2], curve[1::2]
    width = len(measuring) // WINDOWS
    if width < PER_WINDOW:
        return None
    starts = [len(measuring) - width * n for n in range(WINDOWS, 0, -1)]
    best = max(starts, key=lambda start: statistics.fmean(finding[start : start + width]))
    return 100 * (statistics.fmean(measuring[best : best + width]) - statistics.fmean(measuring[-width:]))


def loss_area(result: Result) -> float | None:
    """The mean training loss as a share of its start, in points: larger where the loss falls more gently."""
    losses = [loss for _, loss in result.loss]
    return 100 * statistics.fmean(losses) / losses[0] if losses and losses[0] > 0 else None


def epochs_to_converge(result: Result) -> float | None:
    """Epochs until the dev score is first within a point of its best."""
    if not result.evaluations:
        return None
    best = max(score for _, _, score in result.evaluations)
    return next(epoch for epoch, _, score in result.evaluations if score >= best - CLOSE)


def _epochs_trained(result: Result) -> float:
    return max((epoch for epoch, _, _ in result.evaluations), default=0.0)


def _log_seconds(result: Result) -> float | None:
    """The processor time of a trial that was trained alone; trials of one pass share its time whatever they train."""
    seconds = result.cost.get("cpu", 0.0)
    return math.log2(seconds) if seconds > 0 and result.cost.get("lanes") == 1 else None


def _log_spread(findings: Findings, results: Sequence[Result]) -> float | None:
    """The spread over seeds; None if no seed learnt the task, because the spread of guesses says nothing."""
    if not any(findings.beats_majority(result) for result in results):
        return None
    values = [findings.points(result) for result in results]
    deviation = statistics.stdev(values) if len(values) > 2 else 0.0
    return math.log2(deviation) if deviation > 0 else None


def _failed_share(findings: Findings, results: Sequence[Result]) -> float | None:
    return 100 * sum(findings.failed(result) for result in results) / len(results) if len(results) > 1 else None


def moved(result: Result, terms: Sequence[str] = ()) -> float | None:
    """Mean absolute change of what moved (or of some terms), over terms and layers."""
    names = terms or [name for name, values in result.change.items() if any(values)]
    values = [value for name in names for value in result.change.get(name, ()) if value is not None]
    return statistics.fmean(values) if values else None


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("score", "", "points"),
        Quantity("gap", "generalisation gap", "points", gap, of_learning=True),
        Quantity("train_error", "distance from 100 of the train score", "points", _train_error),
        Quantity(
            "fall",
            "late fall of the dev score",
            "points",
            late_fall,
            missing=f"no place has the {2 * WINDOWS * PER_WINDOW} evaluations that a curve needs",
            of_learning=True,
        ),
        Quantity("gentleness", "mean share of the starting loss", "points", loss_area, of_learning=True),
        Quantity(
            "epochs",
            "epochs to within a point of the best",
            "epochs",
            epochs_to_converge,
            of_learning=True,
            most=_epochs_trained,
        ),
        Quantity(
            "seconds",
            "log2 of the processor seconds of a separate training",
            "doublings",
            _log_seconds,
            missing="no place has the time of a separate training",
        ),
        Quantity(
            "spread",
            "log2 of the standard deviation over seeds",
            "doublings",
            of_cell=_log_spread,
            missing="no place has three seeds that differ",
        ),
        Quantity("failed", "share of failed runs", "points", of_cell=_failed_share),
    )
}
