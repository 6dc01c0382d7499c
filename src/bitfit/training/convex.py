"""The head solved on the frozen base: the same loss as in training, but with one best solution, found in seconds.

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
from ..model.anatomy import HEAD
from ..model.resolution import Resolution
from ..model.rows import Rows
from ..model.selection import Selection
from ..model.task_model import Model
from ..tasks import Task
from .evaluation import outputs
from .job import Job, Part

STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)  # of the penalty, the strongest first
WORSE = 2  # strengths in a row that are worse than the best end the search
ITERATIONS = 100
FOLDS = 4
MOST_OUTPUTS = 20_000  # rows of outputs that a head is solved on; more do not move it
BIAS_PENALTY = 1e-4  # holds the bias of a class that a fold lacks
SMALL = 0.2  # the spread of the outputs of a head that training starts from


@dataclass(frozen=True, eq=False)
class States:
    """What the head's last layer sees of some rows under the base alone, and what the loss compares."""

    rows: Rows
    values: Tensor  # one state per output row, centred and scaled
    targets: Tensor
    by_token: bool
    center: Tensor
    scale: float

    @property
    def count(self) -> int:
        """How many rows of outputs there are."""
        return len(self.values)

    def places(self, chosen: Array) -> Array:
        """Where the outputs of some rows lie."""
        return self.rows.tokens(chosen) if self.by_token else chosen

    def take(self, chosen: Array) -> States:
        """The states of some rows."""
        places = torch.from_numpy(self.places(chosen))
        return replace(self, rows=self.rows.take(chosen), values=self.values[places], targets=self.targets[places])


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear head on centred and scaled states."""

    weight: Tensor  # [outputs, width]
    bias: Tensor

    def __call__(self, states: States) -> Tensor:
        """The outputs of states."""
        return (states.values @ self.weight.T.float() + self.bias.float()).double()

    def shrunk(self, states: States, spread: float = SMALL) -> Linear:
        """The same direction with outputs that vary by `spread` only; the bias stays."""
        varied = float((self(states) - self.bias).std(0).mean()) if states.count > 1 else 0.0
        return Linear(self.weight * (spread / varied if varied > 0 else 1.0), self.bias)

    def raw(self, states: States) -> tuple[Tensor, Tensor]:
        """Weight and bias for states as the base gives them."""
        weight = self.weight / states.scale
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

    A second head of the same form, with one output per input of the last layer and the identity as its weight, gives
    out what the last layer sees. So every architecture's own path serves, whatever it does before that layer.
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
    found = torch.from_numpy(outputs(job, bank, [0], part.rows)[0])
    center = found.double().mean(0)
    scale = float(found.double().std(0).mean()) if len(found) > 1 else 1.0
    scale = scale if math.isfinite(scale) and scale > 0 else 1.0
    targets = part.targets.cpu()
    if targets.is_floating_point():
        targets = targets.double()
    standardised = (found - center.float()) / scale
    return States(part.rows, standardised, targets, model.pool == "tokens", center, scale)


def with_values(lane: Lane, values: dict[str, Tensor]) -> Lane:
    """The lane with other start values for some of its whole tensors."""
    start = lane.start.clone()
    for slot in lane.slots:
        if slot.name in values and slot.index is None:
            start[slot.offset : slot.offset + slot.size] = values[slot.name].reshape(-1).to(start)
    return replace(lane, start=start)


def solve(task: Task, states: States, strength: float, start: Linear | None = None) -> Linear:
    """The linear head with the least mean loss plus strength / 2 times the squared weights."""
    width, count = states.values.shape[1], task.outputs
    values = states.values.double()
    first = torch.zeros(count, width + 1, dtype=torch.float64)
    if start is not None:
        first = torch.cat([start.weight, start.bias[:, None]], 1)
    both = first.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [both], max_iter=ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        weight, bias = both[:, :-1], both[:, -1]
        loss = task.loss(values @ weight.T + bias, states.targets, states.rows)
        total = loss + strength / 2 * weight.square().sum() + BIAS_PENALTY / 2 * bias.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(objective)  # type: ignore[no-untyped-call]
    solved = both.detach()
    return Linear(solved[:, :-1], solved[:, -1])


@dataclass(frozen=True, eq=False)
class Solution:
    """The head of the chosen strength on all rows, and what heads without them say of each fold's rows."""

    head: Linear
    strength: float
    loss: float  # on held-out rows
    predicted: Array  # outputs for held-out rows, each by a head that has not seen it; zeros for others


