"""How good predictions are: the papers' metrics, their 95% intervals and the baseline to beat.

Every metric is computed on many resamples at once, and the plain score is the case of a single one, so a value and
its interval cannot disagree about what the metric means.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..delta.meta import Score as Score
from ..errors import DataError, UsageError, suggest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_Z95 = 1.959963984540054
_MOST_CLASSES = 1 << 31
_BLOCK = 1 << 18  # entries of one block of resamples: bounds the memory whatever the number of rows or classes


def score(metric: str, predictions: ArrayLike, golds: ArrayLike, classes: int | None = None) -> float:
    """The value of one metric; a correlation that is undefined counts as 0 and warns."""
    sample = _sample(metric, predictions, golds, classes)
    if metric not in _DEFINED:
        sample.warn_if_constant(metric)
    return sample.value(metric)


def _value(metric: str, predictions: ArrayLike, golds: ArrayLike, classes: int | None) -> float:
    return _sample(metric, predictions, golds, classes).value(metric)


def interval(
    metric: str,
    predictions: ArrayLike,
    golds: ArrayLike,
    classes: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95% interval of a metric: Wilson's for accuracy, else a seeded percentile bootstrap over the rows."""
    sample = _sample(metric, predictions, golds, classes)
    value = sample.value(metric)
    if metric == "accuracy":
        return _wilson(value, sample.rows)
    if resamples < 1:
        raise UsageError(f"resamples is {resamples}: a bootstrap needs at least 1.")
    values = sample.resampled(metric, resamples, np.random.default_rng(seed))
    low, high = np.quantile(values, [0.025, 0.975])
    # Resamples repeat rows and lose classes, which biases some metrics enough to leave the value outside.
    return min(float(low), value), max(float(high), value)


def metrics_for(kind: str, classes: int) -> tuple[str, ...]:
    """The metrics that make sense for a kind of task, the default main metric first."""
    return tuple(name for name in _of_kind(kind) if (name, kind) != ("f1", "classification") or classes == 2)


def evaluate(
    kind: str, predictions: ArrayLike, golds: ArrayLike, classes: int, resamples: int = 1000, seed: int = 0
) -> dict[str, Score]:
    """Every metric of the kind of task, each with its interval."""
    scores = {}
    for metric in metrics_for(kind, classes):
        # Matthews is one of several metrics of classes: only who asks for it is warned that it is undefined.
        warned = score if kind == "regression" else _value
        value = warned(metric, predictions, golds, classes)
        scores[metric] = Score(value, *interval(metric, predictions, golds, classes, resamples, seed))
    return scores


def majority(golds_train: ArrayLike, golds_eval: ArrayLike, kind: str, metric: str) -> float:
    """The score of always answering the most frequent training class; a constant has no correlation, so 0."""
    if metric not in _of_kind(kind):
        raise UsageError(f'no {kind} metric "{metric}".{suggest(metric, _of_kind(kind))}')
    golds = _column("evaluation labels", golds_eval)
    train = _column("training labels", golds_train)
    if kind == "regression":
        return 0.0
    labels, counts = np.unique(_labels("training labels", train, None), return_counts=True)
    # np.unique sorts and argmax takes the first of equals: a tie goes to the lowest class.
    return _value(metric, np.full(len(golds), labels[counts.argmax()]), golds, None)


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
}
_DEFINED = ("accuracy", "f1", "macro_f1")  # the others are undefined where a side is constant


@dataclass(frozen=True)
class _Cells:
    """The filled cells of a confusion matrix: all that a classification metric needs to know of the rows."""

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
        """The metric of as many resamples, drawn cell by cell: drawing rows with replacement fills cells just so."""
        shares = self.counts / self.rows
        sizes = blocks(resamples, max(len(self.counts), self.width))
        return np.concatenate(
            [_CLASSIFICATION[metric](self.tally(rng.multinomial(self.rows, shares, size=size))) for size in sizes]
        )

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


# --- regression -------------------------------------------------------------------------------------------------


def _pearson(x: Floats, y: Floats) -> Floats:
    """The correlation of matching rows; 0 where either is constant."""
    x_spread, y_spread = _spread(x), _spread(y)
    covariance = (x_spread * y_spread).sum(axis=1)
    return ratio(covariance, np.sqrt((x_spread**2).sum(axis=1) * (y_spread**2).sum(axis=1)))


def _spearman(x: Floats, y: Floats) -> Floats:
    """The correlation of the ranks, for columns given as places."""
    return _pearson(_ranks(x), _ranks(y))


_REGRESSION: dict[str, Callable[[Floats, Floats], Floats]] = {"spearman": _spearman, "pearson": _pearson}


def _spread(values: Floats) -> Floats:
    """Each row around its mean, its largest distance scaled to 1 so that no square overflows or vanishes."""
    apart = values - values.mean(axis=1, keepdims=True)
    # The mean of equal numbers may be off by a rounding, which would pass for a spread.
    apart[values.max(axis=1) == values.min(axis=1)] = 0.0
    return ratio(apart, np.abs(apart).max(axis=1, keepdims=True), limit=None)


def _places(column: NDArray[Any]) -> Floats:
    """Each value's place among the distinct ones: all that ranks depend on, found once for every resample."""
    return np.unique(column, return_inverse=True)[1].astype(np.float64)


