"""Text in, answers out: a delta worn by its base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import data, sources
from .bank import Bank, Lane, lane_of_delta, outputs
from .base import DEMO, Base, load_base
from .delta import Delta
from .encode import Encoded, Encoder
from .errors import DataError, DeltaError, ModelError, UsageError
from .examples import Columns, Examples
from .folding import serving_form
from .model import Model
from .rows import Rows, by_length
from .sentences import split_words
from .tasks import Task
from .tasks.metrics import Score
from .tensorfile import Array

CHUNK = 1024
BATCH = 64

Text = str | Sequence[str]
"""A text, a pair of texts, a question with its context, or a sentence as words."""
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
        self.cut = 0  # how many texts were longer than the maximum length, so far
        self._encoder = _encoder(self.base, self.delta)
        model = Model(self.base, self.task.outputs, self.delta.meta["pool"])
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
            examples = _examples(self.task, chunk, self.columns.text_pair is not None)
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
        by_number = named is not None or self.delta.meta.get("name") is not None
        columns = replace(self.columns_in(path, True, **given), numbered=by_number)
        examples, notes = data.load_labelled(path, columns, self.task.kind, self.task.labels)
        took = f"{path}: the text is column {columns.text!r}, the label is column {columns.label!r}."
        encoded = self.task.encode(self._encoder, examples)
        predictions = self.task.predictions(self.outputs(encoded), encoded, examples)
        remarks = self.task.remarks(self._encoder, encoded, examples)
        return len(examples), self.task.scores(predictions, examples), (*taken, took, *notes, *remarks)

    def columns_in(self, path: str | Path, labelled: bool = False, **given: str | None) -> Columns:
        """The file's columns: those given, else those of the training file if it has them, else found anew."""
        self._require_kind(path)
        wanted = {"text": self.columns.text, "text_pair": self.columns.text_pair}
        wanted |= {"label": self.columns.label} if labelled else {}
        named = {name: column for name, column in given.items() if column is not None}
        try:
            found = self._find_columns(path, wanted | named)
        except DataError:
            found = self._columns_as_far(path, wanted, named)
        if (found.text_pair is None) != (self.columns.text_pair is None):
            need = "two text columns" if self.columns.text_pair else "one text column"
            raise DataError(f"{path}: the delta was trained on {need}; this file has other columns")
        return found

    def _require_kind(self, path: str | Path) -> None:
        """Refuse a file whose format is that of another kind of task."""
        held = data.kind_of_format(path)
        if held is not None and held != self.task.kind:
            raise DataError(f"{path} is a file for {held}, and the delta is for {self.task.kind}; give it another file")

    def _columns_as_far(self, path: str | Path, wanted: dict[str, str | None], named: dict[str, str]) -> Columns:
        """Not all columns of training are there: those that are, and the rest found anew."""
        for name, column in wanted.items():
            try:
                self._find_columns(path, {**named, name: column})
            except DataError:
                continue
            if column is not None:
                named.setdefault(name, column)
        return self._find_columns(path, named)

    def _find_columns(self, path: str | Path, given: Mapping[str, str | None]) -> Columns:
        return data.find_columns_of(self.task.kind, path, **given)

    def texts_in(self, path: str | Path, **given: str | None) -> Iterator[Text]:
        """The texts, or pairs, of a file as a stream."""
        for _, text, pair in data.stream_texts(path, self.columns_in(path, False, **given), self.task.kind):
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
        self._shapes = [_shape(task, delta) for task, delta in zip(self.tasks, self.deltas, strict=True)]
        self._encoders = {shape: _encoder(self.base, d) for shape, d in zip(self._shapes, self.deltas, strict=True)}
        self._homes: list[tuple[int, int]] = []  # of each delta: its bank, and its lane there
        self._banks = self._fill_banks()

    def outputs(self, requests: Sequence[tuple[int, Text]]) -> list[Array]:
        """The head's numbers for each text (a row, or one per token), under the delta of that number; in order."""
        return [numbers for numbers, _, _ in self._outputs(requests)]

    def answers(self, requests: Iterable[tuple[int, Text]]) -> Iterator[dict[str, Any]]:
        """An answer per (number of a delta, text), as a stream."""
        source = iter(requests)
        while chunk := list(islice(source, CHUNK)):
            for (number, _), parts in zip(chunk, self._outputs(chunk), strict=True):
                yield self.tasks[number].answers(*parts)[0]

    def _outputs(self, requests: Sequence[tuple[int, Text]]) -> list[tuple[Array, Encoded, Examples]]:
        """For each request its outputs, token rows and text."""
        read = self._read(requests)
        rows = Rows.join([encoded.rows for encoded, _ in read])
        asker = np.repeat(np.arange(len(read)), [len(encoded.rows) for encoded, _ in read])
        out: list[Array] = [np.empty(0, np.float32)] * len(rows)
        with torch.inference_mode():
            for chosen in by_length(rows, BATCH):
                for bank, lanes in self._by_home(requests, asker, chosen.tolist()).items():
                    own = {lane: rows.take(np.array(members)) for lane, members in lanes.items()}
                    for lane, logits in self._banks[bank].logits(own).items():
                        sizes = own[lane].lengths if self._banks[bank].models[lane].pool == "tokens" else None
                        for member, numbers in zip(lanes[lane], _by_row(logits.cpu().numpy(), sizes), strict=True):
                            out[member] = numbers
        ends = np.cumsum([len(encoded.rows) for encoded, _ in read]).tolist()
        joined = [np.concatenate(out[a:b]) for a, b in pairwise([0, *ends])]
        return [(numbers, encoded, examples) for numbers, (encoded, examples) in zip(joined, read, strict=True)]

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
            (alone if dense else shared).append((model, lane_of_delta(model, serving_form(delta, model))))
        banks = [Bank(model, [lane]) for model, lane in alone]
        return [*banks, Bank([m for m, _ in shared], [lane for _, lane in shared])] if shared else banks

    def _read(self, requests: Sequence[tuple[int, Text]]) -> list[tuple[Encoded, Examples]]:
        places: dict[Shape, list[int]] = {}
        for place, (number, _) in enumerate(requests):
            places.setdefault(self._shapes[number], []).append(place)
        found: dict[int, tuple[Encoded, Examples]] = {}
        for shape, own in places.items():
            task = self.tasks[requests[own[0]][0]]
            examples = _examples(task, [requests[place][1] for place in own], shape[-1])
            encoded = task.encode(self._encoders[shape], examples)
            for i, place in enumerate(own):
                found[place] = encoded.take(np.array([i])), examples.take([i])
        return [found[place] for place in range(len(requests))]

    def _by_home(
        self, requests: Sequence[tuple[int, Text]], asker: Array, members: list[int]
    ) -> dict[int, dict[int, list[int]]]:
        found: dict[int, dict[int, list[int]]] = {}
        for member in members:
            bank, lane = self._homes[requests[asker[member]][0]]
            found.setdefault(bank, {}).setdefault(lane, []).append(member)
        return found


