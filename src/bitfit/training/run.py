"""Training: a labelled file and a frozen base in, trials trained on a bank, the best one out as a delta."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from .. import __version__, files
from ..bank.bank import Bank
from ..bank.lanes import Lane, lane_of_delta, lane_to_train
from ..data import sources
from ..data.examples import Dataset, Files
from ..data.memory import Data, source_of_data
from ..data.named import NamedTask
from ..data.on_disk import NodeRows
from ..data.source import Records, StrPath
from ..delta.delta import Delta
from ..errors import DeltaError, Diverged, UsageError, suggest
from ..model.base import Base, load_base
from ..model.dtypes import FULL
from ..model.language import asks_for_nothing
from ..model.selection import Selection
from ..model.task_model import Model
from ..tasks.metrics import Score
from ..terminal.progress import bar_of, notes_of, silent
from . import recipe
from .autofreeze import AutoFreeze
from .calibration import is_rare
from .checkpoint import SECONDS, Store
from .compute import threads
from .convex import FOLDS, solved_head, with_values
from .diff_pruning import Mask, learn_masks
from .evaluation import naming, score_lanes
from .explain import Story, sentences
from .group import Group
from .history import GatePhase, TrainScore
from .job import Job, Note, Part, open_job
from .loop import Runner, Watch, fit, settle
from .outcome import Outcome, Scores, describe
from .plan import Plan, PlanOptions, SharedOptions, Trial, follows_recipe, several
from .resolved import Resolved, passes, resolve_plan

ADVICE = "The default recipe may do better (remove --lr, --epochs and --batch), or train longer."


@dataclass(frozen=True, eq=False)
class Run:
    """All trials of a grid and the best of them."""

    trials: list[Outcome]
    best: Outcome
    majority: float  # the score of the task's baseline, which is the majority class only for classes
    baseline_name: str
    dataset: Dataset
    notes: tuple[str, ...]
    story: Story | None = None  # of the default recipe

    def __repr__(self) -> str:
        count = f"{len(self.trials)} trial" + ("s" if len(self.trials) != 1 else "")
        return f"<Run: {count}, best dev {self.best.trial.metric} {_percent(self.best.dev)}, {self.best.delta!r}>"

    def _repr_html_(self) -> str:
        """A table of the trials for notebooks, the best one in bold."""
        columns = ("rate", "batch", "seed", f"dev {self.best.trial.metric}", "status")
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        rows = [f"<tr>{head}</tr>"]
        for outcome in self.trials:
            trial = outcome.trial
            values = (f"{trial.lr:g}", str(trial.batch), str(trial.seed), _percent(outcome.dev), outcome.status)
            style = ' style="font-weight:bold"' if trial == self.best.trial else ""
            rows.append(f"<tr{style}>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>")
        return f"<table>{''.join(rows)}</table><p>{html.escape(repr(self.best.delta))}</p>"


def _percent(score: float | None) -> str:
    return "-" if score is None else f"{100 * score:.1f}"


def train(
    source: Data,
    base: Base | str | None = None,
    *,
    plan: Plan | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    say: Note | None = None,
    quiet: bool = False,
    checkpoint_seconds: float = SECONDS,
    **options: Unpack[PlanOptions],
) -> Run:
    """Train a grid of trials on labelled data and keep the best by dev score.

    The source is a file, a folder, a named task, or data in memory: a pandas or polars frame, a datasets.Dataset or
    DatasetDict, a list of dicts, (texts, labels), or a dict of these by split.
    `options` are the fields of Plan (select, lr, seed, epochs, ...); or give a `plan`. With `out` the best delta is
    written there, and checkpoints and histories beside it, so that `resume=True` goes on after any interruption.
    Notes and progress are shown on stderr; `quiet=True` shows none, and `say` and `watch` take them instead.
    """
    plan = _plan(plan, options)
    size = plan.train_size
    if isinstance(size, Sequence):
        raise UsageError("train takes one train size; bitfit.sweep takes several")
    data = source_of_data(source)
    with bar_of(watch, quiet, say) as progress:
        return _train(data, base, plan, size, out, resume, progress, notes_of(say, quiet), checkpoint_seconds)


def train_in_group(
    group: Group,
    source: StrPath,
    base: str | None,
    plan: Plan,
    out: str | Path | None,
    resume: bool,
    checkpoint_seconds: float = SECONDS,
    watch: Watch | None = None,
    rows: NodeRows | None = None,
) -> Run:
    """The part of one worker in a training by several; every worker returns the same run.

    With `rows` one worker of each machine reads and tokenises the data, into files that all of its workers map.
    """
    if isinstance(plan.train_size, Sequence):
        raise UsageError("several workers train on one size at a time: give one --train-size")
    if "diff_pruning" in plan.select:
        raise UsageError("diff_pruning learns its selection in one process: use --engine local")
    data = source_of_data(source)
    return _train(
        data, base, plan, plan.train_size, out, resume, watch or silent, silent, checkpoint_seconds, group, rows
    )


def sweep(
    source: Data,
    base: Base | str | None = None,
    *,
    train_size: Sequence[int] | None = None,
    plan: Plan | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    say: Note | None = None,
    quiet: bool = False,
    checkpoint_seconds: float = SECONDS,
    **options: Unpack[SharedOptions],
) -> dict[int, Run]:
    """A run per train size, the smallest first; the rows of each lie within those of the next."""
    plan = _plan(plan, options if train_size is None else {**options, "train_size": train_size})
    if plan.train_size is None:
        raise UsageError("sweep needs train sizes, such as train_size=[100, 1000]")
    loaded = _loaded(base, plan)
    data = source_of_data(source)
    runs = {}
    saying = notes_of(say, quiet)
    with bar_of(watch, quiet, say) as progress:
        for size in sorted(set(several(plan.train_size))):
            target = None if out is None else sized(out, size)
            runs[size] = _train(data, loaded, plan, size, target, resume, progress, saying, checkpoint_seconds)
    return runs


def _plan(plan: Plan | None, options: Mapping[str, Any]) -> Plan:
    if plan is not None:
        if options:
            raise UsageError(f"give a plan or its fields, not both: {', '.join(options)}")
        return plan
    known = [entry.name for entry in fields(Plan)]
    for name in options:
        if name not in known:
            raise UsageError(f'train has no option "{name}".{suggest(name, known)}')
    return Plan(**options)


def _loaded(base: Base | str | None, plan: Plan) -> Base:
    """The base that a training is on, stored as the plan says."""
    if not isinstance(base, Base):
        return load_base(base, plan.dtype)
    if plan.dtype not in (FULL, base.dtype):
        raise UsageError(f"dtype {plan.dtype}: the base is loaded in {base.dtype}; load_base takes a dtype, too")
    return base


def _train(
    source: StrPath | Dataset | Files,
    base: Base | str | None,
    plan: Plan,
    size: int | None,
    out: str | Path | None,
    resume: bool,
    watch: Watch,
    say: Note,
    checkpoint_seconds: float,
    group: Group | None = None,
    rows: NodeRows | None = None,
) -> Run:
    """One run of a checked plan at one train size. Of several workers only the first one writes files."""
    group = group or Group()
    if group.rank:
        out = None
    if out is not None:
        _check_out(Path(out), source)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    with threads(plan.threads):
        job, trials = prepare(source, base, plan, note, size, rows)
        job = replace(job, group=group)
        groups = passes(trials, plan.lanes)
        folder = None if out is None else run_folder(out)
        by_recipe = follows_recipe(plan)
        store = Store(folder, run_key(job, groups, by_recipe), checkpoint_seconds)
        if not resume and store.clear():
            note("The checkpoints of an interrupted run were dropped; --resume would have gone on from them.")
        with job.stop.listening(), torch.random.fork_rng(devices=[]):
            if by_recipe:
                trained = _follow(job, trials, store, watch, note, plan)
            else:
                trained = _train_grid(job, groups, store, watch, note, plan)
            if folder is not None:
                _write_histories(trained.outcomes, folder)
            if trained.best is None:
                store.clear()  # there is nothing to go on from
                rates = ", ".join(f"{outcome.trial.lr:g}" for outcome in trained.outcomes)
                raise Diverged(f"every trial diverged (rates {rates}): the loss was not a number; try smaller --lr")
            best = tested(job, trained.best)
        assert best.delta is not None
        if group.steps:
            note(f"{group.size} workers summed {group.bytes / group.steps / 1000:,.1f} KB per step.")
        if out is not None:
            best.delta.save(out)
            store.clear()
    baseline = job.task.baseline(job.dataset.train, job.dataset.dev)
    if not by_recipe and best.dev is not None and best.dev <= baseline:
        note(f"No trial beats {job.task.baseline_name} on dev. {ADVICE}")
    story = _with_index(trained.story, source)
    return Run(trained.outcomes, best, baseline, job.task.baseline_name, job.dataset, tuple(notes), story)


def _with_index(story: Story | None, source: object) -> Story | None:
    """The story, its suspects named by the index of the frame that they are from."""
    if story is None or not isinstance(source, Files):
        return story
    rows = source.dev or source.train  # those that were held out
    if not isinstance(rows, Records):
        return story
    named = [replace(suspect, line=rows.index_of(suspect.line)) for suspect in story.suspects]
    return replace(story, suspects=tuple(named))


def require_delta_or_nothing(path: Path) -> None:
    """Refuse to write a delta over a file that is none."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        Delta.load(path)
    except DeltaError as error:
        raise UsageError(f"{path}: exists and is not a delta; remove it or name another file") from error


