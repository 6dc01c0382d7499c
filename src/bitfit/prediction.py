"""Text in, answers out: a delta worn by its base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import data
from .bank import Bank, lane_of_delta
from .base import DEMO, Base, load_base
from .data import Columns
from .delta import Delta
from .encode import Encoder
from .errors import DataError, ModelError, UsageError
from .model import Model
from .resident import Host, Text, split_texts
from .rows import Rows, by_length
from .tasks import Task
from .tasks.metrics import Score
from .tensorfile import Array

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
        self.columns = Columns(**self.delta.meta["columns"])
        self._encoder = Encoder(self.base, self.delta.meta["max_length"])
        model = Model(self.base, self.task.outputs, self.delta.meta["pool"])
        self._bank = Bank(model, [lane_of_delta(model, self.delta)])

    def outputs(self, texts: Sequence[str], pairs: Sequence[str] | None) -> Array:
        """The head's numbers for each text, in order."""
        rows = self._encoder(texts, pairs)
        out = np.zeros((len(rows), self.task.outputs), np.float32)
        with torch.inference_mode():
            for chosen in by_length(rows, BATCH):
                out[chosen] = self._bank.logits({0: rows.take(chosen)})[0].cpu().numpy()
        return out

    def answers(self, texts: Iterable[Text]) -> Iterator[dict[str, Any]]:
        """An answer per text, as a stream: any number of texts in bounded memory."""
        source = iter(texts)
        while chunk := list(islice(source, CHUNK)):
            yield from self.task.answers(self.outputs(*split_texts(chunk, self.columns.text_pair is not None)))

    def evaluate(self, path: str | Path, **given: str | None) -> tuple[int, dict[str, Score], tuple[str, ...]]:
        """Rows, every metric with its interval, and what was noticed, on a labelled file or a folder's test file."""
        if Path(path).is_dir():
            files, _ = data.find_files(path)
            path = files.test or files.dev or files.train
        columns = self.columns_in(path, True, **given)
        examples, notes = data.load_labelled(path, columns, self.task.kind, self.task.labels)
        took = f"{path}: the text is column {columns.text!r}, the label is column {columns.label!r}."
        scores = self.task.scores(self.outputs(examples.texts, examples.pairs), examples.labels)
        return len(examples), scores, (took, *notes)

    def columns_in(self, path: str | Path, labelled: bool = False, **given: str | None) -> Columns:
        """The file's columns: those given, else those of the training file if it has them, else found anew."""
        if any(given.values()):
            found = data.find_columns(path, **given)
        else:
            try:
                wanted = self.columns
                label = {"label": wanted.label} if labelled else {}
                found = data.find_columns(path, text=wanted.text, text_pair=wanted.text_pair, **label)
            except DataError:
                found = data.find_columns(path)
        if (found.text_pair is None) != (self.columns.text_pair is None):
            need = "two text columns" if self.columns.text_pair else "one text column"
            raise DataError(f"{path}: the delta was trained on {need}; this file has other columns")
        return found

    def texts_in(self, path: str | Path, **given: str | None) -> Iterator[Text]:
        """The texts, or pairs, of a file as a stream."""
        for _, text, pair in data.stream_texts(path, self.columns_in(path, False, **given)):
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
        """The head's numbers for each text, under the delta of that number; in order."""
        rows = self._rows(requests)
        out: list[Array] = [np.empty(0, np.float32)] * len(rows)
        for chosen in by_length(rows, BATCH):
            batch = [
                (self.residents[requests[place][0]], rows.take(chosen[i : i + 1])) for i, place in enumerate(chosen)
            ]
            for place, numbers in zip(chosen, self._host.outputs(batch), strict=True):
                out[place] = numbers[0]
        return out

    def answers(self, requests: Iterable[tuple[int, Text]]) -> Iterator[dict[str, Any]]:
        """An answer per (number of a delta, text), as a stream."""
        source = iter(requests)
        while chunk := list(islice(source, CHUNK)):
            for (number, _), numbers in zip(chunk, self.outputs(chunk), strict=True):
                yield self.residents[number].task.answers(numbers[None])[0]

    def _rows(self, requests: Sequence[tuple[int, Text]]) -> Rows:
        # Texts of one shape are tokenized together, whatever their task.
        places: dict[tuple[int, bool], list[int]] = {}
        for place, (number, _) in enumerate(requests):
            resident = self.residents[number]
            places.setdefault((resident.max_length, resident.paired), []).append(place)
        parts = [
            self._host.encode(self.residents[requests[own[0]][0]], [requests[place][1] for place in own])
            for own in places.values()
        ]
        order = np.concatenate([np.array(own) for own in places.values()])
        return Rows.join(parts).take(np.argsort(order))


def base_of(delta: Delta, spec: str | None) -> Base:
    """The base a delta asks for, or the one the user names."""
    if spec is not None:
        return load_base(spec)
    name = str(delta.meta["base"])
    if name != DEMO and not delta.meta["hub"]:
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
