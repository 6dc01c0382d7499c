"""The loop: trials as lanes of one bank, step by step, each with its own optimiser, history and best checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, Tensors
from ..bank.bank import Bank, outputs
from ..data.examples import Dataset, Examples
from ..data.named import NamedTask
from ..errors import Interrupted
from ..model.base import Base
from ..model.rows import Rows, by_length
from ..tasks import Task
from ..tasks.encode import Encoded, Encoder
from ..tasks.metrics import Score
from .checkpoint import Store
from .plan import Trial
from .stop import Stop

LOSS_POINTS = 1000
EVALUATION_ROWS = 64
WARMUP = 0.06
PREFIX_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Part:
    """Examples as the bank takes them, with what the loss compares."""

    examples: Examples
    encoded: Encoded
    targets: Tensor

    def __len__(self) -> int:
        return len(self.encoded.rows)

    @property
    def rows(self) -> Rows:
        """The token rows."""
        return self.encoded.rows

    def with_rows(self, rows: Rows) -> Part:
        """The same with what is known of its rows."""
        return replace(self, encoded=replace(self.encoded, rows=rows))


@dataclass(frozen=True)
class Job:
    """What all trials of a run share: the task and its encoded data, on one base."""

    base: Base
    task: Task
    dataset: Dataset
    encoder: Encoder
    train: Part
    dev: Part
    stop: Stop
    device: torch.device
    named: NamedTask | None = None

    def losses(self, runners: list[Runner], step: int) -> list[Tensor]:
        """Each lane's loss on its own batch of this step, under its own dropout stream."""
        chosen = {r.k: batch_rows(r.trial, step, len(self.train)) for r in runners}
        dropping = drops_out(runners[0].trial, step, len(self.train))
        streams = {r.k: stream(r.trial.seed, step) for r in runners} if dropping else None
        rows = {k: self.train.rows.take(numbers) for k, numbers in chosen.items()}
        bank = runners[0].bank
        logits = bank.logits(rows, streams)
        places = {k: bank.model.output_places(self.train.rows, numbers) for k, numbers in chosen.items()}
        return [self.task.loss(logits[r.k], self.train.targets[places[r.k]], rows[r.k]) for r in runners]

    def with_prefix(self, bank: Bank) -> Job:
        """The job with the states of the bank's frozen layers beside its rows, as far as memory allows.

        They are computed before the first step in batches that depend on the rows alone, so that a resumed run, which
        computes them again, sees the same bits.
        """
        room, parts = PREFIX_BYTES, []
        for part in (self.train, self.dev):
            size = bank.prefix_bytes(part.rows)
            with torch.inference_mode():
                fits = size <= room
                parts.append(part.with_rows(bank.with_prefix(part.rows, self._batches(part.rows))) if fits else part)
            room -= size if fits else 0
        return replace(self, train=parts[0], dev=parts[1])

    def _batches(self, rows: Rows) -> Iterator[Array]:
        for chosen in by_length(rows, EVALUATION_ROWS):
            self.stop.check()
            yield chosen

    def outputs(self, bank: Bank, k: int, rows: Rows) -> Array:
        """Lane k's outputs for all rows, in their order."""
        return outputs(bank, k, rows, self._batches(rows))

    def scores(self, bank: Bank, k: int, encoded: Encoded, examples: Examples) -> dict[str, Score]:
        """Every metric of lane k on some examples."""
        predictions = self.task.predictions(self.outputs(bank, k, encoded.rows), encoded, examples)
        return self.task.scores(predictions, examples)


@dataclass(eq=False)
class Runner:
    """One lane on its way: its optimiser, its best checkpoint, its history."""

    trial: Trial
    bank: Bank
    k: int
    status: str = "running"  # running, done or diverged
    best: float = -math.inf
    best_step: int = 0
    evaluated: int = -1  # the step of the last evaluation
    history: list[dict[str, Any]] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)  # sum and count of losses not yet in the history

    def __post_init__(self) -> None:
        self.flat = self.bank.trained(self.k)
        self.best_values = self.flat.detach().clone()
        trial = self.trial
        self.optimiser = torch.optim.AdamW([self.flat], trial.lr, weight_decay=trial.weight_decay, fused=True)

    def learn(self, step: int, total: int, value: float) -> None:
        """One step by the lane's gradient; a loss or gradient that is no number ends the lane before it moves."""
        norm = float(self.bank.gradients[self.k].norm())
        if not math.isfinite(value) or not math.isfinite(norm):
            self.diverge(step)
            return
        if 0 < self.trial.clip < norm:
            self.bank.gradients[self.k].mul_(self.trial.clip / norm)
        self.optimiser.param_groups[0]["lr"] = self.trial.lr * schedule(self.trial.schedule, step, total)
        self.optimiser.step()
        self.bank.gradients[self.k].zero_()
        self._record(step, total, value)

    def diverge(self, step: int) -> None:
        """End the lane; it touches no other."""
        self.status = "diverged"
        self.history.append({"step": step, "diverged": True})

    def _record(self, step: int, total: int, value: float) -> None:
        self.pending.append(value)
        if len(self.pending) >= math.ceil(total / LOSS_POINTS) or step == total:
            self.history.append({"step": step, "loss": sum(self.pending) / len(self.pending)})
            self.pending.clear()

    def keep_best(self, step: int, epoch: float, loss: float, result: float) -> None:
        """Note an evaluation; the best one so far keeps its values."""
        self.history.append({"step": step, "epoch": epoch, "dev_loss": loss, "dev_score": result})
        self.evaluated = step
        if result > self.best:
            self.best, self.best_step = result, step
            self.best_values.copy_(self.flat.detach())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a later process needs to go on exactly here."""
        facts = {name: getattr(self, name) for name in _FACTS}
        facts["best"] = self.best if math.isfinite(self.best) else None
        moments = self.optimiser.state.get(self.flat, {})
        tensors = {"value": self.flat.detach(), "best": self.best_values}
        tensors |= {name: moments[name] for name in ("exp_avg", "exp_avg_sq") if name in moments}
        return tensors, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any], step: int) -> None:
        """Go on where `state` was taken."""
        for name in _FACTS:
            setattr(self, name, facts[name])
        self.best = -math.inf if facts["best"] is None else facts["best"]
        with torch.no_grad():
            self.flat.copy_(tensors["value"])
            self.best_values.copy_(tensors["best"])
        if "exp_avg" in tensors:
            moments = {name: tensors[name].to(self.flat.device).clone() for name in ("exp_avg", "exp_avg_sq")}
            self.optimiser.state[self.flat] = {"step": torch.tensor(float(step)), **moments}


_FACTS = ("status", "best", "best_step", "evaluated", "history", "pending")


def schedule(kind: str, step: int, total: int) -> float:
    """The share of the learning rate at a step (from 1): constant, or linear warm-up and linear decay to 0."""
    if kind == "constant":
        return 1.0
    warm = max(1, int(WARMUP * total))
    return min(step / warm, (total - step + 1) / max(1, total - warm + 1))


def stream(seed: int, step: int) -> int:
    """The seed of a lane's dropout at a step: a function of these two alone, so a resumed run draws the same."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest())


