"""The default recipe: what `bitfit train FILE` does without other options.

1. The head alone is solved on the frozen base (convex.py): logistic regression and the like, in seconds. It is what is
   delivered, if on rows that were not trained on it does better than training.
2. Training starts from a head of that direction with small outputs. From the full solution the training loss is near
   zero already and the selection learns nothing; from small outputs it learns features (LOG.md has the numbers).
3. With few rows every row is held out once: the folds of the cross-validation are lanes of one pass. With many rows
   one part is held out. The rate is chosen by the loss on held-out rows at its best temperature.
4. The delta is trained on all rows with the chosen rate; with few rows the values of two trainings are averaged.
5. Temperature and threshold, fitted on held-out rows, are folded into the head's values.

On a base that makes sentence embeddings, a pair can be read in two ways: as one sequence, or each text by itself (pool
"pair"). With few rows the latter is searched; with many both are, and the better one is delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from ..bank.bank import Bank
from ..bank.lanes import Lane
from ..data.examples import Dataset
from ..delta.delta import Delta
from ..model.anatomy import PAIR
from ..model.task_model import Model
from .calibration import HeldOut
from .checkpoint import Store
from .convex import (
    LinearHead,
    Split,
    cross_validated,
    fold_splits,
    head_states,
    held_examples,
    held_out_outputs,
    known_examples,
    output_layer,
    sampled,
    solve,
    tensors_of,
    with_values,
)
from .evaluation import outputs
from .explain import Candidate, Curve, Story, Suspect, calibration, confusions, learning_curve, suspects
from .history import History
from .job import Job, encode_part
from .loop import Runner, Watch, fit, steps_per_epoch
from .outcome import Outcome, Scores, describe
from .plan import FEW, Trial
from .resolved import Resolved, delta_tensors, passes, start_lane

VERSION = 8  # raised when the recipe is changed so that its deltas differ; benchmarks record it
AVERAGED = 2  # trainings whose values are averaged, with few rows
START = 10.0  # the strength of the penalty on the head that a training starts from
DROPPED_AFTER = 0.4  # share of the steps after which the worst of three rates or more ends
# The head alone is delivered if its loss on held-out rows is smaller. With fewer than ENOUGH of them it must be smaller
# by MARGIN standard errors, because training mostly helps; with fewer than TOO_FEW it is never chosen. This does not
# hold for a pair read one by one: how similar its texts are is an input of the head, and few rows hardly add to it.
TOO_FEW = 30
ENOUGH = 100
MARGIN = 0.5
HEAD_ONLY = "the head alone, solved on the frozen base"
TOGETHER, APART = "as one sequence", "one by one"  # how the texts of a pair are read


@dataclass(frozen=True, eq=False)
class Reading:
    """A way to read the texts: a job, and its trials, which differ in their rate."""

    job: Job
    trials: list[Resolved]
    name: str = ""  # empty if there is no other


@dataclass(eq=False)
class Searched:
    """One trial of the search, trained on every split."""

    resolved: Resolved
    outputs: Array  # for all examples, each by the training that did not see it
    values: Tensor | None = None  # the trained values, their mean over the splits
    steps: int = 0
    history: History = field(default_factory=History)
    status: str = "done"
    held: HeldOut | None = None  # the outputs for held-out examples; None unless all trainings ended as "done"

    @property
    def trial(self) -> Trial:
        """Its settings."""
        return self.resolved.trial

    @property
    def loss(self) -> float:
        """The loss on held-out rows, at the best temperature."""
        return float("inf") if self.held is None else self.held.best_loss


@dataclass(frozen=True, eq=False)
class Choice:
    """What is delivered, and its outputs for held-out examples."""

    searched: Searched | None  # None: the head alone
    held: HeldOut


@dataclass(frozen=True, eq=False)
class Final:
    """A bank whose only lane becomes a delta, and how it was trained."""

    bank: Bank
    examples: int  # examples that it was trained on
    averaged: int = 1  # trainings whose values were averaged
    steps: int = 0


@dataclass(frozen=True, eq=False)
class Followed:
    """The result of the recipe."""

    job: Job  # that the delta was trained on
    trials: list[Outcome]
    best: Outcome
    story: Story
    baseline: float  # the score of the task's baseline on the rows that were held out


def follow(
    readings: Sequence[Reading], store: Store, watch: Watch, exact: bool = False, lanes: int | None = None
) -> Followed:
    """Follow the recipe for one way to read the texts or two; `lanes` is the most trials of a pass.

    With `exact` there are no folds and no averages: one training with the seed that the user set.
    """
    numbers = count()
    recipes = [_Recipe(reading, numbers, store, watch, exact, lanes) for reading in readings]
    for recipe, trials in zip(recipes, _trials_to_search(recipes), strict=True):
        if trials[0].resolution.selection:
            recipe.search(trials)
    while True:
        choices = {recipe: recipe.choice() for recipe in recipes}
        best = min(recipes, key=lambda recipe: choices[recipe].held.best_loss)
        final = best.finished(choices[best])
        if final is not None:  # None: the last training diverged, and is no longer a choice
            return best.followed(choices[best], final, recipes)


def _trials_to_search(recipes: Sequence[_Recipe]) -> list[list[Resolved]]:
    """The trials of each recipe. Two share the rates that one alone tries, so that they take as long together."""
    if len(recipes) == 1:
        return [recipes[0].trials]
    first, second = recipes
    return [first.trials[1:], second.trials[1:2]]


def uses_folds(dataset: Dataset, exact: bool) -> bool:
    """Whether every row is held out once: there are few, and no dev file."""
    return dataset.held_out and not exact and has_few_rows(dataset)


def has_few_rows(dataset: Dataset) -> bool:
    """Whether training and dev rows are few."""
    return len(dataset.train) + len(dataset.dev) <= FEW


class _Recipe:
    """One run of the recipe. Arrays number the examples of `data`, unless they are called rows."""

    def __init__(
        self,
        reading: Reading,
        numbers: Iterator[int],
        store: Store,
        watch: Watch,
        exact: bool,
        lanes: int | None,
    ) -> None:
        job, self.trials, self.name = reading.job, reading.trials, reading.name
        self.numbers, self.store, self.watch, self.most_lanes = numbers, store, watch, lanes
        first = self.trials[0].trial
        self.model = Model(job.base, job.task.outputs, first.pool, first.inject)
        self.layer = output_layer(self.model)
        self.data = encode_part(job.task, job.encoder, job.dataset.train + job.dataset.dev, job.device)
        self.job = replace(job, train=self.data)
        self.by_fold = uses_folds(job.dataset, exact)
        self.everything = Split(np.arange(len(self.data.examples)), np.zeros(0, np.int64))
        self.splits = self._splits()
        self.held = held_examples(self.splits)
        self.known = known_examples(job.task, self.data, self.splits)
        # The delta trains in the end on held-out rows of the training file, too, but never on those of a dev file.
        self.last_split = self.everything if job.dataset.held_out else self.splits[0]
        self.searched: list[Searched] = []
        self.starts: dict[Split, LinearHead] = {}
        self._solve_head()

    def _splits(self) -> list[Split]:
        if self.by_fold:
            return fold_splits(self.data, self.job.task, self.trials[0].trial.data_seed)
        examples, count = self.everything.train, len(self.job.dataset.train)
        return [Split(examples[:count], examples[count:])]

    # ---- the head alone

    def _solve_head(self) -> None:
        """Solve the head on the frozen base, on a sample of the examples if there are many, with cross-validation."""
        first = self.trials[0]
        self.sample = sampled(self.data, None if self.by_fold else self.held)
        part = self.data.take(self.sample)
        self.states = head_states(self.job, part, first.resolution, first.trial.inject, first.trial.seed)
        self.sample_splits = [self._in_sample(split) for split in self.splits]
        self.solution = cross_validated(self.job, self.states, self.sample_splits)
        known = known_examples(self.job.task, part, self.sample_splits)
        outputs_of_sample = HeldOut(self.job.task, part, self.solution.predicted, known)
        self.head_only = outputs_of_sample.take(held_examples(self.sample_splits))

    def _in_sample(self, split: Split) -> Split:
        """The sampled examples of a split, by their indices in the sample."""
        sides = []
        for examples in (split.train, split.held):
            sides.append(np.searchsorted(self.sample, examples[np.isin(examples, self.sample)]))
        return Split(*sides)

    def _start(self, split: Split) -> dict[str, Tensor]:
        """The head that training on a split starts from."""
        if split not in self.starts:
            states = self.states.take(self._in_sample(split).train)
            self.starts[split] = solve(self.job.task, states, START).shrunk(states)
        return self._tensors(self.starts[split])

    def _tensors(self, head: LinearHead) -> dict[str, Tensor]:
        return tensors_of(self.layer, head, self.states)

    # ---- the search

    def search(self, trials: Sequence[Resolved]) -> None:
        """Train these trials on every split and keep their outputs for held-out examples."""
        shape = len(self.data.targets), self.job.task.outputs
        self.searched = [Searched(resolved, np.zeros(shape, np.float32)) for resolved in trials]
        lanes = []
        for searched in self.searched:
            lanes += [(searched, split) for split in self.splits]
        groups = passes([searched.resolved for searched, _ in lanes], self.most_lanes)
        for number, group in enumerate(groups, 1):
            phase = "search" if len(groups) == 1 else f"search {number} of {len(groups)}"
            if self.name:
                phase = f"{phase}, texts {self.name}"
            self._search_pass(lanes[: len(group)], phase)
            lanes = lanes[len(group) :]
        for searched in self.searched:
            if searched.status == "done":
                everything = HeldOut(self.job.task, self.data, searched.outputs, known=self.known)
                searched.held = everything.take(self.held)

    def _search_pass(self, lanes: Sequence[tuple[Searched, Split]], phase: str) -> None:
        group = [searched.resolved for searched, _ in lanes]
        runners, job = self._train(group, [split for _, split in lanes], phase, searching=True)
        for runner, (searched, split) in zip(runners, lanes, strict=True):
            searched.history.add(runner.history)
            if runner.status != "done":
                searched.status = runner.status
                continue
            searched.steps = runner.history.losses[-1].step  # the evaluation that drops a lane sets `best_step`
            searched.values = _with_share(searched.values, runner, len(self.splits))
            rows = job.train.rows.take(self.data.rows_of(split.held))
            by_lane = outputs(job, runner.bank, [runner.k], rows)
            searched.outputs[self.data.outputs_of(split.held)] = by_lane[runner.k]

    def _train(
        self, group: Sequence[Resolved], splits: Sequence[Split], phase: str, searching: bool = False
    ) -> tuple[list[Runner], Job]:
        """Train a lane for each trial on the examples of its split; also returns the job with the bank's prefix."""
        lanes = [self._lane(resolved, self._start(split)) for resolved, split in zip(group, splits, strict=True)]
        rows = [self.data.rows_of(split.train) for split in splits]
        bank = Bank(self.model, lanes, group[0].trial.prefix_dropout)
        job = self.job.with_prefix(bank)
        runners = [Runner(resolved.trial, bank, k, rows[k], phase) for k, resolved in enumerate(group)]
        evaluations = self._evaluations(group[0].trial, rows, searching)
        fit(job, runners, next(self.numbers), self.store, self.watch, evaluations, self._drop_worst)
        return runners, job

    def _evaluations(self, trial: Trial, rows: Sequence[Array], searching: bool) -> set[int]:
        """The step after which the worst lane of a search ends; none if there are folds, or fewer than three lanes."""
        if searching and len(self.splits) == 1 and len(rows) > 2:
            return {round(DROPPED_AFTER * trial.epochs * steps_per_epoch(trial, len(rows[0])))}
        return set()

    def _drop_worst(self, runners: list[Runner]) -> None:
        known = self.known[self.held]
        drop_worst(runners, lambda outputs: HeldOut(self.job.task, self.job.dev, outputs, known=known))

    def _lane(self, resolved: Resolved, start: dict[str, Tensor]) -> Lane:
        """A lane with this head; all lanes have the start values of one seed, so that their values can be averaged."""
        lane = start_lane(self.job, self.model, self.trials[0].trial, resolved.resolution)
        return with_values(lane, start)

    # ---- the choice

    def choice(self) -> Choice:
        """The trial with the least loss on held-out examples, or the head alone: if it is better or all diverged."""
        done = [searched for searched in self.searched if searched.held is not None]
        best = min(done, key=lambda searched: searched.loss, default=None)
        if best is None or best.held is None or self._frozen_is_better(best.held):
            return Choice(None, self.head_only)
        return Choice(best, best.held)

    def finished(self, choice: Choice) -> Final | None:
        """What was chosen, trained on all examples; None if this last training diverges."""
        return self._head_alone() if choice.searched is None else self._trained(choice.searched)

    def _frozen_is_better(self, trained: HeldOut) -> bool:
        """Whether the head alone has the smaller loss on held-out rows of the sample; with few rows, by a margin."""
        sampled_too = np.isin(self.held, self.sample)
        compared = trained if sampled_too.all() else trained.take(np.flatnonzero(sampled_too))
        compared = replace(compared, known=self.head_only.known)  # a sample may lack more classes
        differences = compared.row_losses - self.head_only.row_losses
        rows = len(differences)
        if rows >= ENOUGH or (rows and self.model.pool == PAIR):
            return bool(differences.mean() > 0)
        if rows < TOO_FEW:
            return False
        return bool(differences.mean() > MARGIN * differences.std(ddof=1) / rows**0.5)

    # ---- the delta

    def _head_alone(self) -> Final:
        states = self.states.take(self._in_sample(self.last_split).train)
        head = solve(self.job.task, states, self.solution.strength)
        return Final(self._bank(self.trials[0], self._tensors(head)), len(states.part.examples))

    def _trained(self, best: Searched) -> Final | None:
        """The chosen trial trained on all examples, the mean over AVERAGED seeds if there are few; None if it diverges.

        With a dev file the search has trained it on the whole training file already.
        """
        if self.last_split is not self.everything:
            return Final(self._bank_with(best, best.values), len(self.last_split.train), steps=best.steps)
        count = AVERAGED if self.by_fold else 1
        trainings = []
        for number in range(count):
            trial = replace(best.trial, seed=best.trial.seed + number)
            trainings.append(replace(best.resolved, trial=trial))
        values: Tensor | None = None
        steps = 0
        for group in passes(trainings, self.most_lanes):
            runners, _ = self._train(group, [self.everything] * len(group), "training on all rows")
            for runner in runners:
                if runner.status != "done":
                    best.history.diverged = runner.history.diverged
                    best.status, best.held = runner.status, None
                    return None
                values, steps = _with_share(values, runner, count), runner.best_step
        return Final(self._bank_with(best, values), len(self.everything.train), count, steps)

    def _bank_with(self, searched: Searched, values: Tensor | None) -> Bank:
        """A bank of one lane with these trained values."""
        bank = self._bank(searched.resolved, self._start(self.last_split))
        assert values is not None
        with torch.no_grad():
            bank.trained(0).copy_(values)
        return bank

    def _bank(self, resolved: Resolved, start: dict[str, Tensor]) -> Bank:
        return Bank(self.model, [self._lane(resolved, start)])

    def _calibrate(self, bank: Bank, held: HeldOut) -> None:
        """Fold temperature and threshold into the head's last layer, in place."""
        for slot in bank.lanes[0].slots:
            values = bank.values[0, slot.offset : slot.offset + slot.size]
            if slot.name in (f"{self.layer}.weight", f"{self.layer}.bias"):
                values /= held.temperature
            if slot.name == f"{self.layer}.bias" and held.threshold:
                values[-1] += held.threshold

    # ---- the outcomes

    def followed(self, choice: Choice, final: Final, recipes: Sequence[_Recipe]) -> Followed:
        """The result; `recipes` are all that took part, this one among them."""
        story = self._story(choice, final, recipes)
        searched = choice.searched
        trial = self.trials[0].trial if searched is None else searched.trial
        history = History() if searched is None else searched.history
        best = self._outcome(trial, final, choice.held, history)
        best = _with_calibration(best, story)
        trials = []
        for recipe in recipes:
            for other in recipe.searched:
                trials.append(best if other is searched else recipe.rejected(other))
        return Followed(self.job, trials or [best], best, story, self._baseline())

    def _baseline(self) -> float:
        """The score of the task's baseline on all held-out examples; of several splits the mean, by their sizes."""
        total = 0.0
        for split in self.splits:
            train, held = (self.data.examples.take(side.tolist()) for side in (split.train, split.held))
            total += len(held) * self.job.task.baseline(train, held)
        return total / len(self.held)

    def rejected(self, searched: Searched) -> Outcome:
        """A trial that was not chosen: its delta is the mean over the splits, calibrated like the chosen one."""
        if searched.held is None:
            return Outcome(searched.trial, searched.status, {}, searched.history, None)
        bank = self._bank_with(searched, searched.values)
        final = Final(bank, len(self.splits[0].train), len(self.splits), searched.steps)
        return self._outcome(searched.trial, final, searched.held, searched.history)

    def _outcome(self, trial: Trial, final: Final, held: HeldOut, history: History) -> Outcome:
        self._calibrate(final.bank, held)
        selection = self.trials[0].resolution.selection
        tensors = delta_tensors(final.bank, 0, selection)
        scores: Scores = {"dev": held.calibrated.scores}
        meta = describe(self.job, self.model, trial, selection, tensors, scores, final.steps, final.examples)
        return Outcome(trial, "done", scores, history, Delta(tensors, meta))

    # ---- the story

    def _story(self, choice: Choice, final: Final, recipes: Sequence[_Recipe]) -> Story:
        held = choice.held.calibrated
        metric = self.trials[0].trial.metric
        candidates: list[Candidate] = []
        diverged = []
        for recipe in recipes:
            candidates += recipe.candidates(choice)
            diverged += [searched.trial.lr for searched in recipe.searched if searched.status == "diverged"]
        return Story(
            how=self._how(),
            candidates=tuple(candidates),
            diverged=tuple(diverged),
            metric=metric,
            expected=held.scores[metric],
            rows=final.examples,
            averaged=final.averaged,
            unknown=choice.held.unknown,
            calibration=calibration(choice.held),
            threshold=choice.held.threshold,
            classes=tuple(self.job.task.by_class(held.predictions, held.part.examples)),
            confusions=confusions(held),
            curve=self._learning_curve(),
            suspects=self._suspects(choice),
        )

    @cached_property
    def _by_head(self) -> tuple[list[Split], Array]:
        """Splits that hold out every example of the sample once, and what the head alone predicts for them.

        Equal texts are in one fold. If all are equal, the splits are those of the search.
        """
        splits = fold_splits(self.states.part, self.job.task, self.trials[0].trial.data_seed)
        if self.by_fold or len(splits) == 1:
            return self.sample_splits, self.solution.predicted
        heads = []
        for split in splits:
            self.job.stop.check()
            heads.append(solve(self.job.task, self.states.take(split.train), self.solution.strength))
        return splits, held_out_outputs(self.states, splits, heads)

    def _learning_curve(self) -> Curve:
        splits, predicted = self._by_head
        return learning_curve(self.job, self.states, splits, self.solution.strength, predicted)

    def _suspects(self, choice: Choice) -> tuple[Suspect, ...]:
        """Rows whose label looks wrong: to what is delivered if there are folds, else to the head alone.

        What is delivered has predicted the few rows held out; the head alone can hold out every row, in seconds.
        """
        if self.by_fold:
            return suspects(choice.held, np.zeros(len(choice.held.part.examples), bool))
        splits, predicted = self._by_head
        known = known_examples(self.job.task, self.states.part, splits)
        by_head = HeldOut(self.job.task, self.states.part, predicted, known)
        examples = held_examples(splits)
        in_dev = self.sample[examples] >= len(self.job.dataset.train)
        return suspects(by_head.take(examples), in_dev)

    def candidates(self, choice: Choice) -> list[Candidate]:
        """What this recipe tried, the head alone first; `choice` is what is delivered, maybe of another recipe."""
        held = self.head_only
        texts = f", texts {self.name}" if self.name else ""
        score, chosen = held.calibrated.score, choice.held is held
        candidates = [Candidate(HEAD_ONLY + texts, None, held.best_loss, score, chosen, self.name)]
        for searched in self.searched:
            if searched.held is None:
                continue
            rate, score, chosen = searched.trial.lr, searched.held.calibrated.score, searched is choice.searched
            name = f"learning rate {rate:g}{texts}"
            candidates.append(Candidate(name, rate, searched.loss, score, chosen, self.name))
        return candidates

    def _how(self) -> str:
        if self.by_fold:
            return f"{len(self.splits)} folds, so that each of {len(self.held):,} rows is held out once"
        return f"{len(self.held):,} rows held out"


def _with_share(total: Tensor | None, runner: Runner, count: int) -> Tensor:
    """Add 1 / `count` of a lane's trained values to a total, which after `count` lanes is their mean."""
    share = runner.flat.detach().cpu().clone() / count
    return share if total is None else total + share


def _with_calibration(outcome: Outcome, story: Story) -> Outcome:
    assert outcome.delta is not None
    errors = None
    if story.calibration is not None:
        errors = story.calibration.before, story.calibration.after
    meta = replace(outcome.delta.meta, recipe="default", calibration_errors=errors)
    return replace(outcome, delta=replace(outcome.delta, meta=meta))


def drop_worst(runners: list[Runner], held_out: Callable[[Array], HeldOut]) -> None:
    """End the lane with the largest dev loss at its best temperature, once in a pass and only of three or more.

    The loss is that of `best_outputs`, which a checkpoint holds; a search has one evaluation, so they are its outputs.
    """
    running = [runner for runner in runners if runner.status == "running"]
    if len(running) < 3 or any(runner.status == "dropped" for runner in runners):
        return
    losses = []
    for runner in running:
        assert runner.best_outputs is not None
        losses.append(held_out(runner.best_outputs).best_loss)
    running[int(np.argmax(losses))].status = "dropped"
