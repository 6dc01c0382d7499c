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
from ..data.memory import Frame, HubDataset, Table, is_frame, records_of, split_of
from ..data.named import NamedTask
from ..data.readers import reader_of
from ..data.source import DataFile, Records, RowSource
from ..delta.delta import Delta
from ..delta.meta import LONG
from ..errors import DataError, DeltaError, ModelError, UsageError, suggest
from ..model.base import DEMO, Base, load_base, model_folder
from ..tasks import Task, Text
from ..tasks.encode import Encoded
from ..tasks.metrics import Score
from ..terminal.progress import counted, notes_of
from .evaluation import Evaluation
from .host import Host, Reading, Resident
from .output import beside, flat_columns

CHUNK = 1024
PREDICTED = "predicted"  # the column of the answer beside a true label

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
        source: str | Path | Table | Mapping[str, Table],
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
        if column_names.get("label") is None and not by_number:
            loading.require_known_label(sample, self.columns, columns, task.labels)
        columns = replace(columns, numbered=by_number, separator=self.columns.separator)
        examples, notes = loading.load_labelled(sample, columns, task.kind, task.labels)
        encoder = self._host.encoder(self._resident)
        reading = Reading(task.encode(encoder, examples), examples)
        outputs = self.outputs(reading.encoded)
        predictions = task.predictions(outputs, reading.encoded, examples)
        confusion = task.confusion(predictions, examples)
        used = f"{labelled_rows}: {loading.columns_note(columns)}"
        remarks = task.remarks(encoder, reading.encoded, examples)
        return Evaluation(
            task=task,
            rows=len(examples),
            scores=task.scores(predictions, examples),
            by_class=tuple(task.by_class(predictions, examples)),
            confusion=() if confusion is None else tuple(map(tuple, confusion.tolist())),
            errors=tuple(self._errors(reading, outputs, task.wrong(predictions, examples), sample, columns)),
            notes=(*source_notes, used, *notes, *labelled_rows.notes, *remarks),
        )

    def _errors(
        self, reading: Reading, outputs: Array, wrong: Sequence[int], sample: Sample, columns: Columns
    ) -> Iterator[dict[str, Any]]:
        """The rows with wrong predictions: their line or index, their columns with the true label, and the answer."""
        if not wrong:
            return
        chosen = reading.take(wrong)
        indices = self._resident.model.output_index(reading.rows, reading.encoded.rows_of(np.array(wrong)))
        answers = self._resident.answers(chosen, outputs[indices])
        examples = chosen.examples
        labels = reader_of(self.task.kind).label_columns(sample, columns.label)
        true = columns.label if columns.label in labels else "label"
        others = other_columns(sample, examples.lines, {columns.text, columns.text_pair, *labels, true, PREDICTED})
        for i, answer in enumerate(answers):
            line = examples.lines[i]
            row = {**place(sample, line), columns.text: examples.texts[i]}
            if examples.pairs is not None:
                row[columns.text_pair or "text_pair"] = examples.pairs[i]
            row |= others.get(line, {})
            row[true] = self.task.gold(examples.labels[i])
            yield beside(row, _with_prediction(answer, self.task), self.task.echo)

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

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the texts that were read so far."""
        if not self.cut:
            return []
        meta = self.delta.meta
        if meta.long == "head":
            return [f"{counted(self.cut, 'text')} longer than {meta.max_length} tokens, cut at that length"]
        return [f"{counted(self.cut, 'text')} too long: --long {meta.long} does not read all of their tokens"]

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


def _with_prediction(answer: dict[str, Any], task: Task) -> dict[str, Any]:
    """An answer whose prediction is called so: its first value that does not repeat the input."""
    main = next(name for name in answer if name not in task.echo)
    return {PREDICTED if name == main else name: value for name, value in answer.items()}


def place(sample: Sample, line: int) -> dict[str, object]:
    """Where a row is: its line in the file, or its index in memory."""
    if isinstance(sample.path, Records):
        return {"index": sample.path.index_of(line)}
    return {"line": line}


def other_columns(sample: Sample, lines: Sequence[int], known: set[str | None]) -> dict[int, dict[str, object]]:
    """The cells of these lines in all columns but the known ones: ids, dates and whatever else a file has."""
    known = {*known, *place(sample, 1)}
    if known.issuperset(sample.names):
        return {}
    wanted = set(lines)
    cells = {}
    for line, values in rows(sample.path):
        if line in wanted:
            cells[line] = {name: value for name, value in values.items() if name not in known}
    return cells


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
        folder = model_folder(name)
        if folder is None:
            raise ModelError(
                f"the delta was trained on the model folder {name}; pass its path with --base FOLDER, "
                "or set BITFIT_MODELS to the folder that contains it"
            )
        return load_base(folder, dtype)
    try:
        return load_base(name, dtype)
    except ModelError as error:
        raise ModelError(f"the delta's base {name} cannot be loaded; pass --base FOLDER ({error})") from error


Rows = Sequence[Mapping[str, Any]] | tuple[Sequence[Any], Sequence[Any]]
"""Rows in memory that are no frame: a list of dicts, or (texts, labels)."""


@overload
def predict(
    delta: Source, texts: Iterable[Text] | str | Rows, base: Base | str | None = None, *, quiet: bool = False
) -> list[dict[str, Any]]: ...
@overload
def predict(
    delta: Source,
    texts: Frame | HubDataset | Mapping[str, Frame | HubDataset],
    base: Base | str | None = None,
    *,
    quiet: bool = False,
) -> Any: ...
@overload
def predict(
    delta: Iterable[tuple[Source, Text]], texts: None = None, base: Base | str | None = None, *, quiet: bool = False
) -> list[dict[str, Any]]: ...
def predict(
    delta: Source | Iterable[tuple[Source, Text]],
    texts: Iterable[Text] | str | Rows | Frame | HubDataset | Mapping[str, Frame | HubDataset] | None = None,
    base: Base | str | None = None,
    *,
    quiet: bool = False,
) -> Any:
    """The answer of a delta for each text: label, score and all scores, or a value.

    Rows in memory (a pandas or polars DataFrame, a datasets.Dataset or DatasetDict, a list of dicts) give the same rows
    back, with the answers as further columns; of (texts, labels) the texts are answered. Instead of a delta and its
    texts: (delta, text) pairs, with any mix of deltas of one base. `quiet` says not to print notes.
    """
    if isinstance(delta, Delta | str | Path):
        if texts is None:
            raise TypeError("predict takes a delta and texts, or a list of (delta, text)")
        predictor = Predictor(delta, base)
        answers = _answered(predictor, texts)
        for text in predictor.notes:
            notes_of(None, quiet)(text)
        return answers
    if texts is not None:
        raise UsageError("predict takes a delta and texts, or a list of (delta, text), not both")
    return _predict_mixed(list(delta), base)


def _answered(predictor: Predictor, texts: Any) -> Any:
    """The answers, in the form of the texts."""
    if is_frame(texts):
        return _with_answers(texts, list(predictor.answers(predictor.texts_in(records_of(texts)))))
    if isinstance(texts, Mapping) and texts and all(map(is_frame, texts.values())):  # a DatasetDict
        by_split: Any = type(texts)
        return by_split({name: _answered(predictor, rows) for name, rows in texts.items()})
    if _is_labelled(texts, predictor.task):
        return list(predictor.answers(predictor.texts_in(records_of(texts))))
    if isinstance(texts, Sequence) and texts and isinstance(texts[0], Mapping):
        return list(predictor.rows_in(records_of(texts)))
    return list(predictor.answers(_texts(texts)))


def _is_labelled(texts: object, task: Task) -> bool:
    """Whether this is (texts, labels), and not a tuple of two texts, pairs or sentences."""
    if not isinstance(texts, tuple) or len(texts) != 2 or any(isinstance(part, str | tuple) for part in texts):
        return False
    words = task.form == "words" and isinstance(next(iter(texts[0]), None), str)
    return not words


def _texts(texts: object) -> Iterable[Text]:
    """The texts as a list or a stream of them; TypeError for anything else."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        kind = f"{type(texts).__module__}.{type(texts).__qualname__}"
        taken = "a text, a list of texts or of dicts, a pandas or polars frame, a datasets.Dataset or DatasetDict"
        raise TypeError(f"texts of type {kind}; predict takes {taken}")
    return map(_text, texts)