def _check_out(out: Path, source: StrPath | Dataset | Files) -> None:
    """Refuse a target that cannot be written, is an input or belongs to somebody else, before anything is computed."""
    inputs = [] if isinstance(source, Dataset | Files) else [Path(source)]
    files.check_target(out, *inputs)
    require_delta_or_nothing(out)
    files.check_target(run_folder(out) / "history")
    with suppress(OSError):
        run_folder(out).rmdir()  # made by the check; a command that fails before the first step leaves none


@dataclass(frozen=True, eq=False)
class _Trained:
    """All trials of a run and the best of them; None if every trial diverged."""

    outcomes: list[Outcome]
    best: Outcome | None
    story: Story | None = None


def _train_grid(job: Job, groups: list[list[Resolved]], store: Store, watch: Watch, note: Note, plan: Plan) -> _Trained:
    """Train pass after pass; the best trial is the one with the best dev score."""
    scored = {"train": job.train_sample} if plan.gap else {}
    outcomes: list[Outcome] = []
    for number, group in enumerate(groups):
        outcomes += run_pass(job, group, number, store, watch, note, scored)
    done = [outcome for outcome in outcomes if outcome.delta is not None]
    best = max(done, key=lambda outcome: outcome.dev or 0.0, default=None)
    return _Trained(outcomes, best)


