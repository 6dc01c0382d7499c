"""The default recipe: what `bitfit train FILE` does when nothing else is asked for.

1. The head is solved on the frozen base (convex.py): logistic regression and its kin, in seconds. What is delivered
   must not do worse than it on rows that were not trained on.
2. Training starts from a head of that direction with small outputs. From the full solution the training loss is near
   zero already and the selection learns nothing; from small outputs it learns features (LOG.md has the numbers).
3. With few rows every row is held out once, the folds being lanes of one pass; with many, one part is held out. The
   rate is chosen by the loss on held-out rows at its best temperature.
4. The delta is trained on all rows with the chosen rate; with few rows the values of two trainings are averaged.
5. Temperature and threshold, fitted on held-out rows, are folded into the head's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..bank.bank import Bank
from ..bank.lanes import Lane, lane_to_train
from ..data.examples import Dataset
from ..data.splits import folds
from ..delta.delta import Delta
from ..errors import Diverged
from ..model.task_model import Model
from .calibration import Held, calibration_error, shifted, temperature, threshold
from .checkpoint import Store
from .convex import (
    FOLDS,
    Linear,
    cross_validated,
    head_states,
    output_layer,
    sampled,
    solve,
    taken,
    tensors_of,
    with_values,
)
from .evaluation import outputs
from .explain import Calibration, Candidate, Story, class_scores, confusions, learning_curve, suspects
from .history import History
from .job import Job, encode_part
from .loop import Runner, Watch, fit, steps_per_epoch
from .outcome import Outcome, Scores, describe
from .plan import FEW, Trial
from .resolved import Resolved, passes

VERSION = 1  # raised when the recipe is changed so that its deltas differ; benchmarks record it
AVERAGED = 2  # trainings whose values are averaged, with few rows
START = 10.0  # the penalty that gives the direction a training starts from
DROPPED_AFTER = 0.4  # of a search of three rates or more, when the worst one ends
MARGIN = 0.5  # standard errors by which the head alone must beat training to be delivered
TOO_FEW = 30  # held-out rows, to say that the head alone is better
FROZEN = "the head alone, solved on the frozen base"


@dataclass(frozen=True, eq=False)
class Split:
    """Examples that are trained on and examples that are held out."""

    train: Array
    held: Array


@dataclass(eq=False)
class Searched:
    """One trial on every split: its outputs for held-out rows and the mean of its values."""

    resolved: Resolved
    outputs: Array
    values: Tensor | None = None
    history: History = field(default_factory=History)
    status: str = "done"
    loss: float = float("inf")  # on held-out rows, at the best temperature

    def add(self, values: Tensor, count: int) -> None:
        """Take one more training of `count` into the mean."""
        part = values / count
        self.values = part if self.values is None else self.values + part


@dataclass(frozen=True, eq=False)
class Followed:
    """What the recipe came to."""

    trials: list[Outcome]
    best: Outcome
    story: Story


def follow(
    job: Job, trials: list[Resolved], store: Store, watch: Watch, exact: bool = False, lanes: int | None = None
) -> Followed:
    """Follow the recipe for trials that differ in rate; `exact`: without folds and averages, as a given seed wants."""
    recipe = _Recipe(job, trials, store, watch, exact, lanes)
    recipe.solve_head()
    if trials[0].resolution.selection:
        recipe.search()
    return recipe.deliver()


def uses_folds(dataset: Dataset, exact: bool) -> bool:
    """Whether every row is held out once: there are few, and no dev file."""
    return dataset.held_out and not exact and len(dataset.train) + len(dataset.dev) <= FEW


class _Recipe:
    """One run of the recipe."""

    def __init__(
        self, job: Job, trials: list[Resolved], store: Store, watch: Watch, exact: bool, lanes: int | None
    ) -> None:
        self.trials, self.store, self.watch, self.exact, self.lanes = trials, store, watch, exact, lanes
        first = trials[0]
        self.model = Model(job.base, job.task.outputs, first.trial.pool, first.trial.inject)
        self.layer = output_layer(self.model)
        self.dataset = job.dataset
        self.part = 0  # passes so far
        self.whole = encode_part(job.task, job.encoder, job.dataset.train + job.dataset.dev, job.device)
        self.job = replace(job, train=self.whole)
        self.splits = self._splits()
        self.held = np.sort(np.concatenate([split.held for split in self.splits]))
        self.retrains = self.dataset.held_out
        self.searched: list[Searched] = []
        self.heads: dict[int, Linear] = {}

    def _splits(self) -> list[Split]:
        rows = np.arange(len(self.whole.examples))
        if self.by_fold:
            held = folds(self.whole.examples, self.job.task.kind, FOLDS, self.trials[0].trial.data_seed)
            return [Split(np.setdiff1d(rows, fold), np.array(fold)) for fold in held]
        border = len(self.dataset.train)
        return [Split(rows[:border], rows[border:])]

    @property
    def by_fold(self) -> bool:
        """Whether every row is held out once."""
        return uses_folds(self.dataset, self.exact)

    # ---- the head alone

    def solve_head(self) -> None:
        """Solve the head on the frozen base, with cross-validation."""
        first = self.trials[0]
        by_token = self.model.pool == "tokens"
        self.sample = sampled(self.whole, by_token)
        self.sampled = taken(self.whole, self.sample, by_token)
        self.states = head_states(self.job, self.sampled, first.resolution, first.trial.inject, first.trial.seed)
        self.row_splits = [(self._sampled_rows(split.train), self._sampled_rows(split.held)) for split in self.splits]
        self.solution = cross_validated(self.job, self.states, self.row_splits)

    def _sampled_rows(self, examples: Array) -> Array:
        inside = np.searchsorted(self.sample, examples[np.isin(examples, self.sample)])
        return self.sampled.encoded.rows_of(np.sort(inside))

    def _places(self, examples: Array) -> Array:
        """Where the outputs of some examples lie among those of all rows."""
        return self.model.output_places(self.whole.rows, self.whole.encoded.rows_of(examples))

    def _start(self, number: int) -> dict[str, Tensor]:
        """The head that training on a split starts from; -1: on all rows."""
        if number not in self.heads:
            rows = self.row_splits[number][0] if number >= 0 else np.arange(len(self.states.rows))
            states = self.states.take(rows)
            self.heads[number] = solve(self.job.task, states, START).shrunk(states)
        return self._tensors(self.heads[number])

    def _tensors(self, head: Linear) -> dict[str, Tensor]:
        return tensors_of(self.layer, head, self.states)

    # ---- the search

    def search(self) -> None:
        """Train every trial on every split and keep what it says of held-out rows."""
        size = self.model.output_count(self.whole.rows), self.job.task.outputs
        self.searched = [Searched(resolved, np.zeros(size, np.float32)) for resolved in self.trials]
        lanes = [(own, number) for own in self.searched for number in range(len(self.splits))]
        groups = passes([own.resolved for own, _ in lanes], self.lanes)
        for group in groups:
            taken, lanes = lanes[: len(group)], lanes[len(group) :]
            self._search_pass(taken, "search" if len(groups) == 1 else f"search {self.part + 1} of {len(groups)}")

    def _search_pass(self, lanes: Sequence[tuple[Searched, int]], phase: str) -> None:
        rows = [self.whole.encoded.rows_of(self.splits[number].train) for _, number in lanes]
        starts = [self._start(number) for _, number in lanes]
        runners, job = self._train([own.resolved for own, _ in lanes], starts, rows, phase, searching=True)
        for runner, (own, number) in zip(runners, lanes, strict=True):
            own.history.add(runner.history)
            if runner.status != "done":
                own.status = runner.status
                continue
            own.add(runner.flat.detach().cpu().clone(), len(self.splits))
            held = self.whole.encoded.rows_of(self.splits[number].held)
            found = outputs(job, runner.bank, [runner.k], job.train.rows.take(held))[runner.k]
            own.outputs[self.model.output_places(self.whole.rows, held)] = found

    def _train(
        self,
        group: Sequence[Resolved],
        starts: Sequence[dict[str, Tensor]],
        rows: Sequence[Array],
        phase: str,
        searching: bool = False,
    ) -> tuple[list[Runner], Job]:
        """Train lanes that start from these heads on these rows."""
        lanes = [self._lane(resolved, start) for resolved, start in zip(group, starts, strict=True)]
        bank = Bank(self.model, lanes, group[0].trial.prefix_dropout)
        job = self.job.with_prefix(bank)
        runners = [Runner(r.trial, bank, k, rows[k], phase) for k, r in enumerate(group)]
        evaluations = self._evaluations(group[0].trial, rows, searching)
        fit(job, runners, self.part, self.store, self.watch, evaluations, drop_worst)
        self.part += 1
        return runners, job

    def _evaluations(self, trial: Trial, rows: Sequence[Array], searching: bool) -> set[int]:
        """The step after which the worst of three rates or more ends."""
        if searching and len(self.splits) == 1 and len(rows) > 2:
            return {round(DROPPED_AFTER * trial.epochs * steps_per_epoch(trial, len(rows[0])))}
        return set()

    # ---- the choice

    def deliver(self) -> Followed:
        """Choose, train on all rows, calibrate and explain."""
        task = self.job.task
        frozen = self._frozen_outputs()
        for own in self.searched:
            if own.status == "done":
                held = self._held(own.outputs)
                own.loss = held.loss(task, temperature(task, held))
        done = [own for own in self.searched if own.status == "done"]
        if self.searched and not done:
            rates = ", ".join(f"{own.resolved.trial.lr:g}" for own in self.searched)
            raise Diverged(f"every trial diverged (rates {rates}): the loss was not a number; try smaller --lr")
        best = min(done, key=lambda own: own.loss) if done else None
        if best is not None and self._frozen_is_better(frozen, best.outputs):
            best = None
        found = frozen if best is None else best.outputs
        examples = self.held if best is not None else self._held_in_sample
        held = self._held(found, examples)
        warm = temperature(task, held)
        shift = threshold(task, held, warm)
        scores: Scores = {"dev": self._scores(shifted(found / np.float32(warm), shift), examples)}
        bank, trained_rows, averaged, steps = self._final(best)
        self._fold(bank, warm, shift)
        trial = (best.resolved if best is not None else self.trials[0]).trial
        outcome = self._outcome(trial, bank, scores, History() if best is None else best.history, steps, trained_rows)
        story = self._story(best, frozen, held, warm, shift, scores, trained_rows, averaged)
        outcome = _with_calibration(outcome, story)
        others = [outcome if own is best else self._candidate(own) for own in self.searched] or [outcome]
        return Followed(others, outcome, story)

    @property
    def _held_in_sample(self) -> Array:
        return self.held[np.isin(self.held, self.sample)]

    def _frozen_outputs(self) -> Array:
        """What the head alone says of held-out rows, in the places of all rows."""
        found = np.zeros((self.model.output_count(self.whole.rows), self.job.task.outputs), np.float32)
        found[self._places(self.sample)] = self.solution.predicted
        return found

    def _held(self, found: Array, examples: Array | None = None) -> Held:
        examples = self.held if examples is None else examples
        places = self._places(examples)
        rows = self.whole.rows.take(self.whole.encoded.rows_of(examples))
        return Held(found[places], self.whole.targets.cpu().numpy()[places], rows, self.model.pool == "tokens")

    def _scores(self, found: Array, examples: Array) -> dict[str, Any]:
        chosen = self.whole.examples.take(examples.tolist())
        return self.job.task.scores(self._predictions(found, examples), chosen)

    def _predictions(self, found: Array, examples: Array) -> Any:
        chosen = self.whole.examples.take(examples.tolist())
        return self.job.task.predictions(found[self._places(examples)], self.whole.encoded.take(examples), chosen)

    def _score(self, found: Array, examples: Array) -> float:
        chosen = self.whole.examples.take(examples.tolist())
        return self.job.task.score(self._predictions(found, examples), chosen)

    def _frozen_is_better(self, frozen: Array, trained: Array) -> bool:
        """Whether the head alone has the smaller loss by more than MARGIN standard errors, row by row."""
        task = self.job.task
        sides = []
        for found in (frozen, trained):
            held = self._held(found, self._held_in_sample)
            sides.append(held.row_losses(task, temperature(task, held)))
        apart = sides[1] - sides[0]
        if len(apart) < TOO_FEW:
            return False
        return bool(apart.mean() > MARGIN * apart.std(ddof=1) / len(apart) ** 0.5)

    # ---- the delta

    def _final(self, best: Searched | None) -> tuple[Bank, int, int, int]:
        """A bank whose only lane is delivered; how many examples, averaged trainings and steps are in it."""
        rows = len(self.whole.examples) if self.retrains else len(self.dataset.train)
        if best is None:
            seen = np.arange(len(self.states.rows)) if self.retrains else self.row_splits[0][0]
            head = solve(self.job.task, self.states.take(seen), self.solution.strength)
            return self._bank(self.trials[0], self._tensors(head)), rows, 1, 0
        trial = best.resolved.trial
        values, averaged, number = best.values, 1, 0
        if self.retrains:
            values, averaged, number = self._retrain(best), self._averaged, -1
        bank = self._bank(best.resolved, self._start(number))
        assert values is not None
        with torch.no_grad():
            bank.trained(0).copy_(values)
        return bank, rows, averaged, trial.epochs * steps_per_epoch(trial, rows)

    @property
    def _averaged(self) -> int:
        return AVERAGED if self.by_fold else 1

    def _retrain(self, best: Searched) -> Tensor:
        """The mean values of trainings on all rows that differ in their seed."""
        trial = best.resolved.trial
        again = [replace(best.resolved, trial=replace(trial, seed=trial.seed + i)) for i in range(self._averaged)]
        mean = Searched(best.resolved, np.zeros((0, 0), np.float32))
        everything = np.arange(len(self.whole))
        for group in passes(again, self.lanes):
            starts = [self._start(-1)] * len(group)
            runners, _ = self._train(group, starts, [everything] * len(group), "training on all rows")
            for runner in runners:
                if runner.status != "done":
                    raise Diverged(f"the training on all rows diverged at rate {trial.lr:g}; try smaller --lr")
                mean.add(runner.flat.detach().cpu().clone(), len(again))
        assert mean.values is not None
        return mean.values

    def _bank(self, resolved: Resolved, start: dict[str, Tensor]) -> Bank:
        return Bank(self.model, [self._lane(resolved, start)])

    def _lane(self, resolved: Resolved, start: dict[str, Tensor]) -> Lane:
        """A lane with this head; all lanes have the start values of one seed, so that their values can be averaged."""
        what, trial = resolved.resolution, self.trials[0].trial
        lane = lane_to_train(self.model, what.selection, trial.head, what.starts, trial.seed)
        return with_values(lane, start)

    def _fold(self, bank: Bank, warm: float, shift: float) -> None:
        """Put temperature and threshold into the head's last layer."""
        for slot in bank.lanes[0].slots:
            values = bank.values[0, slot.offset : slot.offset + slot.size]
            if slot.name in (f"{self.layer}.weight", f"{self.layer}.bias"):
                values /= warm
            if slot.name == f"{self.layer}.bias" and shift:
                values[-1] += shift

    def _candidate(self, own: Searched) -> Outcome:
        """A trial that was not chosen: its delta is the mean over the splits."""
        if own.status != "done" or own.values is None:
            return Outcome(own.resolved.trial, own.status, {}, own.history, None)
        bank = self._bank(own.resolved, self._start(0))
        with torch.no_grad():
            bank.trained(0).copy_(own.values)
        scores: Scores = {"dev": self._scores(own.outputs, self.held)}
        return self._outcome(own.resolved.trial, bank, scores, own.history, 0, len(self.splits[0].train))

    def _outcome(self, trial: Trial, bank: Bank, scores: Scores, history: History, steps: int, rows: int) -> Outcome:
        tensors = bank.tensors(0)
        meta = describe(self.job, self.model, trial, bank.lanes[0].trained, tensors, scores, steps, rows)
        return Outcome(trial, "done", scores, history, Delta(tensors, meta))

    # ---- the story

    def _story(
        self,
        best: Searched | None,
        frozen: Array,
        held: Held,
        warm: float,
        shift: float,
        scores: Scores,
        rows: int,
        averaged: int,
    ) -> Story:
        task, trial = self.job.task, self.trials[0].trial
        examples = self._held_in_sample
        frozen_held = self._held(frozen, examples)
        loss = frozen_held.loss(task, temperature(task, frozen_held))
        candidates = [Candidate(FROZEN, None, loss, self._score(frozen, examples), best is None)]
        for own in self.searched:
            if own.status == "done":
                score = self._score(own.outputs, self.held)
                rate = own.resolved.trial.lr
                candidates.append(Candidate(f"rate {rate:g}", rate, own.loss, score, own is best))
        found = shifted((frozen if best is None else best.outputs) / np.float32(warm), shift)
        shown = examples if best is None else self.held
        predictions = self._predictions(found, shown)
        chosen = self.whole.examples.take(shown.tolist())
        before = calibration_error(task, held)
        after = calibration_error(task, held, warm)
        calibrated = Calibration(warm, before, after) if before is not None and after is not None else None
        curve = learning_curve(self.job, self.states, self.row_splits, self.solution, self._sampled_score)
        return Story(
            how=self._how(),
            candidates=tuple(candidates),
            metric=trial.metric,
            expected=scores["dev"][trial.metric],
            rows=rows,
            averaged=averaged,
            calibration=calibrated,
            threshold=shift,
            classes=class_scores(task, predictions, chosen),
            confusions=confusions(task, predictions, chosen),
            curve=curve,
            suspects=suspects(task, frozen_held, self.whole, examples),
        )

    def _sampled_score(self, predicted: Array) -> float:
        found = np.zeros((self.model.output_count(self.whole.rows), self.job.task.outputs), np.float32)
        found[self._places(self.sample)] = predicted
        return self._score(found, self._held_in_sample)

    def _how(self) -> str:
        if self.by_fold:
            return f"{len(self.splits)} folds, so that each of {len(self.held):,} rows is held out once"
        return f"{len(self.held):,} rows held out"


