"""Metrics of classes and of numbers, with their 95% intervals.

Every metric is computed on many resamples at once. The score is the metric of a single sample, so that a value and
its interval always come from the same code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..delta.meta import ERRORS as ERRORS
from ..delta.meta import Score as Score
from ..errors import DataError, UsageError, suggest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_Z95 = 1.959963984540054
_MOST_CLASSES = 1 << 31
_BLOCK = 1 << 18  # entries of one block of resamples: bounds the memory for any number of rows or classes


def score(
    metric: str, predictions: ArrayLike, golds: ArrayLike, classes: int | None = None, positive: int = 1
) -> float:
    """The value of one metric; an undefined metric is 0, with a warning.

    Predictions of classes are class numbers, or a row of scores per example, one for each class. `positive` is the
    class that precision, recall, f1, auc and average_precision are computed for.
    """
    sample = _sample(metric, predictions, golds, classes, positive)
    if metric not in _DEFINED:
        sample.warn_if_constant(metric)
    return sample.value(metric)


def interval(
    metric: str,
    predictions: ArrayLike,
    golds: ArrayLike,
    classes: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
    positive: int = 1,
) -> tuple[float, float]:
    """The 95% interval of a metric: Wilson's for accuracy, else a seeded percentile bootstrap over the rows."""
    sample = _sample(metric, predictions, golds, classes, positive)
    return _interval(sample, metric, resamples, seed)


def evaluate(
    metrics: Iterable[str],
    predictions: ArrayLike,
    golds: ArrayLike,
    classes: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
    positive: int = 1,
) -> dict[str, Score]:
    """Several metrics, each with its interval; undefined metrics are 0, without a warning."""
    scores = {}
    for metric in metrics:
        sample = _sample(metric, predictions, golds, classes, positive)
        scores[metric] = Score(sample.value(metric), *_interval(sample, metric, resamples, seed))
    return scores


def warn_constant(metric: str, what: str) -> None:
    """Warn that a metric is undefined and counted as 0."""
    warnings.warn(f"{metric}: {what}, counted as 0", UserWarning, stacklevel=3)


