"""Diff-Pruning (Guo, Rush and Kim 2021): training learns which entries of a selection should differ from the base.

The value of an entry is that of the base plus gate * difference. A gate is hard-concrete: with logistic noise,
    soft = sigmoid(logit + noise)      gate = min(1, max(0, LOW + (HIGH - LOW) * soft))
so that it is often exactly 0 or 1. With structured gates each tensor has one more, which multiplies those of its
entries. Differences and logits are trained on the loss plus a penalty on the expected number of open gates. Then the
entries with the largest gate * difference are kept, exactly as many as the selection says, and only these train on, as
any other selection does.

The numbers are those of the paper and its code, but for the penalty. As in the paper, the head has no gates and is not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Tensors
from ..bank.bank import Bank
from ..bank.lanes import Lane, Slot, lane_to_train
from ..errors import Interrupted
from ..model.anatomy import HEAD
from ..model.selection import Learned, Selection
from ..model.strategies import largest
from ..model.task_model import Model
from .checkpoint import Store
from .history import GatePhase
from .job import Job
from .loop import MOMENTS, Runner, Watch, drops_out, lane_losses, schedule, steps_per_epoch, stream
from .plan import Trial, default_rates
from .resolved import Resolved, reachable

LOW, HIGH = -1.5, 1.5  # the interval to which gates are stretched before they are cut to 0..1
START = 5.0  # of every logit: nearly all gates are open
GATE_RATE = 0.1  # learning rate of the logits
# On the share of open gates, so that they suit bases of any size. The paper's 1.25e-7 for each entry of BERT-large is
# 42, which closes every gate in the few steps of a small data set; with these some gates stay open (LOG.md).
STRUCTURED_PENALTY = 0.1
PENALTY = 1.0  # if only entries have gates, not tensors
EDGE = 1e-4  # uniform noise is at least this far from 0 and 1
PHASE = "gates"  # the name in a progress bar and in the names of checkpoints
KEEP = "keep."  # prefix, in the checkpoint of a mask, of the entries that a tensor keeps
VALUE = "value."  # prefix of their values


@dataclass(frozen=True, eq=False)
class Mask:
    """The entries that the gates of a trial kept, and their values and those of the head after the gates' training."""

    selection: Selection
    values: dict[str, Tensor]
    record: GatePhase

    def applied_to(self, lane: Lane) -> Lane:
        """The lane with these values as the start values of what trains."""
        start = lane.start.clone()
        for slot in lane.slots:
            if slot.offset < lane.trained and slot.name in self.values:
                start[slot.offset : slot.offset + slot.size] = self.values[slot.name]
        return replace(lane, start=start)


def learn_masks(
    job: Job, models: Sequence[Model], group: Sequence[Resolved], number: int, store: Store, watch: Watch
) -> list[Mask | None]:
    """The mask of each trial of pass `number` whose selection is learned.

    The rates of this training do not depend on the trial's rate, so trials that differ in their rate alone share a
    mask. The job keeps masks for later passes, which may try further rates.
    """
    masks: list[Mask | None] = []
    # Counts all masks of the pass, also those that the job has already, so that checkpoints keep their names.
    numbers: dict[Trial, int] = {}
    for model, resolved in zip(models, group, strict=True):
        learned = resolved.resolution.selection.learned
        if learned is None:
            masks.append(None)
            continue
        key = replace(resolved.trial, lr=0.0)
        label = f"{number}-{PHASE}{numbers.setdefault(key, len(numbers))}"
        if key not in job.masks:
            job.masks[key] = _learn_mask(job, model, resolved, learned, number, label, store, watch)
        masks.append(job.masks[key])
    return masks


def _learn_mask(
    job: Job,
    model: Model,
    resolved: Resolved,
    learned: Learned,
    number: int,
    label: str,
    store: Store,
    watch: Watch,
) -> Mask:
    """Train the gates of one trial of pass `number` for the trial's epochs; `label` names their checkpoints."""
    trial, resolution = resolved.trial, resolved.resolution
    count = resolution.selection.count
    step, tensors, facts = store.load(label) or (0, {}, {"done": False})
    if facts["done"]:
        return _read_mask(resolution.selection, tensors, facts)
    operand = reachable(job, learned.operand)
    if operand.count < count:
        operand = learned.operand
    lane = lane_to_train(model, operand, trial.head, resolution.starts, trial.seed)
    bank = Bank(model, [lane], trial.prefix_dropout)
    gates = Gates(bank, trial, learned.structured, default_rates(learned.operand, job.base.width)[1])
    if tensors:
        gates.restore(tensors, step)
    runner = Runner(trial, bank, 0, phase=PHASE)
    rows = len(job.train)
    total = trial.epochs * steps_per_epoch(trial, rows)
    try:
        job = job.with_prefix(bank)
        while step < total:
            job.stop.check()
            gates.draw(stream(trial.seed, -step - 1))
            [loss] = lane_losses(job, [runner], step + 1, drops_out(trial, step + 1, rows))
            loss.backward()  # type: ignore[no-untyped-call]
            step += 1
            if not gates.learn(step, total) or not math.isfinite(float(loss.detach())):
                break  # with the values so far; whether the trial diverges is decided by the training that follows
            watch(number, step, total, [runner])
            if store.due():
                store.save(label, step, gates.state(), {"done": False})
    except Interrupted:
        store.save(label, step, gates.state(), {"done": False})
        raise
    mask = gates.project(count, GatePhase(step, learned.operand.count, gates.open_count(), count))
    store.save(label, total + 1, _mask_tensors(mask), {"done": True, "record": vars(mask.record)}, kept=1)
    return mask


