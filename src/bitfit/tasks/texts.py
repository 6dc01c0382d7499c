"""Tasks whose head sees one vector per text or pair: a class, a number, or any number of labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn import functional

from ..arrays import Array
from ..data.examples import Examples, Kind
from ..errors import DataError
from ..model.rows import Rows
from .encode import Encoded
from .metrics import Floats, Score, evaluate, majority, ratio, score, warn_constant
from .sums import Metric, Sums, share
from .task import Task


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes."""

    kind: ClassVar[Kind] = "classification"

    @property
    def outputs(self) -> int:
        """One per class."""
        return len(self.labels)

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """The classes' numbers."""
        return np.asarray(examples.labels, np.int64)

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(logits, targets)

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> Array:
        """The numbers of the likeliest classes."""
        best: Array = logits.argmax(-1)
        return best

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return score(self.metric, predictions, examples.labels, len(self.labels))

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval."""
        return evaluate(self.kind, predictions, examples.labels, len(self.labels))

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The likeliest class, and the share of each."""
        return [self._answer(row) for row in shares(logits)]

    def _answer(self, row: Array) -> dict[str, Any]:
        best = int(row.argmax())
        scores = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
        return {"label": self.labels[best], "score": float(row[best]), "scores": scores}

    def baseline(self, train: Examples, dev: Examples) -> float:
        """Always the most frequent class."""
        return majority(train.labels, dev.labels, self.kind, self.metric)


@dataclass(frozen=True)
class Regression(Task):
    """A number."""

    kind: ClassVar[Kind] = "regression"

    @property
    def outputs(self) -> int:
        """One."""
        return 1

    def fitted(self, examples: Examples) -> Task:
        """The same task with the centre and spread of its training labels."""
        with np.errstate(over="ignore"):
            center, spread = float(np.mean(examples.labels)), float(np.std(examples.labels)) or 1.0
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

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> Array:
        """Values on the scale of the labels."""
        values: Array = logits[:, 0].astype(np.float64) * self.spread + self.center
        return values

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return score(self.metric, predictions, examples.labels)

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval."""
        return evaluate(self.kind, predictions, examples.labels, 0)

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The value."""
        return [{"value": float(value)} for value in self.predictions(logits, encoded, examples)]

    def baseline(self, train: Examples, dev: Examples) -> float:
        """A constant, which correlates with nothing."""
        return majority(train.labels, dev.labels, self.kind, self.metric)


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels at once, each for itself."""

    kind: ClassVar[Kind] = "multilabel"
    baseline_name: ClassVar[str] = "always the most frequent set of labels"

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

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The labels above one half, and the chance of each."""
        chances = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return [self._answer(row) for row in chances]

    def _answer(self, row: Array) -> dict[str, Any]:
        scores = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
        return {"labels": [label for label, value in scores.items() if value > 0.5], "scores": scores}

    def baseline(self, train: Examples, dev: Examples) -> float:
        """Always the most frequent set of labels, the first of equals."""
        counts = Counter(sorted(train.labels))
        return self.score([max(counts, key=lambda labels: counts[labels])] * len(dev), dev)

    def _matrix(self, sets: Sequence[tuple[int, ...]]) -> Floats:
        table = np.zeros((len(sets), len(self.labels)))
        for row, own in enumerate(sets):
            table[row, list(own)] = 1
        return table

    def _sums(self, predictions: Sequence[tuple[int, ...]], golds: Sequence[tuple[int, ...]]) -> Sums:
        """Per row: 1, whether it is right as a whole, and for each label whether it is hit, true and predicted."""
        predicted, true = self._matrix(predictions), self._matrix(golds)
        right = (predicted == true).all(1, keepdims=True)
        return Sums(np.concatenate([np.ones((len(true), 1)), right, predicted * true, true, predicted], 1))

    def _metrics(self) -> dict[str, Metric]:
        count = len(self.labels)

        def parts(sums: Floats) -> tuple[Floats, Floats]:
            hits, true, predicted = (sums[:, 2 + i * count : 2 + (i + 1) * count] for i in range(3))
            return 2 * hits, true + predicted

        def micro(sums: Floats) -> Floats:
            return ratio(*(part.sum(1) for part in parts(sums)))

        def macro(sums: Floats) -> Floats:
            means: Floats = ratio(*parts(sums)).mean(1)
            return means

        return {"micro_f1": micro, "macro_f1": macro, "exact_match": share(1, 0)}


def shares(logits: Array) -> Array:
    """Softmax along each row."""
    exponent = np.exp(logits - logits.max(-1, keepdims=True))
    made: Array = exponent / exponent.sum(-1, keepdims=True)
    return made
