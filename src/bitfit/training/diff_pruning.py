"""Diff-Pruning (Guo, Rush and Kim 2021): training finds which entries of a selection should differ from the base.

Every entry starts from its value in the base plus gate * difference. A gate is hard-concrete: with logistic noise,
    soft = sigmoid(logit + noise)      gate = min(1, max(0, LOW + (HIGH - LOW) * soft))
so that it is often exactly 0 or 1. With structured gates each tensor has one more, which multiplies those of its
entries. Differences and logits are trained on the loss plus a penalty on the expected number of open gates. Then the
entries with the largest gate * difference are kept, exactly as many as were asked for, and these alone train on as any
other selection does.

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
from .loop import Runner, Watch, drops_out, lane_losses, schedule, steps_per_epoch, stream
from .plan import Trial, default_rates
from .resolved import Resolved

LOW, HIGH = -1.5, 1.5  # the interval to which gates are stretched before they are cut to 0..1
START = 5.0  # of every logit: nearly all gates are open
GATE_RATE = 0.1  # learning rate of the logits
# On the share of open gates, so that they suit bases of any size. The paper's 1.25e-7 for each entry of BERT-large is
# 42, which closes every gate in the few steps of a small data set; with these some gates stay open (LOG.md).
STRUCTURED_PENALTY = 0.1
PENALTY = 1.0  # without gates of whole tensors
EDGE = 1e-4  # uniform noise is at least this far from 0 and 1
PHASE = "gates"  # what a progress bar calls it
KEEP = "keep."  # what begins the names of a checkpoint's tensors
VALUE = "value."


@dataclass(frozen=True, eq=False)
class Mask:
    """What the gates of a trial came to: the entries to train on and what they and the head start from."""

    selection: Selection
    values: dict[str, Tensor]
    record: GatePhase

    def worn(self, lane: Lane) -> Lane:
        """The lane with these values in the place of what trains."""
        start = lane.start.clone()
        for slot in lane.slots:
            if slot.offset < lane.trained and slot.name in self.values:
                start[slot.offset : slot.offset + slot.size] = self.values[slot.name]
        return replace(lane, start=start)


def learn_masks(
    job: Job, models: Sequence[Model], group: Sequence[Resolved], number: int, store: Store, watch: Watch
) -> list[Mask | None]:
    """The mask of each trial of pass `number` whose selection is learned.

    The gates have a learning rate of their own, so that trials which differ in their rate alone share them. The job
    keeps masks for later passes: further rates need no gates of their own.
    """
    masks: list[Mask | None] = []
    numbers: dict[Trial, int] = {}  # whether or not a mask is kept, so that checkpoints of a pass keep their names
    for model, resolved in zip(models, group, strict=True):
        learned = resolved.resolution.selection.learned
        if learned is None:
            masks.append(None)
            continue
        key = replace(resolved.trial, lr=0.0)
        label = f"{number}-{PHASE}{numbers.setdefault(key, len(numbers))}"
        if key not in job.masks:
            job.masks[key] = _learn_mask(job, model, resolved, learned, (number, label), store, watch)
        masks.append(job.masks[key])
    return masks


def _learn_mask(
    job: Job,
    model: Model,
    resolved: Resolved,
    learned: Learned,
    place: tuple[int, str],
    store: Store,
    watch: Watch,
) -> Mask:
    """Train the gates of one trial for as many epochs as it has; `place` is the pass and the checkpoints' name."""
    number, label = place
    trial, resolution = resolved.trial, resolved.resolution
    count = resolution.selection.count
    found = store.load(label)
    if found is not None and found[2]["done"]:
        return _read_mask(resolution.selection, found[1], found[2])
    operand = _reachable(job, model, learned.operand, count)
    lane = lane_to_train(model, operand, trial.head, resolution.starts, trial.seed)
    bank = Bank(model, [lane], trial.prefix_dropout)
    gates = Gates(bank, trial, learned.structured, default_rates(learned.operand, job.base.width)[1])
    step = 0
    if found is not None:
        step = found[0]
        gates.restore(found[1], step)
    runner = Runner(trial, bank, 0, phase=PHASE)
    rows = len(job.train)
    total = trial.epochs * steps_per_epoch(trial, rows)
    try:
        with_states = job.with_prefix(bank)
        while step < total:
            job.stop.check()
            gates.draw(stream(trial.seed, -step - 1))
            [loss] = lane_losses(with_states, [runner], step + 1, drops_out(trial, step + 1, rows))
            loss.backward()  # type: ignore[no-untyped-call]
            step += 1
            if not gates.learn(step, total) or not math.isfinite(float(loss.detach())):
                break  # the values up to here are kept; the training that follows tells whether it diverges
            watch(number, step, total, [runner])
            if store.due():
                store.save(label, step, gates.state(), {"done": False})
    except Interrupted:
        store.save(label, step, gates.state(), {"done": False})
        raise
    mask = gates.project(count, GatePhase(step, learned.operand.count, gates.open_count(), count))
    store.save(label, total + 1, _mask_tensors(mask), {"done": True, "record": vars(mask.record)}, kept=1)
    return mask


