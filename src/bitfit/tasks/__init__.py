"""What a task is: how many outputs, which loss, what an output means, which metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..data import Kind
from ..delta import Delta
from ..errors import DataError, DeltaError, UsageError, suggest
from ..tensorfile import Array
from .metrics import Score, evaluate, metrics_for

KINDS: tuple[Kind, ...] = ("classification", "regression")


@dataclass(frozen=True)
class Task:
    """One text or a pair in; a class or a number out."""

    kind: Kind
    labels: tuple[str, ...]
    metric: str
    center: float = 0.0  # regression trains on (label - center) / spread, so that labels of any size are learnt alike
    spread: float = 1.0

    @classmethod
    def of(cls, kind: Kind, labels: tuple[str, ...], metric: str | None = None) -> Task:
        """A task by its kind, scored by `metric` or by the kind's own first one."""
        known = metrics_for(kind, len(labels))
        if metric is not None and metric not in known:
            raise UsageError(f'no metric "{metric}" for {kind} with {len(labels)} classes.{suggest(metric, known)}')
        return cls(kind, labels, metric or known[0])

    def fitted(self, labels: Sequence[float]) -> Task:
        """The same task with the centre and spread of its training labels."""
        if self.kind == "classification":
            return self
        with np.errstate(over="ignore"):
            center, spread = float(np.mean(labels)), float(np.std(labels)) or 1.0
        if not (math.isfinite(center) and math.isfinite(spread)):
            raise DataError("the labels are too large for their mean and spread to be computed; scale them down")
        return replace(self, center=center, spread=spread)

    @classmethod
    def of_delta(cls, delta: Delta) -> Task:
        """The task a delta was trained for."""
        if delta.meta["task"] not in KINDS:
            raise DeltaError(f"the delta is for a {delta.meta['task']!r} task, which this bitfit does not know")
        try:
            task = cls.of(delta.meta["task"], delta.labels, delta.meta["metric"])
        except UsageError as error:
            raise DeltaError(f"the delta's task makes no sense: {error}") from error
        return replace(task, center=float(delta.meta["center"]), spread=float(delta.meta["spread"]))

    @property
    def outputs(self) -> int:
        """How many numbers the head gives per text."""
        return len(self.labels) if self.kind == "classification" else 1

    def targets(self, labels: Sequence[float], device: torch.device) -> Tensor:
        """Gold labels as the loss takes them."""
        if self.kind == "classification":
            return torch.tensor(labels, dtype=torch.long, device=device)
        # In double precision: labels like 1.7e9 +- 5 are all the same number in float32.
        scaled = (np.asarray(labels, np.float64) - self.center) / self.spread
        return torch.tensor(scaled, dtype=torch.float32, device=device)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over the rows: cross-entropy, or squared error."""
        if self.kind == "classification":
            return functional.cross_entropy(logits, targets)
        return functional.mse_loss(logits.squeeze(-1), targets)

    def predictions(self, logits: Array) -> Array:
        """Class numbers, or values."""
        return logits.argmax(-1) if self.kind == "classification" else self.values(logits)

    def values(self, logits: Array) -> Array:
        """Regression outputs on the scale of the labels."""
        return logits[:, 0].astype(np.float64) * self.spread + self.center

    def scores(self, logits: Array, labels: Sequence[float]) -> dict[str, Score]:
        """Every metric of the task with its interval."""
        return evaluate(self.kind, self.predictions(logits), np.asarray(labels), len(self.labels))

    def answers(self, logits: Array) -> list[dict[str, Any]]:
        """What `predict` says of each row."""
        if self.kind == "regression":
            return [{"value": float(value)} for value in self.values(logits)]
        exponent = np.exp(logits - logits.max(-1, keepdims=True))
        shares = exponent / exponent.sum(-1, keepdims=True)
        return [self._answer(row) for row in shares]

    def _answer(self, shares: Array) -> dict[str, Any]:
        best = int(shares.argmax())
        scores = {label: float(share) for label, share in zip(self.labels, shares, strict=True)}
        return {"label": self.labels[best], "score": float(shares[best]), "scores": scores}
