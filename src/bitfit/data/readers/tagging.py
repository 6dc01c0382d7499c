"""Records -> tagged sentences: words and a tag for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import DataError, suggest
from ..columns import Sample
from ..examples import Columns, Examples, Table, skipped
from ..formats import Row, StrPath, extension, fault, rows

WORDS = ("tokens", "words", "form")
TAGS = ("tags", "upos", "pos_tags", "ner_tags", "pos", "ner", "labels", "label", "xpos")
UNTAGGED = -1


def find_columns(
    sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Columns:
    """The columns of the words and of their tags: the given ones, else those with well-known names."""
    if text_pair is not None:
        raise DataError(f"--text-pair {text_pair}: tagging takes one column of words")
    names = sample.names
    sample.check((text, label))
    words = text or next((name for name in WORDS if name in names), None)
    if words is None:
        known = _some(names)
        raise DataError(f"{sample.path}: cannot tell which column holds the words; pass --text with one of: {known}.")
    return Columns(words, None, label or next((name for name in TAGS if name in names and name != words), None))


def looks_tagged(sample: Sequence[Row]) -> bool:
    """Whether records hold a list of words and, in another column, a list as long."""
    for row in sample:
        words = next((row.values[name] for name in WORDS if name in row.values), None)
        tags = next((row.values[name] for name in TAGS if name in row.values), None)
        if not isinstance(words, list) or not isinstance(tags, list):
            return False
    return bool(sample)


def read(path: Path, columns: Columns) -> Table:
    """All sentences with a word in them; a tag that is missing is None."""
    kept = [(line, *_tagged(path, line, values, columns)) for line, values in rows(path)]
    notes = skipped(path, "no word", [line for line, words, _ in kept if not words])
    bare = sum(tags.count(None) for _, _, tags in kept)
    if bare:
        notes.append(f"{bare:,} words of {path.name} have no tag; they are neither learnt from nor scored.")
    if bare == sum(len(words) for _, words, _ in kept):
        raise DataError(f'{path} has no tag in column "{columns.label}". {" ".join(notes)}')
    lines, texts, labels = zip(*(own for own in kept if own[1]), strict=True)
    return Table(path, list(texts), None, list(labels), list(lines), notes)


def _tagged(
    path: Path, line: int, values: dict[str, object], columns: Columns
) -> tuple[tuple[str, ...], list[str | None]]:
    words, tags = words_of(path, line, columns.text, values.get(columns.text)), values.get(columns.label or "")
    if not isinstance(tags, list):
        raise fault(path, line, f'column "{columns.label}" holds no list of tags.')
    if len(tags) != len(words):
        raise fault(path, line, f"{len(words)} words but {len(tags)} tags; every word needs one.")
    return words, [_tag(path, tag) for tag in tags]


def stream(path: StrPath, columns: Columns) -> Iterator[tuple[int, tuple[str, ...], None]]:
    """Line and words of every record; a text is split into words."""
    for line, values in rows(path):
        value = values.get(columns.text)
        words = split_words(value) if isinstance(value, str) else words_of(Path(path), line, columns.text, value)
        yield line, words, None


def words_of(path: Path, line: int, name: str, value: object) -> tuple[str, ...]:
    """A cell as words."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise fault(path, line, f'column "{name}" holds no list of words.')
    blank = [place for place, word in enumerate(value, 1) if not word.strip()]
    if blank:
        raise fault(path, line, f"word {blank[0]} is empty.")
    return tuple(value)


def split_words(text: str) -> tuple[str, ...]:
    """The words of a running text: runs of letters and digits, and every other sign by itself."""
    return tuple(re.findall(r"\w+(?:[-'’.]\w+)*|[^\w\s]", text))


def names(table: Table) -> tuple[str, ...]:
    """All tags, sorted."""
    found = sorted({str(tag) for tags in table.labels for tag in tags if tag is not None})
    if len(found) == 1:
        raise DataError(f'{table.path}: every tag is "{found[0]}"; at least two are needed.')
    return tuple(found)


def examples(table: Table, labels: Sequence[str]) -> Examples:
    """The sentences with the numbers of their tags."""
    index = {name: number for number, name in enumerate(labels)}
    numbered = []
    for line, words, tags in zip(table.lines, table.texts, table.labels, strict=True):
        for word, tag in zip(words, tags, strict=True):
            if tag is not None and tag not in index:
                what = f'tag "{tag}" of "{word}" is not in the training data.{suggest(tag, labels)}'
                raise fault(table.path, line, what)
        numbered.append(tuple(UNTAGGED if tag is None else index[tag] for tag in tags))
    return Examples(table.texts, None, numbered, table.lines)


def _tag(path: Path, value: object) -> str | None:
    # In CoNLL-U a field without a value holds an underscore.
    if value is None or (value == "_" and extension(path) == ".conllu") or not str(value).strip():
        return None
    return str(value)


def _some(found: list[str]) -> str:
    return ", ".join(found[:20])