def hard_concrete(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Gates under logistic noise, and their derivatives with respect to the logits."""
    soft = torch.sigmoid(logits + noise)
    stretched = LOW + (HIGH - LOW) * soft
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0, 1), inside * (HIGH - LOW) * soft * (1 - soft)


def open_chance(logits: Tensor) -> Tensor:
    """The probability of each gate not to be 0."""
    return torch.sigmoid(logits - math.log(-LOW / HIGH))


class Gates:
    """The differences of a bank's only lane and their gates: one for each selected entry and, if structured, tensor."""

    def __init__(self, bank: Bank, trial: Trial, structured: bool, rate: float) -> None:
        lane = bank.lanes[0]
        self.bank = bank
        self.trial = trial
        self.structured = structured
        trained = [slot for slot in lane.slots if slot.offset < lane.trained]
        self.slots = [slot for slot in trained if not slot.name.startswith(HEAD)]
        self.head_slots = [slot for slot in trained if slot.name.startswith(HEAD)]
        self.size = sum(slot.size for slot in self.slots)
        self.penalty = (STRUCTURED_PENALTY if structured else PENALTY) / self.size
        values = bank.values[0, : lane.trained]
        self.start = values[: self.size].clone()
        # The head trains as it is: its "differences" are its values.
        self.differences = torch.cat([torch.zeros_like(self.start), values[self.size :]])
        self.differences.grad = bank.gradients[0, : lane.trained]
        self.entry = torch.full_like(self.start, START)  # logits of the gates of entries
        self.entry.grad = torch.zeros_like(self.entry)
        self.tensor = torch.full((len(self.slots),), START, device=values.device)  # logits of the gates of tensors
        self.tensor.grad = torch.zeros_like(self.tensor)
        self.gate = torch.ones_like(self.start)
        self.derivative = torch.zeros_like(self.start)  # of the gate with respect to its logit
        self.tensor_gate = torch.ones_like(self.tensor)
        self.tensor_derivative = torch.zeros_like(self.tensor)
        self.rate = rate
        logits = [self.entry, self.tensor] if structured else [self.entry]
        self.optimisers = {
            "differences": torch.optim.AdamW([self.differences], rate, weight_decay=trial.weight_decay, fused=True),
            "logits": torch.optim.AdamW(logits, GATE_RATE, weight_decay=0.0, fused=True),
        }

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw the gates and give the bank the values under them."""
        generator = torch.Generator().manual_seed(seed)
        if self.structured:
            noise = self._noise(len(self.slots), generator)
            self.tensor_gate, self.tensor_derivative = hard_concrete(self.tensor, noise)
        for j, entries in self._ranges():
            noise = self._noise(entries.stop - entries.start, generator)
            self.gate[entries], self.derivative[entries] = hard_concrete(self.entry[entries], noise)
            differences = self.gate[entries] * self.differences[entries]
            self.bank.values[0, entries] = self.start[entries] + differences * self.tensor_gate[j]
        self.bank.values[0, self.size : len(self.differences)] = self.differences[self.size :]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Turn the bank's gradients into those of the differences, and set those of the logits, penalty included."""
        assert self.differences.grad is not None and self.entry.grad is not None and self.tensor.grad is not None
        tensor_open = open_chance(self.tensor) if self.structured else torch.ones_like(self.tensor)
        for j, entries in self._ranges():
            gradient = self.differences.grad[entries]
            by_gate = gradient * self.differences[entries]
            entry_open = open_chance(self.entry[entries])
            by_penalty = self.penalty * entry_open * (1 - entry_open) * tensor_open[j]
            self.entry.grad[entries] = by_gate * self.derivative[entries] * self.tensor_gate[j] + by_penalty
            by_tensor_gate = (by_gate * self.gate[entries]).sum() * self.tensor_derivative[j]
            open_derivative = tensor_open[j] * (1 - tensor_open[j])
            self.tensor.grad[j] = by_tensor_gate + self.penalty * open_derivative * entry_open.sum()
            gradient *= self.gate[entries] * self.tensor_gate[j]

    @torch.no_grad()
    def learn(self, step: int, total: int) -> bool:
        """Take a step of both optimisers and return True; if a gradient is not finite, take none and return False."""
        assert self.differences.grad is not None and self.entry.grad is not None and self.tensor.grad is not None
        self.add_gradients()
        logits = [self.entry.grad, self.tensor.grad] if self.structured else [self.entry.grad]
        if not _clip([self.differences.grad], self.trial.clip) or not _clip(logits, self.trial.clip):
            return False
        factor = schedule(self.trial.schedule, step, total)
        self.optimisers["differences"].param_groups[0]["lr"] = self.rate * factor
        for optimiser in self.optimisers.values():
            optimiser.step()
        self.differences.grad.zero_()
        return True

    def _noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Logistic noise."""
        uniform = torch.rand(count, generator=generator)
        return uniform.clamp_(EDGE, 1 - EDGE).logit_().to(self.start.device)

    def _ranges(self) -> Iterator[tuple[int, slice]]:
        """The number and the entries of each tensor; tensor by tensor the work fits into the processor's cache."""
        for j, slot in enumerate(self.slots):
            yield j, slice(slot.offset, slot.offset + slot.size)

    # ---- the mask

    def certain(self) -> Tensor:
        """The gates of the entries without noise, times those of their tensors."""
        gates = hard_concrete(self.entry, torch.zeros_like(self.entry))[0]
        if self.structured:
            tensor_gates = hard_concrete(self.tensor, torch.zeros_like(self.tensor))[0]
            for j, entries in self._ranges():
                gates[entries] *= tensor_gates[j]
        return gates

    def open_count(self) -> int:
        """How many entries have gates that are open without noise."""
        return int((self.certain() > 0).sum())

    def project(self, count: int, record: GatePhase) -> Mask:
        """Keep the `count` entries with the largest differences; if too few gates are open, the likeliest others."""
        differences = self.certain() * self.differences[: self.size]
        sizes = differences.abs()
        open_ = int((sizes > 0).sum())
        if open_ < count:
            # Closed gates come behind all open ones: at most 1, and the open ones are moved above that.
            likely = open_chance(self.entry) * self.differences[: self.size].abs()
            sizes = torch.where(sizes > 0, 2 + sizes, likely / likely.max().clamp(min=1e-30))
        kept = torch.from_numpy(largest(sizes.cpu().numpy(), count)).to(sizes.device)
        values = (self.start + differences)[kept]
        entries: dict[str, Array | None] = {}
        by_name: dict[str, Tensor] = {}
        for slot in self.slots:
            here = (kept >= slot.offset) & (kept < slot.offset + slot.size)
            if here.any():
                entries[slot.name] = _index(slot, kept[here] - slot.offset)
                by_name[slot.name] = values[here].cpu()
        for slot in self.head_slots:
            by_name[slot.name] = self.differences[slot.offset : slot.offset + slot.size].clone().cpu()
        anatomy = self.bank.model.anatomy
        return Mask(Selection(entries, anatomy.shapes, injected=anatomy.injected), by_name, record)

    # ---- checkpoints

    def state(self) -> Tensors:
        """Everything from which another process can continue, to the bit."""
        tensors = {"differences": self.differences, "entry": self.entry, "tensor": self.tensor}
        for name, optimiser in self.optimisers.items():
            for k, parameter in enumerate(optimiser.param_groups[0]["params"]):
                for moment in MOMENTS:
                    if parameter in optimiser.state:
                        tensors[f"{name}.{k}.{moment}"] = optimiser.state[parameter][moment]
        return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}

    def restore(self, tensors: Tensors, step: int) -> None:
        """Continue from a state that was taken after `step`."""
        device = self.start.device
        for name in ("differences", "entry", "tensor"):
            getattr(self, name).copy_(torch.from_numpy(tensors[name]))
        for name, optimiser in self.optimisers.items():
            for k, parameter in enumerate(optimiser.param_groups[0]["params"]):
                state = {"step": torch.tensor(float(step))}
                for moment in MOMENTS:
                    key = f"{name}.{k}.{moment}"
                    if key in tensors:
                        state[moment] = torch.from_numpy(tensors[key]).to(device)
                if len(state) > 1:
                    optimiser.state[parameter] = state


