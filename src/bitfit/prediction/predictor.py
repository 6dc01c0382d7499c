"""Prediction with one delta or several on a base, by the engine that the service uses too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..arrays import Array
from ..data import loading, sources
from ..data.columns import Sample
from ..data.examples import Columns
from ..data.formats import rows
from ..data.memory import Frame, HubDataset, Table, is_frame, records_of
from ..data.named import NamedTask
from ..data.source import DataFile, RowSource
from ..delta.delta import Delta
from ..delta.meta import LONG
from ..errors import DataError, DeltaError, ModelError, UsageError, suggest
from ..model.base import DEMO, Base, load_base
from ..tasks import Task, Text
from ..tasks.encode import Encoded
from ..tasks.metrics import Score
from .evaluation import Evaluation
from .host import Host, Reading, Resident
from .output import beside, flat_columns

CHUNK = 1024

Source = Delta | str | Path
"""A delta, or its file."""


class Predictor:
    """A base with one delta, ready for texts.

    `long` overrides what the delta reads of a text that is too long: head, head+tail or windows.
    """

    def __init__(
        self, delta: Source, base: Base | str | None = None, long: str | None = None, dtype: str | None = None
    ) -> None:
        self.delta = _loaded(delta) if long is None else _reading(_loaded(delta), long)
        self.base = base if isinstance(base, Base) else base_of(self.delta, base, dtype)
        self.delta.check(self.base)
        self.columns = self.delta.meta.columns
        self.cut = 0  # the number of texts so far that were longer than the maximum length
        self._host = Host(self.base)
        # Not folded, so that the scores of a file are exactly those of the training.
        self._resident = self._host.admit(self.delta, fold=False)
        self.task = self._resident.task

    def outputs(self, encoded: Encoded) -> Array:
        """The logits of each text, or of each token of the texts, in order."""
        self.cut += encoded.rows.cut
        if not len(encoded.rows):
            return np.zeros((0, self.task.outputs), np.float32)
        return _finite(self._host.compute({self._resident: encoded.rows})[self._resident])

    def answers(self, texts: Iterable[Text]) -> Iterator[dict[str, Any]]:
        """An answer per text, as a stream: any number of texts in bounded memory."""
        source = iter(texts)
        while chunk := list(islice(source, CHUNK)):
            reading = self._host.encode(self._resident, chunk)
            yield from self._resident.answers(reading, self.outputs(reading.encoded))

    def evaluate(
        self,
        source: str | Path,
        split: str | None = None,
        folder: str | Path | None = None,
        encoding: str | None = None,
        **column_names: str | None,
    ) -> tuple[int, Mapping[str, Score], tuple[str, ...]]:
        """The number of rows, every metric with its interval, and notes: the short form of `evaluation`."""
        result = self.evaluation(source, split, folder, encoding, **column_names)
        return result.rows, result.scores, result.notes

    def evaluation(
        self,
        source: str | Path | Table,
        split: str | None = None,
        folder: str | Path | None = None,
        encoding: str | None = None,
        positive: str | None = None,
        **column_names: str | None,
    ) -> Evaluation:
        """The delta's results on labelled rows.

        The source is a labelled file, a folder (its test file, or the split), a named task (dev, or the split), whose
        data is looked for in `folder` first, or rows in memory. `column_names` are text, text_pair and label.
        """
        labelled_rows, named, source_notes = _labelled_rows(source, split, folder, encoding)
        if named is not None and named.kind != self.task.kind:
            raise DataError(f"{named.name} is a {named.kind} task, but the delta is for {self.task.kind}")
        task = self.task if positive is None else self.task.with_positive(positive)
        sample = Sample.of(labelled_rows)
        by_number = named is not None or self.delta.meta.name is not None
        columns = self.columns_in(sample, True, **column_names)
        columns = replace(columns, numbered=by_number, separator=self.columns.separator)
        examples, notes = loading.load_labelled(sample, columns, task.kind, task.labels)
        encoder = self._host.encoder(self._resident)
        reading = Reading(task.encode(encoder, examples), examples)
        outputs = self.outputs(reading.encoded)
        predictions = task.predictions(outputs, reading.encoded, examples)
        confusion = task.confusion(predictions, examples)
        used = f'{labelled_rows}: the text is column "{columns.text}", the label is column "{columns.label}".'
        remarks = task.remarks(encoder, reading.encoded, examples)
        return Evaluation(
            task=task,
            rows=len(examples),
            scores=task.scores(predictions, examples),
            by_class=tuple(task.by_class(predictions, examples)),
            confusion=() if confusion is None else tuple(map(tuple, confusion.tolist())),
            errors=tuple(self._errors(reading, outputs, task.wrong(predictions, examples), columns)),
            notes=(*source_notes, used, *notes, *labelled_rows.notes, *remarks),
        )

    def _errors(
        self, reading: Reading, outputs: Array, wrong: Sequence[int], columns: Columns
    ) -> Iterator[dict[str, Any]]:
        """The rows with wrong predictions: their line, their input, the gold label and the answer."""
        if not wrong:
            return
        chosen = reading.take(wrong)
        indices = self._resident.model.output_index(reading.rows, reading.encoded.rows_of(np.array(wrong)))
        answers = self._resident.answers(chosen, outputs[indices])
        examples = chosen.examples
        for i, answer in enumerate(answers):
            row = {"line": examples.lines[i], columns.text: examples.texts[i]}
            if examples.pairs is not None:
                row[columns.text_pair or "text_pair"] = examples.pairs[i]
            row["gold"] = self.task.gold(examples.labels[i])
            yield beside(row, answer, self.task.echo)

    def columns_in(
        self, source: str | Path | RowSource | Sample, labelled: bool = False, **column_names: str | None
    ) -> Columns:
        """The file's columns: the named ones, else those of the training file if the file has them, else inferred."""
        return columns_of(self.task, self.columns, Sample.of(source), labelled, column_names)

    def rows_in(self, source: str | Path | RowSource | Sample, **column_names: str | None) -> Iterator[dict[str, Any]]:
        """Every record of a file with its answer, as a stream."""
        sample = Sample.of(source)
        answers = self.answers(self.texts_in(sample, **column_names))
        for row, answer in zip(rows(sample.path), answers, strict=True):
            yield beside(row.values, answer, self.task.echo)

    def texts_in(self, path: str | Path | RowSource | Sample, **column_names: str | None) -> Iterator[Text]:
        """The texts, or pairs, of a file as a stream."""
        sample = Sample.of(path)
        for _, text, pair in loading.stream_texts(
            sample, self.columns_in(sample, False, **column_names), self.task.kind
        ):
            yield text if pair is None else (text, pair)

    def texts_of(self, words: Sequence[str]) -> list[Text]:
        """The texts of a command line; for a delta on pairs, every two make a pair."""
        if self.columns.text_pair is None:
            return list(words)
        if len(words) % 2:
            raise UsageError("the delta takes pairs of texts: pass an even number of texts")
        return list(zip(words[::2], words[1::2], strict=True))


