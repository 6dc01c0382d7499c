"""The training loop: the trials of a pass are lanes of one bank, each with its own optimiser and history."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Tensors
from ..bank.bank import Bank
from ..errors import Interrupted, UsageError
from ..values import read_known
from .checkpoint import Store
from .evaluation import outputs
from .history import Evaluation, History, LossPoint
from .job import Job
from .plan import Trial

LOSS_POINTS = 1000  # about as many losses a history holds at most; each is the mean of several steps
REMEMBERED = "remembered."  # prefix of the names of Runner.remembered in a checkpoint
WARMUP = 0.06  # the share of all steps over which the learning rate rises


@dataclass(eq=False)
class Runner:
    """The training of one lane: its optimiser, its best checkpoint, its history.

    `flat` are the values that train, a view of the lane's row of the bank; `best_values` is a copy of them.
    """

    trial: Trial
    bank: Bank
    k: int  # the number of the lane in the bank
    rows: Array | None = None  # the training rows it sees, by number; None: all of them
    phase: str = ""  # what a progress bar calls the pass
    status: str = "running"  # running, done, dropped or diverged
    best: float = -math.inf
    best_step: int = 0
    evaluated: int = -1  # the step of the last evaluation
    history: History = field(default_factory=History)
    pending: list[float] = field(default_factory=list)  # losses that are not in the history yet
    frozen: int = 0  # the first layers that no longer train
    remembered: dict[str, Tensor] = field(default_factory=dict)  # state of `after_evaluation`; checkpoints hold it

    def __post_init__(self) -> None:
        self.flat = self.bank.trained(self.k)
        self.best_values = self.flat.detach().clone()
        self.best_outputs: Array | None = None  # on dev, at the best checkpoint
        self._frozen_entries: tuple[Tensor, Tensor] | None = None  # positions in `flat`, and their values
        trial = self.trial
        self.optimiser = torch.optim.AdamW([self.flat], trial.lr, weight_decay=trial.weight_decay, fused=True)

    def batch(self, step: int, all_rows: int) -> Array:
        """The numbers of the training rows that the lane sees at a step (from 1); `all_rows` is how many there are."""
        if self.rows is None:
            return batch_rows(self.trial, step, all_rows)
        return self.rows[batch_rows(self.trial, step, len(self.rows))]

    def rows_seen(self, all_rows: int) -> int:
        """How many training rows the lane sees in an epoch."""
        return all_rows if self.rows is None else len(self.rows)

    def freeze(self, layers: int) -> None:
        """Keep the values of the first layers from now on."""
        self.frozen = layers
        self.bank.freeze(self.k, layers)
        entries = self.bank.entries(self.k, self.bank.models[self.k].anatomy.names_below(layers))
        self._frozen_entries = entries, self.flat.detach()[entries]

    def finish(self, step: int) -> None:
        """End the training; a lane that was never evaluated keeps its last values."""
        if self.status != "running":
            return
        self.status = "done"
        if self.evaluated < 0:
            self.best_step = step
            self.best_values.copy_(self.flat.detach())

    def learn(self, step: int, total: int, loss: float) -> None:
        """Take one optimiser step; a loss or gradient that is not finite ends the lane before its values change."""
        norm = float(self.bank.gradients[self.k].norm())
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.diverge(step)
            return
        if 0 < self.trial.clip < norm:
            self.bank.gradients[self.k].mul_(self.trial.clip / norm)
        self.optimiser.param_groups[0]["lr"] = self.trial.lr * schedule(self.trial.schedule, step, total)
        self.optimiser.step()
        if self._frozen_entries is not None:  # momentum and weight decay move entries without a gradient too
            self.flat.detach().index_copy_(0, *self._frozen_entries)
        self.bank.gradients[self.k].zero_()
        self._record(step, total, loss)

    def diverge(self, step: int) -> None:
        """End the lane; the others go on."""
        self.status = "diverged"
        self.history.diverged = step

    def _record(self, step: int, total: int, loss: float) -> None:
        self.pending.append(loss)
        if len(self.pending) >= math.ceil(total / LOSS_POINTS) or step == total:
            self.history.losses.append(LossPoint(step, sum(self.pending) / len(self.pending)))
            self.pending.clear()

    def record_evaluation(self, step: int, epoch: float, loss: float, score: float, outputs: Array) -> None:
        """Add an evaluation to the history; if it is the best so far, keep the lane's values and its outputs on dev."""
        self.history.evaluations.append(Evaluation(step, epoch, loss, score))
        self.evaluated = step
        if self.best_outputs is None or score > self.best:
            self.best, self.best_step = score, step
            self.best_values.copy_(self.flat.detach())
            self.best_outputs = outputs

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the plain values from which another process can continue, to the bit."""
        facts = {name: getattr(self, name) for name in _FACTS}
        facts["best"] = self.best if math.isfinite(self.best) else None  # JSON has no infinity
        facts["history"] = asdict(self.history)
        moments = self.optimiser.state.get(self.flat, {})
        tensors = {"value": self.flat.detach(), "best": self.best_values}
        tensors |= {name: moments[name] for name in MOMENTS if name in moments}
        if self.best_outputs is not None:
            tensors["outputs"] = torch.from_numpy(self.best_outputs)
        tensors |= {REMEMBERED + name: tensor for name, tensor in self.remembered.items()}
        return tensors, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any], step: int) -> None:
        """Continue from a state that was taken after `step`."""
        for name in _FACTS:
            setattr(self, name, facts[name])
        self.best = -math.inf if facts["best"] is None else facts["best"]
        self.history = read_known(History, facts["history"], "history of the checkpoint", UsageError)
        with torch.no_grad():
            self.flat.copy_(tensors["value"])
            self.best_values.copy_(tensors["best"])
        for name, tensor in tensors.items():
            if name.startswith(REMEMBERED):
                self.remembered[name.removeprefix(REMEMBERED)] = tensor.to(self.flat.device)
        if self.frozen:
            self.freeze(self.frozen)
        if "outputs" in tensors:
            self.best_outputs = tensors["outputs"].numpy()
        if "exp_avg" in tensors:
            moments = {name: tensors[name].to(self.flat.device).clone() for name in MOMENTS}
            # A running lane takes one optimiser step in each step of the loop, so AdamW's step count is `step`.
            self.optimiser.state[self.flat] = {"step": torch.tensor(float(step)), **moments}


_FACTS = ("status", "best_step", "evaluated", "pending", "frozen")  # attributes that a checkpoint holds as they are
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps for each value

Watch = Callable[[int, int, int, list[Runner]], None]
"""Called after every step with the number of the pass, the step, the last step and the lanes."""


def schedule(kind: str, step: int, total: int) -> float:
    """The factor of the learning rate at a step (from 1): constant, or linear warm-up and linear decay to 0."""
    if kind == "constant":
        return 1.0
    warm = max(1, int(WARMUP * total))
    return min(step / warm, (total - step + 1) / max(1, total - warm + 1))


def stream(seed: int, step: int) -> int:
    """The seed of a lane's dropout at a step. It depends on nothing else, so a resumed run draws the same masks."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest())


