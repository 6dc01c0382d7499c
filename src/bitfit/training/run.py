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
from ..bank.lanes import lane_of_delta
from ..data import sources
from ..data.examples import Dataset, Files
from ..data.memory import Data, source_of_data
from ..data.named import NamedTask
from ..data.on_disk import NodeRows
from ..data.source import Records, StrPath
from ..delta.delta import Delta
from ..errors import DeltaError, Diverged, UsageError, suggest
from ..model.anatomy import PAIR
from ..model.base import Base, load_base
from ..model.dtypes import FULL
from ..model.task_model import Model
from ..terminal.progress import Say, bar_of, notes_of, silent
from . import recipe
from .calibration import is_rare
from .checkpoint import SECONDS, Store
from .compute import threads
from .convex import FOLDS
from .evaluation import score_lanes
from .explain import Story, sentences
from .group import Group
from .job import Job, Part, open_job
from .loop import Watch
from .one_pass import check_selection, run_pass
from .outcome import Outcome
from .plan import Plan, PlanOptions, SharedOptions, follows_recipe, several
from .resolved import Resolved, passes, resolve_plan

ADVICE = "The default recipe may do better (remove --lr, --epochs and --batch), or train longer."


@dataclass(frozen=True, eq=False)
class Run:
    """All trials of a grid and the best of them."""

    trials: list[Outcome]
    best: Outcome
    majority: float  # the score on held-out rows of the task's baseline, which is the majority class only for classes
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
            style = ' style="font-weight:bold"' if outcome is self.best else ""
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
    say: Say | None = None,
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
    """Train as one of several workers, which all return the same run.

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
    say: Say | None = None,
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
    say: Say,
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
        by_recipe = follows_recipe(plan)
        readings = [recipe.Reading(job, trials)]
        if by_recipe and _may_read_apart(plan, job):
            readings = _readings_of_pairs(job, trials, plan, size, rows, note)
        groups = []
        for reading in readings:
            groups += passes(reading.trials, plan.lanes)
        folder = None if out is None else run_folder(out)
        store = Store(folder, run_key(job, groups, plan), checkpoint_seconds)
        if not resume and store.clear():
            note("The checkpoints of an interrupted run were dropped; --resume would have gone on from them.")
        with job.stop.listening(), torch.random.fork_rng(devices=[]):
            if by_recipe:
                trained = _follow(readings, store, watch, note, plan)
            else:
                trained = _train_grid(job, groups, store, watch, note, plan)
            if folder is not None:
                _write_histories(trained.outcomes, folder)
            if trained.best is None:
                store.clear()  # there is nothing to go on from
                rates = ", ".join(f"{outcome.trial.lr:g}" for outcome in trained.outcomes)
                raise Diverged(f"every trial diverged (rates {rates}): the loss was not a number; try smaller --lr")
            best = _with_scores(trained.job, trained.best, trained.job.tests)
        assert best.delta is not None
        if group.steps:
            note(f"{group.size} workers summed {group.bytes / group.steps / 1000:,.1f} KB per step.")
        if out is not None:
            best.delta.save(out)
            store.clear()
    if not by_recipe and best.dev is not None and best.dev <= trained.baseline:
        note(f"No trial beats {job.task.baseline_name} on dev. {ADVICE}")
    story = _with_index(trained.story, source)
    outcomes = [best if outcome is trained.best else outcome for outcome in trained.outcomes]
    return Run(outcomes, best, trained.baseline, job.task.baseline_name, job.dataset, tuple(notes), story)


def _with_index(story: Story | None, source: object) -> Story | None:
    """The story; if the rows came from a data frame, suspects have its index instead of a position."""
    if story is None or not isinstance(source, Files):
        return story
    named = []
    for suspect in story.suspects:
        rows = source.dev if suspect.split == "dev" and source.dev is not None else source.train
        line = rows.index_of(suspect.line) if isinstance(rows, Records) else suspect.line
        named.append(replace(suspect, line=line))
    return replace(story, suspects=tuple(named))


def prepare(
    source: StrPath | Dataset | Files,
    base: Base | str | None,
    plan: Plan,
    note: Say,
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
        dataset, loaded, note, named=named,
        metric=plan.metric, positive=plan.positive, class_weights=plan.class_weights,
        max_length=plan.max_length, stride=plan.stride, long=plan.long, pool=plan.pool, device=plan.device, rows=rows,
    )  # fmt: skip
    if follows_recipe(plan) and plan.metric is None and named is None:
        job = with_fair_metric(job, note)
    return job, resolve_plan(plan, job, size)


def with_fair_metric(job: Job, note: Say) -> Job:
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


@dataclass(frozen=True, eq=False)
class _Trained:
    """All trials of a run and the best of them; None if every trial diverged."""

    job: Job  # of the best trial
    outcomes: list[Outcome]
    best: Outcome | None
    baseline: float
    story: Story | None = None


def _train_grid(job: Job, groups: list[list[Resolved]], store: Store, watch: Watch, note: Say, plan: Plan) -> _Trained:
    """Train pass after pass; the best trial is the one with the best dev score."""
    scored = {"train": job.train_sample} if plan.gap else {}
    outcomes: list[Outcome] = []
    for number, group in enumerate(groups):
        outcomes += run_pass(job, group, number, store, watch, note, scored)
    done = [outcome for outcome in outcomes if outcome.delta is not None]
    best = max(done, key=lambda outcome: outcome.dev or 0.0, default=None)
    return _Trained(job, outcomes, best, job.task.baseline(job.dataset.train, job.dataset.dev))


def _may_read_apart(plan: Plan, job: Job) -> bool:
    """Whether the texts of pairs may be encoded one by one: the user leaves it open, and the base is made for it.

    A base that declares mean pooling makes sentence embeddings.
    """
    pairs = job.dataset.columns.text_pair is not None and not job.task.by_token
    return pairs and plan.pool == "auto" and job.base.pooling == "mean"


def _readings_of_pairs(
    job: Job, trials: list[Resolved], plan: Plan, size: int | None, rows: NodeRows | None, note: Say
) -> list[recipe.Reading]:
    """The texts one by one; with many rows also as one sequence."""
    apart = job.apart(rows)
    apart_trials = resolve_plan(replace(plan, pool=PAIR), apart, size)
    if recipe.has_few_rows(job.dataset):
        note("Each text of a pair is encoded by itself; --pool mean would encode both as one sequence.")
        return [recipe.Reading(apart, apart_trials)]
    return [recipe.Reading(job, trials, recipe.TOGETHER), recipe.Reading(apart, apart_trials, recipe.APART)]


def _follow(readings: Sequence[recipe.Reading], store: Store, watch: Watch, note: Say, plan: Plan) -> _Trained:
    """Follow the default recipe and note its results."""
    job, first = readings[0].job, readings[0].trials[0]
    model = Model(job.base, job.task.outputs, first.trial.pool, first.trial.inject)
    check_selection(first.trial, first.resolution.selection, model, note)
    exact = _is_exact(plan)
    if recipe.uses_folds(job.dataset, exact):
        rows = len(job.dataset.train) + len(job.dataset.dev)
        note(
            f"Few rows, so this split is not used: {FOLDS}-fold cross-validation holds out each of {rows:,} rows once."
        )
    followed = recipe.follow(readings, store, watch, exact=exact, lanes=plan.lanes)
    best = followed.best
    if plan.gap:
        best = _with_scores(followed.job, best, {"train": followed.job.train_sample})
    for line in sentences(followed.story):
        note(line)
    outcomes = [best if outcome is followed.best else outcome for outcome in followed.trials]
    return _Trained(followed.job, outcomes, best, followed.baseline, followed.story)


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


# ---- the files of a run


def _require_delta_or_nothing(path: Path) -> None:
    """Refuse to overwrite a file that is not a delta."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        Delta.load(path)
    except DeltaError as error:
        raise UsageError(f"{path}: exists and is not a delta; remove it or name another file") from error


