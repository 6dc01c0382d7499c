"""The interface of a task kind: encoding, head outputs, loss, metrics, and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..data.examples import Examples
from ..data.readers import Reader
from ..delta.delta import Delta
from ..delta.meta import HEAD_OF_TEXT
from ..errors import DeltaError, UsageError, suggest
from ..model.rows import Rows
from ..plugins import Registry
from ..terminal.progress import counted
from .encode import MOST_WINDOWS, Encoded, Encoder
from .metrics import ERRORS, ClassScore, Score

KINDS: Registry[type[Task]] = Registry(
    "bitfit.kinds",
    {
        "classification": "bitfit.tasks.texts:Classification",
        "regression": "bitfit.tasks.texts:Regression",
        "multilabel": "bitfit.tasks.texts:MultiLabel",
        "tagging": "bitfit.tasks.tagging:Tagging",
        "answering": "bitfit.tasks.answering:Answering",
    },
)
"""Every kind of task by its name."""

Text = str | Sequence[str]
"""A text, a pair of texts, a question with its context, or a sentence as words."""


@dataclass(frozen=True)
class Task(ABC):
    """A task: its labels and main metric. Each kind of task is a subclass, which holds all that is specific to it."""

    labels: tuple[str, ...]
    metric: str
    center: float = 0.0  # regression trains on (label - center) / spread, so that the scale of labels does not matter
    spread: float = 1.0
    positive: str | None = None  # the class of two that precision, recall and f1 are computed for
    class_weights: tuple[float, ...] = ()  # of the classes in the loss; empty: all 1

    kind: ClassVar[str]
    reader: ClassVar[type[Reader]]
    form: ClassVar[str] = "texts"  # how the encoder reads its inputs: "texts", "words" or "windows"
    length: ClassVar[int] = 128  # the default maximum length, in tokens
    stride: ClassVar[int | None] = None  # the default number of tokens that windows share; None: a third
    baseline_name: ClassVar[str] = "always the majority"
    echo: ClassVar[tuple[str, ...]] = ()  # keys of an answer that repeat the input
    # In an exported folder: the class of transformers, its setting, the pipeline, and the first line of the card.
    transformers_class: ClassVar[str] = "AutoModelForSequenceClassification"
    problem_type: ClassVar[str | None] = None
    wrong_means: ClassVar[str] = "answered wrongly"  # of the rows that `wrong` finds
    pipeline: ClassVar[str | None] = "text-classification"
    card_logits: ClassVar[str] = "output.logits"  # the logits of a model's output, in the example on the card
    card: ClassVar[str]  # may use {texts} and {labels}
    # The fields of a request to the service: a request has exactly one of these sets.
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (("text",), ("text", "text_pair"))

    # ---- construction

    @classmethod
    def of(cls, kind: str, labels: tuple[str, ...], metric: str | None = None) -> Task:
        """A task of this kind, scored by `metric` or by the first metric of the kind."""
        task_class = KINDS.member(kind, "kind of task")
        known = task_class.metric_names(labels)
        if metric is not None and metric not in known:
            raise UsageError(f'no metric "{metric}" for {kind} with {len(labels)} classes.{suggest(metric, known)}')
        if metric in ERRORS:
            raise UsageError(
                f"--metric {metric}: the main metric must be better when higher; use r2 ({metric} is reported)"
            )
        return task_class(labels, metric or known[0])

    @classmethod
    def of_delta(cls, delta: Delta) -> Task:
        """The task a delta was trained for."""
        meta = delta.meta
        if meta.task not in KINDS:
            raise DeltaError(f"the delta is for a {meta.task[:40]!r} task, which this bitfit does not know")
        try:
            task = cls.of(meta.task, meta.labels, meta.metric)
            if meta.positive is not None:
                task = task.with_positive(meta.positive)
        except UsageError as error:
            raise DeltaError(f"the delta's task is inconsistent: {error}") from error
        if task.by_token != (meta.pool == "tokens"):
            raise DeltaError(f"the delta is for {task.kind}, but its head was made for another kind of task")
        return replace(task, center=meta.center, spread=meta.spread)

    def with_positive(self, label: str) -> Task:
        """The same task with another positive class."""
        raise UsageError(f"--positive {label}: {self.kind} has no positive class; it is for two classes only")

    def balanced(self, examples: Examples) -> Task:
        """The same task with a loss in which each class counts alike, however few of these rows it has."""
        raise UsageError(f"--class-weights balanced: {self.kind} has no such weights; they are for classification")

    def fitted(self, examples: Examples) -> Task:
        """The same task with what depends on its training examples: the positive class, the scale of labels."""
        return self

    # ---- encoding

    @property
    def by_token(self) -> bool:
        """Whether the head reads every token; otherwise it reads one vector per text."""
        return self.form != "texts"

    def pool(self, requested: str) -> str:
        """The pooling of the model: "tokens" for a head that reads every token, else the requested one."""
        if self.by_token and requested not in ("auto", "tokens"):
            raise UsageError(f"--pool {requested}: the head of {self.kind} reads every token; remove --pool")
        return "tokens" if self.by_token else requested

    def encoder(
        self,
        base: Any,
        max_length: int | None,
        stride: int | None = None,
        long: str = HEAD_OF_TEXT,
        apart: bool = False,
    ) -> Encoder:
        """The base's tokenizer with the lengths of this kind.

        `long`: what is read of a text that is too long. `apart`: whether the texts of a pair are encoded one by one.
        """
        if not self.by_token:
            return self._text_encoder(base, max_length, stride, long, apart)
        if long != HEAD_OF_TEXT:
            raise UsageError(f"--long {long}: {self.kind} reads every long input in windows; remove --long")
        if stride is None and self.stride is not None:
            window = max_length or min(self.length, base.max_length)
            stride = min(self.stride, window // 3)
        return Encoder(base, max_length, stride, self.length)

    def _text_encoder(self, base: Any, max_length: int | None, stride: int | None, long: str, apart: bool) -> Encoder:
        if stride is not None and long != "windows":
            what = f"{self.kind} reads long texts in windows only with --long windows"
            raise UsageError(f"--stride {stride}: {what}; add it, or remove --stride")
        encoder = Encoder(base, max_length, 0, self.length)
        encoder.cut_at(encoder.max_length, stride or 0, long, apart)
        return encoder

    def encode(self, encoder: Encoder, examples: Examples) -> Encoded:
        """The examples as token rows."""
        return encoder.encode(self.form, examples)

    def complaint(self, text: Text, paired: bool) -> str | None:
        """Why the task does not accept this input; None if it does. `paired`: it was trained on two texts."""
        if paired and (isinstance(text, str) or len(text) != 2):
            return "the delta takes pairs of texts"
        if not paired and not isinstance(text, str):
            return "the delta takes single texts, not pairs"
        return None

    def examples(self, texts: Sequence[Text], paired: bool) -> Examples:
        """Unlabelled examples of inputs that were checked by `complaint`."""
        if not paired:
            return Examples(list(texts), None)
        return Examples([text[0] for text in texts], [text[1] for text in texts])

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """Notes for the user on how the examples were encoded."""
        cut, length, total = encoded.rows.cut, encoder.max_length, len(examples)
        notes = []
        if encoder.apart:
            total *= 2  # the texts of a pair are cut one by one
        windowed = 0 if encoder.apart else int((encoded.rows.window_counts > 1).sum())
        if windowed:
            notes.append(f"Longer than {length} tokens and read in windows: {windowed:,} of {counted(total, 'text')}.")
        share = f"{cut:,} of {counted(total, 'text')}"
        if cut and encoder.long == "windows":
            read = f"{MOST_WINDOWS} windows of each are read, evenly spaced"
            notes.append(f"Longer than {MOST_WINDOWS} windows: {share}; {read}.")
        elif cut and encoder.long == "head+tail":
            notes.append(f"Longer than {length} tokens: {share}; their first and last tokens are read.")
        elif cut:
            more = "--max-length reads more" if encoder.apart else "--max-length or --long windows reads more"
            notes.append(f"Cut at {length} tokens: {share}; {more}.")
        return notes

    # ---- training

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The number of the head's outputs per text or token."""

    @abstractmethod
    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """Gold labels as the loss takes them, one per row of logits."""

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """The mean loss over the texts, or over their labelled words or windows."""

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """The loss of each token row. This calls `loss` row by row; a kind may override it with something faster."""
        losses = []
        for number in range(len(rows)):
            row = np.array([number])
            outputs = torch.from_numpy(rows.tokens(row) if self.by_token else row)
            losses.append(self.loss(logits[outputs], targets[outputs], rows.take(row)))
        return torch.stack(losses)

    def terms(self, targets: Tensor, rows: int) -> int:
        """The number of terms that the loss is the mean of, for this number of rows and these targets; at least 1."""
        return rows

    def lacking(self, targets: Array, trained: Array) -> Array:
        """For each target, whether it has a class that no target of training has; never where there are no classes."""
        return np.zeros(len(targets), bool)

    # ---- scoring

    @classmethod
    @abstractmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """The metrics of a task with these labels, the default main metric first."""

    @abstractmethod
    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> Sequence[Any] | Array:
        """One prediction per example, as `score` takes them."""

    @abstractmethod
    def score(self, predictions: Any, examples: Examples) -> float:
        """The task's main metric."""

    @abstractmethod
    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric of the task with its interval."""

    def by_row(self, predictions: Any, examples: Examples) -> tuple[str, Any, Any]:
        """The main metric's inputs per row, for resampling: the name of a form, and two columns.

        "hits": whether the row is right, and zeros. "classes" and "values": the true and the predicted class or value.
        "ratio", as here: what the row adds to the numerator and to the denominator.
        """
        numerators = []
        for row in range(len(examples)):
            numerators.append(self.score(predictions[row : row + 1], examples.take([row])))
        return "ratio", numerators, [1.0] * len(numerators)

    def by_class(self, predictions: Any, examples: Examples) -> list[ClassScore]:
        """Precision, recall, F1 and support of each class; empty if the task has no classes."""
        return []

    def confusion(self, predictions: Any, examples: Examples) -> Array | None:
        """How often each class (rows) is predicted as each class (columns); None if the task has no classes."""
        return None

    @abstractmethod
    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """The indices of the examples with a wrong prediction."""

    def gold(self, label: Any) -> Any:
        """A gold label as a person reads it."""
        return label

    @abstractmethod
    def baseline(self, train: Examples, dev: Examples) -> float:
        """The main metric of the simplest prediction without a model."""

    # ---- answers

    @abstractmethod
    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """One answer per example, as `predict` returns it."""

    def confidences(self, logits: Array, targets: Array) -> tuple[Array, Array] | None:
        """The probability of each answer and whether it is right; None if answers have no probability."""
        return None

    @staticmethod
    @abstractmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """The cells of an answer's line in the terminal, to be separated by tabs."""

    @staticmethod
    def sample_input(paired: bool) -> tuple[str, ...]:
        """An example input for the command line."""
        return ("some text", "another text") if paired else ("some text",)

    @staticmethod
    def card_input(paired: bool) -> str:
        """The arguments of a tokenizer in the example on a model card."""
        texts = '["first text"], ["second text"]' if paired else '["a text"]'
        return f"{texts}, padding=True, truncation=True"
