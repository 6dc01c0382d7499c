"""The head solved on the frozen base: the same loss as in training, but with one best solution, which takes seconds.

What the head's last linear layer sees does not change while the base is frozen. So its weights are a convex problem:
logistic regression for classes, ridge regression for numbers, and the like for the other kinds, by the loss of the
task itself. The strength of the penalty is chosen by cross-validation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..bank.bank import Bank
from ..bank.lanes import Lane, lane_to_train
from ..data.splits import folds
from ..model.anatomy import HEAD, PAIR
from ..model.resolution import Resolution
from ..model.selection import Selection
from ..model.task_model import RELATION, Model
from ..tasks import Task
from .evaluation import outputs
from .job import Job, Part

STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)  # of the penalty, the strongest first
STRONGEST_FOR_LABELS = 1.0  # with few rows and a stronger penalty every text gets the most frequent label
WORSE = 2  # the search ends after this many strengths in a row that are worse than the best
ITERATIONS = 100
FOLDS = 4
MOST_OUTPUTS = 20_000  # outputs that a head is solved on; more hardly change it
BIAS_PENALTY = 1e-4  # keeps the bias of a class that a fold lacks finite
SMALL = 0.2  # the spread of the outputs of a head that training starts from


@dataclass(frozen=True, eq=False)
class Split:
    """Numbers of examples that are trained on and of examples that are held out."""

    train: Array
    held: Array


@dataclass(frozen=True, eq=False)
class States:
    """The inputs of the head's last layer for a part of the data, computed with the frozen base."""

    part: Part
    values: Tensor  # one row per output, centred and scaled; at the end a column per direction
    center: Tensor
    scale: Tensor  # one number per input of the layer
    directions: Tensor  # [inputs, count]: sums of inputs that are penalised less, as inputs of their own

    def take(self, examples: Array) -> States:
        """The states of some examples."""
        outputs = torch.from_numpy(self.part.outputs_of(examples))
        return replace(self, part=self.part.take(examples), values=self.values[outputs])

    def loss(self, task: Task, outputs: Tensor) -> Tensor:
        """The task's loss of these outputs, in double precision."""
        targets = self.part.targets.cpu()
        if targets.is_floating_point():
            targets = targets.double()
        return task.loss(outputs, targets, self.part.rows)


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A linear head on centred and scaled states."""

    weight: Tensor  # [outputs, width]
    bias: Tensor

    def __call__(self, states: States) -> Tensor:
        """The outputs of states."""
        return (states.values @ self.weight.T.float() + self.bias.float()).double()

    def shrunk(self, states: States, spread: float = SMALL) -> LinearHead:
        """The head with its weight scaled so that the outputs have the standard deviation `spread`; the bias stays."""
        if len(states.values) < 2:
            return self
        deviation = float((self(states) - self.bias).std(0).mean())
        return LinearHead(self.weight * (spread / deviation), self.bias) if deviation > 0 else self

    def raw(self, states: States) -> tuple[Tensor, Tensor]:
        """Weight and bias for states that are not centred and scaled."""
        width = len(states.scale)
        weight = self.weight[:, :width] / states.scale + self.weight[:, width:] @ states.directions.T
        return weight.float(), (self.bias - weight @ states.center).float()


def output_layer(model: Model) -> str:
    """The name of the head's last linear layer: the last matrix with a row per output."""
    names = [
        name
        for name, shape in model.head.items()
        if name.startswith(HEAD) and len(shape) == 2 and shape[0] == model.outputs
    ]
    return names[-1].removesuffix(".weight")


def head_states(job: Job, part: Part, resolution: Resolution, inject: str, seed: int) -> States:
    """The states of all rows of a part.

    They are the outputs of a head of the same form whose last layer is the identity, with one output per input. So
    this works for the head of every architecture, whatever it does before its last layer.
    """
    model = Model(job.base, job.task.outputs, resolution.pool, inject)
    layer = output_layer(model)
    width = model.head[f"{layer}.weight"][1]
    probe = Model(job.base, width, resolution.pool, inject)
    nothing = Selection({}, model.anatomy.shapes)
    lane = lane_to_train(probe, nothing, "full", resolution.starts, seed)
    values = {name: value for name, value in model.head_start(seed).items() if not name.startswith(layer)}
    values[f"{layer}.weight"] = torch.eye(width)
    bank = Bank(probe, [with_values(lane, values)])
    states = torch.from_numpy(outputs(job, bank, [0], part.rows)[0])
    return scaled(part, states, RELATION if model.pool == PAIR else 1)