def _follow(job: Job, trials: list[Resolved], store: Store, watch: Watch, note: Note, plan: Plan) -> _Trained:
    """Follow the default recipe and say what it came to."""
    first = trials[0]
    model = Model(job.base, job.task.outputs, first.trial.pool, first.trial.inject)
    _check_selection(first.trial, first.resolution.selection, model, note)
    exact = plan.seed is not None
    if recipe.uses_folds(job.dataset, exact):
        rows = len(job.dataset.train) + len(job.dataset.dev)
        note(
            f"Few rows, so this split is not used: {FOLDS}-fold cross-validation holds out each of {rows:,} rows once."
        )
    followed = recipe.follow(job, trials, store, watch, exact=exact, lanes=plan.lanes)
    if followed.best is None or followed.story is None:
        return _Trained(followed.trials, None)
    best = followed.best
    if plan.gap:
        best = _with_scores(job, best, {"train": job.train_sample})
    for line in sentences(followed.story):
        note(line)
    outcomes = [best if outcome is followed.best else outcome for outcome in followed.trials]
    return _Trained(outcomes, best, followed.story)


def sized(out: str | Path, size: int) -> Path:
    """Where the delta of one size of a sweep goes: NAME-SIZE.safetensors."""
    path = Path(out)
    return path.with_name(f"{path.stem}-{size}{path.suffix}")


