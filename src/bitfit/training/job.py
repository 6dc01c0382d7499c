"""What all trials of a run share: the base, the task and its data, each part encoded once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..bank.bank import Bank
from ..data.examples import Dataset, Examples
from ..data.named import NamedTask
from ..data.on_disk import NodeRows
from ..delta.meta import HEAD_OF_TEXT
from ..errors import UsageError
from ..model.anatomy import PAIR
from ..model.base import Base
from ..model.rows import Rows, by_length
from ..tasks import Task
from ..tasks.encode import Encoded, Encoder
from ..terminal.progress import Say
from .compute import pick_device
from .group import Group
from .stop import Stop

PREFIX_BYTES = 1 << 30  # memory for the outputs of frozen layers
PREFIX_ROWS = 64  # rows of a batch in which these outputs are computed
TRAIN_SCORE_ROWS = 1000


@dataclass(frozen=True, eq=False)
class Part:
    """Examples as the bank takes them, with the targets of the loss.

    The same data is indexed in three ways. An example is a row of the file. A token row is a text, or a window of a
    long one; batches are drawn from token rows. An output belongs to a token row, or to a single token where the head
    sees every token; outputs and targets have the same indices.
    """

    examples: Examples
    encoded: Encoded
    targets: Tensor
    by_token: bool  # whether there is an output per token

    def __len__(self) -> int:
        """The number of token rows: one per text, or one per window of a long text."""
        return len(self.encoded.rows)

    @property
    def rows(self) -> Rows:
        """The token rows."""
        return self.encoded.rows

    def rows_of(self, examples: Array) -> Array:
        """The indices of the token rows of some examples."""
        return self.encoded.rows_of(examples)

    def outputs_of(self, examples: Array) -> Array:
        """The indices of the outputs of some examples."""
        rows = self.rows_of(examples)
        return self.rows.tokens(rows) if self.by_token else rows

    def take(self, examples: Array) -> Part:
        """The part of these examples alone, indexed from 0."""
        targets = self.targets[torch.from_numpy(self.outputs_of(examples))]
        return Part(self.examples.take(examples.tolist()), self.encoded.take(examples), targets, self.by_token)

    def with_rows(self, rows: Rows) -> Part:
        """The same part with other rows, such as rows that carry the outputs of the frozen layers."""
        return replace(self, encoded=replace(self.encoded, rows=rows))


@dataclass(frozen=True, eq=False)
class Prefix:
    """The bank whose frozen layers' outputs are stored with the rows of a job."""

    bank: Bank
    depths: tuple[int, ...]  # the number of frozen layers of each lane


