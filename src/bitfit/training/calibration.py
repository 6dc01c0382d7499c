"""Probabilities that mean what they say: temperature and threshold, fitted on predictions of rows not trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..arrays import Array
from ..tasks import Task
from ..tasks.metrics import Score
from .job import Part

BINS = 15
RARE = 0.3  # a class with less than this share of an even share of the rows is rare
BETTER = 0.01  # what a threshold must gain in macro F1
HIGHEST = 20.0  # temperatures lie between 1 / HIGHEST and HIGHEST
# The prior of the temperature's logarithm, by its mean and spread. Models tuned on few rows are overconfident: in six
# trainings on 32 and 100 rows the best temperature on test rows was 1.0 to 8, while that of 32 held-out rows is mostly
# luck (LOG.md). A solved head has a penalty that held-out rows chose, so it is expected to need no temperature.
TRAINED = 0.5
SOLVED = 0.0
SPREAD = 0.3
FEWEST = 10  # with fewer rows the temperature is that of the prior


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Outputs for a part of the data by a model that did not train on it, or by several: one for each fold."""

    task: Task
    part: Part
    outputs: Array
    prior: float = TRAINED  # the logarithm of the temperature that is expected
    known: Array | None = None  # for each example, whether the training had its classes; None: all of them

    @property
    def unknown(self) -> int:
        """How many examples have a class that the training lacked."""
        return 0 if self.known is None else int((~self.known).sum())

    @cached_property
    def fair(self) -> HeldOut:
        """The examples whose classes the training had; all of them if there is none.

        A class that a fold lacks gets a probability near zero, which says nothing of a model that was trained on it.
        """
        if self.known is None or not self.unknown or not self.known.any():
            return self
        return self.take(np.flatnonzero(self.known))

    def loss(self, temperature: float = 1.0) -> float:
        """The loss of the fair examples at a temperature."""
        outputs, part = self.fair.outputs, self.fair.part
        scaled = torch.from_numpy(outputs / np.float32(temperature))
        return float(self.task.loss(scaled, part.targets.cpu(), part.rows))

    @cached_property
    def best_loss(self) -> float:
        """The loss at the best temperature."""
        return self.loss(self.temperature)

    @cached_property
    def row_losses(self) -> Array:
        """The loss of each token row of the fair examples at the best temperature."""
        outputs, part = self.fair.outputs, self.fair.part
        scaled = torch.from_numpy(outputs / np.float32(self.temperature))
        losses: Array = self.task.row_losses(scaled, part.targets.cpu(), part.rows).numpy()
        return losses

    def take(self, examples: Array) -> HeldOut:
        """Some of the examples."""
        outputs = self.outputs[self.part.outputs_of(examples)]
        known = None if self.known is None else self.known[examples]
        return replace(self, part=self.part.take(examples), outputs=outputs, known=known)

    @cached_property
    def temperature(self) -> float:
        """The temperature with the least loss; 1 for a kind of task whose answers are not probabilities.

        A normal prior on its logarithm keeps few rows from giving an extreme value.
        """
        if not len(self.part) or self.calibration_error() is None:
            return 1.0
        if len(self.part.examples) - self.unknown < FEWEST:
            return float(np.exp(self.prior))
        rows = len(self.fair.part)
        from scipy.optimize import minimize_scalar

        def objective(log: float) -> float:
            return rows * self.loss(float(np.exp(log))) + ((log - self.prior) / SPREAD) ** 2 / 2

        limit = float(np.log(HIGHEST))
        best = minimize_scalar(objective, bounds=(-limit, limit), method="bounded")
        return float(np.exp(best.x))

    @cached_property
    def threshold(self) -> float:
        """What to add to the output of the second of two classes, after the temperature; 0 unless one class is rare.

        It gives the best macro F1; 0 if that gains less than BETTER.
        """
        if self.task.positive is None or not is_rare(self.task, self.part.targets.cpu().numpy()):
            return 0.0
        margins = (self.outputs[:, 1] - self.outputs[:, 0]) / self.temperature
        return best_shift(margins, self.part.targets.cpu().numpy())

    @cached_property
    def calibrated(self) -> HeldOut:
        """The same with temperature and threshold."""
        outputs = self.outputs / np.float32(self.temperature)
        if self.threshold:
            outputs[:, -1] += np.float32(self.threshold)
        return replace(self, outputs=outputs)

    def calibration_error(self, temperature: float = 1.0) -> float | None:
        """Expected calibration error: the mean distance of confidence and accuracy over bins of equal width.

        None for a kind of task whose answers are not probabilities.
        """
        answers = self.task.confidences(self.outputs / np.float32(temperature), self.part.targets.cpu().numpy())
        if answers is None or not len(answers[0]):
            return None
        counts, confidence, right = reliability(*answers)
        return float(np.abs(confidence - right).sum() / counts.sum())

    @cached_property
    def predictions(self) -> Any:
        """One prediction per example, as the task scores them."""
        return self.task.predictions(self.outputs, self.part.encoded, self.part.examples)

    @cached_property
    def scores(self) -> dict[str, Score]:
        """Every metric with its interval."""
        return self.task.scores(self.predictions, self.part.examples)

    @property
    def score(self) -> float:
        """The main metric."""
        return self.task.score(self.predictions, self.part.examples)


def reliability(confidence: Array, right: Array, bins: int = BINS) -> tuple[Array, Array, Array]:
    """For each bin of the confidence: how many answers are in it, the sum of their confidences, how many are right."""
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    counts = np.bincount(bin_of, minlength=bins)
    return counts, np.bincount(bin_of, confidence, bins), np.bincount(bin_of, right.astype(np.float64), bins)


def is_rare(task: Task, labels: Array) -> bool:
    """Whether a class has so few rows that accuracy hardly notices it."""
    counts = np.bincount(labels, minlength=len(task.labels))
    return bool(counts.min() < RARE * counts.mean())


def best_shift(margins: Array, labels: Array) -> float:
    """The shift of the second class's margins with the best macro F1; 0 if it gains less than BETTER.

    Each cut between two neighbouring margins is tried: below it the first class is predicted, above it the second.
    """
    order = np.argsort(margins, kind="stable")
    margins, second = margins[order], labels[order] == 1
    below = np.arange(len(margins) + 1)
    first_hits = np.concatenate([[0], np.cumsum(~second)])
    second_hits = second.sum() - (below - first_hits)
    first_f1 = 2 * first_hits / np.maximum(1, below + (~second).sum())
    second_f1 = 2 * second_hits / np.maximum(1, len(margins) - below + second.sum())
    scores = (first_f1 + second_f1) / 2
    unmoved = scores[np.searchsorted(margins, 0, side="right")]
    cuts = np.where(margins[1:] > margins[:-1], scores[1:-1], -1.0)  # no cut lies between equal margins
    if not len(cuts) or cuts.max() < unmoved + BETTER:
        return 0.0
    shifts = -(margins[1:] + margins[:-1]) / 2
    best = shifts[cuts == cuts.max()]
    return float(best[np.abs(best).argmin()])