def prepare(
    source: StrPath | Dataset | Files,
    base: Base | str | None,
    plan: Plan,
    note: Note,
    size: int | None = None,
    rows: NodeRows | None = None,
) -> tuple[Job, list[Resolved]]:
    """Read the data, load the base, encode, resolve the trials: everything before the first step."""
    dataset, named = _dataset(source, plan, size, rows)
    for text in dataset.notes:
        note(text)
    loaded = _loaded(base, plan)
    if loaded.dtype != FULL:
        full = 4 * sum(parameter.numel() for parameter in loaded.encoder.parameters())
        note(f"The base is stored in {loaded.dtype}: {loaded.bytes / 1e6:,.0f} MB, {full / 1e6:,.0f} MB in {FULL}.")
    job = open_job(
        dataset, loaded, note, named=named, metric=plan.metric, positive=plan.positive,
        max_length=plan.max_length, stride=plan.stride, long=plan.long, device=plan.device, rows=rows,
    )  # fmt: skip
    if follows_recipe(plan) and plan.metric is None and named is None:
        job = with_fair_metric(job, note)
    return job, resolve_plan(plan, job, size)


def with_fair_metric(job: Job, note: Note) -> Job:
    """The job scored by macro F1 if a class is so rare that accuracy hardly notices it."""
    task, labels = job.task, job.dataset.train.labels
    if task.metric != "accuracy" or task.by_token or "macro_f1" not in task.metric_names(task.labels):
        return job
    if not is_rare(task, np.asarray(labels)):
        return job
    counts = np.bincount(labels, minlength=len(task.labels))
    rarest = task.labels[int(counts.argmin())]
    note(f'Class "{rarest}" is rare ({counts.min():,} of {len(labels):,} rows), so macro F1 is the main metric.')
    return replace(job, task=replace(task, metric="macro_f1"))


def _dataset(
    source: StrPath | Dataset | Files, plan: Plan, size: int | None, rows: NodeRows | None
) -> tuple[Dataset, NamedTask | None]:
    """The data set, and the named task that it follows, if any."""
    if isinstance(source, Dataset):
        return source, None
    if rows is None:
        return _read(source, plan, size)
    return rows.get("dataset", lambda: _read(source, plan, size))


def _read(source: StrPath | Files, plan: Plan, size: int | None) -> tuple[Dataset, NamedTask | None]:
    return sources.load(
        source,
        folder=plan.data,
        encoding=plan.encoding,
        task=plan.task,
        protocol=plan.protocol,
        train_size=size,
        seed=plan.data_seed,
        text=plan.text,
        text_pair=plan.text_pair,
        label=plan.label,
        separator=plan.separator or None,
    )