def sampled(part: Part, by_token: bool) -> Array:
    """The examples that a head is solved on: all, or a seeded draw with at most MOST_OUTPUTS rows of outputs."""
    weights = part.rows.lengths if by_token else None
    counts = np.bincount(part.encoded.owner, weights, len(part.examples))
    order: Array = np.random.default_rng(0).permutation(len(counts))
    fitting = np.cumsum(counts[order]) <= MOST_OUTPUTS
    return np.sort(order[fitting])


def taken(part: Part, examples: Array, by_token: bool) -> Part:
    """Some examples of a part, numbered anew."""
    rows = part.encoded.rows_of(examples)
    places = torch.from_numpy(part.rows.tokens(rows) if by_token else rows)
    return Part(part.examples.take(examples.tolist()), part.encoded.take(examples), part.targets[places])


def solved_head(job: Job, resolution: Resolution, inject: str, seed: int) -> dict[str, Tensor]:
    """The tensors of the last layer of a head solved on the training rows, its strength cross-validated."""
    model = Model(job.base, job.task.outputs, resolution.pool, inject)
    by_token = model.pool == "tokens"
    part = taken(job.train, sampled(job.train, by_token), by_token)
    states = head_states(job, part, resolution, inject, seed)
    rows = np.arange(len(part))
    splits = []
    for fold in folds(part.examples, job.task.kind, FOLDS, seed):
        held = part.encoded.rows_of(np.array(fold))
        splits.append((np.setdiff1d(rows, held), held))
    return tensors_of(output_layer(model), cross_validated(job, states, splits).head, states)


def tensors_of(layer: str, head: Linear, states: States) -> dict[str, Tensor]:
    """A head as the tensors of a layer."""
    weight, bias = head.raw(states)
    return {f"{layer}.weight": weight, f"{layer}.bias": bias}


def cross_validated(job: Job, states: States, splits: Sequence[tuple[Array, Array]]) -> Solution:
    """Choose the strength by the loss on held-out rows and solve on all rows with it.

    A split is the rows that are trained on and those that are held out.
    """
    trained = [states.take(seen) for seen, _ in splits]
    held = [states.take(unseen) for _, unseen in splits]
    starts: list[Linear | None] = [None] * len(splits)
    best: tuple[float, float, list[Linear]] | None = None
    worse = 0
    for strength in STRENGTHS:
        job.stop.check()
        heads = [solve(job.task, own, strength, start) for own, start in zip(trained, starts, strict=True)]
        loss = mean_loss(job.task, heads, held)
        starts = list(heads)
        if best is None or loss < best[0]:
            best = loss, strength, heads
            worse = 0
        else:
            worse += 1
        if worse == WORSE:
            break
    assert best is not None
    predicted = np.zeros((states.count, job.task.outputs), np.float32)
    for head, (_, unseen), own in zip(best[2], splits, held, strict=True):
        predicted[states.places(unseen)] = head(own).numpy()
    return Solution(solve(job.task, states, best[1]), best[1], best[0], predicted)


def mean_loss(task: Task, heads: Sequence[Linear], held: Sequence[States]) -> float:
    """The loss of each head on its own rows, the mean over all rows."""
    total, count = 0.0, 0
    for head, own in zip(heads, held, strict=True):
        total += float(task.loss(head(own), own.targets, own.rows)) * len(own.rows)
        count += len(own.rows)
    return total / count
