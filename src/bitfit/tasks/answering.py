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
from ..data.examples import Answer, Examples
from ..data.readers.answering import Questions
from ..model.rows import Rows
from .encode import Encoded, Encoder
from .metrics import Score
from .sums import Metric, Sums, share
from .task import Task, Text

BEST = 20  # spans compared in a score
LONGEST = 30  # tokens of an answer
METRICS: dict[str, Metric] = {"f1": share(0, 2), "exact_match": share(1, 2)}


@dataclass(frozen=True)
class Answering(Task):
    """Where in a context the answer to a question begins and ends."""

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
        """SQuAD's: shared words, and equal answers."""
        return tuple(METRICS)

    def complaint(self, text: Text, paired: bool) -> str | None:
        """A question and its context are needed."""
        if super().complaint(text, paired) is None:
            return None
        return "the delta takes a question and its context"

    @property
    def outputs(self) -> int:
        """Two: whether the answer begins, and whether it ends, with a token."""
        return 2

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """1 where the first gold answer begins and ends; at a window's first token if it does not lie in it."""
        targets = np.zeros((len(encoded.marks), 2), np.float32)
        for row, owner in enumerate(encoded.owner.tolist()):
            begin, end = int(encoded.rows.starts[row]), int(encoded.rows.starts[row + 1])
            first, last = _tokens_of(encoded.marks[begin:end], examples.labels[owner][0]) or (0, 0)
            targets[begin + first, 0] = targets[begin + last, 1] = 1
        return targets

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy over the tokens of each window, the mean over begins, ends and windows."""
        return -self._logs_of_targets(logits, targets, rows).sum() / (2 * len(rows))

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy over the tokens of each window, the mean of its begin and its end."""
        found = self._logs_of_targets(logits, targets, rows).sum(1)
        row = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.lengths)).to(found.device)
        return -found.new_zeros(len(rows)).index_add(0, row, found) / 2

    def _logs_of_targets(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """The logarithms of the probabilities of the targets, token by token; 0 for other tokens."""
        inside = torch.arange(int(rows.lengths.max()))[None] < torch.from_numpy(rows.lengths)[:, None]
        inside = inside.to(logits.device)
        wide = logits.new_full((*inside.shape, 2), -torch.inf)
        wide[inside] = logits
        return wide.log_softmax(1)[inside] * targets

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> list[str]:
        """The best span's text."""
        return [answer["answer"] for answer in self.answers(logits, encoded, examples)]

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return _sums(predictions, examples.labels).value(METRICS[self.metric])

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval."""
        return _sums(predictions, examples.labels).scores(METRICS)

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """The best span of all windows with its share among the best ones."""
        assert examples.pairs is not None
        bounds = np.searchsorted(encoded.owner, np.arange(len(examples) + 1))
        found = []
        for number, context in enumerate(examples.pairs):
            spans = [span for row in range(bounds[number], bounds[number + 1]) for span in _spans(logits, encoded, row)]
            found.append(_answer(context, sorted(spans, reverse=True)))
        return found

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
        """A question with its context, which alone is cut."""
        return '["a question"], ["its context"], padding=True, truncation="only_second"'

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """Those whose answer equals none of the gold ones."""
        wrong = []
        for number, (answer, golds) in enumerate(zip(predictions, examples.labels, strict=True)):
            if not exact_match(answer, [gold.text for gold in golds]):
                wrong.append(number)
        return wrong

    def gold(self, label: Any) -> list[str]:
        """The gold answers."""
        return list(dict.fromkeys(answer.text for answer in label))

    def baseline(self, train: Examples, dev: Examples) -> float:
        """The sentence of the context that shares most words with the question."""
        assert dev.pairs is not None
        pairs = zip(dev.texts, dev.pairs, strict=True)
        return self.score([_closest_sentence(question, context) for question, context in pairs], dev)

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """What was cut, and which answers no window holds."""
        notes = []
        if encoded.rows.cut:
            notes.append(f"{encoded.rows.cut:,} questions were too long for windows of {encoder.max_length}, cut.")
        if examples.labels:
            held = {o for row, o in enumerate(encoded.owner.tolist()) if _held(encoded, row, examples.labels[o][0])}
            lost = [examples.lines[i] for i in range(len(examples)) if i not in held]
            if lost:
                shown = ", ".join(map(str, lost[:5])) + (", ..." if len(lost) > 5 else "")
                notes.append(f"The answer of {len(lost):,} questions (rows {shown}) lies in no single window.")
        return notes


def _held(encoded: Encoded, row: int, answer: Answer) -> bool:
    return _tokens_of(encoded.marks[encoded.rows.starts[row] : encoded.rows.starts[row + 1]], answer) is not None


def _tokens_of(marks: Array, answer: Answer) -> tuple[int, int] | None:
    """The first and last token of an answer in a window; None if the window does not hold all of it."""
    inside = np.flatnonzero((marks[:, 1] > answer.start) & (marks[:, 0] < answer.start + len(answer.text)))
    context = np.flatnonzero(marks[:, 0] >= 0)
    if not len(inside) or (inside[0] == context[0] and marks[inside[0], 0] > answer.start):
        return None
    if inside[-1] == context[-1] and marks[inside[-1], 1] < answer.start + len(answer.text.rstrip()):
        return None
    return int(inside[0]), int(inside[-1])


def _spans(logits: Array, encoded: Encoded, row: int) -> list[tuple[float, int, int]]:
    """The best spans of a window: their logit, and where they begin and end in the context."""
    tokens = np.arange(encoded.rows.starts[row], encoded.rows.starts[row + 1])
    tokens = tokens[encoded.marks[tokens, 0] >= 0]
    if not len(tokens):
        return []
    begins, ends = logits[tokens, 0].astype(np.float64), logits[tokens, 1].astype(np.float64)
    padded = np.concatenate([ends, np.full(LONGEST - 1, -np.inf)])
    table = begins[:, None] + np.lib.stride_tricks.sliding_window_view(padded, LONGEST)
    best = np.argsort(-table, axis=None, kind="stable")[:BEST]
    first, length = np.divmod(best, LONGEST)
    real = first + length < len(tokens)
    marks = encoded.marks[tokens]
    spans = zip(table.ravel()[best[real]], marks[first[real], 0], marks[(first + length)[real], 1], strict=True)
    return [(float(value), int(begin), int(end)) for value, begin, end in spans]


def _answer(context: str, spans: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    unique = list({(begin, end): value for value, begin, end in reversed(spans) if context[begin:end].strip()}.items())
    unique = sorted(unique, key=lambda item: (-item[1], item[0]))[:BEST]
    if not unique:
        return {"answer": "", "start": 0, "end": 0, "score": 0.0}
    (begin, end), _ = unique[0]
    values = np.exp(np.array([value for _, value in unique]) - unique[0][1])
    return {"answer": context[begin:end], "start": begin, "end": end, "score": float(values[0] / values.sum())}


def normalised(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation, articles and needless spaces."""
    plain = "".join(sign for sign in answer.lower() if sign not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 if the answer is one of the gold ones."""
    return float(any(normalised(prediction) == normalised(gold) for gold in golds))


def word_f1(prediction: str, golds: Sequence[str]) -> float:
    """How much of the words the answer shares with the gold one it is most like; of two without words, 1."""
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
    asked = set(normalised(question).split())
    sentences = re.split(r"(?<=[.!?])\s+", context)
    return max(sentences, key=lambda sentence: len(asked & set(normalised(sentence).split())))
