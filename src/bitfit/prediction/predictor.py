"""Text in, answers out: a delta worn by its base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array
from ..bank.bank import Bank, outputs
from ..bank.lanes import lane_of_delta
from ..data import loading, sources
from ..data.columns import Sample
from ..data.examples import Columns
from ..delta.delta import Delta
from ..errors import DataError, DeltaError, ModelError, UsageError
from ..model.base import DEMO, Base, load_base
from ..model.rows import by_length
from ..model.task_model import Model
from ..tasks import Task, Text
from ..tasks.encode import Encoded, Encoder
from ..tasks.metrics import Score
from .host import Host, Reading, as_examples

CHUNK = 1024
BATCH = 64

Source = Delta | str | Path
"""A delta, or its file."""


class Predictor:
    """A base wearing one delta, ready for texts."""

    def __init__(self, delta: Source, base: Base | str | None = None) -> None:
        self.delta = _loaded(delta)
        self.base = base if isinstance(base, Base) else base_of(self.delta, base)
        self.delta.check(self.base)
        self.task = Task.of_delta(self.delta)
        self.columns = self.delta.meta.columns
        self.cut = 0  # how many texts were longer than the maximum length, so far
        self._encoder = _encoder(self.base, self.delta)
        model = Model(self.base, self.task.outputs, self.delta.meta.pool)
        self._bank = Bank(model, [lane_of_delta(model, self.delta)])

    def outputs(self, encoded: Encoded) -> Array:
        """The head's numbers for each text, or each token of the texts, in order."""
        self.cut += encoded.rows.cut
        out = outputs(self._bank, 0, encoded.rows, by_length(encoded.rows, BATCH))
        if not np.isfinite(out).all():
            raise DeltaError("the delta's values are so large that its answers are no numbers; train it anew")
        return out

    def answers(self, texts: Iterable[Text]) -> Iterator[dict[str, Any]]:
        """An answer per text, as a stream: any number of texts in bounded memory."""
        source = iter(texts)
        while chunk := list(islice(source, CHUNK)):
            examples = as_examples(self.task, chunk, self.columns.text_pair is not None)
            encoded = self.task.encode(self._encoder, examples)
            yield from self.task.answers(self.outputs(encoded), encoded, examples)

    def evaluate(
        self, source: str | Path, split: str | None = None, folder: str | Path | None = None, **given: str | None
    ) -> tuple[int, dict[str, Score], tuple[str, ...]]:
        """Rows, every metric with its interval, and what was noticed.

        The source is a labelled file, a folder (its test file, or the split), or a named task (dev, or the split),
        whose data is looked for in `folder` first.
        """
        path, named, taken = sources.split_file(source, split, folder)
        if named is not None and named.kind != self.task.kind:
            raise DataError(f"{named.name} is a task of {named.kind}, and the delta is for {self.task.kind}")
        by_number = named is not None or self.delta.meta.name is not None
        sample = Sample.of(path)
        columns = replace(self.columns_in(sample, True, **given), numbered=by_number)
        examples, notes = loading.load_labelled(sample, columns, self.task.kind, self.task.labels)
        took = f"{path}: the text is column {columns.text!r}, the label is column {columns.label!r}."
        encoded = self.task.encode(self._encoder, examples)
        predictions = self.task.predictions(self.outputs(encoded), encoded, examples)
        remarks = self.task.remarks(self._encoder, encoded, examples)
        return len(examples), self.task.scores(predictions, examples), (*taken, took, *notes, *remarks)

    def columns_in(self, source: str | Path | Sample, labelled: bool = False, **given: str | None) -> Columns:
        """The file's columns: those given, else those of the training file if it has them, else found anew."""
        sample = Sample.of(source)
        self._require_kind(sample.path)
        named = {role: column for role, column in given.items() if column is not None}
        trained = {"text": self.columns.text, "text_pair": self.columns.text_pair}
        if labelled:
            trained["label"] = self.columns.label
        for role, column in trained.items():
            if column is None or role in named or column in named.values():
                continue
            if loading.has_column(sample, column):
                named[role] = column
        found = loading.find_columns_of(self.task.kind, sample, **named)
        if (found.text_pair is None) != (self.columns.text_pair is None):
            need = "two text columns" if self.columns.text_pair else "one text column"
            raise DataError(f"{sample.path}: the delta was trained on {need}; this file has other columns")
        return found

    def _require_kind(self, path: str | Path) -> None:
        """Refuse a file whose format is that of another kind of task."""
        held = loading.kind_of_format(path)
        if held is not None and held != self.task.kind:
            raise DataError(f"{path} is a file for {held}, and the delta is for {self.task.kind}; give it another file")

    def texts_in(self, path: str | Path, **given: str | None) -> Iterator[Text]:
        """The texts, or pairs, of a file as a stream."""
        sample = Sample.of(path)
        for _, text, pair in loading.stream_texts(sample, self.columns_in(sample, False, **given), self.task.kind):
            yield text if pair is None else (text, pair)

    def texts_of(self, words: Sequence[str]) -> list[Text]:
        """Texts as a command line gives them: a delta of pairs takes two each."""
        if self.columns.text_pair is None:
            return list(words)
        if len(words) % 2:
            raise UsageError("the delta takes pairs of texts: give an even number of them")
        return list(zip(words[::2], words[1::2], strict=True))


