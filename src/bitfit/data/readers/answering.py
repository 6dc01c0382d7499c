"""Records -> questions on a context, with the answers that lie in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ...errors import DataError
from ..columns import Sample
from ..examples import Answer, Columns, Examples, Table, shortened
from ..formats import fault, rows
from ..source import RowSource
from .reader import Reader, Record

QUESTION, CONTEXT, ANSWERS = ("question", "query"), ("context", "passage", "document"), ("answers", "answer")
Given = tuple[str, int | None]
"""An answer as a file gives it: its text and where it is said to begin."""


class Questions(Reader):
    """A question, its context and the answers."""

    kind: ClassVar[str] = "answering"
    formats: ClassVar[tuple[str, ...]] = (".json",)
    labelled: ClassVar[bool] = False
    by_pair: ClassVar[bool] = True

    def looks_like(self, sample: Sample, label: str | None) -> bool:
        """Whether every record holds a question, a context and answers."""
        for row in sample.rows:
            names = list(row.values)
            if not all(_first(known, names) for known in (QUESTION, CONTEXT, ANSWERS)):
                return False
        return bool(sample.rows)

    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
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

    def read(self, sample: Sample, columns: Columns) -> Table:
        """All questions with an answer in their context; an answer at a wrong offset is moved to the nearest."""
        path = sample.path
        kept: list[tuple[str, str, tuple[Answer, ...], int]] = []
        problems: dict[str, list[str]] = {}
        for line, values in rows(path):
            question, context = _texts(path, line, values, columns)
            given = _answers(path, line, values.get(columns.label or ""))
            located = [_located(context, *answer) for answer in given]
            for problem in _problems(given, located):
                problems.setdefault(problem, []).append(str(values.get("id") or line))
            answers = tuple(answer for answer in located if answer)
            if answers:
                kept.append((question, context, answers, line))
        notes = [f"{_count(ids)} of {path.name} had {problem}." for problem, ids in problems.items()]
        if not kept:
            raise DataError(f"{path} has no usable question. {' '.join(notes)}")
        texts, pairs, labels, lines = (list(column) for column in zip(*kept, strict=True))
        return Table(path, texts, pairs, labels, lines, notes)

    def stream(self, path: RowSource, columns: Columns) -> Iterator[Record]:
        """Line, question and context of every record."""
        for line, values in rows(path):
            yield line, *_texts(path, line, values, columns, empty=True)

    def label_names(self, table: Table) -> tuple[str, ...]:
        """An answer has no label."""
        return ()

    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The questions with their answers."""
        return Examples(table.texts, table.pairs, table.labels, table.lines)


def _first(known: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in known if name in names), None)


def _texts(
    path: RowSource, line: int, values: dict[str, object], columns: Columns, empty: bool = False
) -> tuple[str, str]:
    question, context = values.get(columns.text), values.get(columns.text_pair or "")
    for name, value in ((columns.text, question), (columns.text_pair, context)):
        if not isinstance(value, str) or not (empty or value.strip()):
            which = f"id {values['id']}: " if "id" in values else ""
            raise fault(path, line, f'{which}column "{name}" holds no text.')
    return str(question), str(context)


def _answers(path: RowSource, line: int, value: object) -> list[Given]:
    """The answers of a cell: SQuAD's list, the two lists of the hub's data sets, plain texts, or one of these."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts = value["text"]
        starts = value.get("answer_start") or [None] * len(texts)
        if len(starts) != len(texts):
            raise fault(path, line, f"{len(texts)} answers but {len(starts)} offsets.")
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    return [_answer(path, line, item) for item in items]


def _answer(path: RowSource, line: int, item: object) -> Given:
    text, start = (item.get("text"), item.get("answer_start")) if isinstance(item, dict) else (item, None)
    if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int | None):
        raise fault(path, line, "an answer needs a text and, if any, a whole number as answer_start.")
    return text, start


def _located(context: str, text: str, start: int | None) -> Answer | None:
    """The answer where it truly begins: at its offset, or the nearest to it; None if it is nowhere."""
    found = []
    at = context.find(text) if text.strip() else -1
    while at >= 0:
        found.append(at)
        at = context.find(text, at + 1)
    if not found:
        return None
    return Answer(text, min(found, key=lambda offset: abs(offset - (start or 0))))


def _problems(given: list[Given], located: list[Answer | None]) -> Iterator[str]:
    if not given:
        yield "no answer and were left out"
    if None in located:
        yield "an answer that is not in its context, which was left out"
    for (_, start), answer in zip(given, located, strict=True):
        if answer and start not in (None, answer.start):
            yield "an answer beside its offset, which was moved to the nearest"
            return


def _count(ids: list[str]) -> str:
    return f"{len(ids):,} question{'' if len(ids) == 1 else 's'} ({shortened(ids)})"