class MixedPredictor:
    """A base with many deltas at once: every text is answered by the delta it names.

    The deltas may differ in task, labels, head, pooling and length. Texts of different tasks share the passes through
    the encoder. Only a delta that replaces entire matrices, which has nothing to share, gets a separate bank.
    """

    def __init__(self, deltas: Sequence[Source], base: Base | str | None = None, dtype: str | None = None) -> None:
        first = _loaded(deltas[0])
        self.base = base if isinstance(base, Base) else base_of(first, base, dtype)
        self._host = Host(self.base)
        # One delta at a time, so that only one is in memory twice: as a file's arrays and as a resident.
        self.residents = [self._host.admit(_loaded(delta)) for delta in (first, *deltas[1:])]

    def outputs(self, requests: Sequence[tuple[int, Text]]) -> list[Array]:
        """The logits of each text (a row, or one per token) by the delta of that number, in order."""
        outputs: list[Array] = [np.zeros(0, np.float32)] * len(requests)
        for resident, (numbers, reading, logits) in self._computed(requests).items():
            for i, number in enumerate(numbers):
                rows = reading.encoded.rows_of(np.array([i]))
                outputs[number] = logits[resident.model.output_index(reading.rows, rows)]
        return outputs

    def answers(self, requests: Iterable[tuple[int, Text]]) -> Iterator[dict[str, Any]]:
        """An answer per (number of a delta, text), as a stream."""
        source = iter(requests)
        while chunk := list(islice(source, CHUNK)):
            answers: list[dict[str, Any]] = [{}] * len(chunk)
            for resident, (numbers, reading, out) in self._computed(chunk).items():
                for number, answer in zip(numbers, resident.answers(reading, _finite(out)), strict=True):
                    answers[number] = answer
            yield from answers

    def _computed(self, requests: Sequence[tuple[int, Text]]) -> dict[Resident, tuple[list[int], Reading, Array]]:
        """For each resident the numbers of its requests, their reading and the logits."""
        readings = self._read(requests)
        outputs = self._host.compute({resident: reading.rows for resident, (_, reading) in readings.items()})
        return {resident: (*readings[resident], out) for resident, out in outputs.items()}

    def _read(self, requests: Sequence[tuple[int, Text]]) -> dict[Resident, tuple[list[int], Reading]]:
        """For each resident the numbers of its requests and their reading.

        The texts of all deltas that encode in the same way are tokenized in one call.
        """
        by_shape: defaultdict[object, list[int]] = defaultdict(list)
        for number, (delta, _) in enumerate(requests):
            by_shape[self.residents[delta].shape].append(number)
        readings = {}
        for numbers in by_shape.values():
            residents = [self.residents[requests[number][0]] for number in numbers]
            texts = [requests[number][1] for number in numbers]
            together = self._host.encode(residents[0], texts)
            members: defaultdict[Resident, list[int]] = defaultdict(list)
            for i, resident in enumerate(residents):
                members[resident].append(i)
            for resident, indices in members.items():
                readings[resident] = ([numbers[i] for i in indices], together.take(indices))
        return readings


