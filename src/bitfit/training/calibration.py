"""Probabilities that mean what they say: a temperature fitted on predictions of rows that were not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..arrays import Array
from ..model.rows import Rows
from ..tasks import Task

BINS = 15
RARE = 0.3  # a class with less than this part of an even share of the rows is rare
BETTER = 0.01  # what a threshold must gain in macro F1
HOTTEST = 20.0  # the range of temperatures is 1 / HOTTEST to HOTTEST
STEPS = 60
PRIOR = 0.5  # standard deviation of the temperature's logarithm


@dataclass(frozen=True, eq=False)
class Held:
    """Outputs for rows that the model has not seen, and what is true of them."""

    outputs: Array
    targets: Array
    rows: Rows
    by_token: bool = False

    def loss(self, task: Task, temperature: float = 1.0) -> float:
        """The loss of the outputs at a temperature."""
        scaled = torch.from_numpy(self.outputs / np.float32(temperature))
        return float(task.loss(scaled, torch.from_numpy(self.targets), self.rows))

    def row_losses(self, task: Task, temperature: float = 1.0) -> Array:
        """The loss of every row for itself."""
        scaled = torch.from_numpy(self.outputs / np.float32(temperature))
        targets = torch.from_numpy(self.targets)
        losses = []
        for number in range(len(self.rows)):
            chosen = np.array([number])
            places = torch.from_numpy(self.rows.tokens(chosen) if self.by_token else chosen)
            losses.append(float(task.loss(scaled[places], targets[places], self.rows.take(chosen))))
        return np.array(losses)


def temperature(task: Task, held: Held) -> float:
    """The temperature with the least loss; 1 for a kind of task whose answers are not probabilities.

    A normal prior around 1 keeps a handful of rows from asking for extremes.
    """
    if task.confidences(held.outputs, held.targets) is None or not len(held.rows):
        return 1.0
    limit = float(np.log(HOTTEST))

    def total(log: float) -> float:
        return len(held.rows) * held.loss(task, float(np.exp(log))) + (log / PRIOR) ** 2 / 2

    return float(np.exp(least(total, -limit, limit)))


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number with a single valley is least: golden-section search."""
    golden = (5**0.5 - 1) / 2
    inner = [high - golden * (high - low), low + golden * (high - low)]
    values = [function(inner[0]), function(inner[1])]
    for _ in range(STEPS):
        if values[0] < values[1]:
            high = inner[1]
            inner = [high - golden * (high - low), inner[0]]
            values = [function(inner[0]), values[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + golden * (high - low)]
            values = [values[1], function(inner[1])]
    return (low + high) / 2


def calibration_error(task: Task, held: Held, temperature: float = 1.0) -> float | None:
    """Expected calibration error: the mean distance of confidence and accuracy over bins of equal width."""
    found = task.confidences(held.outputs / np.float32(temperature), held.targets)
    if found is None or not len(found[0]):
        return None
    confidence, right = found
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    apart = np.bincount(bins, confidence, BINS) - np.bincount(bins, right.astype(np.float64), BINS)
    return float(np.abs(apart).sum() / counts.sum())


def is_rare(task: Task, labels: Array) -> bool:
    """Whether a class has so few rows that accuracy hardly notices it."""
    counts = np.bincount(labels, minlength=len(task.labels))
    return bool(counts.min() < RARE * counts.mean())


def threshold(task: Task, held: Held, temperature: float) -> float:
    """What to add to the second of two classes for the best macro F1 if one of them is rare; 0: nothing."""
    if task.outputs != 2 or held.by_token or held.targets.dtype.kind != "i" or not is_rare(task, held.targets):
        return 0.0
    apart = (held.outputs[:, 1] - held.outputs[:, 0]) / temperature
    order = np.sort(apart)
    shifts = -(order[1:] + order[:-1]) / 2
    scores = np.array([_macro_f1(apart + shift > 0, held.targets) for shift in shifts])
    if not len(scores) or scores.max() < _macro_f1(apart > 0, held.targets) + BETTER:
        return 0.0
    best = shifts[scores == scores.max()]
    return float(best[np.abs(best).argmin()])


def shifted(outputs: Array, shift: float) -> Array:
    """The outputs with `shift` added to the last class."""
    moved = outputs.copy()
    moved[:, -1] += np.float32(shift)
    return moved


def _macro_f1(predicted: Array, gold: Array) -> float:
    scores = []
    for label in (0, 1):
        true, said = gold == label, predicted == label
        below = true.sum() + said.sum()
        scores.append(2 * (true & said).sum() / below if below else 0.0)
    return float(np.mean(scores))