def batch_rows(trial: Trial, step: int, rows: int) -> Array:
    """The training rows of a trial's batch at a step (from 1), in an order that is drawn for each epoch."""
    epoch, number = divmod(step - 1, steps_per_epoch(trial, rows))
    start = number * trial.batch
    return _order(trial.seed, epoch, rows)[start : start + trial.batch].astype(np.int64)


def drops_out(trial: Trial, step: int, rows: int) -> bool:
    """Whether dropout is on at a step; `first-tenth` has it on in the first tenth of each epoch only."""
    if trial.dropout != "first-tenth":
        return trial.dropout == "on"
    steps = steps_per_epoch(trial, rows)
    return (step - 1) % steps < max(1, round(steps / 10))


def _order(seed: int, epoch: int, rows: int) -> Array:
    """The order of the rows in an epoch.

    An order is as long as the data, so of each seed only the one of the current epoch is cached.
    """
    cached = _cached_order(seed, rows)
    if epoch not in cached:
        cached.clear()
        order = np.random.default_rng((seed, epoch)).permutation(rows)
        cached[epoch] = order.astype(np.int32) if rows < 1 << 31 else order
    return cached[epoch]


@lru_cache(maxsize=32)
def _cached_order(seed: int, rows: int) -> dict[int, Array]:
    """The cache of one seed, which `_order` fills: epoch -> order."""
    return {}


