"""Deltas in memory that answer together: a resident is a lane, and every batch makes a bank of the lanes in it.

So a delta's values exist once, a resident is removed by dropping the reference to it, and a caller that still holds it
can still use it.
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
from ..model.anatomy import PAIR
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
    """Inputs of a task as token rows; a long input may have several."""

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
    long: str = HEAD_OF_TEXT  # what is read of a text that is too long

    @property
    def shape(self) -> tuple[str, int, int, bool, str, bool]:
        """The settings of its encoder; texts of residents with equal settings are encoded together."""
        return self.task.form, self.max_length, self.stride, self.paired, self.long, self.apart

    @property
    def apart(self) -> bool:
        """Whether it encodes the two texts of a pair one by one."""
        return self.model.pool == PAIR

    def answers(self, reading: Reading, outputs: Array) -> list[dict[str, Any]]:
        """The answers in the outputs for some inputs."""
        return self.task.answers(outputs, reading.encoded, reading.examples)

    def answer(self, reading: Reading, outputs: Array) -> dict[str, Any]:
        """The answer in the outputs for one input."""
        return self.answers(reading, outputs)[0]

    @property
    def bytes(self) -> int:
        """The size of its values and their indices."""
        indices = (slot.index.nbytes for slot in self.lane.slots if slot.index is not None)
        return self.lane.start.nbytes + sum(indices)

    @cached_property
    def dense(self) -> bool:
        """Whether it replaces entire matrices of the base."""
        for slot in self.lane.slots:
            is_matrix = slot.index is None and len(slot.shape) > 1
            if is_matrix and slot.name in self.model.base.parameters and slot.name not in self.model.head:
                return True
        return False


class Host:
    """A base that admits deltas and computes any mix of them. Threads may share it."""

    def __init__(self, base: Base) -> None:
        self.base = base
        base.fingerprint, base.parameters, base.anatomy  # noqa: B018  cached before threads replace parameters
        self._models: WeakValueDictionary[tuple[int, str], Model] = WeakValueDictionary()
        self._shapes: WeakValueDictionary[tuple[Slot, ...], Lane] = WeakValueDictionary()
        self._packed: Packed | None = None
        self._admitting = Lock()
        self._per_thread = local()  # a tokenizer has settings, so threads cannot share one

    def admit(self, delta: Delta, fold: bool = True) -> Resident:
        """Check a delta against the base and its task, and make a resident of it.

        With `fold` the delta is folded: it takes less memory, and its outputs differ by rounding.
        """
        task = Task.of_delta(delta)
        meta = delta.meta
        longest = self.base.max_length
        if not 3 <= meta.max_length <= longest:
            raise DeltaError(f"the delta reads {meta.max_length} tokens; its base takes 3 to {longest}")
        with self._admitting:
            model = self._model(task.outputs, meta.pool)
            if fold:
                delta = serving_form(delta, model)
            lane = self._with_shared_slots(lane_of_delta(model, delta))
        return Resident(task, model, lane, meta.max_length, meta.stride, meta.pairs, meta.long)

    def plain(self) -> Resident:
        """The base with an empty head, for health checks."""
        model = Model(self.base, 1)
        lane = lane_to_train(model, select(model.anatomy, "none"), head="frozen")
        return Resident(Task.of("regression", ()), model, lane, 8, 0, False)

    def encode(self, resident: Resident, texts: Sequence[Text]) -> Reading:
        """Texts encoded for the resident's task; UsageError or DataError for texts that it does not accept."""
        examples = as_examples(resident.task, texts, resident.paired)
        return Reading(resident.task.encode(self.encoder(resident), examples), examples)

    def encoder(self, resident: Resident) -> Encoder:
        """This thread's tokenizer with the lengths of a resident."""
        if not hasattr(self._per_thread, "encoder"):
            self._per_thread.encoder = Encoder(self.base)
        encoder: Encoder = self._per_thread.encoder
        encoder.cut_at(resident.max_length, resident.stride, resident.long, resident.apart)
        return encoder

    def read(self, resident: Resident, texts: Sequence[Text]) -> list[Reading]:
        """The reading of each text."""
        together = self.encode(resident, texts)
        if len(texts) == 1:  # the usual request of a service: nothing to split
            return [together]
        return [together.take([i]) for i in range(len(texts))]

    def compute(self, rows: Mapping[Resident, Rows]) -> dict[Resident, Array]:
        """The logits of all token rows of each resident, in batches of similar length across the residents."""
        residents = list(rows)
        lengths = np.concatenate([rows[resident].lengths for resident in residents])
        windows = np.concatenate([rows[resident].window_counts for resident in residents])
        owners = np.repeat(np.arange(len(residents)), [len(rows[resident]) for resident in residents])
        numbers = np.concatenate([np.arange(len(rows[resident])) for resident in residents])
        order = np.argsort(-lengths, kind="stable")
        out: dict[Resident, Array] = {}
        for batch in in_batches(order, windows[order], BATCH):
            chosen = {residents[k]: numbers[batch[owners[batch] == k]] for k in np.unique(owners[batch])}
            computed = self.outputs([(resident, rows[resident].take(some)) for resident, some in chosen.items()])
            for (resident, some), logits in zip(chosen.items(), computed, strict=True):
                if resident not in out:
                    count = resident.model.output_count(rows[resident])
                    out[resident] = np.zeros((count, logits.shape[1]), np.float32)
                out[resident][resident.model.output_index(rows[resident], some)] = logits
        return out

    def outputs(self, batch: Sequence[tuple[Resident, Rows]]) -> list[Array]:
        """The logits of each item of the batch, under its resident: a row per token row or per token."""
        members: dict[Resident, list[int]] = {}
        for i, (resident, _) in enumerate(batch):
            members.setdefault(resident, []).append(i)
        out: list[Array] = [np.empty(0, np.float32)] * len(batch)
        for residents in _banks(members):
            models = [resident.model for resident in residents]
            bank = Bank(models, [resident.lane for resident in residents], packed=self._packed_path(models[0]))
            by_lane: dict[int, list[Rows]] = {}
            for k, resident in enumerate(residents):
                by_lane[k] = [batch[i][1] for i in members[resident]]
            joined = {k: rows[0] if len(rows) == 1 else Rows.join(rows) for k, rows in by_lane.items()}
            with torch.inference_mode():
                logits = bank.logits(joined)
            for k, resident in enumerate(residents):
                ends = np.cumsum([resident.model.output_count(rows) for rows in by_lane[k]])
                by_item = np.split(logits[k].cpu().numpy(), ends[:-1])
                for i, item_logits in zip(members[resident], by_item, strict=True):
                    out[i] = item_logits
        return out

    def _model(self, outputs: int, pool: str) -> Model:
        """The model with this head; residents with the same head share one."""
        key = (outputs, pool)
        model = self._models.get(key) or Model(self.base, outputs, pool)
        return self._models.setdefault(key, model)

    def _with_shared_slots(self, lane: Lane) -> Lane:
        """The lane with the slots of an equal lane: thousands of deltas have the same slots, which exist once."""
        if any(slot.index is not None for slot in lane.slots):
            return lane
        known = self._shapes.get(lane.slots)
        shared = lane if known is None else replace(lane, slots=known.slots)
        self._shapes[shared.slots] = shared  # the newest lane keeps the entry alive longest
        return shared

    def _packed_path(self, model: Model) -> Packed | None:
        if self._packed is None and Packed.supports(model):
            self._packed = Packed(model)
        return self._packed


def _banks(residents: Iterable[Resident]) -> list[list[Resident]]:
    """The residents of each bank: one bank for each dense resident, and one for all others.

    In a shared bank, the matrices of a dense resident would be copied for every lane.
    """
    shared = []
    banks = []
    for resident in residents:
        if resident.dense:
            banks.append([resident])
        else:
            shared.append(resident)
    if shared:
        banks.insert(0, shared)
    return banks


def as_examples(task: Task, texts: Sequence[Text], paired: bool) -> Examples:
    """Texts as examples of a task; UsageError for a text that it does not accept."""
    for text in texts:
        _check_text(text)
        if reason := task.complaint(text, paired):
            raise UsageError(reason)
    return task.examples(texts, paired)


def _check_text(text: object) -> None:
    strings = (text,) if isinstance(text, str) else text
    if not isinstance(strings, tuple | list) or not all(isinstance(string, str) for string in strings):
        raise UsageError(f"{text!r} is not a text, a pair of texts or a list of words")
    if any(SURROGATE.search(string) for string in strings):
        raise UsageError("a text contains a lone surrogate (half a character), which is not valid Unicode")
