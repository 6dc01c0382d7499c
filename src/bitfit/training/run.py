"""Training: a labelled file and a frozen base in, trials trained on a bank, the best one out as a delta."""

from __future__ import annotations

import hashlib
import html
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import transformers

from .. import __version__, files
from ..arrays import Tensors
from ..bank.bank import Bank
from ..bank.lanes import Lane, lane_of_delta, lane_to_train
from ..data import sources
from ..data.examples import Columns, Dataset, Examples
from ..data.named import NamedTask
from ..delta.change import change_map
from ..delta.delta import Delta
from ..delta.meta import Meta, TrialRecord
from ..errors import Diverged, UsageError, suggest
from ..model.base import Base, load_base
from ..model.selection import Selection
from ..model.task_model import Model
from ..tasks import Task
from ..tasks.encode import Encoder
from ..tasks.metrics import Score
from .checkpoint import Store
from .loop import Job, Part, Runner, Watch, fit
from .plan import Plan, PlanOptions, SharedOptions, Trial
from .resolved import Resolved, passes, resolve_plan
from .stop import Stop

TRAIN_SCORE_ROWS = 1000


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one trial."""

    trial: Trial
    status: str  # done or diverged
    scores: dict[str, dict[str, Score]]  # "dev", "train", and for the best trial "test"
    history: list[dict[str, Any]]
    delta: Delta | None

    @property
    def dev(self) -> float | None:
        """The dev score by the trial's metric, of its best checkpoint."""
        return self.scores["dev"][self.trial.metric].value if self.delta is not None else None

    @property
    def gap(self) -> dict[str, float]:
        """The generalisation gap: by how much train scores above dev, by every metric."""
        return {name: self.scores["train"][name].value - dev.value for name, dev in self.scores["dev"].items()}


@dataclass(frozen=True, eq=False)
class Run:
    """All trials of a grid and the best of them."""

    trials: list[Outcome]
    best: Outcome
    majority: float  # the score of the task's baseline
    baseline_name: str
    dataset: Dataset
    notes: tuple[str, ...]

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


Note = Callable[[str], None]


def train(
    source: str | Path | Dataset,
    base: Base | str | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    say: Note | None = None,
    checkpoint_seconds: float | None = None,
    **plan: Unpack[PlanOptions],
) -> Run:
    """Train a grid of trials on a labelled file and keep the best by dev score.

    `plan` is any field of Plan: select, lr, seed, epochs, ... With `out` the best delta is written there, and
    checkpoints and histories beside it, so that `resume=True` goes on after any interruption.
    """
    known = [entry.name for entry in fields(Plan)]
    for name in plan:
        if name not in known:
            raise UsageError(f'train has no option "{name}".{suggest(name, known)}')
    asked = Plan(**plan)
    if isinstance(asked.train_size, Sequence):
        raise UsageError("train takes one train size; bitfit.sweep takes several")
    if out is not None:
        files.check_target(Path(out), *([] if isinstance(source, Dataset) else [Path(source)]))
        files.check_target(run_folder(out) / "history")
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        (say or (lambda _: None))(text)

    with _threads(asked.threads):
        job, trials = prepare(source, base, asked, note)
        folder = run_folder(out) if out is not None else None
        groups = passes(trials, asked.lanes)
        store = Store(folder, run_key(job, groups), *([] if checkpoint_seconds is None else [checkpoint_seconds]))
        if not resume and store.clear():
            note("The checkpoints of an interrupted run were dropped; --resume would have gone on from them.")
        outcomes: list[Outcome] = []
        with job.stop.listening(), torch.random.fork_rng(devices=[]):
            for part, group in enumerate(groups):
                outcomes += run_pass(job, group, part, store, watch or (lambda *_: None), note)
            if folder is not None:
                _write_histories(outcomes, folder)
            if all(outcome.delta is None for outcome in outcomes):
                store.clear()  # there is nothing to go on from
            best = _best(job, outcomes)
        assert best.delta is not None
        if out is not None:
            best.delta.save(out)
            store.clear()
    baseline = job.task.baseline(job.dataset.train, job.dataset.dev)
    return Run(outcomes, best, baseline, job.task.baseline_name, job.dataset, tuple(notes))


def sweep(
    source: str | Path,
    base: Base | str | None = None,
    *,
    train_size: Sequence[int],
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    say: Note | None = None,
    checkpoint_seconds: float | None = None,
    **plan: Unpack[SharedOptions],
) -> dict[int, Run]:
    """A run per train size, the smallest first; the rows of each lie within those of the next."""
    loaded = base if isinstance(base, Base) else load_base(base)
    sizes = sorted(set(train_size))
    targets = {size: None if out is None else sized(out, size) for size in sizes}
    runs = {}
    for size in sizes:
        runs[size] = train(
            source,
            loaded,
            out=targets[size],
            resume=resume,
            watch=watch,
            say=say,
            checkpoint_seconds=checkpoint_seconds,
            train_size=size,
            **plan,
        )
    return runs