@dataclass(frozen=True)
class ClassScore:
    """The scores of one class, label or entity type."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int  # how often it is true

    @classmethod
    def of(cls, label: str, hits: float, predicted: float, true: float) -> ClassScore:
        """The scores from the numbers of right, predicted and true cases."""
        precision = hits / predicted if predicted else 0.0
        recall = hits / true if true else 0.0
        f1 = 2 * hits / (predicted + true) if predicted + true else 0.0
        return cls(label, float(precision), float(recall), float(f1), int(true))  # counts may be numpy's


class _Sample(Protocol):
    """Predictions and golds in the form that a metric takes."""

    @property
    def rows(self) -> int: ...
    def value(self, metric: str) -> float: ...
    def resampled(self, metric: str, resamples: int, rng: np.random.Generator) -> Floats: ...
    def warn_if_constant(self, metric: str) -> None: ...


def _interval(sample: _Sample, metric: str, resamples: int, seed: int) -> tuple[float, float]:
    value = sample.value(metric)
    if metric == "accuracy":
        return wilson(value, sample.rows)
    if resamples < 1:
        raise UsageError(f"resamples is {resamples}: a bootstrap needs at least 1.")
    values = sample.resampled(metric, resamples, np.random.default_rng(seed))
    low, high = np.quantile(values, [0.025, 0.975])
    if metric in _SHARES and low == high == value and value in (0.0, 1.0):
        return wilson(value, sample.rows)  # resamples of rows that are all right, or all wrong, are all alike
    # Resamples repeat rows and lose classes, which biases some metrics enough to leave the value outside.
    return min(float(low), value), max(float(high), value)


# --- classification ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tally:
    """Per resample (rows) and class (columns): how often it was right, how often true and how often predicted."""

    hits: Floats
    true: Floats
    predicted: Floats


def _accuracy(tally: _Tally) -> Floats:
    return ratio(tally.hits.sum(axis=1), tally.true.sum(axis=1))


def _class_f1(tally: _Tally) -> Floats:
    return ratio(2 * tally.hits, tally.true + tally.predicted)


def _f1(tally: _Tally) -> Floats:
    return _class_f1(tally)[:, 1]


def _precision(tally: _Tally) -> Floats:
    return ratio(tally.hits, tally.predicted)[:, 1]


def _recall(tally: _Tally) -> Floats:
    return ratio(tally.hits, tally.true)[:, 1]


def _macro_f1(tally: _Tally) -> Floats:
    present = (tally.true + tally.predicted > 0).sum(axis=1)
    return ratio(_class_f1(tally).sum(axis=1), present.astype(np.float64))


def _matthews(tally: _Tally) -> Floats:
    rows = tally.true.sum(axis=1)
    covariance = rows * tally.hits.sum(axis=1) - (tally.true * tally.predicted).sum(axis=1)
    spread_true = rows**2 - (tally.true**2).sum(axis=1)
    spread_predicted = rows**2 - (tally.predicted**2).sum(axis=1)
    return ratio(covariance, np.sqrt(spread_true * spread_predicted))


_CLASSIFICATION: dict[str, Callable[[_Tally], Floats]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "precision": _precision,
    "recall": _recall,
}


@dataclass(frozen=True)
class _Cells:
    """The non-zero cells of a confusion matrix, from which every classification metric is computed."""

    gold: Ints
    predicted: Ints
    counts: Ints
    width: int

    @classmethod
    def of(cls, predictions: Ints, golds: Ints) -> _Cells:
        # Classes are renumbered to those that occur, plus 0 and 1 so that class 1 stays the positive one.
        present = np.union1d([0, 1], np.concatenate([predictions, golds]))
        width = len(present)
        codes = np.searchsorted(present, golds) * width + np.searchsorted(present, predictions)
        cells, counts = np.unique(codes, return_counts=True)
        return cls(cells // width, cells % width, counts, width)

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def value(self, metric: str) -> float:
        return float(_CLASSIFICATION[metric](self.tally(self.counts[None, :]))[0])

    def resampled(self, metric: str, resamples: int, rng: np.random.Generator) -> Floats:
        """The metric of each resample. The counts of the cells under drawing rows with replacement are multinomial."""
        shares = self.counts / self.rows
        values = []
        for size in blocks(resamples, max(len(self.counts), self.width)):
            counts = rng.multinomial(self.rows, shares, size=size)
            values.append(_CLASSIFICATION[metric](self.tally(counts)))
        return np.concatenate(values)

    def warn_if_constant(self, metric: str) -> None:
        for name, classes in (("predictions", self.predicted), ("golds", self.gold)):
            if len(np.unique(classes)) == 1:
                warn_constant(metric, f"{name} are constant")

    def tally(self, counts: Ints) -> _Tally:
        right = np.flatnonzero(self.gold == self.predicted)
        return _Tally(
            hits=self._by_class(counts[:, right], self.gold[right]),
            true=self._by_class(counts, self.gold),
            predicted=self._by_class(counts, self.predicted),
        )

    def _by_class(self, counts: Ints, classes: Ints) -> Floats:
        totals = np.zeros((len(counts), self.width))
        order = np.argsort(classes, kind="stable")
        present, starts = np.unique(classes[order], return_index=True)
        if len(present):
            totals[:, present] = np.add.reduceat(counts[:, order], starts, axis=1)
        return totals


# --- ranking: two classes by score, as dense ranks -----------------------------------------------------------------


def _auc(dense: Floats, golds: Floats) -> Floats:
    """The area under the ROC curve: how often a positive example outranks a negative one, ties counting half."""
    positives = golds.sum(axis=1)
    negatives = golds.shape[1] - positives
    outranked = (_ranks(dense) * golds).sum(axis=1) - positives * (positives + 1) / 2
    return ratio(outranked, positives * negatives)


def _average_precision(dense: Floats, golds: Floats) -> Floats:
    """The mean of the precision at every threshold, weighted by the recall that it adds."""
    rows = len(dense)
    width = int(dense.max()) + 1
    cells = (dense.astype(np.int64) + width * np.arange(rows)[:, None]).ravel()
    counts = np.bincount(cells, minlength=rows * width).reshape(rows, width)[:, ::-1]
    hits = np.bincount(cells, golds.ravel(), minlength=rows * width).reshape(rows, width)[:, ::-1]
    precision = ratio(hits.cumsum(axis=1), counts.cumsum(axis=1).astype(np.float64))
    return ratio((precision * hits).sum(axis=1), golds.sum(axis=1))


_RANKING: dict[str, Callable[[Floats, Floats], Floats]] = {"auc": _auc, "average_precision": _average_precision}


# --- regression -------------------------------------------------------------------------------------------------


def _pearson(x: Floats, y: Floats) -> Floats:
    """The correlation of matching rows; 0 where either is constant."""
    x_spread, y_spread = _spread(x), _spread(y)
    covariance = (x_spread * y_spread).sum(axis=1)
    return ratio(covariance, np.sqrt((x_spread**2).sum(axis=1) * (y_spread**2).sum(axis=1)))


def _spearman(x: Floats, y: Floats) -> Floats:
    """The correlation of the ranks; `x` and `y` are dense ranks."""
    return _pearson(_ranks(x), _ranks(y))


def _mae(x: Floats, y: Floats) -> Floats:
    """The mean absolute error."""
    means: Floats = np.abs(x - y).mean(axis=1)
    return means


def _rmse(x: Floats, y: Floats) -> Floats:
    """The root of the mean squared error."""
    roots: Floats = np.sqrt(((x - y) ** 2).mean(axis=1))
    return roots


def _r2(x: Floats, y: Floats) -> Floats:
    """The share of the variance of `y` that `x` explains; 0 where `y` is constant."""
    error = ((x - y) ** 2).sum(axis=1)
    variance = ((y - y.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    return np.where(variance > 0, 1 - ratio(error, variance, limit=None), 0.0)


_REGRESSION: dict[str, Callable[[Floats, Floats], Floats]] = {
    "spearman": _spearman,
    "pearson": _pearson,
    "r2": _r2,
    "mae": _mae,
    "rmse": _rmse,
}


def _spread(values: Floats) -> Floats:
    """Each row minus its mean, scaled so that the largest distance is 1 and no square overflows or vanishes."""
    centred = values - values.mean(axis=1, keepdims=True)
    # The mean of equal numbers may be off by a rounding error, which must not count as a spread.
    centred[values.max(axis=1) == values.min(axis=1)] = 0.0
    return ratio(centred, np.abs(centred).max(axis=1, keepdims=True), limit=None)


def _dense_ranks(column: NDArray[Any]) -> Floats:
    """Each value's rank among the distinct values. Computed once, since resamples keep the order of values."""
    return np.unique(column, return_inverse=True)[1].astype(np.float64)


