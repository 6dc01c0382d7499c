"""Records -> questions on a context, with the answers that lie in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from .errors import DataError, suggest
from .examples import Answer, Columns, Examples, Table, skipped
from .formats import UNITS, Row, StrPath, extension, fault, rows

QUESTION, CONTEXT, ANSWERS = ("question", "query"), ("context", "passage", "document"), ("answers", "answer")
SAMPLE = 50


def find_columns(
    path: StrPath, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Columns:
    """The columns of question, context and answers: those asked for, else by well-known names."""
    names = list(dict.fromkeys(name for row in islice(rows(path), SAMPLE) for name in row.values))
    for given in (text, text_pair, label):
        if given is not None and given not in names:
            raise DataError(f'{path} has no column "{given}".{suggest(given, names)}')
    question = text or _first(QUESTION, names)
    context = text_pair or _first(CONTEXT, names)
    if question is None or context is None:
        option = "--text with the question" if question is None else "--text-pair with the context"
        raise DataError(f"{path}: cannot tell question and context; pass {option}, one of: {', '.join(names[:20])}.")
    return Columns(question, context, label or _first(ANSWERS, names))


def looks_answered(sample: Sequence[Row]) -> bool:
    """Whether records hold a question, a context and answers."""
    parts = (QUESTION, CONTEXT, ANSWERS)
    return bool(sample) and all(_first(part, list(row.values)) for row in sample for part in parts)


def read(path: Path, columns: Columns) -> Table:
    """All questions with an answer that lies in its context; one at a wrong place is moved to the nearest."""
    found = Table(path, [], [], [], [], [])
    assert found.pairs is not None
    moved, absent, without = list[str](), list[str](), list[str]()
    for line, values in rows(path):
        question, context = _texts(path, line, values, columns)
        name = str(values.get("id") or line)
        raw = _answers(path, line, values.get(columns.label or ""))
        answers = [_placed(context, text, start) for text, start in raw]
        kept = tuple(answer for answer in answers if answer is not None)
        if kept and any(given not in (None, own.start) for (_, given), own in zip(raw, answers, strict=True) if own):
            moved.append(name)
        if not raw:
            without.append(name)
        elif len(kept) < len(raw):
            absent.append(name)
        if kept:
            for column, value in zip((found.texts, found.pairs, found.labels), (question, context, kept), strict=True):
                column.append(value)
            found.lines.append(line)
    found.notes.extend(_notes(path, moved, absent, without))
    if not found.texts:
        raise DataError(f"{path} has no usable question. {' '.join(found.notes)}")
    return found


def stream(path: StrPath, columns: Columns) -> Iterator[tuple[int, str, str]]:
    """Line, question and context of every record."""
    for line, values in rows(path):
        yield line, *_texts(Path(path), line, values, columns, empty=True)


def names(table: Table) -> tuple[str, ...]:
    """An answer has no label."""
    return ()


def examples(table: Table, labels: Sequence[str]) -> Examples:
    """The questions with their answers."""
    return Examples(table.texts, table.pairs, table.labels, table.lines)


def _first(known: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in known if name in names), None)


def _texts(path: Path, line: int, values: dict[str, object], columns: Columns, empty: bool = False) -> tuple[str, str]:
    question, context = values.get(columns.text), values.get(columns.text_pair or "")
    for name, value in ((columns.text, question), (columns.text_pair, context)):
        if not isinstance(value, str) or not (empty or value.strip()):
            raise fault(path, line, f'{_named(values)}column "{name}" holds no text.')
    return str(question), str(context)


def _named(values: dict[str, object]) -> str:
    return f"id {values['id']}: " if "id" in values else ""


def _answers(path: Path, line: int, value: object) -> list[tuple[str, int | None]]:
    """The answers of a cell: SQuAD's list, the two lists of the hub's data sets, plain texts, or one of these."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts = value["text"]
        starts = value.get("answer_start") or [None] * len(texts)
        if len(starts) != len(texts):
            raise fault(path, line, f"{len(texts)} answers but {len(starts)} offsets.")
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    found = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        text, start = (item.get("text"), item.get("answer_start")) if isinstance(item, dict) else (item, None)
        if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int | None):
            raise fault(path, line, "an answer needs a text and, if any, a whole number as answer_start.")
        if text.strip():
            found.append((text, start))
    return found


def _placed(context: str, text: str, start: int | None) -> Answer | None:
    """The answer where it truly begins: at its offset, or the nearest to it; None if it is nowhere."""
    places, place = [], context.find(text)
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    if not places:
        return None
    return Answer(text, min(places, key=lambda found: abs(found - (start or 0))))


def _notes(path: Path, moved: list[str], absent: list[str], without: list[str]) -> list[str]:
    unit = "id" if extension(path) in UNITS else "line or id"
    notes = skipped(path, "no answer", without, unit)
    if absent:
        notes.append(f"{_some(absent, 'question')} of {path.name} had an answer that is not in its context, left out.")
    if moved:
        notes.append(
            f"{_some(moved, 'question')} of {path.name} had an answer beside its offset, moved to the nearest."
        )
    return notes


def _some(ids: list[str], what: str) -> str:
    shown = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
    return f"{len(ids):,} {what}{'' if len(ids) == 1 else 's'} ({shown})"
