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
from .rows import by_length
from .tasks import Task
from .tasks.metrics import Score
from .tensorfile import Array

CHUNK = 1024
BATCH = 64

Text = str | tuple[str, str]


class Predictor:
    """A base wearing one delta, ready for texts."""

    def __init__(self, delta: Delta | str | Path, base: Base | str | None = None) -> None:
        self.delta = delta if isinstance(delta, Delta) else Delta.load(delta)
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
            yield from self.task.answers(self.outputs(*self._split(chunk)))

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

    def _split(self, texts: Sequence[Text]) -> tuple[list[str], list[str] | None]:
        paired = self.columns.text_pair is not None
        for text in texts:
            parts = (text,) if isinstance(text, str) else text
            if not isinstance(parts, tuple | list) or not all(isinstance(part, str) for part in parts):
                raise UsageError(f"{text!r} is not a text or a pair of texts")
            if any("\ud800" <= character <= "\udfff" for part in parts for character in part):
                raise UsageError("a text holds half a character (a lone surrogate); it is no valid Unicode")
        if any(isinstance(text, str) == paired for text in texts):
            raise UsageError("the delta takes " + ("pairs of texts" if paired else "single texts, not pairs"))
        if not paired:
            return [str(text) for text in texts], None
        return [text[0] for text in texts], [text[1] for text in texts]


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
    delta: Delta | str | Path, texts: Iterable[Text] | str, base: Base | str | None = None
) -> list[dict[str, Any]]:
    """What a delta says of each text: label, score and all scores, or a value."""
    return list(Predictor(delta, base).answers([texts] if isinstance(texts, str) else texts))