def scaled(part: Part, states: Tensor, blocks: int = 1) -> States:
    """States centred, and scaled so that each block of inputs has a mean standard deviation of 1.

    Of the blocks of a pair, the last is u * v. Its mean is the cosine of the two texts: what the encoder was trained
    for. It becomes a column of its own with as much variance as all inputs together, so that it is hardly penalised.
    """
    width = states.shape[1]
    center = states.double().mean(0)
    scale = _nonzero(states.double().std(0).reshape(blocks, -1).mean(1)).repeat_interleave(width // blocks)
    centred = states - center.float()
    directions = torch.zeros(width, 0, dtype=torch.float64)
    if blocks > 1:
        cosine = torch.zeros(width, 1, dtype=torch.float64)
        cosine[-(width // blocks) :] = 1.0
        deviation = _nonzero((centred.double() @ cosine).std(0))
        directions = cosine * (math.sqrt(width) / deviation)
    values = torch.cat([centred / scale.float(), centred @ directions.float()], 1)
    return States(part, values, center, scale, directions)


def _nonzero(deviations: Tensor) -> Tensor:
    """Standard deviations to divide by: 1 for those that are zero, or unknown because there is one row."""
    return torch.where(deviations > 0, deviations, 1.0)


def with_values(lane: Lane, values: dict[str, Tensor]) -> Lane:
    """The lane with these start values for some of its tensors; tensors of which only some entries train stay."""
    start = lane.start.clone()
    for slot in lane.slots:
        if slot.name in values and slot.index is None:
            start[slot.offset : slot.offset + slot.size] = values[slot.name].reshape(-1).to(start)
    return replace(lane, start=start)


def solve(task: Task, states: States, strength: float, start: LinearHead | None = None) -> LinearHead:
    """The linear head with the least mean loss plus strength / 2 times the squared weights."""
    width, count = states.values.shape[1], task.outputs
    values = states.values.double()
    if start is None:
        head = torch.zeros(count, width + 1, dtype=torch.float64)
    else:
        head = torch.cat([start.weight, start.bias[:, None]], 1)
    head.requires_grad_()
    optimiser = torch.optim.LBFGS(
        [head], max_iter=ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        weight, bias = head[:, :-1], head[:, -1]
        loss = states.loss(task, values @ weight.T + bias)
        total = loss + strength / 2 * weight.square().sum() + BIAS_PENALTY / 2 * bias.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(objective)  # type: ignore[no-untyped-call]
    solved = head.detach()
    return LinearHead(solved[:, :-1], solved[:, -1])


@dataclass(frozen=True, eq=False)
class Solution:
    """The head solved on all rows with the chosen strength, and the outputs of the cross-validation's heads."""

    head: LinearHead
    strength: float
    predicted: Array  # outputs for held-out rows, each by a head that has not seen it; zeros for others


def sampled(part: Part, held: Array | None = None) -> Array:
    """The examples that a head is solved on and scored with: all, or a seeded draw with about MOST_OUTPUTS outputs.

    Of the examples `held` all are drawn, up to a quarter of the outputs: they can be few among many.
    """
    weights = part.rows.lengths if part.by_token else None
    counts: Array = np.bincount(part.encoded.owner, weights, len(part.examples))
    everything = np.arange(len(counts))
    if counts.sum() <= MOST_OUTPUTS:
        return everything
    if held is None:
        return _drawn(everything, counts, MOST_OUTPUTS)
    scored = _drawn(held, counts, MOST_OUTPUTS // 4)
    solved = _drawn(np.setdiff1d(everything, held), counts, MOST_OUTPUTS - counts[scored].sum())
    return np.sort(np.concatenate([scored, solved]))


def _drawn(examples: Array, counts: Array, most: float) -> Array:
    """A seeded draw of examples whose counts sum up to at most `most`; at least one, if there are any."""
    order: Array = np.random.default_rng(0).permutation(examples)
    fitting = np.cumsum(counts[order]) <= most
    fitting[:1] = True
    return np.sort(order[fitting])


def solved_head(job: Job, resolution: Resolution, inject: str, seed: int) -> dict[str, Tensor]:
    """The tensors of the last layer of a head solved on the training rows, its strength cross-validated."""
    model = Model(job.base, job.task.outputs, resolution.pool, inject)
    part = job.train.take(sampled(job.train))
    states = head_states(job, part, resolution, inject, seed)
    solution = cross_validated(job, states, fold_splits(part, job.task, seed))
    return tensors_of(output_layer(model), solution.head, states)


def fold_splits(part: Part, task: Task, seed: int) -> list[Split]:
    """Splits that hold out every example once."""
    everything = np.arange(len(part.examples))
    splits = []
    for fold in folds(part.examples, task.kind, FOLDS, seed):
        splits.append(Split(np.setdiff1d(everything, fold), np.sort(np.array(fold, np.int64))))
    return splits


def held_examples(splits: Sequence[Split]) -> Array:
    """The examples that any of the splits holds out, in order."""
    return np.sort(np.concatenate([split.held for split in splits]))


def known_examples(task: Task, part: Part, splits: Sequence[Split]) -> Array:
    """For each example, whether the training part of the split that holds it out has its classes; true for others."""
    targets = part.targets.cpu().numpy()
    row_of = np.repeat(np.arange(len(part)), part.rows.lengths) if part.by_token else np.arange(len(part))
    example_of = part.encoded.owner[row_of]  # of each output
    known = np.ones(len(part.examples), bool)
    for split in splits:
        held = part.outputs_of(split.held)
        lacking = task.lacking(targets[held], targets[part.outputs_of(split.train)])
        known[example_of[held[lacking]]] = False
    return known


def tensors_of(layer: str, head: LinearHead, states: States) -> dict[str, Tensor]:
    """A head as the tensors of a layer."""
    weight, bias = head.raw(states)
    return {f"{layer}.weight": weight, f"{layer}.bias": bias}


def cross_validated(job: Job, states: States, splits: Sequence[Split]) -> Solution:
    """Choose the strength by the loss on held-out examples of known classes and solve on all examples with it."""
    seen = [states.take(split.train) for split in splits]
    known = known_examples(job.task, states.part, splits)
    held = [states.take(split.held[known[split.held]]) for split in splits]
    starts: list[LinearHead | None] = [None] * len(splits)
    best_loss, best_strength = math.inf, STRENGTHS[0]
    best_heads: list[LinearHead] = []
    worse = 0
    for strength in strengths(job.task, states):
        job.stop.check()
        heads = [solve(job.task, some, strength, start) for some, start in zip(seen, starts, strict=True)]
        loss = mean_loss(job.task, heads, held)
        starts = list(heads)
        if not best_heads or loss < best_loss:
            best_loss, best_strength, best_heads = loss, strength, heads
            worse = 0
        else:
            worse += 1
        if worse == WORSE:
            break
    predicted = held_out_outputs(states, splits, best_heads)
    return Solution(solve(job.task, states, best_strength), best_strength, predicted)


def strengths(task: Task, states: States) -> list[float]:
    """The strengths to try: all of them for numbers and for pairs read one by one, else none above the bound."""
    if not task.labels or states.directions.shape[1] > 0:
        return list(STRENGTHS)
    return [strength for strength in STRENGTHS if strength <= STRONGEST_FOR_LABELS]


def held_out_outputs(states: States, splits: Sequence[Split], heads: Sequence[LinearHead]) -> Array:
    """The outputs for all examples, each by the head of the split that holds it out; zeros for others."""
    predicted = np.zeros((len(states.values), len(heads[0].bias)), np.float32)
    for head, split in zip(heads, splits, strict=True):
        predicted[states.part.outputs_of(split.held)] = head(states.take(split.held)).numpy()
    return predicted


def mean_loss(task: Task, heads: Sequence[LinearHead], held: Sequence[States]) -> float:
    """The loss of each head on the states it has not seen, the mean over all token rows; infinite if there is none."""
    total, count = 0.0, 0
    for head, unseen in zip(heads, held, strict=True):
        rows = len(unseen.part)
        if rows:
            total += float(unseen.loss(task, head(unseen))) * rows
            count += rows
    return total / count if count else math.inf
