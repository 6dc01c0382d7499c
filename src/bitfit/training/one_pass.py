"""One pass: its trials train as lanes of one bank, and each becomes an outcome with a delta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..bank.bank import Bank
from ..bank.lanes import Lane
from ..delta.delta import Delta
from ..errors import UsageError
from ..model.language import asks_for_nothing
from ..model.selection import Selection
from ..model.task_model import Model
from ..tasks.metrics import Score
from ..terminal.progress import Say
from .autofreeze import AutoFreeze
from .checkpoint import Store
from .convex import solved_head, with_values
from .diff_pruning import Mask, learn_masks
from .evaluation import naming, score_lanes
from .history import GatePhase, TrainScore
from .job import Job, Part
from .loop import Runner, Watch, evaluate_only, fit
from .outcome import Outcome, Scores, describe
from .plan import Trial
from .resolved import Resolved, delta_tensors, start_lane


def run_pass(
    job: Job,
    group: list[Resolved],
    number: int,
    store: Store,
    watch: Watch,
    note: Say,
    scored: Mapping[str, Part],
    solve_frozen: bool = False,
    after_training: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Train the trials of pass `number` as the lanes of one bank; `scored` are the parts to score besides dev.

    With `solve_frozen` trials that train the head only get it by convex optimisation, without the loop.
    `after_training` is called before the parts are scored.
    """
    first = group[0].trial
    models = _models(job, group)
    if number == 0:  # once for all passes of a run
        check_selection(first, group[0].resolution.selection, models[0], note)
    masks = learn_masks(job, models, group, number, store, watch)
    group = _with_masks(group, masks, note)
    lanes = [_lane(job, model, resolved, mask) for model, resolved, mask in zip(models, group, masks, strict=True)]
    solved = solve_frozen and first.head == "full" and not any(each.resolution.selection for each in group)
    if solved:
        lanes = _with_solved_heads(job, group, lanes)
    if not all(lane.trained for lane in lanes):
        raise UsageError(f"--select {first.select} --head {first.head}: nothing is left to train")
    bank = Bank(models, lanes, first.prefix_dropout, most_frozen=group[0].resolution.depth)
    runners = [Runner(resolved.trial, bank, k) for k, resolved in enumerate(group)]
    for runner, mask in zip(runners, masks, strict=True):
        runner.history.gates = None if mask is None else mask.record
    if solved:
        evaluate_only(job, runners, number, store)
    else:
        after_evaluation = AutoFreeze(runners) if first.autofreeze else None
        fit(job, runners, number, store, watch, after_evaluation=after_evaluation)
    if after_training is not None:
        after_training()
    return _outcomes(job, runners, [resolved.resolution.selection for resolved in group], scored)


def _models(job: Job, group: Sequence[Resolved]) -> list[Model]:
    """The model of each trial; trials with the same grafts share one."""
    by_inject: dict[str, Model] = {}
    for resolved in group:
        trial = resolved.trial
        if trial.inject not in by_inject:
            by_inject[trial.inject] = Model(job.base, job.task.outputs, trial.pool, trial.inject)
    return [by_inject[resolved.trial.inject] for resolved in group]


def _with_solved_heads(job: Job, group: list[Resolved], lanes: list[Lane]) -> list[Lane]:
    """The lanes with solved heads, one for each seed: the layers of a head below its last one are random."""
    heads: dict[int, dict[str, torch.Tensor]] = {}
    for resolved in group:
        seed = resolved.trial.seed
        if seed not in heads:
            heads[seed] = solved_head(job, resolved.resolution, resolved.trial.inject, seed)
    return [with_values(lane, heads[resolved.trial.seed]) for lane, resolved in zip(lanes, group, strict=True)]


def _with_masks(group: list[Resolved], masks: Sequence[Mask | None], note: Say) -> list[Resolved]:
    """The trials with the entries that their gates kept."""
    reported: set[int] = set()
    trials = []
    for resolved, mask in zip(group, masks, strict=True):
        if mask is None:
            trials.append(resolved)
            continue
        if id(mask) not in reported:  # trials may share one
            reported.add(id(mask))
            note(_gates_note(resolved.trial, mask.record))
        resolution = replace(resolved.resolution, selection=mask.selection)
        trials.append(replace(resolved, resolution=resolution))
    return trials


