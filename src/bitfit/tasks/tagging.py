"""Tagging: a tag for every word, predicted at the word's first piece."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
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
# Columns of the sums: 0 right words, 1 words, 2 right entities, 3 predicted entities, 4 true entities.
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
        """Accuracy over words; if the tags mark entities, the metrics of entities come first."""
        return tuple(_metrics(labels))

    def complaint(self, text: Text, paired: bool) -> str | None:
        """None: every text or list of words is a sentence."""
        return None

    def examples(self, texts: Sequence[Text], paired: bool) -> Examples:
        """The sentences as words; a text is split into words."""
        return Examples([split_words(text) if isinstance(text, str) else tuple(text) for text in texts], None)

    @property
    def outputs(self) -> int:
        """One per tag."""
        return len(self.labels)

    def targets(self, encoded: Encoded, examples: Examples) -> Array:
        """The tag's number at each word's first piece; IGNORED at the other tokens."""
        sentence, word, token = self._words(encoded)
        golds = np.fromiter(chain.from_iterable(examples.labels), np.int64)
        starts = np.concatenate([[0], np.cumsum([len(tags) for tags in examples.labels], dtype=np.int64)])
        targets = np.full(len(encoded.marks), IGNORED, np.int64)
        targets[token] = golds[starts[sentence] + word]
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

    def terms(self, targets: Tensor, rows: int) -> int:
        """The tagged words."""
        return max(1, int((targets != IGNORED).sum()))

    def lacking(self, targets: Array, trained: Array) -> Array:
        """Words with another tag than all those of training."""
        words: Array = ~np.isin(targets, trained) & (targets != IGNORED)
        return words

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> list[Array]:
        """The number of the most probable tag of each word."""
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
            predicted_spans = self._spans(guess, gold)
            true_spans = self._spans(gold, gold)
            hits.update(span.type for span in predicted_spans & true_spans)
            predicted.update(span.type for span in predicted_spans)
            true.update(span.type for span in true_spans)
        names = sorted(predicted | true)
        return [ClassScore.of(name, hits[name], predicted[name], true[name]) for name in names]

    def wrong(self, predictions: Any, examples: Examples) -> list[int]:
        """The indices of the sentences with a wrong tag."""
        wrong = []
        for i, (guess, gold) in enumerate(zip(predictions, examples.labels, strict=True)):
            tags = np.asarray(gold)
            if ((tags >= 0) & (tags != guess)).any():
                wrong.append(i)
        return wrong

    def gold(self, label: Any) -> list[str | None]:
        """The tags' names; None for a word without one."""
        return [None if number < 0 else self.labels[number] for number in label]

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """Words, tags, and the probability of each tag; the entities, if the tags mark them."""
        answers = []
        for words, rows in zip(examples.texts, self.by_word(logits, encoded, examples), strict=True):
            probabilities = softmax(rows) if len(rows) else rows
            scores = probabilities.max(-1, initial=0.0).tolist()
            tags = [self.labels[number] for number in rows.argmax(-1)]
            answer = {"tokens": list(words), "tags": tags, "scores": scores}
            if self.marks_entities:
                answer["entities"] = [_entity(span, words, scores) for span in spans(tags)]
            answers.append(answer)
        return answers

    @staticmethod
    def line(answer: dict[str, Any]) -> tuple[str, ...]:
        """Every word with its tag; then the entities, if the tags mark them."""
        words = [f"{word}/{tag}" for word, tag in zip(answer["tokens"], answer["tags"], strict=True)]
        if "entities" not in answer:
            return (" ".join(words),)
        entities = [f"{entity['type']}: {entity['text']}" for entity in answer["entities"]]
        return " ".join(words), "; ".join(entities) or "(none)"

    @staticmethod
    def sample_input(paired: bool) -> tuple[str, ...]:
        """A sentence."""
        return ("a sentence of words",)

    @staticmethod
    def card_input(paired: bool) -> str:
        """A sentence as words."""
        return '[["some", "words"]], is_split_into_words=True, padding=True, truncation=True'

    def by_row(self, predictions: Any, examples: Examples) -> tuple[str, Any, Any]:
        """What a sentence adds to the numerator and to the denominator of the main metric."""
        right, words, hits, predicted, true = self._sums(predictions, examples.labels).table.T
        fractions = {
            "span_f1": (2 * hits, predicted + true),
            "span_precision": (hits, predicted),
            "span_recall": (hits, true),
            "accuracy": (right, words),
        }
        numerator, denominator = fractions[self.metric]
        return "ratio", numerator, denominator

    def confidences(self, logits: Array, targets: Array) -> tuple[Array, Array] | None:
        """The probability of the most probable tag of each tagged word, and whether it is the true one."""
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
        """The score of each word's most frequent tag in training; a new word gets the most frequent tag of all."""
        counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for words, tags in zip(train.texts, train.labels, strict=True):
            for word, tag in zip(words, tags, strict=True):
                if tag >= 0:
                    counts[word][tag] += 1
        overall = sum(counts.values(), Counter[int]())
        default = _most_frequent(overall)
        by_word = {word: _most_frequent(tags) for word, tags in counts.items()}
        guesses = []
        for words in dev.texts:
            guesses.append(np.array([by_word.get(word, default) for word in words]))
        return self.score(guesses, dev)

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """A note on sentences that are read in windows."""
        _, counts = np.unique(encoded.owner, return_counts=True)
        long = int((counts > 1).sum())
        if not long:
            return []
        reading = f"longer than {encoder.max_length} tokens and are read in overlapping windows"
        return [f"{long:,} of {len(examples):,} sentences are {reading}; every word counts once."]

    @cached_property
    def marks_entities(self) -> bool:
        """Whether the tags mark entities."""
        return has_spans(self.labels)

    def _spans(self, tags: Iterable[int], gold: Sequence[int]) -> set[Span]:
        """The entities of a sentence, or a span per word if tags mark none; a word without a gold tag is left out."""
        names = [OUTSIDE if true < 0 else self.labels[tag] for tag, true in zip(tags, gold, strict=True)]
        if self.marks_entities:
            return set(spans(names))
        return {Span(name, i, i + 1) for i, name in enumerate(names) if gold[i] >= 0}

    def _sums(self, predictions: Sequence[Array], golds: Sequence[Sequence[int]]) -> Sums:
        table = np.zeros((len(golds), 5))
        for row, (guess, gold) in enumerate(zip(predictions, golds, strict=True)):
            true = np.asarray(gold)
            tagged = true >= 0
            table[row, :2] = ((guess == true) & tagged).sum(), tagged.sum()
            if self.marks_entities:
                predicted_spans = self._spans(guess, gold)
                true_spans = self._spans(gold, gold)
                table[row, 2:] = len(predicted_spans & true_spans), len(predicted_spans), len(true_spans)
        return Sums(table)

    def _words(self, encoded: Encoded) -> tuple[Array, Array, Array]:
        """For every word: its sentence, its number in the sentence, and its first token."""
        token = np.flatnonzero(encoded.marks[:, 0] >= 0)
        sentence = np.repeat(encoded.owner, encoded.rows.lengths)[token]
        return sentence, encoded.marks[token, 0], token

    def by_word(self, logits: Array, encoded: Encoded, examples: Examples) -> list[Array]:
        """The logits of the words of each sentence."""
        sentence, word, token = self._words(encoded)
        order = np.lexsort((word, sentence))  # windows overlap, so words may be out of order
        ends = np.cumsum([len(words) for words in examples.texts])
        return np.split(logits[token[order]], ends[:-1])


def _metrics(labels: Sequence[str]) -> dict[str, Metric]:
    if has_spans(labels):
        return SPAN_METRICS | WORD_METRICS
    return WORD_METRICS


def _entity(span: Span, words: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    """An entity by its words, their numbers and the mean probability of its tags."""
    score = sum(scores[span.start : span.end]) / (span.end - span.start)
    text = " ".join(words[span.start : span.end])
    return {"type": span.type, "text": text, "start": span.start, "end": span.end, "score": score}


def _most_frequent(counts: Counter[int]) -> int:
    """The most frequent tag, the first of equally frequent ones."""
    return max(sorted(counts), key=lambda tag: counts[tag])