@dataclass(frozen=True, eq=False)
class Job:
    """The base, the task and its encoded data."""

    base: Base
    task: Task
    dataset: Dataset
    encoder: Encoder
    train: Part
    dev: Part
    stop: Stop
    device: torch.device
    named: NamedTask | None = None
    prefix: Prefix | None = None
    group: Group = field(default_factory=Group)  # the workers that train together
    masks: dict[object, Any] = field(default_factory=dict)  # learned in earlier passes, for later ones (diff_pruning)

    def apart(self, rows: NodeRows | None = None) -> Job:
        """The same job with the two texts of each pair encoded one by one, for the pool "pair"."""
        encoder = self.task.encoder(self.base, self.encoder.max_length, apart=True)
        train = _encode_train(self.task, encoder, self.dataset.train, self.device, rows, "train-apart")
        dev = encode_part(self.task, encoder, self.dataset.dev, self.device)
        return replace(self, encoder=encoder, train=train, dev=dev)

    @cached_property
    def tests(self) -> dict[str, Part]:
        """The test part and the further parts to score, by name; encoded when first needed."""
        named: dict[str, Examples] = {}
        if self.dataset.test is not None:
            named["test"] = self.dataset.test
        named.update(self.dataset.more)
        return {name: encode_part(self.task, self.encoder, examples, self.device) for name, examples in named.items()}

    @cached_property
    def train_sample(self) -> Part:
        """At most TRAIN_SCORE_ROWS training examples, to score on."""
        chosen: Array = np.random.default_rng(0).permutation(len(self.train.examples))[:TRAIN_SCORE_ROWS]
        return self.train.take(chosen)

    def with_prefix(self, bank: Bank) -> Job:
        """The job with the outputs of the bank's frozen layers stored with its rows, as far as memory allows.

        They are computed in batches that depend on the rows alone, so that a resumed run, which computes them again,
        sees the same bits. A second call computes only what changed: lanes whose number of frozen layers has grown.
        """
        depths = tuple(bank.depths)
        if self.prefix is None or self.prefix.bank is not bank:
            job = self._with_layer_outputs(bank, PREFIX_BYTES, bank.frozen, None)
            stored = [bank.frozen] * len(depths)
        elif self.prefix.depths == depths:
            return self
        else:
            job, stored = self, list(self.prefix.depths)
        for k, depth in enumerate(depths):
            if depth != stored[k]:
                job = job._with_layer_outputs(bank, PREFIX_BYTES // len(depths), depth, k)
        return replace(job, prefix=Prefix(bank, depths))

    def _with_layer_outputs(self, bank: Bank, memory: int, layers: int, k: int | None) -> Job:
        """The job with the outputs of the first `layers` of lane k (None: of the base), where `memory` suffices."""
        parts = []
        for part in (self.train, self.dev):
            size = bank.prefix_bytes(part.rows, layers)
            if size <= memory:
                memory -= size
                part = part.with_rows(self._rows_with_outputs(bank, part.rows, k))
            parts.append(part)
        return replace(self, train=parts[0], dev=parts[1])

    def _rows_with_outputs(self, bank: Bank, rows: Rows, k: int | None) -> Rows:
        batches = self.stop.checked(by_length(rows, PREFIX_ROWS))
        with torch.no_grad():
            return bank.with_prefix(rows, batches) if k is None else bank.with_lane_prefix(rows, batches, k)


def open_job(
    dataset: Dataset,
    base: Base,
    note: Say,
    *,
    named: NamedTask | None = None,
    metric: str | None = None,
    positive: str | None = None,
    class_weights: str = "none",
    max_length: int | None = None,
    stride: int | None = None,
    long: str = HEAD_OF_TEXT,
    pool: str = "auto",
    device: str = "auto",
    rows: NodeRows | None = None,
) -> Job:
    """Encode a data set for a base; metric, positive class and length are by default those of the named task.

    The base is moved to the device. With `rows` one process of a machine encodes the data for all of its processes.
    """
    if max_length is None and named is not None and named.max_length:
        max_length = min(named.max_length, base.max_length)
    task = _task(dataset, named, metric, positive, note)
    if class_weights == "balanced":
        task = task.balanced(dataset.train)
    chosen_device = pick_device(device)
    base.to(chosen_device).require_clean()
    if long != HEAD_OF_TEXT and dataset.columns.text_pair is not None and not task.by_token:
        raise UsageError(f"--long {long}: only single texts can be read so, and these are pairs; remove --long")
    if pool == PAIR and dataset.columns.text_pair is None:
        raise UsageError("--pool pair: the rows have one text; name the column of the second one with --text-pair")
    encoder = task.encoder(base, max_length, stride, long, pool == PAIR)
    train = _encode_train(task, encoder, dataset.train, chosen_device, rows, "train")
    dev = encode_part(task, encoder, dataset.dev, chosen_device)
    for name, part in (("train", train), ("dev", dev)):
        for text in task.remarks(encoder, part.encoded, part.examples):
            note(f"{name}: {text}")
    return Job(base, task, dataset, encoder, train, dev, Stop(), chosen_device, named)


def _task(dataset: Dataset, named: NamedTask | None, metric: str | None, positive: str | None, note: Say) -> Task:
    """The task with its metric and its positive class, fitted to the training rows."""
    if metric is None and named is not None:
        metric = named.metric
    if positive is None and named is not None and len(named.labels) == 2:
        positive = named.labels[1]  # as GLUE scores its tasks
        note(f'Precision, recall and f1 are about "{positive}", as the task is scored; --positive names the other one.')
    task = Task.of(dataset.kind, dataset.labels, metric)
    if positive is not None:
        return task.with_positive(positive).fitted(dataset.train)
    task = task.fitted(dataset.train)
    if task.positive is not None:
        note(f'Precision, recall and f1 are about "{task.positive}", the rarer class; --positive names the other one.')
    return task


def _encode_train(
    task: Task, encoder: Encoder, examples: Examples, device: torch.device, rows: NodeRows | None, name: str
) -> Part:
    """Encode the training examples; with `rows` one process of a machine does so for all, under this name."""
    if rows is None:
        return encode_part(task, encoder, examples, device)
    return part_of(task, rows.get(name, lambda: task.encode(encoder, examples)), examples, device)


def encode_part(task: Task, encoder: Encoder, examples: Examples, device: torch.device) -> Part:
    """Encode examples and their targets."""
    return part_of(task, task.encode(encoder, examples), examples, device)


def part_of(task: Task, encoded: Encoded, examples: Examples, device: torch.device) -> Part:
    """Encoded examples with their targets."""
    targets = torch.from_numpy(task.targets(encoded, examples))
    return Part(examples, encoded, targets.to(device), task.by_token)
