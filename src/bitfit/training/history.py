"""The history of a trial: its losses, its evaluations and how it ended. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any


@dataclass(frozen=True)
class LossPoint:
    """The mean training loss of the steps up to this one."""

    step: int
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """The loss and the score on dev after a step."""

    step: int
    epoch: float
    dev_loss: float
    dev_score: float


@dataclass(frozen=True)
class TrainScore:
    """The score of the best checkpoint on a sample of the training rows."""

    train_score: float
    rows: int


@dataclass(frozen=True)
class Freezing:
    """After this step the first `frozen_layers` layers no longer train."""

    step: int
    frozen_layers: int


@dataclass(frozen=True)
class GatePhase:
    """The result of training the gates of Diff-Pruning."""

    gate_steps: int
    gated: int  # entries that could have been kept
    open: int  # of those, how many had an open gate in the end
    kept: int  # entries that train on: those with the largest differences

    @property
    def open_share(self) -> float:
        """The share of open gates: the sparsity that the penalty reached by itself."""
        return self.open / self.gated


@dataclass
class History:
    """What was recorded of a trial."""

    losses: list[LossPoint] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    freezings: list[Freezing] = field(default_factory=list)
    diverged: int | None = None  # the step at which the loss was not a number
    train: TrainScore | None = None
    gates: GatePhase | None = None  # of a learned selection

    def add(self, other: History) -> None:
        """Append the history of another training of the same trial."""
        self.losses += other.losses
        self.evaluations += other.evaluations
        self.freezings += other.freezings
        if self.diverged is None:
            self.diverged = other.diverged

    def lines(self) -> list[dict[str, Any]]:
        """The records as the lines of a history file, in the order of steps."""
        lines = [asdict(point) for point in self.losses]
        lines += [asdict(evaluation) for evaluation in self.evaluations]
        lines += [asdict(freezing) for freezing in self.freezings]
        lines.sort(key=itemgetter("step"))  # stable: the loss of a step comes before its evaluation
        if self.diverged is not None:
            lines.append({"step": self.diverged, "diverged": True})
        if self.gates is not None:
            lines.insert(0, asdict(self.gates))
        if self.train is not None:
            lines.append(asdict(self.train))
        return lines