def steps_per_epoch(trial: Trial, rows: int) -> int:
    """How many batches cover the training rows once."""
    return math.ceil(rows / trial.batch)


def evaluation_steps(trial: Trial, rows: int) -> set[int]:
    """The steps after which a trial is evaluated: evenly over each epoch, always at its end."""
    steps = steps_per_epoch(trial, rows)
    numbers = range(1, trial.epochs * trial.evals_per_epoch + 1)
    return {max(1, round(steps * number / trial.evals_per_epoch)) for number in numbers}


def fit(
    job: Job,
    runners: list[Runner],
    number: int,
    store: Store,
    watch: Watch,
    evaluations: set[int] | None = None,
    after_evaluation: Callable[[list[Runner]], None] | None = None,
) -> None:
    """Train the lanes of pass `number` to the end, from its last checkpoint on.

    `evaluations` are the steps after which lanes are evaluated; None: those of the trial. A lane that is never
    evaluated ends with its last values. All lanes take the same number of steps, even if they see fewer rows.
    `after_evaluation` may end lanes or freeze layers; it may depend only on what a checkpoint holds.
    """
    trial = runners[0].trial
    rows = max(runner.rows_seen(len(job.train)) for runner in runners)
    total = trial.epochs * steps_per_epoch(trial, rows)
    if evaluations is None:
        evaluations = evaluation_steps(trial, rows)
    bank = runners[0].bank
    job.group.broadcast(bank.values)
    step = resume(job, store, number, runners)
    try:
        job = job.with_prefix(bank)
        evaluate_lanes(job, runners, step, evaluations, after_evaluation)
        while step < total and any(runner.status == "running" for runner in runners):
            job.stop.check()
            step += 1
            job = job.with_prefix(bank)  # does nothing unless layers were frozen
            running = [runner for runner in runners if runner.status == "running"]
            losses = compute_gradients(job, running, step, drops_out(trial, step, rows))
            for runner, loss in zip(running, losses, strict=True):
                runner.learn(step, total, loss)
            evaluate_lanes(job, runners, step, evaluations, after_evaluation)
            watch(number, step, total, runners)
            if store.due():
                checkpoint(store, number, step, runners)
    except Interrupted:
        checkpoint(store, number, step, runners)
        raise
    for runner in runners:
        runner.finish(total)
    checkpoint(store, number, step, runners)


def evaluate_only(job: Job, runners: list[Runner], number: int, store: Store) -> None:
    """Evaluate the lanes of pass `number` once and end them: their start values need no training."""
    evaluate_lanes(job, runners, 0, {0})
    for runner in runners:
        runner.finish(0)
    checkpoint(store, number, 0, runners)


def compute_gradients(job: Job, runners: list[Runner], step: int, dropout: bool) -> list[float]:
    """Add the gradients of a step to the bank's, summed over all workers; returns each lane's loss."""
    losses = torch.stack(lane_losses(job, runners, step, dropout))
    if losses.requires_grad:  # not if this worker has no row of a small batch
        losses.sum().backward()  # type: ignore[no-untyped-call]
    values = losses.detach()
    if not job.group.alone:
        bank, lanes = runners[0].bank, [runner.k for runner in runners]
        gradients = bank.gradients[lanes]
        job.group.sum_gradients(gradients, values)
        bank.gradients[lanes] = gradients
    return [float(loss) for loss in values]