def sized(out: str | Path, size: int) -> Path:
    """Where the delta of one size of a sweep goes: NAME-SIZE.safetensors."""
    path = Path(out)
    return path.with_name(f"{path.stem}-{size}{path.suffix}")


def prepare(
    source: str | Path | Dataset, base: Base | str | None, asked: Plan, note: Note
) -> tuple[Job, list[Resolved]]:
    """Read the data, load the base, encode: everything before the first step."""
    dataset, named = (source, None) if isinstance(source, Dataset) else _read(source, asked)
    for text in dataset.notes:
        note(text)
    task = _task(dataset, named, asked, note)
    device = pick_device(asked.device)
    loaded = (base if isinstance(base, Base) else load_base(base)).to(device)
    loaded.require_clean()
    usual = min(named.max_length, loaded.max_length) if named and named.max_length else None
    encoder = task.encoder(loaded, asked.max_length or usual, asked.stride)
    parts = [_part(task, encoder, examples, device) for examples in (dataset.train, dataset.dev)]
    for name, part in zip(("train", "dev"), parts, strict=True):
        for text in task.remarks(encoder, part.encoded, part.examples):
            note(f"{name}: {text}")
    job = Job(loaded, task, dataset, encoder, parts[0], parts[1], Stop(), device, named)
    return job, resolve_plan(asked, job)


def _task(dataset: Dataset, named: NamedTask | None, asked: Plan, note: Note) -> Task:
    task = Task.of(dataset.kind, dataset.labels, asked.metric or (named.metric if named else None))
    if asked.positive is not None:
        return task.with_positive(asked.positive).fitted(dataset.train)
    if named is not None and len(named.labels) == 2:
        return task.with_positive(named.labels[1]).fitted(dataset.train)  # as GLUE scores its tasks
    task = task.fitted(dataset.train)
    if task.positive is not None:
        note(f'Precision, recall and f1 are about "{task.positive}", the rarer class; --positive names the other one.')
    return task


def _part(task: Task, encoder: Encoder, examples: Examples, device: torch.device) -> Part:
    encoded = task.encode(encoder, examples)
    return Part(examples, encoded, torch.from_numpy(task.targets(encoded, examples)).to(device))


def _read(source: str | Path, asked: Plan) -> tuple[Dataset, NamedTask | None]:
    assert not isinstance(asked.train_size, Sequence)
    return sources.load(
        source, folder=asked.data, task=asked.task, protocol=asked.protocol, train_size=asked.train_size,
        seed=asked.data_seed, text=asked.text, text_pair=asked.text_pair, label=asked.label,
    )  # fmt: skip


def run_pass(job: Job, group: list[Resolved], part: int, store: Store, watch: Watch, note: Note) -> list[Outcome]:
    """Train the trials of one pass as the lanes of one bank."""
    first = group[0].trial
    model = Model(job.base, job.task.outputs, first.pool, first.inject)
    if part == 0:
        _remark(first, group[0].resolution.selection, model, note)
    lanes = [_lane(model, resolved) for resolved in group]
    if not all(lane.trained for lane in lanes):
        raise UsageError(f"--select {first.select} --head {first.head}: nothing is left to train")
    bank = Bank(model, lanes, first.prefix_dropout)
    job = job.with_prefix(bank)
    runners = [Runner(resolved.trial, bank, k) for k, resolved in enumerate(group)]
    fit(job, runners, part, store, watch)
    return [finish(job, model, runner) for runner in runners]


def _lane(model: Model, resolved: Resolved) -> Lane:
    trial, what = resolved.trial, resolved.resolution
    return lane_to_train(model, what.selection, trial.head, what.starts, trial.seed)


def _remark(trial: Trial, chosen: Selection, model: Model, note: Note) -> None:
    for text in chosen.notes:
        note(text)
    if not chosen and trial.select.strip() != "none":
        hint = "its layers lack biases, and --inject gives them some" if model.base.slots else "see bitfit count BASE"
        raise UsageError(f"--select {trial.select}: selects nothing of this base ({hint})")
    if model.injected:
        if not any(name in chosen for name in model.injected):
            raise UsageError(f"--select {trial.select} trains none of the biases that --inject {trial.inject} adds")
        note(f"--inject {trial.inject} gives {len(model.injected)} layers a bias that they lack, zero at first.")
    frozen = [name for name in model.head if trial.head == "frozen" or not name.endswith("bias")]
    if trial.head != "full" and frozen:
        note(f"--head {trial.head} leaves the head's random start frozen: {', '.join(frozen)}.")


