"""Task kinds whose head reads one vector per text or pair: classification, regression and multi-label."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn import functional

from ..arrays import Array
from ..data.examples import Examples
from ..data.readers.multilabel import LabelSets
from ..data.readers.texts import Classes, Numbers
from ..errors import DataError, UsageError, suggest
from ..model.rows import Rows
from .encode import Encoded, Encoder
from .metrics import (
    CLASS_METRICS,
    NUMBER_METRICS,
    TWO_CLASS_METRICS,
    ClassScore,
    Floats,
    Score,
    evaluate,
    ratio,
    score,
    warn_constant,
)
from .sums import Metric, Sums
from .task import Task


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes."""

    kind: ClassVar[str] = Classes.kind
    reader: ClassVar[type[Classes]] = Classes
    card: ClassVar[str] = "Classification of {texts} into one of {labels}."

    @classmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """Accuracy first; precision, recall, f1, auc and average_precision for two classes only."""
        return TWO_CLASS_METRICS if len(labels) == 2 else CLASS_METRICS

    def with_positive(self, label: str) -> Task:
        """The same task with another positive class."""
        if len(self.labels) != 2:
            raise UsageError(f"--positive {label}: it is for two classes only, and there are {len(self.labels)}")
        if label not in self.labels:
            raise UsageError(f'--positive: no class "{label}".{suggest(label, self.labels)}')
        return replace(self, positive=label)

    def fitted(self, examples: Examples) -> Task:
        """The same task; the rarer of two classes becomes the positive one, unless one was chosen."""
        if self.positive is not None or len(self.labels) != 2:
            return self
        ones = sum(examples.labels)
        rarer = 1 if 2 * ones <= len(examples) else 0
        return replace(self, positive=self.labels[rarer])

    def balanced(self, examples: Examples) -> Task:
        """The same task with a weight for each class: all classes of these rows have the same sum, the mean is 1."""
        counts = np.bincount(examples.labels, minlength=len(self.labels))
        weights = len(examples) / (np.count_nonzero(counts) * np.maximum(1, counts))
        return replace(self, class_weights=tuple(weights.tolist()))

    @property
    def positive_class(self) -> int:
        """The number of the positive class; in deltas that do not name it, the last."""
        return 1 if self.positive is None else self.labels.index(self.positive)

    @property
    def outputs(self) -> int:
        """One per class."""
        return len(self.labels)

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """The classes' numbers."""
        return np.asarray(examples.labels, np.int64)

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy, weighted by class if there are weights."""
        if not self.class_weights:
            return functional.cross_entropy(logits, targets)
        return self.row_losses(logits, targets, rows).mean()

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy, text by text."""
        losses = functional.cross_entropy(logits, targets, reduction="none")
        return losses * losses.new_tensor(self.class_weights)[targets] if self.class_weights else losses

    def lacking(self, targets: Array, trained: Array) -> Array:
        """Texts of another class than all those of training."""
        return ~np.isin(targets, trained)

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> Array:
        """A row of scores per example, one for each class."""
        return logits

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric. Predictions are logits per class, or class numbers."""
        return score(self.metric, predictions, examples.labels, len(self.labels), self.positive_class)

    def by_class(self, predictions: Any, examples: Examples) -> list[ClassScore]:
        """Precision, recall, F1 and support of each class."""
        table = self.confusion(predictions, examples)
        scores = []
        for number, label in enumerate(self.labels):
            hits = table[number, number]
            predicted = table[:, number].sum()
            true = table[number].sum()
            scores.append(ClassScore.of(label, hits, predicted, true))
        return scores

    def confusion(self, predictions: Any, examples: Examples) -> Array:
        """How often each class (rows) is predicted as each class (columns)."""
        table = np.zeros((len(self.labels), len(self.labels)), np.int64)
        np.add.at(table, (np.asarray(examples.labels), _classes(predictions)), 1)
        return table

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """Notes on how the examples were encoded, and on scores that they leave undefined."""
        notes = super().remarks(encoder, encoded, examples)
        classes = set(examples.labels)
        if len(self.labels) == 2 and len(classes) == 1:
            name = self.labels[classes.pop()]
            notes.append(f'Every row is "{name}": auc, average_precision and matthews are undefined and shown as 0.')
        return notes

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """The indices of texts with a wrong class."""
        return np.flatnonzero(_classes(predictions) != np.asarray(examples.labels)).tolist()

    def gold(self, label: Any) -> str:
        """The name of the class."""
        return self.labels[int(label)]

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval; a warning if one class is predicted for all."""
        guesses = _classes(predictions)
        if len(np.unique(guesses)) == 1 and len(set(examples.labels)) > 1:
            name = self.labels[int(guesses[0])]
            warnings.warn(f'"{name}" is predicted for all {len(guesses):,} texts', ConstantPrediction, 2)
        names = self.metric_names(self.labels)
        return evaluate(names, predictions, examples.labels, len(self.labels), positive=self.positive_class)

    def by_row(self, predictions: Any, examples: Examples) -> tuple[str, Any, Any]:
        """Hits, or the true and predicted classes, numbered so that of two the positive one is 1.

        For auc and average_precision: whether the row is positive, and its rank, both as numbers.
        """
        guesses = _classes(predictions)
        golds = np.asarray(examples.labels, np.int64)
        if self.metric in ("auc", "average_precision"):
            return "values", (golds == self.positive_class).astype(np.float64), self._ranks(predictions)
        if self.metric == "accuracy":
            return "hits", golds == guesses, np.zeros(len(golds))
        if len(self.labels) == 2 and self.positive_class == 0:
            return "classes", 1 - golds, 1 - guesses
        return "classes", golds, guesses

    def _ranks(self, predictions: Any) -> Array:
        """The ranks of the rows by the score of the positive class of two, from -0.5 to 0.5; equal scores share one."""
        scores = np.asarray(predictions)
        margins = scores == self.positive_class
        if scores.ndim > 1:
            margins = scores[:, self.positive_class] - scores[:, 1 - self.positive_class]
        ranks: Array = np.unique(margins, return_inverse=True)[1] / len(margins) - 0.5
        return ranks

    def confidences(self, logits: Array, targets: Array) -> tuple[Array, Array] | None:
        """The probability of the most probable class, and whether it is the true one."""
        table = softmax(logits)
        return table.max(-1), table.argmax(-1) == targets

    def baseline(self, train: Examples, dev: Examples) -> float:
        """The score of always predicting the most frequent class, the first of equally frequent ones."""
        counts = Counter(train.labels)
        majority = max(sorted(counts), key=lambda label: counts[label])
        guesses = np.full(len(dev), majority)
        scores = evaluate([self.metric], guesses, dev.labels, resamples=1, positive=self.positive_class)
        return scores[self.metric].value

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The most probable class, and the probability of each."""
        return [self._answer(row) for row in softmax(logits)]

    def _answer(self, row: Array) -> dict[str, Any]:
        best = int(row.argmax())
        scores = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
        return {"label": self.labels[best], "score": float(row[best]), "scores": scores}

    @staticmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """The class and its probability."""
        return answer["label"], f"{answer['score']:.4f}"


def _classes(predictions: Any) -> Array:
    """The numbers of the predicted classes, from logits per class or from numbers."""
    guesses = np.asarray(predictions)
    return guesses.argmax(-1) if guesses.ndim > 1 else guesses


class ConstantPrediction(UserWarning):
    """Every text gets the same prediction, which is no better than the baseline."""


@dataclass(frozen=True)
class Regression(Task):
    """A number."""

    kind: ClassVar[str] = Numbers.kind
    reader: ClassVar[type[Numbers]] = Numbers
    baseline_name: ClassVar[str] = "always the mean"
    problem_type: ClassVar[str | None] = "regression"
    wrong_means: ClassVar[str] = "off by more than the rmse"
    card: ClassVar[str] = "A number for {texts}."

    @classmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """Correlations, the explained variance, and errors in the unit of the labels."""
        return NUMBER_METRICS

    @property
    def outputs(self) -> int:
        """One: the standardised number."""
        return 1

    def fitted(self, examples: Examples) -> Task:
        """The same task with the mean and spread of its training labels."""
        with np.errstate(over="ignore"):
            center = float(np.mean(examples.labels))
            spread = float(np.std(examples.labels)) or 1.0
        if not (math.isfinite(center) and math.isfinite(spread)):
            raise DataError("the labels are too large for their mean and spread to be computed; scale them down")
        return replace(self, center=center, spread=spread)

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """The labels, standardised."""
        # In double precision: labels like 1.7e9 +- 5 are all the same number in float32.
        scaled: Array = (np.asarray(examples.labels, np.float64) - self.center) / self.spread
        return scaled.astype(np.float32)

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Squared error."""
        return functional.mse_loss(logits.squeeze(-1), targets)

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Squared error, text by text."""
        return functional.mse_loss(logits.squeeze(-1), targets, reduction="none")

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> Array:
        """Values on the scale of the labels."""
        values: Array = logits[:, 0].astype(np.float64) * self.spread + self.center
        return values

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return score(self.metric, predictions, examples.labels)

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval; a warning if the main one is undefined."""
        self.score(predictions, examples)
        return evaluate(self.metric_names(()), predictions, examples.labels)

    def by_row(self, predictions: Any, examples: Examples) -> tuple[str, Any, Any]:
        """The true and the predicted numbers, scaled in a way that does not change the metric.

        They are stored as float16, which has no room for large numbers nor for small differences between them.
        """
        golds = np.asarray(examples.labels, np.float64)
        values = np.asarray(predictions, np.float64)
        scale = golds if self.metric == "r2" else values  # r2 needs one scale for both
        return "values", _scaled(golds, golds), _scaled(values, scale)

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """The indices of texts with an error above the root mean squared error, the largest error first."""
        errors = np.abs(np.asarray(predictions) - np.asarray(examples.labels))
        order = np.argsort(-errors, kind="stable")
        wrong: list[int] = order[errors[order] > np.sqrt((errors**2).mean())].tolist()
        return wrong

    def baseline(self, train: Examples, dev: Examples) -> float:
        """The score of always predicting the mean of the training labels; 0 for correlations."""
        guesses = np.full(len(dev), np.mean(train.labels))
        return evaluate([self.metric], guesses, dev.labels, resamples=1)[self.metric].value

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The predicted number of each text."""
        return [{"value": float(value)} for value in self.predictions(logits, encoded, examples)]

    @staticmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """The value."""
        return (f"{answer['value']:g}",)


def _scaled(values: Array, scale: Array) -> Array:
    """Values minus the mean of `scale`, divided by its standard deviation."""
    scaled: Array = (values - scale.mean()) / (scale.std() or 1.0)
    return scaled


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels per text, each predicted independently."""

    kind: ClassVar[str] = LabelSets.kind
    reader: ClassVar[type[LabelSets]] = LabelSets
    baseline_name: ClassVar[str] = "always the most frequent set of labels"
    problem_type: ClassVar[str | None] = "multi_label_classification"
    card: ClassVar[str] = "Any number of labels for {texts}, of {labels}."

    @classmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """F1 over all labels, the mean of each label's F1, and the share of texts with exactly the right labels."""
        return tuple(SET_METRICS)

    @property
    def outputs(self) -> int:
        """One per label."""
        return len(self.labels)

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """1 for each label that applies."""
        return self._matrix(examples.labels).astype(np.float32)

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Binary cross-entropy, the mean over texts and labels."""
        return functional.binary_cross_entropy_with_logits(logits, targets)

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Binary cross-entropy, text by text."""
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)

    def lacking(self, targets: Array, trained: Array) -> Array:
        """Texts with a label that no text of training has."""
        new_labels = np.logical_not(np.any(trained > 0, axis=0))
        texts: Array = np.any(targets[:, new_labels] > 0, axis=1)
        return texts

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> list[tuple[int, ...]]:
        """The numbers of the labels above one half."""
        return [tuple(np.flatnonzero(row > 0).tolist()) for row in logits]

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return self._sums(predictions, examples.labels).value(self._metrics()[self.metric])

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval."""
        if not any(predictions):
            warn_constant(self.metric, "no label is predicted for any text")
        return self._sums(predictions, examples.labels).scores(self._metrics())

    def by_row(self, predictions: Any, examples: Examples) -> tuple[str, Any, Any]:
        """What a text adds to the numerator and to the denominator of micro_f1 or exact_match."""
        if self.metric != "micro_f1":
            return super().by_row(predictions, examples)
        sums = self._sums(predictions, examples.labels).table
        numerators, denominators = _f1_fractions(len(self.labels), sums)
        return "ratio", numerators.sum(1), denominators.sum(1)

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The labels above one half, and the probability of each."""
        probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return [self._answer(row) for row in probabilities]

    def _answer(self, row: Array) -> dict[str, Any]:
        scores = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
        return {"labels": [label for label, value in scores.items() if value > 0.5], "scores": scores}

    @staticmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """The labels."""
        return (", ".join(answer["labels"]) or "(none)",)

    def by_class(self, predictions: Any, examples: Examples) -> list[ClassScore]:
        """Precision, recall, F1 and support of each label."""
        predicted, true = self._matrix(predictions), self._matrix(examples.labels)
        counts = zip((predicted * true).sum(0), predicted.sum(0), true.sum(0), strict=True)
        return [ClassScore.of(label, *row) for label, row in zip(self.labels, counts, strict=True)]

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """The indices of texts with a label too many or too few."""
        pairs = enumerate(zip(predictions, examples.labels, strict=True))
        return [i for i, (predicted, true) in pairs if set(predicted) != set(true)]

    def gold(self, label: Any) -> list[str]:
        """The labels' names."""
        return [self.labels[number] for number in label]

    def confidences(self, logits: Array, targets: Array) -> tuple[Array, Array] | None:
        """For each text and label, the probability of the prediction and whether it is right."""
        logits = logits.astype(np.float64)
        probability = 1 / (1 + np.exp(-np.abs(logits)))
        return probability.ravel(), ((logits > 0) == (targets > 0)).ravel()

    def baseline(self, train: Examples, dev: Examples) -> float:
        """The score of always predicting the most frequent set of labels, the first of equally frequent ones."""
        counts = Counter(sorted(train.labels))
        majority = max(counts, key=lambda labels: counts[labels])
        return self.score([majority] * len(dev), dev)

    def _matrix(self, sets: Sequence[tuple[int, ...]]) -> Floats:
        table = np.zeros((len(sets), len(self.labels)))
        for row, labels in enumerate(sets):
            table[row, list(labels)] = 1
        return table

    def _sums(self, predictions: Sequence[tuple[int, ...]], golds: Sequence[tuple[int, ...]]) -> Sums:
        """Per row: 1, whether all labels are right, and for each label whether it is hit, true and predicted."""
        predicted = self._matrix(predictions)
        true = self._matrix(golds)
        rows = np.ones((len(true), 1))
        right = (predicted == true).all(1, keepdims=True)
        return Sums(np.concatenate([rows, right, predicted * true, true, predicted], 1))

    def _metrics(self) -> dict[str, Metric]:
        return {name: partial(metric, len(self.labels)) for name, metric in SET_METRICS.items()}


def _f1_fractions(count: int, sums: Floats) -> tuple[Floats, Floats]:
    """Numerator and denominator of each label's F1: twice the hits, and true plus predicted labels."""
    hits, true, predicted = np.split(sums[:, 2:], [count, 2 * count], axis=1)
    return 2 * hits, true + predicted


def _micro_f1(count: int, sums: Floats) -> Floats:
    numerators, denominators = _f1_fractions(count, sums)
    return ratio(numerators.sum(1), denominators.sum(1))


def _macro_f1(count: int, sums: Floats) -> Floats:
    numerators, denominators = _f1_fractions(count, sums)
    means: Floats = ratio(numerators, denominators).mean(1)
    return means


def _exact_match(count: int, sums: Floats) -> Floats:
    return ratio(sums[:, 1], sums[:, 0])


SET_METRICS: dict[str, Callable[[int, Floats], Floats]] = {
    "micro_f1": _micro_f1,
    "macro_f1": _macro_f1,
    "exact_match": _exact_match,
}


def softmax(logits: Array) -> Array:
    """Probabilities along each row."""
    exponent = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Array = exponent / exponent.sum(-1, keepdims=True)
    return probabilities
