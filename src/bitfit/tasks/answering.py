"""Answering: the span of a context that answers a question, scored as SQuAD does."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..data.examples import Answer, Examples, shortened
from ..data.readers.answering import Questions
from ..model.rows import Rows
from .encode import Encoded, Encoder
from .metrics import Score
from .sums import Metric, Sums, share
from .task import Task, Text

BEST = 20  # spans among which probabilities are computed
LONGEST = 30  # tokens in an answer, at most
METRICS: dict[str, Metric] = {"f1": share(0, 2), "exact_match": share(1, 2)}


@dataclass(frozen=True)
class Answering(Task):
    """The start and end of the answer to a question in its context."""

    kind: ClassVar[str] = Questions.kind
    reader: ClassVar[type[Questions]] = Questions
    form: ClassVar[str] = "windows"
    length: ClassVar[int] = 384
    stride: ClassVar[int | None] = 128
    baseline_name: ClassVar[str] = "the sentence most like the question"
    transformers_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    pipeline: ClassVar[str | None] = None  # transformers 5 has none
    card_logits: ClassVar[str] = "torch.stack([output.start_logits, output.end_logits], -1)"
    card: ClassVar[str] = "The span of a context that answers a question."
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (("question", "context"),)

    @classmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """SQuAD's metrics: word F1 and exact match."""
        return tuple(METRICS)

    def complaint(self, text: Text, paired: bool) -> str | None:
        """Why this is not a question with its context; None if it is."""
        if super().complaint(text, paired) is None:
            return None
        return "the delta takes a question and its context"

    @property
    def outputs(self) -> int:
        """Two logits per token: the answer starts there, and it ends there."""
        return 2

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """1 at the first and the last token of the first gold answer; in a window without it, at the first token."""
        targets = np.zeros((len(encoded.marks), 2), np.float32)
        for row, owner in enumerate(encoded.owner.tolist()):
            start = int(encoded.rows.starts[row])
            first, last = _tokens_of(encoded, row, examples.labels[owner][0]) or (0, 0)
            targets[start + first, 0] = 1
            targets[start + last, 1] = 1
        return targets

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy over the tokens of each window, the mean over starts, ends and windows."""
        return -self._log_likelihoods(logits, targets, rows).sum() / (2 * len(rows))

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy over the tokens of each window, the mean of its start and its end."""
        log_likelihoods = self._log_likelihoods(logits, targets, rows).sum(1)
        row = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.lengths)).to(logits.device)
        return -log_likelihoods.new_zeros(len(rows)).index_add(0, row, log_likelihoods) / 2

    def _log_likelihoods(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """The log-likelihoods of the targets, token by token; 0 for other tokens."""
        mask = torch.arange(int(rows.lengths.max()))[None] < torch.from_numpy(rows.lengths)[:, None]
        mask = mask.to(logits.device)
        padded = logits.new_full((*mask.shape, 2), -torch.inf)
        padded[mask] = logits
        return padded.log_softmax(1)[mask] * targets

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> list[str]:
        """The text of the best span."""
        return [answer["answer"] for answer in self.answers(logits, encoded, examples)]

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return _sums(predictions, examples.labels).value(METRICS[self.metric])

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval."""
        return _sums(predictions, examples.labels).scores(METRICS)

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The best span of all windows with its probability among the best spans."""
        assert examples.pairs is not None
        bounds = np.searchsorted(encoded.owner, np.arange(len(examples) + 1))
        answers = []
        for number, context in enumerate(examples.pairs):
            spans: list[tuple[float, int, int]] = []
            for row in range(bounds[number], bounds[number + 1]):
                spans += _spans(logits, encoded, row)
            answers.append(_answer(context, spans))
        return answers

    @staticmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """The answer and its score."""
        return answer["answer"], f"{answer['score']:.4f}"

    @staticmethod
    def sample_input(paired: bool) -> tuple[str, ...]:
        """A question and its context."""
        return "a question", "its context"

    @staticmethod
    def card_input(paired: bool) -> str:
        """A question and its context; only the context is truncated."""
        return '["a question"], ["its context"], padding=True, truncation="only_second"'

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """The questions whose answer equals none of the gold answers, by index."""
        wrong = []
        for number, (answer, golds) in enumerate(zip(predictions, examples.labels, strict=True)):
            if not exact_match(answer, [gold.text for gold in golds]):
                wrong.append(number)
        return wrong

    def gold(self, label: Any) -> list[str]:
        """The gold answers."""
        return list(dict.fromkeys(answer.text for answer in label))

    def baseline(self, train: Examples, dev: Examples) -> float:
        """The score of answering with the sentence of the context that shares most words with the question."""
        assert dev.pairs is not None
        pairs = zip(dev.texts, dev.pairs, strict=True)
        return self.score([_closest_sentence(question, context) for question, context in pairs], dev)

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """Notes on questions that were cut, and on answers that no window contains."""
        notes = []
        if encoded.rows.cut:
            notes.append(
                f"{encoded.rows.cut:,} questions were too long for windows of {encoder.max_length} and were cut."
            )
        if examples.labels:
            contained = set()
            for row, owner in enumerate(encoded.owner.tolist()):
                if _tokens_of(encoded, row, examples.labels[owner][0]) is not None:
                    contained.add(owner)
            lost = [examples.lines[i] for i in range(len(examples)) if i not in contained]
            if lost:
                notes.append(
                    f"The answer to {len(lost):,} questions (rows {shortened(lost)}) does not fit into any one window."
                )
        return notes


def _tokens_of(encoded: Encoded, row: int, answer: Answer) -> tuple[int, int] | None:
    """The first and last token of an answer in a window; None if the window does not contain all of it."""
    window = encoded.marks[encoded.rows.starts[row] : encoded.rows.starts[row + 1]]
    starts, ends = window[:, 0], window[:, 1]
    tokens = np.flatnonzero((ends > answer.start) & (starts < answer.start + len(answer.text)))
    if not len(tokens):
        return None
    context = np.flatnonzero(starts >= 0)
    first, last = int(tokens[0]), int(tokens[-1])
    cut_at_start = first == context[0] and starts[first] > answer.start
    cut_at_end = last == context[-1] and ends[last] < answer.start + len(answer.text.rstrip())
    return None if cut_at_start or cut_at_end else (first, last)


def _spans(logits: Array, encoded: Encoded, row: int) -> list[tuple[float, int, int]]:
    """The BEST best spans of a window: the sum of their two logits, and their start and end in the context."""
    # Answers are spans of the context, so tokens of the question and special tokens are left out.
    tokens = np.arange(encoded.rows.starts[row], encoded.rows.starts[row + 1])
    tokens = tokens[encoded.marks[tokens, 0] >= 0]
    if not len(tokens):
        return []
    start_logits = logits[tokens, 0].astype(np.float64)
    end_logits = logits[tokens, 1].astype(np.float64)

    # The logits of all spans as a table: row i are the spans that start at token i, column n those that end n tokens
    # later. Ends behind the last token get -inf, so that they come last.
    padded_ends = np.concatenate([end_logits, np.full(LONGEST - 1, -np.inf)])
    ends_by_start = np.lib.stride_tricks.sliding_window_view(padded_ends, LONGEST)
    span_logits = start_logits[:, None] + ends_by_start

    best = np.argsort(-span_logits, axis=None, kind="stable")[:BEST]
    starts, later = np.divmod(best, LONGEST)
    ends = starts + later
    spans = []
    for start, end, logit in zip(starts, ends, span_logits.ravel()[best], strict=True):
        if end < len(tokens):
            first_character = int(encoded.marks[tokens[start], 0])
            last_character = int(encoded.marks[tokens[end], 1])
            spans.append((float(logit), first_character, last_character))
    return spans


def _answer(context: str, spans: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """The best span, with its softmax probability among the BEST best spans."""
    logits: dict[tuple[int, int], float] = {}
    for logit, start, end in sorted(spans, reverse=True):
        if context[start:end].strip():
            logits.setdefault((start, end), logit)  # windows overlap: of equal spans the best one counts
    ranked = sorted(logits.items(), key=lambda item: (-item[1], item[0]))[:BEST]
    if not ranked:
        return {"answer": "", "start": 0, "end": 0, "score": 0.0}
    (start, end), best_logit = ranked[0]
    values = np.exp(np.array([logit for _, logit in ranked]) - best_logit)
    return {"answer": context[start:end], "start": start, "end": end, "score": float(values[0] / values.sum())}


def normalised(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation, articles and extra spaces."""
    plain = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 if the normalised answer equals one of the gold answers, else 0."""
    return float(any(normalised(prediction) == normalised(gold) for gold in golds))


def word_f1(prediction: str, golds: Sequence[str]) -> float:
    """The best F1 between the words of the answer and those of a gold answer; 1 if both have no words."""
    return max(_word_f1(normalised(prediction).split(), normalised(gold).split()) for gold in golds)


def _word_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    shared = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * shared / (len(predicted) + len(gold))


def _sums(predictions: Sequence[str], golds: Sequence[Sequence[Answer]]) -> Sums:
    rows = []
    for prediction, answers in zip(predictions, golds, strict=True):
        texts = [answer.text for answer in answers]
        rows.append((word_f1(prediction, texts), exact_match(prediction, texts), 1.0))
    return Sums(np.array(rows))


def _closest_sentence(question: str, context: str) -> str:
    question_words = set(normalised(question).split())
    sentences = re.split(r"(?<=[.!?])\s+", context)
    return max(sentences, key=lambda sentence: len(question_words & set(normalised(sentence).split())))
