"""Tagging: a tag for every word, by the word's first piece."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn import functional

from ..arrays import Array
from ..data.examples import Examples
from ..data.readers.tagging import Sentences, split_words
from ..model.rows import Rows
from .encode import Encoded, Encoder
from .metrics import Score
from .sums import Metric, Sums, share
from .task import Task, Text
from .texts import softmax

IGNORED = -100
METRICS: dict[str, Metric] = {"accuracy": share(0, 1)}


@dataclass(frozen=True)
class Tagging(Task):
    """A tag for every word of a sentence."""

    kind: ClassVar[str] = Sentences.kind
    reader: ClassVar[type[Sentences]] = Sentences
    form: ClassVar[str] = "words"
    baseline_name: ClassVar[str] = "each word's most frequent tag"
    transformers_class: ClassVar[str] = "AutoModelForTokenClassification"
    pipeline: ClassVar[str | None] = "token-classification"
    card: ClassVar[str] = "A tag for every word of a sentence, of {labels}."
    fields: ClassVar[tuple[tuple[str, ...], ...]] = (("words",), ("text",))

    @classmethod
    def metric_names(cls, labels: Sequence[str]) -> tuple[str, ...]:
        """The share of the words whose tag is right."""
        return tuple(METRICS)

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

    def predictions(self, logits: Array, encoded: Encoded, examples: Examples) -> list[Array]:
        """The number of the likeliest tag of each word."""
        return [row.argmax(-1) for row in self._by_word(logits, encoded, examples)]

    def score(self, predictions: Any, examples: Examples) -> float:
        """The main metric."""
        return _sums(predictions, examples.labels).value(METRICS[self.metric])

    def scores(self, predictions: Any, examples: Examples) -> dict[str, Score]:
        """Every metric with its interval, over sentences: words of one sentence are not independent."""
        return _sums(predictions, examples.labels).scores(METRICS)

    def answers(self, logits: Array, encoded: Encoded, examples: Examples) -> list[dict[str, Any]]:
        """Words, tags, and the share of each tag given."""
        found = []
        for words, own in zip(examples.texts, self._by_word(logits, encoded, examples), strict=True):
            part = softmax(own) if len(own) else own
            tags = [self.labels[number] for number in own.argmax(-1)]
            found.append({"tokens": list(words), "tags": tags, "scores": part.max(-1, initial=0.0).tolist()})
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

    def row_weight(self, label: Any) -> float:
        """The tagged words of a sentence."""
        return float(sum(tag >= 0 for tag in label))

    def baseline(self, train: Examples, dev: Examples) -> float:
        """Each word's most frequent tag in training; the most frequent of all for a word that is new."""
        counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for words, tags in zip(train.texts, train.labels, strict=True):
            for word, tag in zip(words, tags, strict=True):
                if tag >= 0:
                    counts[word][tag] += 1
        overall = sum(counts.values(), Counter[int]())
        common = {word: _most(own) for word, own in counts.items()}
        guesses = [np.array([common.get(word, _most(overall)) for word in words]) for words in dev.texts]
        return self.score(guesses, dev)

    def remarks(self, encoder: Encoder, encoded: Encoded, examples: Examples) -> list[str]:
        """How many sentences are read in windows."""
        _, counts = np.unique(encoded.owner, return_counts=True)
        long = int((counts > 1).sum())
        what = f"longer than {encoder.max_length} tokens and are read in overlapping windows"
        return [f"{long:,} of {len(examples):,} sentences are {what}; every word counts once."] if long else []

    def _places(self, encoded: Encoded) -> tuple[Array, Array]:
        """The sentence and number of every word, and the token that stands for it."""
        place = np.flatnonzero(encoded.marks[:, 0] >= 0)
        sentence = np.repeat(encoded.owner, encoded.rows.lengths)[place]
        return np.stack([sentence, encoded.marks[place, 0]], 1), place

    def _by_word(self, logits: Array, encoded: Encoded, examples: Examples) -> list[Array]:
        words, place = self._places(encoded)
        order = np.lexsort((words[:, 1], words[:, 0]))  # windows overlap, so words may stand out of order
        ends = np.cumsum([len(words) for words in examples.texts])
        return np.split(logits[place[order]], ends[:-1])


def _sums(predictions: Sequence[Array], golds: Sequence[Sequence[int]]) -> Sums:
    table = np.zeros((len(golds), 2))
    for row, (own, gold) in enumerate(zip(predictions, golds, strict=True)):
        true = np.asarray(gold)
        table[row] = ((own == true) & (true >= 0)).sum(), (true >= 0).sum()
    return Sums(table)


def _most(counts: Counter[int]) -> int:
    return max(sorted(counts), key=lambda tag: counts[tag])
