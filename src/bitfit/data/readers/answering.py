"""Reader of question answering: a question, its context, and the answers that occur in the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ...errors import DataError
from ..columns import Sample
from ..examples import Answer, Columns, Examples, Table, shortened
from ..formats import fault, rows
from ..source import RowSource
from .reader import Reader, Record, first_known

QUESTION = ("question", "query")
CONTEXT = ("context", "passage", "document")
ANSWERS = ("answers", "answer")
WrittenAnswer = tuple[str, int | None]
"""An answer as written in the file: its text and its offset in the context, which may be wrong or missing."""


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
            if not all(first_known(known, names) for known in (QUESTION, CONTEXT, ANSWERS)):
                return False
        return bool(sample.rows)

    def find_columns(
        self, sample: Sample, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
    ) -> Columns:
        """The columns of question, context and answers: the named ones, else those with well-known names."""
        names = sample.names
        sample.check((text, text_pair, label))
        question = text or first_known(QUESTION, names)
        context = text_pair or first_known(CONTEXT, names)
        if question is None or context is None:
            option = "--text with the question" if question is None else "--text-pair with the context"
            known = ", ".join(names[:20])
            what = "question" if question is None else "context"
            raise DataError(f"{sample.path}: no column is known as the {what}; pass {option}, one of: {known}.")
        return Columns(question, context, label or first_known(ANSWERS, names))

    def read(self, sample: Sample, columns: Columns) -> Table:
        """All questions with an answer in their context; a wrong offset is corrected to the nearest occurrence."""
        path = sample.path
        questions: list[tuple[str, str, tuple[Answer, ...], int]] = []
        problems: dict[str, list[str]] = {}
        for line, values in rows(path):
            question, context = _texts(path, line, values, columns)
            written = _answers(path, line, values.get(columns.label or ""))
            located = [_locate(context, *answer) for answer in written]
            for problem in _problems(written, located):
                problems.setdefault(problem, []).append(str(values.get("id") or line))
            answers = tuple(answer for answer in located if answer)
            if answers:
                questions.append((question, context, answers, line))
        notes = [f"{_count(ids)} of {path.name} had {problem}." for problem, ids in problems.items()]
        if not questions:
            raise DataError(f"{path} has no usable question. {' '.join(notes)}")
        texts, pairs, labels, lines = (list(column) for column in zip(*questions, strict=True))
        return Table(path, texts, pairs, labels, lines, notes)

    def stream(self, path: RowSource, columns: Columns) -> Iterator[Record]:
        """Line, question and context of every record."""
        for line, values in rows(path):
            yield line, *_texts(path, line, values, columns, empty=True)

    def label_names(self, table: Table) -> tuple[str, ...]:
        """No names: answers are texts."""
        return ()

    def examples(self, table: Table, labels: Sequence[str], numbered: bool = False) -> Examples:
        """The questions with their answers."""
        return Examples(table.texts, table.pairs, table.labels, table.lines)


def _texts(
    path: RowSource, line: int, values: dict[str, object], columns: Columns, empty: bool = False
) -> tuple[str, str]:
    """Question and context of a record; `empty`: whether they may be empty."""
    question = values.get(columns.text)
    context = values.get(columns.text_pair or "")
    for name, value in ((columns.text, question), (columns.text_pair, context)):
        if not isinstance(value, str) or not (empty or value.strip()):
            record = f"id {values['id']}: " if "id" in values else ""
            raise fault(path, line, f'{record}column "{name}" contains no text.')
    return str(question), str(context)


def _answers(path: RowSource, line: int, value: object) -> list[WrittenAnswer]:
    """The answers in a cell: SQuAD's list, the two lists of the hub's data sets, plain texts, or one of these."""
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


def _answer(path: RowSource, line: int, item: object) -> WrittenAnswer:
    text, start = item, None
    if isinstance(item, dict):
        text, start = item.get("text"), item.get("answer_start")
    if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int | None):
        raise fault(path, line, "an answer must have a text; its answer_start, if it has one, must be a whole number.")
    return text, start


def _locate(context: str, text: str, start: int | None) -> Answer | None:
    """The occurrence of the answer that is nearest to its offset; None if it does not occur in the context."""
    offsets = []
    offset = context.find(text) if text.strip() else -1
    while offset >= 0:
        offsets.append(offset)
        offset = context.find(text, offset + 1)
    if not offsets:
        return None
    expected = start or 0
    nearest = min(offsets, key=lambda offset: abs(offset - expected))
    return Answer(text, nearest)


def _problems(written: list[WrittenAnswer], located: list[Answer | None]) -> Iterator[str]:
    if not written:
        yield "no answer and were left out"
    if None in located:
        yield "an answer that is not in its context, which was left out"
    for (_, start), answer in zip(written, located, strict=True):
        if answer and start not in (None, answer.start):
            yield "an answer_start that does not match; the nearest occurrence was used"
            return


def _count(ids: list[str]) -> str:
    plural = "" if len(ids) == 1 else "s"
    return f"{len(ids):,} question{plural} ({shortened(ids)})"