Shape = tuple[str, int, int, bool]
"""How texts are read: form, length, stride and whether they are pairs."""


def _shape(task: Task, delta: Delta) -> Shape:
    meta = delta.meta
    return task.form, meta["max_length"], meta.get("stride", 0), meta["columns"].get("text_pair") is not None


def _encoder(base: Base, delta: Delta) -> Encoder:
    return Encoder(base, delta.meta["max_length"], delta.meta.get("stride", 0))


def _by_row(logits: Array, sizes: Array | None) -> Sequence[Array]:
    """The outputs of each row: one, or one per token."""
    return list(logits[:, None]) if sizes is None else np.split(logits, np.cumsum(sizes)[:-1])


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


def _examples(task: Task, texts: Sequence[Text], paired: bool) -> Examples:
    for text in texts:
        _check_text(text)
    if task.form == "words":
        return Examples([split_words(text) if isinstance(text, str) else tuple(text) for text in texts], None)
    if any(isinstance(text, str) == paired or (paired and len(text) != 2) for text in texts):
        need = "a question and its context" if task.form == "windows" else "pairs of texts"
        raise UsageError("the delta takes " + (need if paired else "single texts, not pairs"))
    if not paired:
        return Examples(list(texts), None)
    return Examples([text[0] for text in texts], [text[1] for text in texts])


def _check_text(text: object) -> None:
    parts = (text,) if isinstance(text, str) else text
    if not isinstance(parts, tuple | list) or not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{text!r} is not a text, a pair of texts or a list of words")
    if any("\ud800" <= character <= "\udfff" for part in parts for character in part):
        raise UsageError("a text holds half a character (a lone surrogate); it is no valid Unicode")