def lane_losses(job: Job, runners: list[Runner], step: int, dropout: bool) -> list[Tensor]:
    """Each lane's loss on its batch of this step; with `dropout` each lane draws its masks from its own seed.

    Each of several workers computes the loss of its share of the rows; the losses add up to that of the batch.
    """
    train, bank = job.train, runners[0].bank
    batches = {runner.k: runner.batch(step, len(train)) for runner in runners}
    shares = {k: job.group.share(len(numbers)) for k, numbers in batches.items()}
    rows = {}
    for k, numbers in batches.items():
        if shares[k].stop > shares[k].start:
            batch = train.rows.of_lane(k).take(numbers)
            rows[k] = batch if job.group.alone else batch.share(shares[k])
    streams = None
    if dropout:
        streams = {runner.k: stream(runner.trial.seed, step) for runner in runners}
    logits = bank.logits(rows, streams) if rows else {}
    losses = []
    for k, numbers in batches.items():
        if k not in rows:  # a small batch may have no row for this worker
            losses.append(torch.zeros((), device=job.device))
            continue
        targets = train.targets[bank.model.output_index(train.rows, numbers[shares[k]])]
        loss = job.task.loss(logits[k], targets, rows[k])
        if not job.group.alone:
            batch_targets = train.targets[bank.model.output_index(train.rows, numbers)]
            loss = loss * (job.task.terms(targets, len(rows[k])) / job.task.terms(batch_targets, len(numbers)))
        losses.append(loss)
    return losses


def evaluate_lanes(
    job: Job,
    runners: list[Runner],
    step: int,
    evaluations: set[int],
    after_evaluation: Callable[[list[Runner]], None] | None = None,
) -> None:
    """Evaluate together every running lane that is due at this step and has not been evaluated there yet."""
    if step not in evaluations:
        return
    due = [runner for runner in runners if runner.status == "running" and runner.evaluated != step]
    if not due:
        return
    dev = job.dev
    by_lane = outputs(job, due[0].bank, [runner.k for runner in due], dev.rows)
    for runner in due:
        logits = by_lane[runner.k]
        loss = float(job.task.loss(torch.from_numpy(logits), dev.targets.cpu(), dev.rows))
        if not np.isfinite(logits).all() or not math.isfinite(loss):
            runner.diverge(step)
            continue
        score = job.task.score(job.task.predictions(logits, dev.encoded, dev.examples), dev.examples)
        epoch = step / steps_per_epoch(runner.trial, runner.rows_seen(len(job.train)))
        runner.record_evaluation(step, epoch, loss, score, logits)
    if after_evaluation is not None:
        after_evaluation(runners)


def checkpoint(store: Store, number: int, step: int, runners: list[Runner]) -> None:
    """Write the state of all lanes of a pass."""
    tensors: Tensors = {}
    facts = []
    for k, runner in enumerate(runners):
        state, fact = runner.state()
        tensors |= {f"lane{k}.{name}": tensor.cpu().numpy() for name, tensor in state.items()}
        facts.append(fact)
    store.save(number, step, tensors, {"lanes": facts})


def resume(job: Job, store: Store, number: int, runners: list[Runner]) -> int:
    """Restore the lanes of a pass from their last checkpoint; returns its step, 0 if there is none."""
    saved = job.group.from_first(lambda: store.load(number))
    if saved is None:
        return 0
    step, arrays, facts = saved
    for k, (runner, fact) in enumerate(zip(runners, facts["lanes"], strict=True)):
        prefix = f"lane{k}."
        tensors = {}
        for name, array in arrays.items():
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = torch.from_numpy(array)
        runner.restore(tensors, fact, step)
    return step