def finish(job: Job, model: Model, runner: Runner) -> Outcome:
    """Take a lane's best checkpoint, score it on dev and train by the same code, and make it a delta."""
    if runner.status == "diverged":
        return Outcome(runner.trial, runner.status, {}, runner.history, None)
    with torch.no_grad():
        runner.flat.copy_(runner.best_values)
    train, dev = job.train, job.dev
    sample = np.random.default_rng(0).permutation(len(train.examples))[:TRAIN_SCORE_ROWS]
    part = train.examples.take(sample.tolist())
    scores = {
        "dev": job.scores(runner.bank, runner.k, dev.encoded, dev.examples),
        "train": job.scores(runner.bank, runner.k, train.encoded.take(sample), part),
    }
    ending = {"train_score": scores["train"][runner.trial.metric].value, "rows": len(part)}
    tensors = runner.bank.tensors(runner.k)
    meta = describe(job, model, runner, tensors, scores)
    return Outcome(runner.trial, runner.status, scores, [*runner.history, ending], Delta(tensors, meta))


def describe(job: Job, model: Model, runner: Runner, tensors: Tensors, scores: dict[str, dict[str, Score]]) -> Meta:
    """The metadata of the delta that a trial ends in."""
    trial, columns = runner.trial, job.dataset.columns
    head_size = sum(math.prod(shape) for shape in model.head.values())
    return Meta(
        base=job.base.name,
        hub=job.base.hub,
        fingerprint=job.base.fingerprint,
        select=trial.select,
        inject=trial.inject,
        head=trial.head,
        init=trial.init,
        pool=trial.pool,
        task=job.task.kind,
        name=job.named.name if job.named else None,
        labels=job.task.labels,
        center=job.task.center,
        spread=job.task.spread,
        positive=job.task.positive,
        columns=Columns(columns.text, columns.text_pair, columns.label),
        max_length=trial.max_length,
        stride=trial.stride,
        metric=trial.metric,
        metrics=scores,
        trial=TrialRecord(**asdict(trial), best_step=runner.best_step, train_rows=len(job.train.examples)),
        trained=runner.bank.lanes[runner.k].trained,
        total=job.base.grown(trial.inject).total + head_size,
        change={term: tuple(row) for term, row in change_map(model, tensors).items()},
        versions={"bitfit": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__},
        threads=torch.get_num_threads(),
    )


def _best(job: Job, outcomes: list[Outcome]) -> Outcome:
    done = [outcome for outcome in outcomes if outcome.delta is not None]
    if not done:
        rates = ", ".join(f"{outcome.trial.lr:g}" for outcome in outcomes)
        raise Diverged(f"every trial diverged (rates {rates}): the loss was no number; try smaller --lr")
    best = max(done, key=lambda outcome: outcome.dev or 0.0)
    return tested(job, best)


def tested(job: Job, best: Outcome) -> Outcome:
    """The outcome with its scores on the test part and on what other parts there are."""
    if best.delta is None:
        return best
    tests = {} if job.dataset.test is None else {"test": job.dataset.test}
    tests |= job.dataset.more
    if not tests:
        return best
    model = Model(job.base, job.task.outputs, best.trial.pool)
    bank = Bank(model, [lane_of_delta(model, best.delta)])
    scores = {name: job.scores(bank, 0, job.task.encode(job.encoder, test), test) for name, test in tests.items()}
    scores = {**best.scores, **scores}
    delta = replace(best.delta, meta=replace(best.delta.meta, metrics=scores))
    return replace(best, scores=scores, delta=delta)


def run_folder(out: str | Path) -> Path:
    """Where a run keeps its histories and, while it is under way, its checkpoints: NAME.run beside the delta."""
    path = Path(out)
    return path.with_name(path.name.removesuffix(".safetensors") + ".run")


def run_key(job: Job, groups: list[list[Resolved]]) -> str:
    """A digest of everything that decides the outcome, so that checkpoints are never mixed up."""
    table = []
    for group in groups:
        table.append([asdict(resolved.trial) for resolved in group])
    state = hashlib.sha256(json.dumps(table, sort_keys=True).encode())
    state.update(f"{__version__} {job.base.fingerprint} {job.task}".encode())
    for part in (job.dataset.train, job.dataset.dev):
        for row in zip(part.texts, part.pairs or part.texts, part.labels, strict=True):
            state.update(repr(row).encode())
    return state.hexdigest()


def _write_histories(outcomes: list[Outcome], folder: Path) -> None:
    for old in folder.glob("lr*.jsonl"):
        old.unlink()
    for outcome in outcomes:
        trial = outcome.trial
        lines = [{"trial": asdict(trial), "status": outcome.status}, *outcome.history]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        files.replace(folder / f"lr{trial.lr!r}-batch{trial.batch}-seed{trial.seed}.jsonl", text.encode())


def pick_device(name: str) -> torch.device:
    """The named device; `auto` takes an accelerator where there is one."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(known for known in ("cuda", "mps", "cpu") if available[known])
    if not available[name]:
        raise UsageError(
            f"--device {name}: not available here; this machine has {', '.join(k for k in available if available[k])}"
        )
    return torch.device(name)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