def _ranks(dense: Floats) -> Floats:
    """Ranks along each row of dense ranks, ties sharing the average; by counting, which is faster than sorting."""
    rows = len(dense)
    width = int(dense.max()) + 1
    cells = dense.astype(np.int64) + width * np.arange(rows)[:, None]
    counts = np.bincount(cells.ravel(), minlength=rows * width).reshape(rows, width)
    ranks: Floats = (counts.cumsum(axis=1) - (counts - 1) / 2).ravel()[cells]
    return ranks


@dataclass(frozen=True)
class _Pairs:
    """Two numbers per row: predicted and true value, or score and whether the example is positive."""

    predictions: Floats
    golds: Floats
    unit: float = 1.0  # an error of 1 in these numbers is an error of `unit` in the labels

    @property
    def rows(self) -> int:
        return len(self.golds)

    def value(self, metric: str) -> float:
        return float(self._of(metric, self.predictions[None, :], self.golds[None, :])[0])

    def resampled(self, metric: str, resamples: int, rng: np.random.Generator) -> Floats:
        """The metric of each resample of the rows, drawn with replacement."""
        values = []
        for size in blocks(resamples, self.rows):
            rows = rng.integers(self.rows, size=(size, self.rows))
            values.append(self._of(metric, self.predictions[rows], self.golds[rows]))
        return np.concatenate(values)

    def _of(self, metric: str, predictions: Floats, golds: Floats) -> Floats:
        return self.unit * (_REGRESSION | _RANKING)[metric](predictions, golds)

    def warn_if_constant(self, metric: str) -> None:
        for name, values in (("predictions", self.predictions), ("golds", self.golds)):
            if values.min() == values.max():
                warn_constant(metric, f"{name} are constant")


# --- shared -----------------------------------------------------------------------------------------------------


CLASS_METRICS = ("accuracy", "macro_f1", "matthews")
TWO_CLASS_METRICS = ("accuracy", "f1", "macro_f1", "matthews", "precision", "recall", "auc", "average_precision")
NUMBER_METRICS = tuple(_REGRESSION)

# The other metrics are undefined if predictions or golds are constant.
_DEFINED = ("accuracy", "f1", "macro_f1", "precision", "recall", *ERRORS)
_SHARES = ("f1", "macro_f1", "precision", "recall")
_OF_POSITIVE = ("f1", "precision", "recall", *_RANKING)


