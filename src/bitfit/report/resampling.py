"""How much of a difference is the choice of test rows: a paired bootstrap over the stored results of each row."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from ..study.examples import Rows
from ..study.store import Result

RESAMPLES = 400
Array = Any


def variance_from_rows(pairs: Sequence[tuple[Result, Result]], part: str) -> float:
    """The variance over test rows of the mean difference of paired trials, in points squared.

    All trials are scored on the same drawn rows, so that what they share cancels. 0 where a trial has no stored rows.
    """
    tables = [(a.rows_of(part), b.rows_of(part)) for a, b in pairs]
    known = [(a, b) for a, b in tables if a is not None and b is not None and len(a) == len(b)]
    if not known or len(known) < len(tables):
        return 0.0
    metric, form = pairs[0][0].metric, known[0][0].form
    if metric not in METRICS[form]:
        return 0.0
    weights = draws(len(known[0][0]))
    differences = [metric_of(a, metric, weights) - metric_of(b, metric, weights) for a, b in known]
    return float((100 * sum(differences) / len(differences)).var(ddof=1))


def score_variance(results: Sequence[Result], part: str) -> float:
    """The variance over test rows of the mean score of trials, in points squared; 0 where rows are not stored."""
    stored = [result.rows_of(part) for result in results]
    known = [rows for rows in stored if rows is not None]
    if not known or len(known) < len(results):
        return 0.0
    metric = results[0].metric
    if metric not in METRICS[known[0].form]:
        return 0.0
    weights = draws(len(known[0]))
    scores = [metric_of(rows, metric, weights) for rows in known]
    return float((100 * sum(scores) / len(scores)).var(ddof=1))


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
        return (weights @ first) / (weights @ second)
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


_CLASSES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
}
_VALUES: dict[str, Callable[[Array, Array, Array], Array]] = {"pearson": _pearson, "spearman": _spearman}
METRICS: dict[str, Container[str]] = {
    "hits": ("accuracy", "exact_match"),
    "ratio": ("accuracy", "f1", "exact_match"),
    "classes": _CLASSES,
    "values": _VALUES,
}
"""The metrics that can be resampled, by the form of the rows."""
