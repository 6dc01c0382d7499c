"""What a task is: how texts are read, how many outputs there are, the loss, what an output means, how it is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from ..arrays import Array
from ..data.examples import Examples, Kind
from ..delta.delta import Delta
from ..errors import DeltaError, UsageError, suggest
from ..model.rows import Rows
from .encode import Encoded, Encoder
from .metrics import Score, metrics_for

KINDS: dict[Kind, type[Task]] = {}
"""Every kind of task by its name; a subclass of Task joins by being defined."""


@dataclass(frozen=True)
class Task(ABC):
    """One text, a pair, a sentence of words or a question on a context in; what its kind says out."""

    labels: tuple[str, ...]
    metric: str
    center: float = 0.0  # regression trains on (label - center) / spread, so that labels of any size are learnt alike
    spread: float = 1.0

    kind: ClassVar[Kind]
    form: ClassVar[str] = "texts"  # how the encoder reads its inputs
    length: ClassVar[int] = 128  # the maximum length, in tokens, when nobody says
    stride: ClassVar[int | None] = None  # the tokens that windows share when nobody says; None: a third
    baseline_name: ClassVar[str] = "always the majority"

    def __init_subclass__(cls) -> None:
        KINDS[cls.kind] = cls

    @classmethod
    def of(cls, kind: Kind, labels: tuple[str, ...], metric: str | None = None) -> Task:
        """A task by its kind, scored by `metric` or by the kind's own first one."""
        known = metrics_for(kind, len(labels))
        if metric is not None and metric not in known:
            raise UsageError(f'no metric "{metric}" for {kind} with {len(labels)} classes.{suggest(metric, known)}')
        return KINDS[kind](labels, metric or known[0])

    @classmethod
    def of_delta(cls, delta: Delta) -> Task:
        """The task a delta was trained for."""
        meta = delta.meta
        if meta.task not in KINDS:
            raise DeltaError(f"the delta is for a {meta.task[:40]!r} task, which this bitfit does not know")
        try:
            task = cls.of(meta.task, meta.labels, meta.metric)
        except UsageError as error:
            raise DeltaError(f"the delta's task makes no sense: {error}") from error
        if task.by_token != (meta.pool == "tokens"):
            raise DeltaError(f"the delta is for {task.kind}, but its head was made for another kind of task")
        return replace(task, center=meta.center, spread=meta.spread)

    @property
    def by_token(self) -> bool:
        """Whether the head sees every token; else it sees one vector per text."""
        return self.form != "texts"

    def pool(self, asked: str) -> str:
        """What the head sees, as a model takes it."""
        if self.by_token and asked not in ("auto", "tokens"):
            raise UsageError(f"--pool {asked}: {self.kind} looks at every token; leave --pool away")
        return "tokens" if self.by_token else asked

    def encoder(self, base: Any, max_length: int | None, stride: int | None = None) -> Encoder:
        """The base's tokenizer as this kind of task reads with it."""
        if stride is not None and not self.by_token:
            raise UsageError(f"--stride {stride}: {self.kind} cuts long texts; only tagging and answering use windows")
        wanted = max_length or min(self.length, base.max_length)
        shared = self.stride if stride is None else stride
        if stride is None and shared is not None:
            shared = min(shared, wanted // 3)
        return Encoder(base, max_length, shared, self.length)

    def encode(self, encoder: Encoder, examples: Examples) -> Encoded:
        """The examples as token rows."""
        return encoder.encode(self.form, examples)

    def fitted(self, examples: Examples) -> Task:
        """The same task as far as it is known from its training examples only."""
        return self

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """What a person should know about how the examples were read."""
        cut = encoded.rows.cut
        if not cut:
            return []
        return [f"{cut:,} of {len(examples):,} texts are cut at {encoder.max_length} tokens; --max-length reads more."]

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many numbers the head gives per text or token."""

    @abstractmethod
    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """Gold labels as the loss takes them: one per row of outputs."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """The mean over the texts, or over what is labelled in them."""

    @abstractmethod
    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> Sequence[Any] | Array:
        """One prediction per example, in the form of its label."""

    @abstractmethod
    def score(self, predictions: Any, examples: Examples) -> float:
        """The task's main metric."""

    @abstractmethod
    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric of the task with its interval."""

    @abstractmethod
    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """What `predict` says of each example."""

    @abstractmethod
    def baseline(self, train: Examples, dev: Examples) -> float:
        """The main metric of the simplest way to answer without a model."""