def run_pass(
    job: Job,
    group: list[Resolved],
    number: int,
    store: Store,
    watch: Watch,
    note: Note,
    scored: Mapping[str, Part],
    solve_frozen: bool = False,
) -> list[Outcome]:
    """Train the trials of pass `number` as the lanes of one bank; `scored` are the parts to score beside dev.

    With `solve_frozen` a head on a frozen base is solved instead of trained: it has one best solution.
    """
    first = group[0].trial
    models = _models(job, group)
    if number == 0:  # once for all passes of a run
        _check_selection(first, group[0].resolution.selection, models[0], note)
    masks = learn_masks(job, models, group, number, store, watch)
    group = _with_masks(group, masks, note)
    lanes = [_lane(model, resolved, mask) for model, resolved, mask in zip(models, group, masks, strict=True)]
    solved = solve_frozen and first.head == "full" and not any(each.resolution.selection for each in group)
    if solved:
        lanes = _solved(job, group, lanes)
    if not all(lane.trained for lane in lanes):
        raise UsageError(f"--select {first.select} --head {first.head}: nothing is left to train")
    bank = Bank(models, lanes, first.prefix_dropout, most_frozen=group[0].resolution.depth)
    runners = [Runner(resolved.trial, bank, k) for k, resolved in enumerate(group)]
    for runner, mask in zip(runners, masks, strict=True):
        runner.history.gates = None if mask is None else mask.record
    if solved:
        settle(job, runners, number, store)
    else:
        after_evaluation = AutoFreeze(runners) if first.autofreeze else None
        fit(job, runners, number, store, watch, after_evaluation=after_evaluation)
    return finish(job, runners, scored)


def _models(job: Job, group: Sequence[Resolved]) -> list[Model]:
    """The model of each trial; trials with the same grafts share one."""
    by_inject: dict[str, Model] = {}
    for resolved in group:
        trial = resolved.trial
        if trial.inject not in by_inject:
            by_inject[trial.inject] = Model(job.base, job.task.outputs, trial.pool, trial.inject)
    return [by_inject[resolved.trial.inject] for resolved in group]


def _solved(job: Job, group: list[Resolved], lanes: list[Lane]) -> list[Lane]:
    """The lanes with solved heads; below the last layer a head may depend on the seed."""
    heads: dict[int, dict[str, torch.Tensor]] = {}
    for resolved in group:
        seed = resolved.trial.seed
        if seed not in heads:
            heads[seed] = solved_head(job, resolved.resolution, resolved.trial.inject, seed)
    return [with_values(lane, heads[resolved.trial.seed]) for lane, resolved in zip(lanes, group, strict=True)]


def _with_masks(group: list[Resolved], masks: Sequence[Mask | None], note: Note) -> list[Resolved]:
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


def _lane(model: Model, resolved: Resolved, mask: Mask | None) -> Lane:
    trial, resolution = resolved.trial, resolved.resolution
    lane = lane_to_train(model, resolution.selection, trial.head, resolution.starts, trial.seed)
    return lane if mask is None else mask.worn(lane)


def _check_selection(trial: Trial, chosen: Selection, model: Model, note: Note) -> None:
    """Refuse a selection that leaves nothing to train; note what it leaves out or frozen."""
    for text in chosen.notes:
        note(text)
    if not chosen and not asks_for_nothing(trial.select):
        lacking = model.base.target.lacking
        hint = "its layers lack biases, and --inject gives them some" if lacking else "see bitfit count BASE"
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


def finish(job: Job, runners: list[Runner], scored: Mapping[str, Part]) -> list[Outcome]:
    """Make a delta of each lane's best checkpoint, with its scores on dev and on the parts in `scored`."""
    done = [runner for runner in runners if runner.status == "done"]
    scores: dict[int, Scores] = {runner.k: {} for runner in runners}
    predictions: dict[int, dict[str, Any]] = {runner.k: {} for runner in runners}
    sources = {runner.k: _source(runner.trial, len(runners) > 1) for runner in runners}
    with torch.no_grad():
        for runner in done:
            with naming(sources[runner.k]):
                scores[runner.k]["dev"] = _dev_scores(job, runner)
            runner.flat.copy_(runner.best_values)
    if done:
        for name, part in scored.items():
            lanes = [runner.k for runner in done]
            for k, scored_lane in score_lanes(job, done[0].bank, lanes, part, sources).items():
                scores[k][name] = scored_lane.scores
                predictions[k][name] = scored_lane.predictions
    return [_outcome(job, runner, scores[runner.k], predictions[runner.k]) for runner in runners]