def _clip(gradients: Sequence[Tensor], most: float) -> bool:
    """Scale the gradients down to a norm of at most `most` (0: no limit); False if their norm is not finite."""
    norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
    if not math.isfinite(norm):
        return False
    if 0 < most < norm:
        for gradient in gradients:
            gradient.mul_(most / norm)
    return True


def _index(slot: Slot, positions: Tensor) -> Array:
    """The flat entries of a slot's tensor at these positions of the slot."""
    index = positions if slot.index is None else slot.index[positions]
    return index.cpu().numpy()


def _mask_tensors(mask: Mask) -> Tensors:
    tensors: Tensors = {}
    for name, values in mask.values.items():
        tensors[VALUE + name] = values.numpy()
    for name, index in mask.selection.entries.items():
        size = mask.selection.size(name)
        tensors[KEEP + name] = np.arange(size) if index is None else np.array(index)
    return tensors


def _read_mask(requested: Selection, tensors: Tensors, facts: dict[str, Any]) -> Mask:
    entries: dict[str, Array | None] = {}
    values: dict[str, Tensor] = {}
    for name, array in tensors.items():
        if name.startswith(KEEP):
            entries[name.removeprefix(KEEP)] = array
        else:
            values[name.removeprefix(VALUE)] = torch.from_numpy(array)
    selection = Selection(entries, requested.shapes, injected=requested.injected)
    return Mask(selection, values, GatePhase(**facts["record"]))
