"""Deltas at hand in memory, answering together: a resident is a lane, a batch is a bank of the lanes it names.

A bank that lives for one batch gathers the rows it needs, as a lasting one would. So a delta's values exist once, a
resident is replaced or dropped by dropping it, and whoever still holds one can still ask under it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock, local
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..arrays import Array
from ..bank.bank import Bank
from ..bank.lanes import Lane, Slot, lane_of_delta, lane_to_train
from ..bank.packed import Packed
from ..data.examples import Examples
from ..delta.delta import Delta
from ..delta.fold import serving_form
from ..delta.meta import HEAD_OF_TEXT
from ..errors import DeltaError, UsageError
from ..model.base import Base
from ..model.language import select
from ..model.rows import Rows, in_batches
from ..model.task_model import Model
from ..tasks import Task, Text
from ..tasks.encode import Encoded, Encoder

BATCH = 64  # windows of one pass


SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Reading:
    """Inputs as a task reads them: in token rows, several for an input that is long and must be read whole."""

    encoded: Encoded
    examples: Examples

    @property
    def rows(self) -> Rows:
        """The token rows."""
        return self.encoded.rows

    def take(self, inputs: Sequence[int]) -> Reading:
        """Some of the inputs."""
        return Reading(self.encoded.take(np.array(inputs)), self.examples.take(inputs))


@dataclass(frozen=True, eq=False)
class Resident:
    """A delta ready to answer."""

    task: Task
    model: Model
    lane: Lane
    max_length: int
    stride: int
    paired: bool  # whether it takes two texts
    long: str = HEAD_OF_TEXT  # what of a text that is too long is read

    @property
    def shape(self) -> tuple[str, int, int, bool, str]:
        """How it reads: texts of one shape are read together, whatever their task."""
        return self.task.form, self.max_length, self.stride, self.paired, self.long

    def answers(self, reading: Reading, outputs: Array) -> list[dict[str, Any]]:
        """What the outputs for some inputs mean."""
        return self.task.answers(outputs, reading.encoded, reading.examples)

    def answer(self, reading: Reading, outputs: Array) -> dict[str, Any]:
        """What the outputs for one input mean."""
        return self.answers(reading, outputs)[0]

    @property
    def bytes(self) -> int:
        """What its values and their indices weigh."""
        indices = (slot.index.nbytes for slot in self.lane.slots if slot.index is not None)
        return self.lane.start.nbytes + sum(indices)

    @cached_property
    def dense(self) -> bool:
        """Whether it wears whole matrices of the base."""
        whole = (slot for slot in self.lane.slots if slot.index is None and len(slot.shape) > 1)
        return any(slot.name in self.model.base.parameters and slot.name not in self.model.head for slot in whole)


class Host:
    """A base that takes on deltas and answers for any mix of them. Threads may share it."""

    def __init__(self, base: Base) -> None:
        self.base = base
        base.fingerprint, base.parameters, base.anatomy  # noqa: B018  found once, before threads put tensors in their places
        self._models: WeakValueDictionary[tuple[int, str], Model] = WeakValueDictionary()
        self._shapes: WeakValueDictionary[tuple[Slot, ...], Lane] = WeakValueDictionary()
        self._packed: Packed | None = None
        self._admitting = Lock()
        self._own = local()  # a tokenizer has settings, so each thread has its own

    def admit(self, delta: Delta, fold: bool = True) -> Resident:
        """Check a delta against the base and against its own task, and make it ready.

        With `fold` biases that others can stand for are left out: less memory, and outputs that differ by rounding.
        """
        task, meta = Task.of_delta(delta), delta.meta
        longest = self.base.max_length
        if not 3 <= meta.max_length <= longest:
            raise DeltaError(f"the delta reads {meta.max_length} tokens, its base takes 3 to {longest}")
        with self._admitting:
            model = self._model(task.outputs, meta.pool)
            lane = self._alike(lane_of_delta(model, serving_form(delta, model) if fold else delta))
        return Resident(task, model, lane, meta.max_length, meta.stride, meta.pairs, meta.long)

    def plain(self) -> Resident:
        """The base with an empty head: for asking whether it works at all."""
        model = Model(self.base, 1)
        lane = lane_to_train(model, select(model.anatomy, "none"), head="frozen")
        return Resident(Task.of("regression", ()), model, lane, 8, 0, False)

    def encode(self, resident: Resident, texts: Sequence[Text]) -> Reading:
        """Texts as the resident's task reads them; UsageError or DataError for those it cannot."""
        examples = as_examples(resident.task, texts, resident.paired)
        return Reading(resident.task.encode(self.encoder(resident), examples), examples)

    def encoder(self, resident: Resident) -> Encoder:
        """This thread's tokenizer with the lengths of a resident."""
        if not hasattr(self._own, "encoder"):
            self._own.encoder = Encoder(self.base)
        encoder: Encoder = self._own.encoder
        encoder.cut_at(resident.max_length, resident.stride, resident.long)
        return encoder

    def read(self, resident: Resident, texts: Sequence[Text]) -> list[Reading]:
        """Each text by itself, as `encode` reads it."""
        together = self.encode(resident, texts)
        if len(texts) == 1:  # the usual request of a service: nothing to take apart
            return [together]
        return [together.take([i]) for i in range(len(texts))]

    def compute(self, rows: Mapping[Resident, Rows]) -> dict[Resident, Array]:
        """The head's numbers for all token rows of each resident, in batches of like length across the residents."""
        residents = list(rows)
        lengths = np.concatenate([rows[resident].lengths for resident in residents])
        windows = np.concatenate([rows[resident].window_counts for resident in residents])
        owners = np.repeat(np.arange(len(residents)), [len(rows[resident]) for resident in residents])
        numbers = np.concatenate([np.arange(len(rows[resident])) for resident in residents])
        order = np.argsort(-lengths, kind="stable")
        out: dict[Resident, Array] = {}
        for batch in in_batches(order, windows[order], BATCH):
            chosen = {residents[k]: numbers[batch[owners[batch] == k]] for k in np.unique(owners[batch])}
            found = self.outputs([(resident, rows[resident].take(own)) for resident, own in chosen.items()])
            for (resident, own), logits in zip(chosen.items(), found, strict=True):
                if resident not in out:
                    count = resident.model.output_count(rows[resident])
                    out[resident] = np.zeros((count, logits.shape[1]), np.float32)
                out[resident][resident.model.output_places(rows[resident], own)] = logits
        return out

    def outputs(self, batch: Sequence[tuple[Resident, Rows]]) -> list[Array]:
        """The head's numbers, a row for each token row or for each token, each under its resident."""
        members: dict[Resident, list[int]] = {}
        for place, (resident, _) in enumerate(batch):
            members.setdefault(resident, []).append(place)
        out: list[Array] = [np.empty(0, np.float32)] * len(batch)
        for residents in _together(members):
            bank = Bank(
                [r.model for r in residents], [r.lane for r in residents], packed=self._fast(residents[0].model)
            )
            own = []
            for resident in residents:
                own.append([batch[place][1] for place in members[resident]])
            with torch.inference_mode():
                found = bank.logits({k: rows[0] if len(rows) == 1 else Rows.join(rows) for k, rows in enumerate(own)})
            for k, resident in enumerate(residents):
                ends = np.cumsum([resident.model.output_count(rows) for rows in own[k]])
                for place, numbers in zip(members[resident], np.split(found[k].cpu().numpy(), ends[:-1]), strict=True):
                    out[place] = numbers
        return out

    def _model(self, outputs: int, pool: str) -> Model:
        kind = (outputs, pool)
        model = self._models.get(kind) or Model(self.base, outputs, pool)
        return self._models.setdefault(kind, model)

    def _alike(self, lane: Lane) -> Lane:
        # Thousands of deltas have their values in the same places: what says where is held once.
        if any(slot.index is not None for slot in lane.slots):
            return lane
        known = self._shapes.get(lane.slots)
        shared = lane if known is None else replace(lane, slots=known.slots)
        self._shapes[shared.slots] = shared  # the newest keeps the entry alive longest
        return shared

    def _fast(self, model: Model) -> Packed | None:
        if self._packed is None and Packed.supports(model):
            self._packed = Packed(model)
        return self._packed


def _together(residents: Iterable[Resident]) -> list[list[Resident]]:
    """Which residents share a bank: all but those of whole matrices, which would be copied to lie side by side."""
    every = list(residents)
    shared = [resident for resident in every if not resident.dense]
    return [*([shared] if shared else []), *([resident] for resident in every if resident.dense)]


def as_examples(task: Task, texts: Sequence[Text], paired: bool) -> Examples:
    """Texts as a task takes them; UsageError for what it does not take."""
    for text in texts:
        _check_text(text)
        if why := task.complaint(text, paired):
            raise UsageError(why)
    return task.examples(texts, paired)


def _check_text(text: object) -> None:
    parts = (text,) if isinstance(text, str) else text
    if not isinstance(parts, tuple | list) or not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{text!r} is not a text, a pair of texts or a list of words")
    if any(SURROGATE.search(part) for part in parts):
        raise UsageError("a text holds half a character (a lone surrogate); it is no valid Unicode")
