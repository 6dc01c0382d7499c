"""Records -> questions on a context, with the answers that lie in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import DataError
from ..columns import Sample
from ..examples import Answer, Columns, Examples, Table
from ..formats import Row, StrPath, fault, rows

QUESTION, CONTEXT, ANSWERS = ("question", "query"), ("context", "passage", "document"), ("answers", "answer")


def find_columns(
    sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Columns:
    """The columns of question, context and answers: the given ones, else those with well-known names."""
    names = sample.names
    sample.check((text, text_pair, label))
    question = text or _first(QUESTION, names)
    context = text_pair or _first(CONTEXT, names)
    if question is None or context is None:
        option = "--text with the question" if question is None else "--text-pair with the context"
        known = ", ".join(names[:20])
        raise DataError(f"{sample.path}: cannot tell question and context; pass {option}, one of: {known}.")
    return Columns(question, context, label or _first(ANSWERS, names))


def looks_answered(sample: Sequence[Row]) -> bool:
    """Whether records hold a question, a context and answers."""
    parts = (QUESTION, CONTEXT, ANSWERS)
    return bool(sample) and all(_first(part, list(row.values)) for row in sample for part in parts)


def read(path: Path, columns: Columns) -> Table:
    """All questions with an answer that lies in its context; one at a wrong place is moved to the nearest."""
    kept: list[tuple[str, str, tuple[Answer, ...], int]] = []
    said: dict[str, list[str]] = {}
    for line, values in rows(path):
        question, context = _texts(path, line, values, columns)
        given = _answers(path, line, values.get(columns.label or ""))
        placed = [_placed(context, text, start) for text, start in given]
        for problem in _problems(given, placed):
            said.setdefault(problem, []).append(str(values.get("id") or line))
        if any(placed):
            kept.append((question, context, tuple(answer for answer in placed if answer), line))
    notes = [f"{_some(names)} of {path.name} had {problem}." for problem, names in said.items()]
    if not kept:
        raise DataError(f"{path} has no usable question. {' '.join(notes)}")
    texts, pairs, labels, lines = (list(column) for column in zip(*kept, strict=True))
    return Table(path, texts, pairs, labels, lines, notes)


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
        found.append((text, start))
    return found


def _placed(context: str, text: str, start: int | None) -> Answer | None:
    """The answer where it truly begins: at its offset, or the nearest to it; None if it is nowhere."""
    places, place = [], context.find(text) if text.strip() else -1
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    if not places:
        return None
    return Answer(text, min(places, key=lambda found: abs(found - (start or 0))))


def _problems(given: list[tuple[str, int | None]], placed: list[Answer | None]) -> Iterator[str]:
    if not given:
        yield "no answer and were left out"
    if None in placed:
        yield "an answer that is not in its context, which was left out"
    if any(own and start not in (None, own.start) for (_, start), own in zip(given, placed, strict=True)):
        yield "an answer beside its offset, which was moved to the nearest"


def _some(ids: list[str]) -> str:
    shown = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
    return f"{len(ids):,} question{'' if len(ids) == 1 else 's'} ({shown})"
