"""Tagging: a tag for every word, by the word's first piece."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..arrays import Array
from ..data.examples import Examples
from ..data.readers.tagging import Sentences, split_words
from ..model.rows import Rows
from .encode import Encoded, Encoder
from .metrics import ClassScore, Score, ratio
from .spans import OUTSIDE, Span, has_spans, spans
from .sums import Metric, Sums, share
from .task import Task, Text
from .texts import softmax

IGNORED = -100
# Of sums over sentences: right words, words, entities that are right, predicted and true.
SPAN_METRICS: dict[str, Metric] = {
    "span_f1": lambda sums: ratio(2 * sums[:, 2], sums[:, 3] + sums[:, 4]),
    "span_precision": share(2, 3),
    "span_recall": share(2, 4),
}
WORD_METRICS: dict[str, Metric] = {"accuracy": share(0, 1)}


@dataclass(frozen=True)
class Tagging(Task):
    """A tag for every word of a sentence."""

    kind: ClassVar[str] = Sentences.kind
    reader: ClassVar[type[Sentences]] = Sentences
    form: ClassVar[str] = "words"
    echo: ClassVar[tuple[str, ...]] = ("tokens",)
    baseline_name: ClassVar[str] = "each word's most frequent tag"
    transformers_class: ClassVar[str] = "AutoModelForTokenClassification"
    pipeline: ClassVar[str | None] = "token-classification"
    card: ClassVar[str] = "A tag for every word of a sentence, of {labels}."
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (("words",), ("text",))

    @classmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """The share of the words whose tag is right; before it, where tags mark entities, how well these are found."""
        return tuple(_metrics(labels))

    def complaint(self, text: Text, paired: bool) -> str | None:
        """Nothing: a sentence is a text or a list of words."""
        return None

    def examples(self, texts: Sequence[Text], paired: bool) -> Examples:
        """The sentences as words; a text is split into words."""
        return Examples([split_words(text) if isinstance(text, str) else tuple(text) for text in texts], None)

    @property
    def outputs(self) -> int:
        """One per tag."""
        return len(self.labels)

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """The tag's number at each word's first piece; nothing elsewhere."""
        words, place = self._places(encoded)
        golds = np.fromiter((tag for tags in examples.labels for tag in tags), np.int64)
        starts = np.concatenate([[0], np.cumsum([len(tags) for tags in examples.labels], dtype=np.int64)])
        targets = np.full(len(encoded.marks), IGNORED, np.int64)
        targets[place] = golds[starts[words[:, 0]] + words[:, 1]]
        targets[targets < 0] = IGNORED
        return targets

    def loss(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy, the mean over the tagged words (0 in a batch that has none)."""
        total = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)

    def row_losses(self, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        """Cross-entropy, the mean over the tagged words of each row."""
        losses = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        row = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.lengths)).to(losses.device)
        totals = losses.new_zeros(len(rows)).index_add(0, row, losses)
        words = losses.new_zeros(len(rows)).index_add(0, row, (targets != IGNORED).to(losses))
        return totals / words.clamp(min=1)

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> list[Array]:
        """The number of the likeliest tag of each word."""
        return [row.argmax(-1) for row in self.by_word(logits, encoded, examples)]

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return self._sums(predictions, examples.labels).value(_metrics(self.labels)[self.metric])

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval, over sentences: words of one sentence are not independent."""
        return self._sums(predictions, examples.labels).scores(_metrics(self.labels))

    def by_class(self, predictions: Any, examples: Examples) -> list[ClassScore]:
        """Precision, recall, F1 and support of each entity type, or of each tag where tags mark no entities."""
        hits: Counter[str] = Counter()
        predicted: Counter[str] = Counter()
        true: Counter[str] = Counter()
        for guess, gold in zip(predictions, examples.labels, strict=True):
            ours, theirs = self._marks(guess, gold), self._marks(gold, gold)
            hits.update(mark.type for mark in ours & theirs)
            predicted.update(mark.type for mark in ours)
            true.update(mark.type for mark in theirs)
        names = sorted(predicted | true)
        return [ClassScore.of(name, hits[name], predicted[name], true[name]) for name in names]

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """Sentences with a wrong tag."""
        pairs = enumerate(zip(predictions, examples.labels, strict=True))
        return [i for i, (guess, gold) in pairs if ((np.asarray(gold) >= 0) & (np.asarray(gold) != guess)).any()]

    def gold(self, label: Any) -> list[str | None]:
        """The tags' names; None for a word without one."""
        return [None if number < 0 else self.labels[number] for number in label]

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """Words, tags, and the probability of each tag given; where tags mark entities, these too."""
        found = []
        for words, rows in zip(examples.texts, self.by_word(logits, encoded, examples), strict=True):
            probabilities = softmax(rows) if len(rows) else rows
            scores = probabilities.max(-1, initial=0.0).tolist()
            tags = [self.labels[number] for number in rows.argmax(-1)]
            answer = {"tokens": list(words), "tags": tags, "scores": scores}
            if self.marks_entities:
                answer["entities"] = [_entity(span, words, scores) for span in spans(tags)]
            found.append(answer)
        return found

    @staticmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """Every word with its tag."""
        return (" ".join(f"{word}/{tag}" for word, tag in zip(answer["tokens"], answer["tags"], strict=True)),)

    @staticmethod
    def sample_input(paired: bool) -> tuple[str, ...]:
        """A sentence."""
        return ("a sentence of words",)

    @staticmethod
    def card_input(paired: bool) -> str:
        """A sentence as words."""
        return '[["some", "words"]], is_split_into_words=True, padding=True, truncation=True'

    def by_row(self, predictions: Any, examples: Examples) -> tuple[str, Any, Any]:
        """What a sentence adds above and below the fraction line of the main metric."""
        right, words, hits, predicted, true = self._sums(predictions, examples.labels).table.T
        above, below = {
            "span_f1": (2 * hits, predicted + true),
            "span_precision": (hits, predicted),
            "span_recall": (hits, true),
            "accuracy": (right, words),
        }[self.metric]
        return "ratio", above, below

    def confidences(self, logits: Array, targets: Array) -> tuple[Array, Array] | None:
        """The probability of the likeliest tag of each tagged word, and whether it is the true one."""
        tagged = targets != IGNORED
        table = softmax(logits[tagged])
        return table.max(-1, initial=0.0), table.argmax(-1) == targets[tagged]

    def confusion(self, predictions: Any, examples: Examples) -> Array:
        """How often each tag (rows) is predicted as each tag (columns), over the tagged words."""
        table = np.zeros((len(self.labels), len(self.labels)), np.int64)
        for guess, gold in zip(predictions, examples.labels, strict=True):
            true = np.asarray(gold, np.int64)
            tagged = true >= 0
            np.add.at(table, (true[tagged], np.asarray(guess)[tagged]), 1)
        return table

    def baseline(self, train: Examples, dev: Examples) -> float:
        """Each word's most frequent tag in training; the most frequent of all for a word that is new."""
        counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for words, tags in zip(train.texts, train.labels, strict=True):
            for word, tag in zip(words, tags, strict=True):
                if tag >= 0:
                    counts[word][tag] += 1
        overall = sum(counts.values(), Counter[int]())
        most_of_all = _most(overall)
        common = {word: _most(own) for word, own in counts.items()}
        guesses = []
        for words in dev.texts:
            guesses.append(np.array([common.get(word, most_of_all) for word in words]))
        return self.score(guesses, dev)

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """How many sentences are read in windows."""
        _, counts = np.unique(encoded.owner, return_counts=True)
        long = int((counts > 1).sum())
        what = f"longer than {encoder.max_length} tokens and are read in overlapping windows"
        return [f"{long:,} of {len(examples):,} sentences are {what}; every word counts once."] if long else []

    @cached_property
    def marks_entities(self) -> bool:
        """Whether the tags mark entities."""
        return has_spans(self.labels)

    def _marks(self, tags: Iterable[int], gold: Sequence[int]) -> set[Span]:
        """The entities of a sentence, or each tag by itself; a word without a gold tag is left out."""
        names = [OUTSIDE if true < 0 else self.labels[tag] for tag, true in zip(tags, gold, strict=True)]
        if self.marks_entities:
            return set(spans(names))
        return {Span(name, i, i + 1) for i, name in enumerate(names) if gold[i] >= 0}

    def _sums(self, predictions: Sequence[Array], golds: Sequence[Sequence[int]]) -> Sums:
        table = np.zeros((len(golds), 5))
        for row, (guess, gold) in enumerate(zip(predictions, golds, strict=True)):
            true = np.asarray(gold)
            table[row, :2] = ((guess == true) & (true >= 0)).sum(), (true >= 0).sum()
            if self.marks_entities:
                ours, theirs = self._marks(guess, gold), self._marks(gold, gold)
                table[row, 2:] = len(ours & theirs), len(ours), len(theirs)
        return Sums(table)

    def _places(self, encoded: Encoded) -> tuple[Array, Array]:
        """The sentence and number of every word, and the token that stands for it."""
        place = np.flatnonzero(encoded.marks[:, 0] >= 0)
        sentence = np.repeat(encoded.owner, encoded.rows.lengths)[place]
        return np.stack([sentence, encoded.marks[place, 0]], 1), place

    def by_word(self, logits: Array, encoded: Encoded, examples: Examples) -> list[Array]:
        words, place = self._places(encoded)
        order = np.lexsort((words[:, 1], words[:, 0]))  # windows overlap, so words may stand out of order
        ends = np.cumsum([len(words) for words in examples.texts])
        return np.split(logits[place[order]], ends[:-1])


def _metrics(labels: Sequence[str]) -> dict[str, Metric]:
    return SPAN_METRICS | WORD_METRICS if has_spans(labels) else WORD_METRICS


def _entity(span: Span, words: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    """An entity by its words, their numbers and the mean probability of its tags."""
    score = sum(scores[span.start : span.end]) / (span.end - span.start)
    text = " ".join(words[span.start : span.end])
    return {"type": span.type, "text": text, "start": span.start, "end": span.end, "score": score}


def _most(counts: Counter[int]) -> int:
    return max(sorted(counts), key=lambda tag: counts[tag])