def _finite(outputs: Array) -> Array:
    if not np.isfinite(outputs).all():
        raise DeltaError("the delta's values are so large that its answers are not finite numbers; train it again")
    return outputs


def columns_of(
    task: Task, trained: Columns, sample: Sample, labelled: bool, column_names: Mapping[str, str | None]
) -> Columns:
    """The columns of a file that a delta reads, by role: those named, else the training file's, else inferred."""
    kind = loading.kind_of_format(sample.path)
    if kind is not None and kind != task.kind:
        raise DataError(f"{sample.path} is a file for {kind}, but the delta is for {task.kind}; pass another file")
    named = {role: column for role, column in column_names.items() if column is not None}
    defaults = {"text": trained.text, "text_pair": trained.text_pair}
    if labelled:
        defaults["label"] = trained.label
    for role, column in defaults.items():
        if column is None or role in named or column in named.values():
            continue
        if loading.has_column(sample, column):
            named[role] = column
    columns = loading.find_columns_of(task.kind, sample, **named)
    if (columns.text_pair is None) != (trained.text_pair is None):
        need = "two text columns" if trained.text_pair else "one text column"
        actual = "one" if trained.text_pair else "two"
        raise DataError(f"{sample.path}: the delta was trained on {need}, but this file has {actual}; name the columns")
    return columns


def base_of(delta: Delta, spec: str | None, dtype: str | None = None) -> Base:
    """The base `spec`, or the one in the delta's metadata; stored in `dtype`, or as in the delta's training."""
    dtype = dtype or delta.meta.dtype
    if spec is not None:
        return load_base(spec, dtype)
    name = delta.meta.base
    if name != DEMO and not delta.meta.hub:
        raise ModelError(f"the delta was trained on the model folder {name}; pass its path with --base FOLDER")
    try:
        return load_base(name, dtype)
    except ModelError as error:
        raise ModelError(f"the delta's base {name} cannot be loaded; pass --base FOLDER ({error})") from error


