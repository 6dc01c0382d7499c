"""How much of a difference is the choice of test rows: a paired bootstrap over the stored results of each row."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from ..study.examples import Rows
from ..study.store import Result

RESAMPLES = 400
TOLERANCE = 0.002  # how far the score of the stored rows, which are rounded, may be from the score of the trial
Array = Any


def variance_from_rows(pairs: Sequence[tuple[Result, Result]], part: str) -> float | None:
    """The variance over test rows of the mean difference of paired trials, in points squared.

    All trials are scored on the same drawn rows, so that what they share cancels. None where rows cannot be resampled.
    """
    tables = _tables([*(a for a, _ in pairs), *(b for _, b in pairs)], part)
    if not tables:
        return None
    metric, weights = pairs[0][0].metric, draws(len(tables[0]))
    first = _mean_score(tables[: len(pairs)], metric, weights)
    second = _mean_score(tables[len(pairs) :], metric, weights)
    return float((first - second).var(ddof=1))


def score_variance(results: Sequence[Result], part: str) -> float | None:
    """The variance over test rows of the mean score of trials, in points squared; None if rows cannot be resampled."""
    tables = _tables(results, part)
    if not tables:
        return None
    return float(_mean_score(tables, results[0].metric, draws(len(tables[0]))).var(ddof=1))


def _mean_score(tables: Sequence[Rows], metric: str, weights: Array) -> Array:
    """The mean score of trials on each resample, in points."""
    scores = [metric_of(rows, metric, weights) for rows in tables]
    return 100 * sum(scores) / len(scores)


def _tables(results: Sequence[Result], part: str) -> list[Rows]:
    """The rows of all trials; empty if those of one cannot be resampled, or are not as many as those of another."""
    tables: list[Rows] = []
    for result in results:
        rows = _usable_rows(result, part)
        if rows is None or (tables and len(rows) != len(tables[0])):
            return []
        tables.append(rows)
    return tables


def _usable_rows(result: Result, part: str) -> Rows | None:
    """The rows of a trial; None where they are not stored, or where the metric of these rows is not its score.

    They differ where earlier versions stored other rows, and where the rounding of stored numbers loses too much.
    """
    import numpy as np

    rows, score = result.rows_of(part), result.score(part)
    if rows is None or score is None or result.metric not in METRICS[rows.form]:
        return None
    value = float(metric_of(rows, result.metric, np.ones((1, len(rows))))[0])
    return rows if abs(value - score) <= TOLERANCE else None


def draws(rows: int, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """How often each row is drawn in each resample: [resamples, rows]."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return rng.multinomial(rows, np.full(rows, 1 / rows), size=resamples).astype(np.float32)


def metric_of(rows: Rows, metric: str, weights: Array) -> Array:
    """The metric of each resample."""
    first, second = rows.columns
    if rows.form == "hits":
        return weights @ first / weights.sum(1)
    if rows.form == "ratio":
        return _ratio(weights @ first, weights @ second)
    if rows.form == "values":
        return _VALUES[metric](first, second, weights)
    return _CLASSES[metric](*_tally(first, second, weights))


def _tally(golds: Array, predictions: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Per resample and class: how often it was right, how often true and how often predicted."""
    import numpy as np

    classes = np.arange(max(2, int(max(golds.max(), predictions.max())) + 1))
    true, predicted = golds[:, None] == classes, predictions[:, None] == classes
    return weights @ (true & predicted), weights @ true, weights @ predicted


def _ratio(above: Array, below: Array) -> Array:
    import numpy as np

    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)


def _accuracy(hits: Array, true: Array, predicted: Array) -> Array:
    return _ratio(hits.sum(1), true.sum(1))


def _f1(hits: Array, true: Array, predicted: Array) -> Array:
    return _ratio(2 * hits, true + predicted)[:, 1]


def _precision(hits: Array, true: Array, predicted: Array) -> Array:
    return _ratio(hits, predicted)[:, 1]


def _recall(hits: Array, true: Array, predicted: Array) -> Array:
    return _ratio(hits, true)[:, 1]


def _macro_f1(hits: Array, true: Array, predicted: Array) -> Array:
    present = (true + predicted > 0).sum(1).astype(hits.dtype)
    return _ratio(_ratio(2 * hits, true + predicted).sum(1), present)


def _matthews(hits: Array, true: Array, predicted: Array) -> Array:
    rows = true.sum(1)
    above = rows * hits.sum(1) - (true * predicted).sum(1)
    below = (rows**2 - (true**2).sum(1)) * (rows**2 - (predicted**2).sum(1))
    return _ratio(above, below.clip(0) ** 0.5)


def _pearson(x: Array, y: Array, weights: Array) -> Array:
    total = weights.sum(1)
    x_mean, y_mean = weights @ x / total, weights @ y / total
    covariance = weights @ (x * y) / total - x_mean * y_mean
    x_variance = weights @ (x * x) / total - x_mean**2
    y_variance = weights @ (y * y) / total - y_mean**2
    return _ratio(covariance, (x_variance * y_variance).clip(0) ** 0.5)


def _spearman(x: Array, y: Array, weights: Array) -> Array:
    """The ranks are those among all rows: drawing rows again changes them little."""
    from scipy.stats import rankdata

    rows = len(x)
    return _pearson(rankdata(x) / rows, rankdata(y) / rows, weights)


def _r2(true: Array, predicted: Array, weights: Array) -> Array:
    total = weights.sum(1)
    centred = true - true.mean()
    error = weights @ (predicted - true) ** 2 / total
    variance = weights @ centred**2 / total - (weights @ centred / total) ** 2
    return (1 - _ratio(error, variance)) * (variance > 0)


def _auc(positive: Array, ranks: Array, weights: Array) -> Array:
    """How often a positive row outranks a negative one; ties count half."""
    hits = _by_rank(positive, ranks, weights)
    misses = _by_rank(1 - positive, ranks, weights)
    below = misses.cumsum(1) - misses / 2
    return _ratio((hits * below).sum(1), hits.sum(1) * misses.sum(1))


def _average_precision(positive: Array, ranks: Array, weights: Array) -> Array:
    """The mean of the precision at every threshold, weighted by the recall that it adds."""
    hits = _by_rank(positive, -ranks, weights)
    rows = _by_rank(positive * 0 + 1, -ranks, weights)
    precision = _ratio(hits.cumsum(1), rows.cumsum(1))
    return _ratio((precision * hits).sum(1), hits.sum(1))


def _by_rank(values: Array, ranks: Array, weights: Array) -> Array:
    """Per resample: the sums of the values of rows with equal rank, the lowest rank first."""
    import numpy as np

    order = np.argsort(ranks, kind="stable")
    starts = np.unique(ranks[order], return_index=True)[1]
    return np.add.reduceat((weights * values)[:, order], starts, axis=1)


_CLASSES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "precision": _precision,
    "recall": _recall,
}
_VALUES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "pearson": _pearson,
    "spearman": _spearman,
    "r2": _r2,
    "auc": _auc,
    "average_precision": _average_precision,
}
METRICS: dict[str, Container[str]] = {
    "hits": ("accuracy", "exact_match"),
    "ratio": ("accuracy", "f1", "exact_match", "span_f1", "span_precision", "span_recall", "micro_f1"),
    "classes": _CLASSES,
    "values": _VALUES,
}
"""The metrics that can be resampled, by the form of the rows."""