class MixedPredictor:
    """A base wearing many deltas at once: every text is answered under the delta it names.

    The deltas may differ in task, labels, head, pooling and length. Texts of different tasks share the passes through
    the encoder. Only a delta with whole matrices, which has nothing to share, is a bank of its own.
    """

    def __init__(self, deltas: Sequence[Source], base: Base | str | None = None) -> None:
        first = _loaded(deltas[0])
        self.base = base if isinstance(base, Base) else base_of(first, base)
        self._host = Host(self.base)
        # One delta at a time: as residents their values exist once.
        self.residents = [self._host.admit(_loaded(delta)) for delta in (first, *deltas[1:])]

    def outputs(self, requests: Sequence[tuple[int, Text]]) -> list[Array]:
        """The head's numbers for each text (a row, or one per token), under the delta of that number; in order."""
        return self._outputs(requests, self._read(requests))

    def answers(self, requests: Iterable[tuple[int, Text]]) -> Iterator[dict[str, Any]]:
        """An answer per (number of a delta, text), as a stream."""
        source = iter(requests)
        while chunk := list(islice(source, CHUNK)):
            readings = self._read(chunk)
            for (number, _), reading, numbers in zip(chunk, readings, self._outputs(chunk, readings), strict=True):
                yield self.residents[number].answer(reading, numbers)

    def _read(self, requests: Sequence[tuple[int, Text]]) -> list[Reading]:
        places: dict[object, list[int]] = {}
        for place, (number, _) in enumerate(requests):
            places.setdefault(self.residents[number].shape, []).append(place)
        found: dict[int, Reading] = {}
        for own in places.values():
            resident = self.residents[requests[own[0]][0]]
            found |= zip(own, self._host.read(resident, [requests[place][1] for place in own]), strict=True)
        return [found[place] for place in range(len(requests))]

    def _outputs(self, requests: Sequence[tuple[int, Text]], readings: Sequence[Reading]) -> list[Array]:
        out: dict[int, Array] = {}
        order = np.argsort([-len(reading.rows.ids) for reading in readings], kind="stable").tolist()
        for i in range(0, len(order), BATCH):
            chosen = order[i : i + BATCH]
            batch = [(self.residents[requests[place][0]], readings[place].rows) for place in chosen]
            out |= zip(chosen, self._host.outputs(batch), strict=True)
        return [out[place] for place in range(len(requests))]


def _encoder(base: Base, delta: Delta) -> Encoder:
    return Encoder(base, delta.meta.max_length, delta.meta.stride)


def base_of(delta: Delta, spec: str | None) -> Base:
    """The base a delta asks for, or the one the user names."""
    if spec is not None:
        return load_base(spec)
    name = delta.meta.base
    if name != DEMO and not delta.meta.hub:
        raise ModelError(f"the delta was trained on the model folder {name}; say where it is with --base FOLDER")
    try:
        return load_base(name)
    except ModelError as error:
        raise ModelError(
            f"the delta needs its base {name}, which is not at hand; pass --base FOLDER ({error})"
        ) from error


def predict(
    delta: Source | Iterable[tuple[Source, Text]],
    texts: Iterable[Text] | str | None = None,
    base: Base | str | None = None,
) -> list[dict[str, Any]]:
    """What a delta says of each text: label, score and all scores, or a value.

    Instead of a delta and its texts: (delta, text) pairs, with any mix of deltas of one base.
    """
    if isinstance(delta, Delta | str | Path):
        if texts is None:
            raise UsageError("predict takes a delta and texts, or a list of (delta, text)")
        return list(Predictor(delta, base).answers([texts] if isinstance(texts, str) else texts))
    if texts is not None:
        raise UsageError("predict takes a delta and texts, or a list of (delta, text), not both")
    return _predict_mixed(list(delta), base)


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


def _loaded(source: Source) -> Delta:
    return source if isinstance(source, Delta) else Delta.load(source)
