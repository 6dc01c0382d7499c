"""The outcome of a trial: its scores, its history and its delta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

from .. import __version__
from ..arrays import Tensors
from ..bank.lanes import head_trains
from ..data.examples import Columns
from ..delta.change import change_map
from ..delta.delta import Delta
from ..delta.meta import Meta, TrialRecord
from ..model.selection import Selection
from ..model.task_model import Model
from ..tasks.metrics import Score
from .history import History
from .job import Job
from .plan import Trial

Scores = dict[str, dict[str, Score]]
"""Part of the data -> metric -> score."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The scores, the history and the delta of one trial."""

    trial: Trial
    status: str  # done, dropped or diverged
    scores: Scores  # of "dev"; "train" if the gap was asked for; "test" of the best trial
    history: History
    delta: Delta | None  # None unless the status is done
    predictions: Mapping[str, Any] = field(default_factory=dict)  # of the parts that were scored besides dev

    @property
    def dev(self) -> float | None:
        """The dev score by the trial's metric, of its best checkpoint."""
        return self.scores["dev"][self.trial.metric].value if self.delta is not None else None

    @property
    def gap(self) -> dict[str, float]:
        """The generalisation gap: by how much train scores above dev, by every metric; empty without train scores."""
        train = self.scores.get("train", {})
        return {name: score.value - self.scores["dev"][name].value for name, score in train.items()}


def describe(
    job: Job, model: Model, trial: Trial, selection: Selection, tensors: Tensors, scores: Scores, step: int, rows: int
) -> Meta:
    """The metadata of a trial's delta: its values are those after `step`, and it was trained on `rows` examples."""
    columns = job.dataset.columns
    head_sizes = {name: math.prod(shape) for name, shape in model.head.items()}
    head_trained = sum(size for name, size in head_sizes.items() if head_trains(trial.head, name))
    change = change_map(model, tensors, model.graft_starts(trial.seed))
    return Meta(
        base=job.base.name,
        hub=job.base.hub,
        fingerprint=job.base.fingerprint,
        dtype=job.base.dtype,
        select=trial.select,
        inject=trial.inject,
        head=trial.head,
        init=trial.init,
        pool=trial.pool,
        task=job.task.kind,
        name=job.named.name if job.named else None,
        labels=job.task.labels,
        positive=job.task.positive,
        center=job.task.center,
        spread=job.task.spread,
        columns=Columns(columns.text, columns.text_pair, columns.label, separator=columns.separator),
        max_length=trial.max_length,
        stride=trial.stride,
        long=job.encoder.long,
        metric=trial.metric,
        metrics=scores,
        trial=TrialRecord(**asdict(trial), best_step=step, train_rows=rows),
        trained=selection.count + head_trained,
        total=job.base.grown(trial.inject).total + sum(head_sizes.values()),
        change={term: tuple(row) for term, row in change.items()},
        versions={"bitfit": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__},
        threads=torch.get_num_threads(),
    )