@overload
def predict(delta: Source, texts: Iterable[Text] | str, base: Base | str | None = None) -> list[dict[str, Any]]: ...
@overload
def predict(delta: Source, texts: Frame | HubDataset, base: Base | str | None = None) -> Any: ...
@overload
def predict(
    delta: Iterable[tuple[Source, Text]], texts: None = None, base: Base | str | None = None
) -> list[dict[str, Any]]: ...
def predict(
    delta: Source | Iterable[tuple[Source, Text]],
    texts: Iterable[Text] | str | Frame | HubDataset | None = None,
    base: Base | str | None = None,
) -> Any:
    """The answer of a delta for each text: label, score and all scores, or a value.

    Rows in memory (a pandas or polars DataFrame, a datasets.Dataset) give the same rows back, with the answers as
    further columns. Instead of a delta and its texts: (delta, text) pairs, with any mix of deltas of one base.
    """
    if isinstance(delta, Delta | str | Path):
        if texts is None:
            raise UsageError("predict takes a delta and texts, or a list of (delta, text)")
        predictor = Predictor(delta, base)
        if is_frame(texts):
            return _with_answers(texts, list(predictor.answers(predictor.texts_in(records_of(texts)))))
        return list(predictor.answers(_texts(texts)))
    if texts is not None:
        raise UsageError("predict takes a delta and texts, or a list of (delta, text), not both")
    return _predict_mixed(list(delta), base)


def _texts(texts: object) -> Iterable[Text]:
    """The texts as a list or a stream of them; TypeError for anything else."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        kind = f"{type(texts).__module__}.{type(texts).__qualname__}"
        raise TypeError(f"texts of type {kind}; predict takes a text, a list of texts, or a pandas or polars frame")
    return texts


def _with_answers(frame: Any, answers: list[dict[str, Any]]) -> Any:
    """The frame with the answers as further columns; its index does not change."""
    columns = {}
    for name, values in flat_columns(answers).items():
        taken = name in frame.columns if hasattr(frame, "columns") else name in frame.column_names
        columns[f"predicted_{name}" if taken else name] = values
    if hasattr(frame, "assign"):  # pandas
        return frame.assign(**columns)
    if hasattr(frame, "hstack"):  # polars
        return frame.hstack(type(frame)(columns))
    for name, values in columns.items():
        frame = frame.add_column(name, values)
    return frame


def evaluate(
    delta: Source,
    data: str | Path | Table,
    base: Base | str | None = None,
    *,
    split: str | None = None,
    positive: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    long: str | None = None,
) -> Evaluation:
    """The results of a delta on labelled data: scores, results by class, and the rows that it answers wrongly.

    `long` overrides what the delta reads of a text that is too long: head, head+tail or windows.
    """
    columns = {"text": text, "text_pair": text_pair, "label": label}
    return Predictor(delta, base, long).evaluation(data, split, positive=positive, **columns)


def _labelled_rows(
    source: str | Path | Table, split: str | None, folder: str | Path | None, encoding: str | None
) -> tuple[RowSource, NamedTask | None, list[str]]:
    if isinstance(source, str | Path | DataFile):
        return sources.split_file(source, split, folder, encoding)
    if split is not None:
        raise UsageError(f"split {split!r}: rows in memory have no splits; pass the rows of one split")
    return records_of(source), None, []


def _predict_mixed(requests: list[tuple[Source, Text]], base: Base | str | None) -> list[dict[str, Any]]:
    if not requests:
        return []
    numbers: dict[object, int] = {}
    sources: list[Source] = []
    named: list[tuple[int, Text]] = []
    for source, text in requests:
        key = id(source) if isinstance(source, Delta) else Path(source)
        if key not in numbers:
            numbers[key] = len(sources)
            sources.append(source)
        named.append((numbers[key], text))
    return list(MixedPredictor(sources, base).answers(named))


def _reading(delta: Delta, long: str) -> Delta:
    """The delta with another setting for texts that are too long."""
    if long not in LONG:
        raise UsageError(f'--long: no "{long}".{suggest(long, LONG)}')
    if long == delta.meta.long:
        return delta
    try:
        return replace(delta, meta=replace(delta.meta, long=long, stride=0))
    except ValueError as error:
        what = f"--long {long}: the delta is for {'pairs of texts' if delta.meta.pairs else delta.meta.task}"
        raise UsageError(f"{what}, and --long is for single texts only; remove --long") from error


def _loaded(source: Source) -> Delta:
    return source if isinstance(source, Delta) else Delta.load(source)