def _reachable(job: Job, model: Model, operand: Selection, count: int) -> Selection:
    """The operand without the rows of the word embedding that no training text has, if `count` entries are left.

    Their gradient is always zero, and so is their difference, whatever their gate.
    """
    name = model.base.word_embedding
    if name is None or name not in operand:
        return operand
    words: Array = np.unique(job.train.rows.ids)
    width = operand.shapes[name][1]
    seen: Array = (words[:, None] * width + np.arange(width)).ravel()
    rows = Selection({name: seen}, operand.shapes, injected=operand.injected)
    whole = Selection({name: None}, operand.shapes, injected=operand.injected)
    reachable = operand - (whole - rows)
    return reachable if reachable.count >= count else operand


def hard_concrete(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Gates under logistic noise, and their derivatives by the logits."""
    soft = torch.sigmoid(logits + noise)
    stretched = LOW + (HIGH - LOW) * soft
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0, 1), inside * (HIGH - LOW) * soft * (1 - soft)


def open_chance(logits: Tensor) -> Tensor:
    """The chance of each gate not to be 0."""
    return torch.sigmoid(logits - math.log(-LOW / HIGH))


class Gates:
    """The differences of a bank's only lane and their gates: one for each selected entry and, if structured, tensor."""

    def __init__(self, bank: Bank, trial: Trial, structured: bool, rate: float) -> None:
        lane = bank.lanes[0]
        self.bank = bank
        self.trial = trial
        self.structured = structured
        self.slots = [slot for slot in lane.slots if slot.offset < lane.trained and not slot.name.startswith(HEAD)]
        self.heads = [slot for slot in lane.slots if slot.offset < lane.trained and slot.name.startswith(HEAD)]
        self.size = sum(slot.size for slot in self.slots)
        self.penalty = (STRUCTURED_PENALTY if structured else PENALTY) / self.size
        values = bank.values[0, : lane.trained]
        self.start = values[: self.size].clone()
        # The head trains as it is: its "differences" are its values.
        self.differences = torch.cat([torch.zeros_like(self.start), values[self.size :]])
        self.differences.grad = bank.gradients[0, : lane.trained]
        self.entry = torch.full_like(self.start, START)
        self.entry.grad = torch.zeros_like(self.entry)
        self.tensor = torch.full((len(self.slots),), START, device=values.device)
        self.tensor.grad = torch.zeros_like(self.tensor)
        self.gate = torch.ones_like(self.start)
        self.slope = torch.zeros_like(self.start)
        self.tensor_gate = torch.ones_like(self.tensor)
        self.tensor_slope = torch.zeros_like(self.tensor)
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
            self.tensor_gate, self.tensor_slope = hard_concrete(self.tensor, self._noise(len(self.slots), generator))
        for j, part in self._parts():
            noise = self._noise(part.stop - part.start, generator)
            self.gate[part], self.slope[part] = hard_concrete(self.entry[part], noise)
            differences = self.gate[part] * self.differences[part]
            self.bank.values[0, part] = self.start[part] + differences * self.tensor_gate[j]
        self.bank.values[0, self.size : len(self.differences)] = self.differences[self.size :]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Turn the bank's gradients into those of the differences; fill in those of the logits, with the penalty's."""
        assert self.differences.grad is not None and self.entry.grad is not None and self.tensor.grad is not None
        tensor_chance = open_chance(self.tensor) if self.structured else torch.ones_like(self.tensor)
        for j, part in self._parts():
            gradient = self.differences.grad[part]
            by_gate = gradient * self.differences[part]
            chance = open_chance(self.entry[part])
            by_penalty = self.penalty * chance * (1 - chance) * tensor_chance[j]
            self.entry.grad[part] = by_gate * self.slope[part] * self.tensor_gate[j] + by_penalty
            by_tensor = (by_gate * self.gate[part]).sum() * self.tensor_slope[j]
            slope = tensor_chance[j] * (1 - tensor_chance[j])
            self.tensor.grad[j] = by_tensor + self.penalty * slope * chance.sum()
            gradient *= self.gate[part] * self.tensor_gate[j]

    @torch.no_grad()
    def learn(self, step: int, total: int) -> bool:
        """Take a step of both optimisers; without one, False, if a gradient is not finite."""
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

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """The number and the range of each tensor; one after the other, as they fit into the processor's cache."""
        for j, slot in enumerate(self.slots):
            yield j, slice(slot.offset, slot.offset + slot.size)

    # ---- what the gates came to

    def certain(self) -> Tensor:
        """The gates without noise, those of the tensors multiplied in."""
        gates = hard_concrete(self.entry, torch.zeros_like(self.entry))[0]
        if self.structured:
            tensor = hard_concrete(self.tensor, torch.zeros_like(self.tensor))[0]
            for j, part in self._parts():
                gates[part] *= tensor[j]
        return gates

    def open_count(self) -> int:
        """How many entries have gates that are open without noise."""
        return int((self.certain() > 0).sum())

    def project(self, count: int, record: GatePhase) -> Mask:
        """Keep the `count` entries with the largest differences; of those with closed gates, the likeliest."""
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
        named: dict[str, Tensor] = {}
        for _, part, slot in self._with_slots():
            here = (kept >= part.start) & (kept < part.stop)
            if here.any():
                entries[slot.name] = _index(slot, kept[here] - part.start)
                named[slot.name] = values[here].cpu()
        for slot in self.heads:
            named[slot.name] = self.differences[slot.offset : slot.offset + slot.size].clone().cpu()
        anatomy = self.bank.model.anatomy
        return Mask(Selection(entries, anatomy.shapes, injected=anatomy.injected), named, record)

    def _with_slots(self) -> Iterator[tuple[int, slice, Slot]]:
        for j, part in self._parts():
            yield j, part, self.slots[j]

    # ---- checkpoints

    def state(self) -> Tensors:
        """Everything from which another process can continue, to the bit."""
        tensors = {"differences": self.differences, "entry": self.entry, "tensor": self.tensor}
        for name, optimiser in self.optimisers.items():
            for k, parameter in enumerate(optimiser.param_groups[0]["params"]):
                for moment in _MOMENTS:
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
                for moment in _MOMENTS:
                    key = f"{name}.{k}.{moment}"
                    if key in tensors:
                        state[moment] = torch.from_numpy(tensors[key]).to(device)
                if len(state) > 1:
                    optimiser.state[parameter] = state


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _clip(gradients: Sequence[Tensor], most: float) -> bool:
    """Scale the gradients down to this norm (0: not at all); False if it is not finite."""
    norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
    if not math.isfinite(norm):
        return False
    if 0 < most < norm:
        for gradient in gradients:
            gradient.mul_(most / norm)
    return True


def _index(slot: Slot, positions: Tensor) -> Array:
    """The flat entries of a slot's tensor at these positions of the slot."""
    found = positions if slot.index is None else slot.index[positions]
    return found.cpu().numpy()


def _mask_tensors(mask: Mask) -> Tensors:
    tensors: Tensors = {}
    for name, values in mask.values.items():
        tensors[VALUE + name] = values.numpy()
    for name, index in mask.selection.entries.items():
        size = mask.selection.size(name)
        tensors[KEEP + name] = np.arange(size) if index is None else np.array(index)
    return tensors


def _read_mask(asked: Selection, tensors: Tensors, facts: dict[str, Any]) -> Mask:
    entries: dict[str, Array | None] = {}
    values: dict[str, Tensor] = {}
    for name, array in tensors.items():
        if name.startswith(KEEP):
            entries[name.removeprefix(KEEP)] = array
        else:
            values[name.removeprefix(VALUE)] = torch.from_numpy(array)
    selection = Selection(entries, asked.shapes, injected=asked.injected)
    return Mask(selection, values, GatePhase(**facts["record"]))