def batch_rows(trial: Trial, step: int, rows: int) -> Array:
    """Which training rows a trial sees at a step (from 1): its own seeded order, anew each epoch."""
    epoch, place = divmod(step - 1, steps_per_epoch(trial, rows))
    return _order(trial.seed, epoch, rows)[place * trial.batch : (place + 1) * trial.batch]


def drops_out(trial: Trial, step: int, rows: int) -> bool:
    """Whether dropout is on at a step; what-to-freeze had it only up to the first of ten evaluations of each epoch."""
    steps = steps_per_epoch(trial, rows)
    return trial.dropout == "on" or (trial.dropout == "first-tenth" and (step - 1) % steps < max(1, round(steps / 10)))


@lru_cache(maxsize=32)
def _order(seed: int, epoch: int, rows: int) -> Array:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def steps_per_epoch(trial: Trial, rows: int) -> int:
    """Batches that cover the training rows once."""
    return math.ceil(rows / trial.batch)


def evaluation_steps(trial: Trial, rows: int) -> set[int]:
    """The steps after which a trial is evaluated: evenly over each epoch, always at its end."""
    steps, parts = steps_per_epoch(trial, rows), trial.evals_per_epoch
    return {max(1, round(steps * part / parts)) for part in range(1, trial.epochs * parts + 1)}


def fit(job: Job, runners: list[Runner], part: int, store: Store, watch: Watch) -> None:
    """Train the lanes of one pass to the end, from wherever its last checkpoint stands."""
    trial = runners[0].trial
    total = trial.epochs * steps_per_epoch(trial, len(job.train))
    evaluations = evaluation_steps(trial, len(job.train))
    step = resume(store, part, runners)
    try:
        evaluate_lanes(job, runners, step, evaluations)
        while step < total and any(runner.status == "running" for runner in runners):
            job.stop.check()
            step += 1
            running = [runner for runner in runners if runner.status == "running"]
            losses = job.losses(running, step)
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            for runner, loss in zip(running, losses, strict=True):
                runner.learn(step, total, float(loss.detach()))
            evaluate_lanes(job, runners, step, evaluations)
            watch(part, step, total, runners)
            if store.due():
                checkpoint(store, part, step, runners)
    except Interrupted:
        checkpoint(store, part, step, runners)
        raise
    for runner in runners:
        runner.status = "done" if runner.status == "running" else runner.status
    checkpoint(store, part, step, runners)


def evaluate_lanes(job: Job, runners: list[Runner], step: int, evaluations: set[int]) -> None:
    """Evaluate every running lane that is due at this step and has not been evaluated there yet."""
    if step not in evaluations:
        return
    dev = job.dev
    for runner in runners:
        if runner.status == "running" and runner.evaluated != step:
            logits = job.outputs(runner.bank, runner.k, dev.rows)
            loss = float(job.task.loss(torch.from_numpy(logits), dev.targets.cpu(), dev.rows))
            if not np.isfinite(logits).all() or not math.isfinite(loss):
                runner.diverge(step)
                continue
            result = job.task.score(job.task.predictions(logits, dev.encoded, dev.examples), dev.examples)
            epoch = step / steps_per_epoch(runner.trial, len(job.train))
            runner.keep_best(step, epoch, loss, result)


def checkpoint(store: Store, part: int, step: int, runners: list[Runner]) -> None:
    """Write the state of all lanes of a pass."""
    tensors: Tensors = {}
    facts = []
    for k, runner in enumerate(runners):
        state, fact = runner.state()
        tensors |= {f"lane{k}.{name}": tensor.cpu().numpy() for name, tensor in state.items()}
        facts.append(fact)
    store.save(part, step, tensors, {"lanes": facts})


def resume(store: Store, part: int, runners: list[Runner]) -> int:
    """Bring the lanes of a pass to their last checkpoint; the step it was taken after, 0 if there is none."""
    found = store.load(part)
    if found is None:
        return 0
    step, arrays, facts = found
    for k, (runner, fact) in enumerate(zip(runners, facts["lanes"], strict=True)):
        prefix = f"lane{k}."
        own = {name.removeprefix(prefix): torch.from_numpy(a) for name, a in arrays.items() if name.startswith(prefix)}
        runner.restore(own, fact, step)
    return step


Watch = Callable[[int, int, int, list[Runner]], None]
"""Is told the part, the step, the last step and the lanes."""
