"""Text in, answers out: a delta worn by its base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import data, sources
from .bank import Bank, Lane, lane_of_delta
from .base import DEMO, Base, load_base
from .data import Columns
from .delta import Delta
from .encode import Encoder
from .errors import DataError, ModelError, UsageError
from .model import Model
from .rows import Rows, by_length
from .tasks import Task
from .tasks.metrics import Score
from .tensorfile import Array

CHUNK = 1024
BATCH = 64

Text = str | tuple[str, str]
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
            yield from self.task.answers(self.outputs(*_split(chunk, self.columns.text_pair is not None)))

    def evaluate(
        self, source: str | Path, split: str | None = None, folder: str | Path | None = None, **given: str | None
    ) -> tuple[int, dict[str, Score], tuple[str, ...]]:
        """Rows, every metric with its interval, and what was noticed.

        The source is a labelled file, a folder (its test file, or the split), or a named task (dev, or the split),
        whose data is looked for in `folder` first.
        """
        path, named, taken = sources.split_file(source, split, folder)
        columns = self.columns_in(path, True, **given)
        numbered = named is not None or self.delta.meta.get("name") is not None
        examples, notes = data.load_labelled(path, columns, self.task.kind, self.task.labels, numbered)
        took = f"{path}: the text is column {columns.text!r}, the label is column {columns.label!r}."
        scores = self.task.scores(self.outputs(examples.texts, examples.pairs), examples.labels)
        return len(examples), scores, (*taken, took, *notes)

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
        self.deltas = [_loaded(delta) for delta in deltas]
        self.base = base if isinstance(base, Base) else base_of(self.deltas[0], base)
        self.tasks = [Task.of_delta(delta) for delta in self.deltas]
        # Texts of one shape are tokenized together, whatever their task.
        self._shapes = [(d.meta["max_length"], d.meta["columns"].get("text_pair") is not None) for d in self.deltas]
        self._encoders = {length: Encoder(self.base, length) for length, _ in dict.fromkeys(self._shapes)}
        self._homes: list[tuple[int, int]] = []  # of each delta: its bank, and its lane there
        self._banks = self._fill_banks()

    def outputs(self, requests: Sequence[tuple[int, Text]]) -> list[Array]:
        """The head's numbers for each text, under the delta of that number; in order."""
        rows = self._rows(requests)
        out: list[Array] = [np.empty(0, np.float32)] * len(rows)
        with torch.inference_mode():
            for chosen in by_length(rows, BATCH):
                for bank, lanes in self._by_home(requests, chosen.tolist()).items():
                    own = {lane: rows.take(np.array(members)) for lane, members in lanes.items()}
                    for lane, logits in self._banks[bank].logits(own).items():
                        out_of_lane = logits.cpu().numpy()
                        for member, numbers in zip(lanes[lane], out_of_lane, strict=True):
                            out[member] = numbers
        return out

    def answers(self, requests: Iterable[tuple[int, Text]]) -> Iterator[dict[str, Any]]:
        """An answer per (number of a delta, text), as a stream."""
        source = iter(requests)
        while chunk := list(islice(source, CHUNK)):
            for (number, _), numbers in zip(chunk, self.outputs(chunk), strict=True):
                yield self.tasks[number].answers(numbers[None])[0]

    def _fill_banks(self) -> list[Bank]:
        models: dict[tuple[int, str], Model] = {}
        shared: list[tuple[Model, Lane]] = []
        alone: list[tuple[Model, Lane]] = []
        for delta, task in zip(self.deltas, self.tasks, strict=True):
            kind = (task.outputs, str(delta.meta["pool"]))
            model = models[kind] = models.get(kind) or Model(self.base, *kind)
            dense = any(index is None and values.ndim > 1 for index, values in delta.entries.values())
            # -1 stands for the shared bank until it is known to be needed; it comes last.
            self._homes.append((len(alone), 0) if dense else (-1, len(shared)))
            (alone if dense else shared).append((model, lane_of_delta(model, delta)))
        banks = [Bank(model, [lane]) for model, lane in alone]
        return [*banks, Bank([m for m, _ in shared], [lane for _, lane in shared])] if shared else banks

    def _rows(self, requests: Sequence[tuple[int, Text]]) -> Rows:
        places: dict[tuple[int, bool], list[int]] = {}
        for place, (number, _) in enumerate(requests):
            places.setdefault(self._shapes[number], []).append(place)
        parts = [
            self._encoders[length](*_split([requests[place][1] for place in own], paired))
            for (length, paired), own in places.items()
        ]
        order = np.concatenate([np.array(own) for own in places.values()])
        return Rows.join(parts).take(np.argsort(order))

    def _by_home(self, requests: Sequence[tuple[int, Text]], members: list[int]) -> dict[int, dict[int, list[int]]]:
        found: dict[int, dict[int, list[int]]] = {}
        for member in members:
            bank, lane = self._homes[requests[member][0]]
            found.setdefault(bank, {}).setdefault(lane, []).append(member)
        return found


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


def _split(texts: Sequence[Text], paired: bool) -> tuple[list[str], list[str] | None]:
    for text in texts:
        _check_text(text)
    if any(isinstance(text, str) == paired for text in texts):
        raise UsageError("the delta takes " + ("pairs of texts" if paired else "single texts, not pairs"))
    if not paired:
        return [str(text) for text in texts], None
    return [text[0] for text in texts], [text[1] for text in texts]


def _check_text(text: object) -> None:
    parts = (text,) if isinstance(text, str) else text
    if not isinstance(parts, tuple | list) or not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{text!r} is not a text or a pair of texts")
    if any("\ud800" <= character <= "\udfff" for part in parts for character in part):
        raise UsageError("a text holds half a character (a lone surrogate); it is no valid Unicode")