def _ranks(places: Floats) -> Floats:
    """Ranks along each row of places, equals sharing the average, by counting instead of sorting each row."""
    rows, width = len(places), int(places.max()) + 1
    cells = places.astype(np.int64) + width * np.arange(rows)[:, None]
    counts = np.bincount(cells.ravel(), minlength=rows * width).reshape(rows, width)
    ranks: Floats = (counts.cumsum(axis=1) - (counts - 1) / 2).ravel()[cells]
    return ranks


@dataclass(frozen=True)
class _Pairs:
    """Predicted and true numbers, row by row."""

    predictions: Floats
    golds: Floats

    @property
    def rows(self) -> int:
        return len(self.golds)

    def value(self, metric: str) -> float:
        return float(_REGRESSION[metric](self.predictions[None, :], self.golds[None, :])[0])

    def resampled(self, metric: str, resamples: int, rng: np.random.Generator) -> Floats:
        """The metric of as many resamples of the rows, drawn with replacement."""
        draws = (rng.integers(self.rows, size=(size, self.rows)) for size in blocks(resamples, self.rows))
        return np.concatenate([_REGRESSION[metric](self.predictions[rows], self.golds[rows]) for rows in draws])

    def warn_if_constant(self, metric: str) -> None:
        for name, values in (("predictions", self.predictions), ("golds", self.golds)):
            if values.min() == values.max():
                warn_constant(metric, f"{name} are constant")


# --- shared -----------------------------------------------------------------------------------------------------


# Computed by the tasks themselves, from sums over their rows.
_SUMMED = {
    "multilabel": ("micro_f1", "macro_f1", "exact_match"),
    "tagging": ("accuracy",),
    "answering": ("f1", "exact_match"),
}


def warn_constant(metric: str, what: str) -> None:
    """Say that a score is not a number that means something, and is counted as 0."""
    warnings.warn(f"{metric}: {what}, counted as 0", UserWarning, stacklevel=3)


def _of_kind(kind: str) -> tuple[str, ...]:
    kinds = {"classification": tuple(_CLASSIFICATION), "regression": tuple(_REGRESSION), **_SUMMED}
    if kind not in kinds:
        raise UsageError(f'no kind of task "{kind}".{suggest(kind, kinds)}')
    return kinds[kind]


def _sample(metric: str, predictions: ArrayLike, golds: ArrayLike, classes: int | None) -> _Cells | _Pairs:
    """The checked columns in the form that the metric reads."""
    if metric not in _CLASSIFICATION and metric not in _REGRESSION:
        raise UsageError(f'no metric "{metric}".{suggest(metric, [*_CLASSIFICATION, *_REGRESSION])}')
    predicted, true = _column("predictions", predictions), _column("golds", golds)
    if len(predicted) != len(true):
        raise DataError(f"{len(predicted)} predictions for {len(true)} golds: give one prediction per gold.")
    if metric == "spearman":
        return _Pairs(_places(predicted), _places(true))
    if metric == "pearson":
        return _Pairs(_unit(predicted), _unit(true))
    if metric == "f1":
        classes = _two_classes(classes, predicted, true)
    return _Cells.of(_labels("predictions", predicted, classes), _labels("golds", true, classes))


def _two_classes(classes: int | None, predicted: NDArray[Any], true: NDArray[Any]) -> int:
    count = classes or max(2, int(max(predicted.max(), true.max())) + 1)
    if count != 2:
        raise UsageError(f"f1 is for 2 classes and there are {count}: use macro_f1.")
    return count


def _column(name: str, values: ArrayLike) -> NDArray[Any]:
    column = np.asarray(values)
    if column.ndim != 1:
        raise DataError(f"{name} have shape {column.shape}: give one number per row.")
    if not len(column):
        raise DataError(f"{name} are empty: there is nothing to score.")
    if column.dtype.kind not in "biuf":
        raise DataError(f"{name} are not numbers ({column.dtype}): give class indices or values.")
    if not np.isfinite(column).all():
        row = int(np.flatnonzero(~np.isfinite(column))[0])
        raise DataError(f"{name} hold {column[row]} in row {row}: the training may have diverged.")
    return column


def _labels(name: str, column: NDArray[Any], classes: int | None) -> Ints:
    wrong = (column % 1 != 0) | (column < 0) | (column >= (_MOST_CLASSES if classes is None else classes))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        known = "0 and up" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"{name} hold {column[row]} in row {row}: class indices are whole numbers, {known}.")
    return column.astype(np.int64)


def _unit(column: NDArray[Any]) -> Floats:
    """Scaled to at most 1 in size, which no correlation notices, so that sums of huge values stay finite."""
    values = column.astype(np.float64)
    return values / (np.abs(values).max() or 1.0)


def ratio(above: Floats, below: Floats, limit: float | None = 1.0) -> Floats:
    """The quotient, 0 where it is undefined, without the last rounding beyond the limit."""
    quotient = np.divide(above, below, out=np.zeros_like(above), where=below != 0)
    return quotient if limit is None else quotient.clip(-limit, limit)


def blocks(resamples: int, width: int) -> Iterator[int]:
    """The sizes of the blocks in which resamples of this width are drawn."""
    size = max(1, _BLOCK // width)
    for start in range(0, resamples, size):
        yield min(size, resamples - start)


def _wilson(share: float, rows: int) -> tuple[float, float]:
    """Wilson's interval of a share, which unlike a bootstrap keeps its width where every row is right or wrong."""
    shrink = 1 + _Z95**2 / rows
    centre = (share + _Z95**2 / (2 * rows)) / shrink
    half = _Z95 / shrink * math.sqrt(share * (1 - share) / rows + _Z95**2 / (4 * rows**2))
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))