def _source(trial: Trial, several: bool) -> str:
    """What names a trial in warnings: nothing if there is only one."""
    return f"rate {trial.lr:g}, batch {trial.batch}, seed {trial.seed}" if several else ""


def _dev_scores(job: Job, runner: Runner) -> dict[str, Score]:
    """Every metric of the evaluation that was the best; its outputs were kept."""
    assert runner.best_outputs is not None
    predictions = job.task.predictions(runner.best_outputs, job.dev.encoded, job.dev.examples)
    return job.task.scores(predictions, job.dev.examples)


def _outcome(job: Job, runner: Runner, scores: Scores, predictions: Mapping[str, Any]) -> Outcome:
    """What became of a lane; one that did not end well has no scores and no delta."""
    trial, history = runner.trial, runner.history
    if not scores:
        return Outcome(trial, runner.status, {}, history, None)
    if "train" in scores:
        train_score = scores["train"][trial.metric].value
        history = replace(history, train=TrainScore(train_score, len(job.train_sample.examples)))
    tensors = runner.bank.tensors(runner.k)
    trained = runner.bank.lanes[runner.k].trained
    model = runner.bank.models[runner.k]
    meta = describe(job, model, trial, trained, tensors, scores, runner.best_step, len(job.train.examples))
    if history.gates is not None:
        meta = replace(meta, open_gates=history.gates.open_share)
    return Outcome(trial, runner.status, scores, history, Delta(tensors, meta), predictions)


def tested(job: Job, best: Outcome) -> Outcome:
    """The outcome with its scores on the test part and on the further parts there are."""
    return _with_scores(job, best, job.tests)


def _with_scores(job: Job, outcome: Outcome, parts: Mapping[str, Part]) -> Outcome:
    """The outcome, and its delta's metadata, with the scores of its delta on these parts."""
    if outcome.delta is None or not parts:
        return outcome
    model = Model(job.base, job.task.outputs, outcome.trial.pool)
    bank = Bank(model, [lane_of_delta(model, outcome.delta)])
    scores = dict(outcome.scores)
    for name, part in parts.items():
        scores[name] = score_lanes(job, bank, [0], part)[0].scores
    delta = replace(outcome.delta, meta=replace(outcome.delta.meta, metrics=scores))
    return replace(outcome, scores=scores, delta=delta)


def has_checkpoints(out: str | Path) -> bool:
    """Whether there is a checkpoint of a run to go on from."""
    return any(run_folder(out).glob("pass*.checkpoint"))


def run_folder(out: str | Path) -> Path:
    """Where a run keeps its histories and, while it is under way, its checkpoints: NAME.run beside the delta."""
    path = Path(out)
    return path.with_name(path.name.removesuffix(".safetensors") + ".run")


def run_key(job: Job, groups: list[list[Resolved]], by_recipe: bool = False) -> str:
    """A digest of everything that decides the outcome, so that checkpoints are never mixed up."""
    table = []
    for group in groups:
        table.append([asdict(resolved.trial) for resolved in group])
    state = hashlib.sha256(json.dumps([by_recipe, table], sort_keys=True).encode())
    state.update(f"{__version__} {job.base.fingerprint} {job.base.dtype} {job.task} {job.encoder.long}".encode())
    for part in (job.dataset.train, job.dataset.dev):
        for row in zip(part.texts, part.pairs or part.texts, part.labels, strict=True):
            state.update(repr(row).encode())
    return state.hexdigest()


def _write_histories(outcomes: list[Outcome], folder: Path) -> None:
    for old in folder.glob("lr*.jsonl"):
        old.unlink()
    for outcome in outcomes:
        trial = outcome.trial
        lines = [{"trial": asdict(trial), "status": outcome.status}, *outcome.history.lines()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        files.replace(folder / f"lr{trial.lr!r}-batch{trial.batch}-seed{trial.seed}.jsonl", text.encode())