def _sample(
    metric: str, predictions: ArrayLike, golds: ArrayLike, classes: int | None = None, positive: int = 1
) -> _Sample:
    """Check predictions and golds, and convert them to the form that the metric takes."""
    known = [*_CLASSIFICATION, *_RANKING, *_REGRESSION]
    if metric not in known:
        raise UsageError(f'no metric "{metric}".{suggest(metric, known)}')
    true = _column("golds", golds)
    scores = _class_scores(metric, predictions, classes)
    predicted = _column("predictions", predictions if scores is None else scores.argmax(1))
    if len(predicted) != len(true):
        raise DataError(f"{len(predicted)} predictions for {len(true)} golds: pass one prediction per gold label.")
    if metric in _REGRESSION:
        return _numbers(metric, predicted, true)

    if metric in _OF_POSITIVE:
        classes = _two_classes(metric, classes, predicted, true)
    predicted_class = _class_numbers("predictions", predicted, classes)
    true_class = _class_numbers("golds", true, classes)
    if metric in _RANKING:
        # Class numbers rank too: those predicted as positive before the others.
        margin = predicted_class == positive if scores is None else scores[:, positive] - scores[:, 1 - positive]
        return _Pairs(_dense_ranks(margin), (true_class == positive).astype(np.float64))
    if metric in _OF_POSITIVE and positive == 0:  # these metrics are computed for class 1
        return _Cells.of(1 - predicted_class, 1 - true_class)
    return _Cells.of(predicted_class, true_class)


def _class_scores(metric: str, predictions: ArrayLike, classes: int | None) -> NDArray[Any] | None:
    """The predictions as [rows, classes] if they are scores per class; None if they are a number per row."""
    scores = np.asarray(predictions)
    if metric in _REGRESSION or scores.ndim != 2 or not scores.size:
        return None
    return scores if classes is None or scores.shape[1] == classes else None


def _numbers(metric: str, predicted: NDArray[Any], true: NDArray[Any]) -> _Pairs:
    if metric == "spearman":
        return _Pairs(_dense_ranks(predicted), _dense_ranks(true))
    if metric == "pearson":
        return _Pairs(_unit(predicted), _unit(true))
    # On a common scale, so that no square overflows; only errors are in the unit of the labels.
    largest = float(max(np.abs(predicted).max(), np.abs(true).max())) or 1.0
    return _Pairs(predicted / largest, true / largest, largest if metric in ERRORS else 1.0)


def _two_classes(metric: str, classes: int | None, predicted: NDArray[Any], true: NDArray[Any]) -> int:
    count = classes or max(2, int(max(predicted.max(), true.max())) + 1)
    if count != 2:
        raise UsageError(f"{metric} needs 2 classes, but there are {count}: use macro_f1.")
    return count


def _column(name: str, values: ArrayLike) -> NDArray[Any]:
    column = np.asarray(values)
    if column.ndim != 1:
        raise DataError(f"{name} have shape {column.shape}: pass one number per row.")
    if not len(column):
        raise DataError(f"{name} are empty: there is nothing to score.")
    if column.dtype.kind not in "biuf":
        raise DataError(f"{name} are not numbers ({column.dtype}): pass class numbers or values.")
    if not np.isfinite(column).all():
        row = int(np.flatnonzero(~np.isfinite(column))[0])
        raise DataError(f"{name} contain {column[row]} in row {row}: the training may have diverged.")
    return column


def _class_numbers(name: str, column: NDArray[Any], classes: int | None) -> Ints:
    end = _MOST_CLASSES if classes is None else classes
    wrong = (column % 1 != 0) | (column < 0) | (column >= end)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        known = "0 and up" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"{name} contain {column[row]} in row {row}: classes are whole numbers, {known}.")
    return column.astype(np.int64)


def _unit(column: NDArray[Any]) -> Floats:
    """Scale to at most 1 in absolute value, so that sums of huge values stay finite; correlations do not change."""
    values = column.astype(np.float64)
    return values / (np.abs(values).max() or 1.0)


def ratio(numerator: Floats, denominator: Floats, limit: float | None = 1.0) -> Floats:
    """The quotient, 0 where it is undefined, clipped to the limit against rounding errors."""
    quotient = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)
    return quotient if limit is None else quotient.clip(-limit, limit)


def blocks(resamples: int, width: int) -> Iterator[int]:
    """The sizes of the blocks in which resamples of this width are drawn."""
    size = max(1, _BLOCK // width)
    for start in range(0, resamples, size):
        yield min(size, resamples - start)


def wilson(share: float, rows: int) -> tuple[float, float]:
    """Wilson's interval of a share. Unlike a bootstrap, it has a width even if every row is right or all wrong."""
    shrink = 1 + _Z95**2 / rows
    centre = (share + _Z95**2 / (2 * rows)) / shrink
    half = _Z95 / shrink * math.sqrt(share * (1 - share) / rows + _Z95**2 / (4 * rows**2))
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))