def _gates_note(trial: Trial, gates: GatePhase) -> str:
    return (
        f"{trial.select}, seed {trial.seed}: after {gates.gate_steps:,} steps {gates.open_share:.2%} of "
        f"{gates.gated:,} gates were open; the {gates.kept:,} largest differences train on."
    )


def _lane(job: Job, model: Model, resolved: Resolved, mask: Mask | None) -> Lane:
    lane = start_lane(job, model, resolved.trial, resolved.resolution)
    return lane if mask is None else mask.applied_to(lane)


def check_selection(trial: Trial, chosen: Selection, model: Model, note: Say) -> None:
    """Refuse a selection that leaves nothing to train; note what it leaves out or frozen."""
    for text in chosen.notes:
        note(text)
    if not chosen and not asks_for_nothing(trial.select):
        lacking = model.base.target.lacking
        hint = "its layers lack biases, and --inject gives them some" if lacking else "see bitfit count BASE"
        if trial.select == "injected" and not lacking:
            hint = 'add parameters first, e.g. --inject "lora(W_q + W_v, 8)"'
        raise UsageError(f"--select {trial.select}: selects nothing of this base ({hint})")
    if model.injected:
        if not any(name in chosen for name in model.injected):
            raise UsageError(
                f"--select {trial.select} trains none of the parameters that --inject {trial.inject} adds; "
                "--select injected does"
            )
        note(f"--inject {trial.inject} adds {len(model.injected)} tensors, which change nothing at first.")
    frozen = [name for name in model.head if trial.head == "frozen" or not name.endswith("bias")]
    if trial.head != "full" and frozen:
        note(f"--head {trial.head} leaves the head's random start frozen: {', '.join(frozen)}.")


def _outcomes(
    job: Job, runners: list[Runner], selections: Sequence[Selection], scored: Mapping[str, Part]
) -> list[Outcome]:
    """Make a delta of each lane's best checkpoint, with its scores on dev and on the parts in `scored`."""
    done = [runner for runner in runners if runner.status == "done"]
    scores: dict[int, Scores] = {runner.k: {} for runner in runners}
    predictions: dict[int, dict[str, Any]] = {runner.k: {} for runner in runners}
    names = {runner.k: _name(runner.trial) if len(runners) > 1 else "" for runner in runners}
    with torch.no_grad():
        for runner in done:
            with naming(names[runner.k]):
                scores[runner.k]["dev"] = _dev_scores(job, runner)
            runner.flat.copy_(runner.best_values)
    if done:
        for name, part in scored.items():
            lanes = [runner.k for runner in done]
            for k, scored_lane in score_lanes(job, done[0].bank, lanes, part, names).items():
                scores[k][name] = scored_lane.scores
                predictions[k][name] = scored_lane.predictions
    outcomes = []
    for runner, selection in zip(runners, selections, strict=True):
        outcomes.append(_outcome(job, runner, selection, scores[runner.k], predictions[runner.k]))
    return outcomes


def _name(trial: Trial) -> str:
    """What a trial is called in warnings."""
    return f"rate {trial.lr:g}, batch {trial.batch}, seed {trial.seed}"


def _dev_scores(job: Job, runner: Runner) -> dict[str, Score]:
    """Every metric on dev at the best checkpoint, from the outputs that were kept of it."""
    assert runner.best_outputs is not None
    predictions = job.task.predictions(runner.best_outputs, job.dev.encoded, job.dev.examples)
    return job.task.scores(predictions, job.dev.examples)


def _outcome(job: Job, runner: Runner, selection: Selection, scores: Scores, predictions: Mapping[str, Any]) -> Outcome:
    """The outcome of a lane; a lane that diverged has no scores and no delta."""
    trial, history = runner.trial, runner.history
    if not scores:
        return Outcome(trial, runner.status, {}, history, None)
    if "train" in scores:
        train_score = scores["train"][trial.metric].value
        history = replace(history, train=TrainScore(train_score, len(job.train_sample.examples)))
    tensors = delta_tensors(runner.bank, runner.k, selection)
    model = runner.bank.models[runner.k]
    meta = describe(job, model, trial, selection, tensors, scores, runner.best_step, len(job.train.examples))
    if history.gates is not None:
        meta = replace(meta, open_gates=history.gates.open_share)
    return Outcome(trial, runner.status, scores, history, Delta(tensors, meta), predictions)