def _check_out(out: Path, source: StrPath | Dataset | Files) -> None:
    """Refuse a target that cannot be written, is an input or is not a delta, before anything is computed."""
    inputs = [] if isinstance(source, Dataset | Files) else [Path(source)]
    files.check_target(out, *inputs)
    _require_delta_or_nothing(out)
    files.check_target(run_folder(out) / "history")
    with suppress(OSError):
        run_folder(out).rmdir()  # the check made it; a command that fails before the first step must not leave it


def sized(out: str | Path, size: int) -> Path:
    """Where the delta of one size of a sweep goes: NAME-SIZE.safetensors."""
    path = Path(out)
    return path.with_name(f"{path.stem}-{size}{path.suffix}")


def has_checkpoints(out: str | Path) -> bool:
    """Whether there is a checkpoint from which the run to `out` can be resumed."""
    return any(run_folder(out).glob("pass*.checkpoint"))


def run_folder(out: str | Path) -> Path:
    """The folder of a run's histories and, until it has finished, of its checkpoints: NAME.run beside the delta."""
    path = Path(out)
    return path.with_name(path.name.removesuffix(".safetensors") + ".run")


def run_key(job: Job, groups: list[list[Resolved]], plan: Plan) -> str:
    """A digest of everything that decides the outcome, so that checkpoints are never mixed up."""
    table = []
    for group in groups:
        table.append([asdict(resolved.trial) for resolved in group])
    state = hashlib.sha256(json.dumps([_recipe_key(plan), table], sort_keys=True).encode())
    state.update(f"{__version__} {job.base.fingerprint} {job.base.dtype} {job.task} {job.encoder.long}".encode())
    for part in (job.dataset.train, job.dataset.dev):
        for row in zip(part.texts, part.pairs or part.texts, part.labels, strict=True):
            state.update(repr(row).encode())
    return state.hexdigest()


def _recipe_key(plan: Plan) -> list[Any]:
    """What decides the passes of the default recipe besides its trials; empty for the plain recipe."""
    if not follows_recipe(plan):
        return []
    return [recipe.VERSION, _is_exact(plan), plan.lanes]


def _is_exact(plan: Plan) -> bool:
    """Whether the recipe makes one training with a given seed: without folds and without averages."""
    return plan.seed is not None


def _write_histories(outcomes: list[Outcome], folder: Path) -> None:
    for old in folder.glob("lr*.jsonl"):
        old.unlink()
    for outcome in outcomes:
        trial = outcome.trial
        lines = [{"trial": asdict(trial), "status": outcome.status}, *outcome.history.lines()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        pair = "-pair" if trial.pool == PAIR else ""  # the same rate may also be tried on one sequence
        files.replace(folder / f"lr{trial.lr!r}-batch{trial.batch}-seed{trial.seed}{pair}.jsonl", text.encode())
