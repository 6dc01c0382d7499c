"""Metrics that are a function of sums over rows, with bootstrap intervals over the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .metrics import Floats, Score, blocks, ratio, wilson

Metric = Callable[[Floats], Floats]
"""[resamples, statistics] -> one value per resample."""


@dataclass(frozen=True)
class Sums:
    """The statistics of a metric per row; a row is a sentence, a question or a text."""

    table: Floats  # [rows, statistics]

    def value(self, metric: Metric) -> float:
        """The metric of all rows."""
        return float(metric(self.table.sum(0, keepdims=True))[0])

    def score(self, metric: Metric, resamples: int = 1000, seed: int = 0) -> Score:
        """The metric, a share of 1, with its 95% interval: a seeded percentile bootstrap over the rows."""
        value = self.value(metric)
        rows = len(self.table)
        rng = np.random.default_rng(seed)
        values = []
        for size in blocks(resamples, rows):
            counts = rng.multinomial(rows, np.full(rows, 1 / rows), size=size)
            values.append(metric(counts @ self.table))
        low, high = np.quantile(np.concatenate(values), [0.025, 0.975])
        if low == high == value and value in (0.0, 1.0):
            low, high = wilson(value, rows)  # resamples of rows that are all right, or all wrong, are all alike
        return Score(value, min(float(low), value), max(float(high), value))

    def scores(self, metrics: Mapping[str, Metric]) -> dict[str, Score]:
        """Every metric with its interval."""
        return {name: self.score(metric) for name, metric in metrics.items()}


def share(column: int, of: int) -> Metric:
    """The sum of one statistic as a share of another."""
    return lambda sums: ratio(sums[:, column], sums[:, of])