def _text(text: object) -> Text:
    if not isinstance(text, str | Sequence) or isinstance(text, bytes):
        kind = f"{type(text).__module__}.{type(text).__qualname__}"
        raise TypeError(f"a text of type {kind}; a text is a string, a pair of strings or a list of words")
    return text


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
    data: str | Path | Table | Mapping[str, Table],
    base: Base | str | None = None,
    *,
    split: str | None = None,
    positive: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    long: str | None = None,
    quiet: bool = False,
) -> Evaluation:
    """The results of a delta on labelled data: scores, results by class, and the rows that it answers wrongly.

    The data is a path, the name of a task, or rows in memory as `train` takes them; of data by split the test rows are
    scored, or those of `split`. `long` overrides what the delta reads of a text that is too long: head, head+tail or
    windows. `quiet` prints no notes; the result has them, too.
    """
    columns = {"text": text, "text_pair": text_pair, "label": label}
    result = Predictor(delta, base, long).evaluation(data, split, positive=positive, **columns)
    for note in result.notes:
        notes_of(None, quiet)(note)
    return result


def _labelled_rows(
    source: str | Path | Table | Mapping[str, Table], split: str | None, folder: str | Path | None, encoding: str | None
) -> tuple[RowSource, NamedTask | None, list[str]]:
    if isinstance(source, str | Path | DataFile):
        return sources.split_file(source, split, folder, encoding)
    if isinstance(source, Mapping):
        return split_of(source, split), None, []
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
