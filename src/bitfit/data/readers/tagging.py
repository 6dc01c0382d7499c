"""Reader of tagging: sentences as lists of words, with a tag for each word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from ...errors import DataError, suggest
from ..columns import Sample
from ..examples import Columns, Examples, Table, skipped
from ..formats import fault, rows
from ..source import RowSource, extension
from .reader import Reader, Record, counts_by_name, first_known

WORDS = ("tokens", "words", "form")
TAGS = ("tags", "upos", "pos_tags", "ner_tags", "pos", "ner", "labels", "label", "xpos")
UNTAGGED = -1


class Sentences(Reader):
    """A list of words and a list of their tags."""

    kind: ClassVar[str] = "tagging"
    formats: ClassVar[tuple[str, ...]] = (".conllu", ".conll", ".txt")

    def looks_like(self, sample: Sample, label: str | None) -> bool:
        """Whether every record holds a list of words and a list of tags."""
        for row in sample.rows:
            words = row.values.get(first_known(WORDS, row.values) or "")
            tags = row.values.get(first_known(TAGS, row.values) or "")
            if not isinstance(words, list) or not isinstance(tags, list):
                return False
        return bool(sample.rows)

    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
    ) -> Columns:
        """The columns of the words and of their tags: the named ones, else those with well-known names."""
        if text_pair is not None:
            raise DataError(f"--text-pair {text_pair}: tagging takes one column of words")
        names = sample.names
        sample.check((text, label))
        words = text or first_known(WORDS, names)
        if words is None:
            known = ", ".join(names[:20])
            raise DataError(
                f"{sample.path}: cannot tell which column holds the words; pass --text with one of: {known}."
            )
        tags = label or first_known(TAGS, [name for name in names if name != words])
        return Columns(words, None, tags)

    def read(self, sample: Sample, columns: Columns) -> Table:
        """All sentences with a word in them; a tag that is missing is None."""
        path = sample.path
        sentences: list[tuple[int, tuple[str, ...], list[str | None]]] = []
        empty: list[int] = []
        total = 0
        untagged = 0
        for line, values in rows(path):
            words, tags = _words_and_tags(path, line, values, columns)
            total += len(words)
            untagged += tags.count(None)
            if words:
                sentences.append((line, words, tags))
            else:
                empty.append(line)
        notes = skipped(path, "no word", empty)
        if untagged:
            notes.append(f"{untagged:,} words of {path.name} have no tag; they are neither learnt from nor scored.")
        if untagged == total:
            raise DataError(f'{path} has no tag in column "{columns.label}". {" ".join(notes)}')
        lines, texts, labels = zip(*sentences, strict=True)
        return Table(path, list(texts), None, list(labels), list(lines), notes)

    def stream(self, path: RowSource, columns: Columns) -> Iterator[Record]:
        """Line and words of every record; a text is split into words."""
        for line, values in rows(path):
            value = values.get(columns.text)
            words = split_words(value) if isinstance(value, str) else _words_of(path, line, columns.text, value)
            yield line, words, None

    def label_names(self, table: Table) -> tuple[str, ...]:
        """All tags, sorted."""
        names = {str(tag) for tag in chain.from_iterable(table.labels) if tag is not None}
        if len(names) == 1:
            raise DataError(f'{table.path}: every tag is "{names.pop()}"; at least two are needed.')
        return tuple(sorted(names))

    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The sentences with the numbers of their tags."""
        index = {name: number for number, name in enumerate(labels)}
        sentences = []
        for line, words, tags in zip(table.lines, table.texts, table.labels, strict=True):
            for word, tag in zip(words, tags, strict=True):
                if tag is not None and tag not in index:
                    what = f'tag "{tag}" of "{word}" is not in the training data.{suggest(tag, labels)}'
                    raise fault(table.path, line, what)
            sentences.append(tuple(UNTAGGED if tag is None else index[tag] for tag in tags))
        return Examples(table.texts, None, sentences, table.lines)

    def doubts(self, examples: Examples, labels: tuple[str, ...]) -> list[str]:
        """The number of words with each tag."""
        counts = Counter(chain.from_iterable(examples.labels))
        del counts[UNTAGGED]
        return [f"Words by tag: {counts_by_name(labels, counts)}.", *super().doubts(examples, labels)]


def split_words(text: str) -> tuple[str, ...]:
    """Split a text into words: runs of letters and digits, and every punctuation mark as a word."""
    return tuple(re.findall(r"\w+(?:[-'’.]\w+)*|[^\w\s]", text))


def _words_and_tags(
    path: RowSource, line: int, values: dict[str, object], columns: Columns
) -> tuple[tuple[str, ...], list[str | None]]:
    words = _words_of(path, line, columns.text, values.get(columns.text))
    tags = values.get(columns.label or "")
    if not isinstance(tags, list):
        raise fault(path, line, f'column "{columns.label}" contains no list of tags.')
    if len(tags) != len(words):
        raise fault(path, line, f"{len(words)} words but {len(tags)} tags; every word needs one.")
    return words, [_tag(path, tag) for tag in tags]


def _words_of(path: RowSource, line: int, name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise fault(path, line, f'column "{name}" contains no list of words.')
    blank = [number for number, word in enumerate(value, 1) if not word.strip()]
    if blank:
        raise fault(path, line, f"word {blank[0]} is empty.")
    return tuple(value)


def _tag(path: RowSource, value: object) -> str | None:
    if value is None or not str(value).strip():
        return None
    if value == "_" and extension(path) == ".conllu":  # CoNLL-U writes an underscore for a missing value
        return None
    return str(value)