def _with_calibration(outcome: Outcome, story: Story) -> Outcome:
    assert outcome.delta is not None
    found = story.calibration
    errors = None if found is None else (found.before, found.after)
    meta = replace(outcome.delta.meta, recipe="default", calibration_errors=errors)
    return replace(outcome, delta=replace(outcome.delta, meta=meta))


def drop_worst(runners: list[Runner]) -> None:
    """End the lane with the largest dev loss, once in a pass and only of three or more."""
    running = [runner for runner in runners if runner.status == "running"]
    if len(running) < 3 or any(runner.status == "dropped" for runner in runners):
        return
    worst = max(running, key=lambda runner: runner.history.evaluations[-1].dev_loss)
    worst.status = "dropped"


def lines(story: Story) -> list[str]:
    """The story in a few sentences."""
    percent = f"{100 * story.expected.value:.1f} ({100 * story.expected.low:.1f} to {100 * story.expected.high:.1f})"
    tried = "; ".join(f"{own.name}: {100 * own.score:.1f}" for own in story.candidates)
    chosen = next(own.name for own in story.candidates if own.chosen)
    told = [f"Tried with {story.how} ({story.metric}): {tried}."]
    told.append(f"Chosen by the loss on these rows: {chosen}.")
    again = f" {story.averaged} times and averaged" if story.averaged > 1 else ""
    told.append(f"The delta is trained on {story.rows:,} rows{again}. Expected on new data: {story.metric} {percent}.")
    if story.calibration is not None:
        own = story.calibration
        told.append(
            f"Probabilities: temperature {own.temperature:.2f}, calibration error {own.before:.3f} before and "
            f"{own.after:.3f} after."
        )
    if story.threshold:
        told.append(f"A class is rare: {story.threshold:+.2f} is added to the output of the second class.")
    if story.confusions:
        first = ", ".join(f"{own.label} taken for {own.taken_for} ({own.rows})" for own in story.confusions[:3])
        told.append(f"Most confused: {first}.")
    if story.curve is not None:
        curve = story.curve
        verdict = "more rows are likely to help" if curve.helps else "more rows may help little"
        told.append(
            f"The head alone: {100 * curve.half:.1f} with half of the rows (± {100 * curve.spread:.1f}), "
            f"{100 * curve.all:.1f} with all: {verdict}."
        )
    if story.suspects:
        told.append(f"{len(story.suspects):,} labels look wrong; --suspects FILE lists them.")
    return told
