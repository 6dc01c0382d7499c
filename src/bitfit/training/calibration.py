"""Probabilities that mean what they say: temperature and threshold, fitted on predictions of rows not trained on."""

from __future__ import annotations

from collections.abc import Callable
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
BETTER = 0.01  # what a threshold must gain in F1 on the rows that it is fitted on
SHIFTED = ("f1", "macro_f1")  # the main metrics for which there is a threshold
PARTS = 5  # of the rows; the threshold of each is fitted on the others
RESAMPLES = 1000
HIGHEST = 20.0  # temperatures lie between 1 / HIGHEST and HIGHEST
# The prior of the temperature's logarithm, by its mean and spread. Models of few rows are overconfident, trained ones
# and solved heads: the best temperature on test rows was mostly 1.2 to 3, while that of few held-out rows is luck
# (LOG.md).
EXPECTED = 0.5
SPREAD = 0.3
FEWEST = 10  # with fewer rows the temperature is that of the prior


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Outputs for a part of the data by a model that did not train on it, or by several: one for each fold."""

    task: Task
    part: Part
    outputs: Array
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
            return float(np.exp(EXPECTED))
        rows = len(self.fair.part)
        from scipy.optimize import minimize_scalar

        def objective(log: float) -> float:
            return rows * self.loss(float(np.exp(log))) + ((log - EXPECTED) / SPREAD) ** 2 / 2

        limit = float(np.log(HIGHEST))
        best = minimize_scalar(objective, bounds=(-limit, limit), method="bounded")
        return float(np.exp(best.x))

    @cached_property
    def threshold(self) -> float:
        """What to add to the output of the second of two classes, after the temperature.

        0 unless one class is rare and the main metric is an F1, which must improve on rows that it is not fitted on.
        """
        if not self._may_shift:
            return 0.0
        return sure_shift(self.fair._margins, self.fair._labels, self._scored_class)

    @property
    def _may_shift(self) -> bool:
        if self.task.positive is None or self.task.metric not in SHIFTED:
            return False
        return is_rare(self.task, self.fair._labels)

    @property
    def _margins(self) -> Array:
        """How far the output of the second of two classes is above that of the first, after the temperature."""
        margins: Array = (self.outputs[:, 1] - self.outputs[:, 0]) / self.temperature
        return margins

    @property
    def _labels(self) -> Array:
        labels: Array = self.part.targets.cpu().numpy()
        return labels

    @property
    def _scored_class(self) -> int | None:
        """The number of the class whose F1 is the main metric; None for macro F1."""
        if self.task.metric != "f1" or self.task.positive is None:
            return None
        return self.task.labels.index(self.task.positive)

    @cached_property
    def delivered(self) -> HeldOut:
        """The same with temperature and threshold, as the head's values have them."""
        outputs = self.outputs / np.float32(self.temperature)
        if self.threshold:
            outputs[:, -1] += np.float32(self.threshold)
        return replace(self, outputs=outputs)

    @cached_property
    def calibrated(self) -> HeldOut:
        """The same with the temperature and a threshold for each part of the rows, fitted on the others.

        Its score is what to expect: with few rows, the score of the rows that a threshold is fitted on is too good.
        """
        outputs = self.outputs / np.float32(self.temperature)
        if self._may_shift:
            known = np.ones(len(outputs), bool) if self.known is None else self.known
            shifts = cross_fitted(sure_shift, self._margins, self._labels, known, self._scored_class)
            outputs[:, -1] += shifts.astype(np.float32)
        return replace(self, outputs=outputs)

    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean distance of confidence and accuracy over bins of equal width.

        None for a kind of task whose answers are not probabilities.
        """
        answers = self.task.confidences(self.outputs, self.part.targets.cpu().numpy())
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


def spread_over(parts: int, labels: Array) -> Array:
    """The part of each row; the rows of each class are dealt out to the parts in turn."""
    part_of = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        part_of[members] = np.arange(len(members)) % parts
    return part_of


def best_shift(margins: Array, labels: Array, scored_class: int | None = None) -> float:
    """The shift of the second class's margins with the best F1 (None: macro F1); 0 if it gains less than BETTER.

    Each cut between two neighbouring margins is tried: below it the first class is predicted, above it the second.
    """
    order = np.argsort(margins, kind="stable")
    margins, second = margins[order], labels[order] == 1
    below = np.arange(len(margins) + 1)
    first_hits = np.concatenate([[0], np.cumsum(~second)])
    second_below = below - first_hits
    firsts = np.stack([first_hits, (~second).sum() - first_hits], 1)
    seconds = np.stack([second_below, second.sum() - second_below], 1)
    scores = f1_of(np.stack([firsts, seconds], 1), scored_class)
    unmoved = scores[np.searchsorted(margins, 0, side="right")]
    cuts = np.where(margins[1:] > margins[:-1], scores[1:-1], -1.0)  # no cut lies between equal margins
    if not len(cuts) or cuts.max() < unmoved + BETTER:
        return 0.0
    shifts = -(margins[1:] + margins[:-1]) / 2
    best = shifts[cuts == cuts.max()]
    return float(best[np.abs(best).argmin()])


def cross_fitted(
    fit: Callable[[Array, Array, int | None], float],
    margins: Array,
    labels: Array,
    known: Array,
    scored_class: int | None,
) -> Array:
    """For each row a shift that is fitted on the known rows of the other parts."""
    shifts = np.zeros(len(labels))
    parts = spread_over(PARTS, labels)
    for part in range(PARTS):
        others = known & (parts != part)
        shifts[parts == part] = fit(margins[others], labels[others], scored_class)
    return shifts


def sure_shift(margins: Array, labels: Array, scored_class: int | None) -> float:
    """The best shift; 0 if on rows that it is not fitted on it gains less than the standard error of the gain."""
    if np.bincount(labels, minlength=2).min() < 2:
        return 0.0
    known = np.ones(len(labels), bool)
    shifts = cross_fitted(best_shift, margins, labels, known, scored_class)
    if not gain_is_sure(labels, margins > 0, margins + shifts > 0, scored_class):
        return 0.0
    return best_shift(margins, labels, scored_class)


def f1_of(tables: Array, scored_class: int | None) -> Array:
    """The F1 of a class, or the mean over classes, of each of several tables of true (rows) and predicted classes."""
    hits = np.diagonal(tables, axis1=1, axis2=2)
    by_class: Array = 2 * hits / np.maximum(1, tables.sum(1) + tables.sum(2))
    return by_class.mean(1) if scored_class is None else by_class[:, scored_class]


def gain_is_sure(labels: Array, plain: Array, shifted: Array, scored_class: int | None) -> bool:
    """Whether predictions of two classes gain more F1 by a shift than the standard error, by a paired bootstrap."""
    counts = np.zeros((1, 2, 2, 2), np.int64)  # by the true class and by both predictions
    np.add.at(counts[0], (labels, plain.astype(np.int64), shifted.astype(np.int64)), 1)
    shares = counts.ravel() / counts.sum()
    resampled = np.random.default_rng(0).multinomial(counts.sum(), shares, RESAMPLES).reshape(-1, 2, 2, 2)
    error = _gains(resampled, scored_class).std(ddof=1)
    return bool(_gains(counts, scored_class)[0] > error)


def _gains(counts: Array, scored_class: int | None) -> Array:
    gains: Array = f1_of(counts.sum(2), scored_class) - f1_of(counts.sum(3), scored_class)
    return gains
