"""Methods side by side on one data set: the same rows, seeds, epochs and number of rates for all of them.

Every method trains by the plain recipe from the same random head: a convex start of the head would help some methods
more than others. Each method tries its rates on the first seed, further ones if the best is at the edge, and the best
one on dev trains the other seeds. The head alone is solved and needs no rate. The test rows take part in no choice.

Trials of all methods are lanes of shared passes, where they can be. Only on the second seed every method trains alone,
so that its time and memory are known. Results are files, one per trial: the same command goes on after a stop.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .. import files
from ..bank.sparse import SCATTERED
from ..data import sources
from ..data.examples import Dataset, Examples, Files
from ..data.loading import sizes_note
from ..data.memory import Data, source_of_data
from ..data.named import NamedTask
from ..data.source import StrPath
from ..data.splits import split, subset
from ..delta.delta import Delta
from ..delta.meta import trial_table
from ..errors import DataError, Interrupted, SelectionError, UsageError
from ..model.base import DEMO, Base, load_base
from ..model.dtypes import FULL
from ..model.language import asks_for_nothing
from ..model.resolution import resolve_pool
from ..prediction.predictor import MixedPredictor, Predictor
from ..tasks.texts import ConstantPrediction
from ..terminal.progress import Say as Say
from ..training.checkpoint import SECONDS
from ..training.compute import threads as use_threads
from ..training.job import Job, open_job
from ..training.loop import Watch
from ..training.plan import BATCH, EVALS_PER_EPOCH, EVALUATIONS_TO_FREEZE, Trial, default_rates, recipe_epochs
from ..training.resolved import Resolved, passes, resolve_trials
from ..training.run import with_fair_metric
from . import forecast
from .data import Opening, fingerprint
from .grid import Point, wider_rate
from .methods import METHODS, ComparePlan, Extent, fit_extent, full_extent, spaced_rates, unknown_method
from .passes import Pass, perform_on
from .spec import Method
from .store import Result, Results, key_of

NAME = "compare"  # of the lock and of the folder of checkpoints
HELD_OUT = 0.2  # share of the rows that becomes dev, or test, where there is no file
MOST_HELD_OUT = 2000
# Dev rows are cut to ENOUGH_DEV, or to a quarter of the training rows if that is more. With a half of them the
# evaluations took a third of a training on 1,000 rows.
ENOUGH_DEV = 200
DEV_SHARE = 4
LEAST_TRAIN, LEAST_HELD_OUT = 16, 8  # rows below which a comparison says nothing
# Options of the plan that `bitfit train` must be given too, to read and score the data alike.
SHARED_OPTIONS = (
    "data", "encoding", "task", "text", "text_pair", "label", "separator", "metric", "positive", "max_length",
)  # fmt: skip
TIMED_SEED = 1  # on which every method trains alone
MIXED = 8  # deltas of a mixed batch
MIXED_BYTES = 1e9  # most memory of these deltas
TIMED = 32  # texts that predictions are timed on
REPEATS = 5  # of which the fastest counts


@dataclass(frozen=True)
class Contestant:
    """A method with its results: all rates on the first seed, the chosen one on every seed."""

    method: Method
    searched: tuple[Result, ...]
    chosen: tuple[Result, ...]  # by seed; the first is also in `searched`
    trained: int  # entries, without the head

    @property
    def rate(self) -> float | None:
        """The rate that dev chose; None for a solved head, which has none."""
        return float(self.chosen[0].trial["lr"]) if self.trained else None

    @property
    def at_edge(self) -> bool:
        """Whether the best of several rates is the smallest or the largest of them."""
        return self.rate is not None and wider_rate(_rates_of(self.searched), self.rate) is not None


@dataclass(frozen=True)
class Contest:
    """What was compared, on what, and the results of every method."""

    data: str
    source: str | None  # the path or task that was given; None for data in memory
    base: str
    base_given: str | None  # the name or path that was given; None for the default base
    kind: str
    metric: str
    rows: Mapping[str, int]
    baseline: float
    epochs: int
    batch: int
    extent: Extent
    contestants: tuple[Contestant, ...]
    notes: tuple[str, ...]
    options: tuple[str, ...] = ()  # of the command line: how the data is read and scored


# ---- the data


def prepare_data(dataset: Dataset, size: int | None = None) -> Dataset:
    """The data set with a test part that no choice sees, cut to `size` training rows.

    A test file is the test. Without one a dev file is, and without both a fifth of the rows. Where dev is not a file,
    or is the test, it is held out from the training rows.
    """
    train, dev, test = dataset.train, dataset.dev, dataset.test
    notes = list(dataset.notes)
    if dataset.held_out:
        train = train + dev
        dev = dev.take([])
    if test is None and len(dev):
        test, dev = dev, dev.take([])
        notes.append("No test file, so the dev file is the test.")
    elif test is None:
        train, test = _hold_out(dataset, train, 1)
        notes.append(f"No test file, so {len(test):,} rows are held out as the test.")
    if not len(dev):
        train, dev = _hold_out(dataset, train, 2)
        notes.append(f"{len(dev):,} rows are held out as dev, to choose rates and checkpoints.")
    if size is not None and size < len(train):
        notes.append(f"{size:,} of {len(train):,} training rows were drawn.")
        train = train.take(subset(train, dataset.kind, size, 0))
    elif size is not None:
        notes.append(f"There are {len(train):,} training rows, not more than the {size:,} that were asked for.")
    most = max(ENOUGH_DEV, len(train) // DEV_SHARE)
    if len(dev) > most:
        notes.append(f"{most:,} of {len(dev):,} dev rows were drawn: they are scored ten times in each training.")
        dev = dev.take(subset(dev, dataset.kind, most, 0))
    for name, part, least in (
        ("train", train, LEAST_TRAIN),
        ("dev", dev, LEAST_HELD_OUT),
        ("test", test, LEAST_HELD_OUT),
    ):
        if len(part) < least:
            raise DataError(f"{len(part):,} {name} rows are too few to compare methods; at least {least} are needed.")
    return replace(dataset, train=train, dev=dev, test=test, more={}, notes=tuple(notes), held_out=False)


def _hold_out(dataset: Dataset, part: Examples, seed: int) -> tuple[Examples, Examples]:
    share = min(HELD_OUT, MOST_HELD_OUT / max(1, len(part)))
    kept, held = split(part, dataset.kind, seed, share)
    if not held:
        raise DataError(f"{len(part):,} rows are too few to hold out a part of them; add rows or a test file.")
    return part.take(kept), part.take(held)


# ---- the run


def run_contest(
    source: Data,
    base: Base | str | None = None,
    plan: ComparePlan | None = None,
    *,
    out: str | Path | None = None,
    watch: Watch | None = None,
    say: Say | None = None,
    checkpoint_seconds: float = SECONDS,
) -> Contest:
    """Train every method on the data and return all results. `out` is a folder from which the same call continues."""
    plan = plan or ComparePlan()
    data = source_of_data(source)
    dataset, named = _read(data, plan)
    loaded = base if isinstance(base, Base) else load_base(base)
    path = os.fspath(data) if isinstance(data, str | os.PathLike) else None
    with tempfile.TemporaryDirectory() as folder, use_threads(plan.threads):
        results = Results(Path(folder if out is None else out))
        run = _Run(path, dataset, named, loaded, plan, results, watch or _ignore, say or _ignore, checkpoint_seconds)
        with results.locked(NAME):  # only now: data or methods that are wrong must leave no folder
            results.replay()
            try:
                contest = run.contest()
            except Interrupted:
                raise Interrupted("stopped; the same command continues from the last checkpoint") from None
    return replace(contest, base_given=_origin(base) if isinstance(base, Base) else base)


def _origin(base: Base) -> str:
    """What loads a base again: its hub id, its folder, or the name of the demo's."""
    return base.name if base.hub or base.name == DEMO else str(base.config._name_or_path)


def _ignore(*_: object) -> None:
    """Watch and say nothing."""


def _read(data: StrPath | Dataset | Files, plan: ComparePlan) -> tuple[Dataset, NamedTask | None]:
    """The rows to compare on, and the named task that they follow, if any."""
    if isinstance(data, Dataset):
        return prepare_data(data, plan.train_size), None
    source = sources.read(
        data,
        folder=plan.data,
        encoding=plan.encoding,
        task=plan.task,
        text=plan.text,
        text_pair=plan.text_pair,
        label=plan.label,
        separator=plan.separator,
    )
    prepared = prepare_data(source.published.unsplit(), plan.train_size)
    return replace(prepared, notes=(*source.notes, *prepared.notes)), source.follows


class _Run:
    """One comparison under way."""

    def __init__(
        self,
        path: str | None,
        dataset: Dataset,
        named: NamedTask | None,
        base: Base,
        plan: ComparePlan,
        results: Results,
        watch: Watch,
        say: Say,
        checkpoint_seconds: float,
    ) -> None:
        self.path, self.named, self.base, self.plan, self.results = path, named, base, plan, results
        self.label = "the data" if path is None else Path(path).name
        self.watch, self.say, self.checkpoint_seconds = watch, say, checkpoint_seconds
        self.notes: list[str] = []
        self.pass_number = 0
        self.timed: set[str] = set()  # methods whose predictions were timed
        self.extent_key = ""  # of the stored extent: the plan and all rows, before the budget cuts any
        for text in dataset.notes:
            self._note(text)
        self._use(self._open(dataset))
        self.methods = self._methods_by_size()
        self.extent = full_extent(plan, len(dataset.train), len(dataset.dev))

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def _open(self, dataset: Dataset) -> Job:
        plan = self.plan
        job = open_job(
            dataset, self.base, self._note_once, named=self.named, metric=plan.metric, positive=plan.positive,
            max_length=plan.max_length, device=plan.device,
        )  # fmt: skip
        if plan.metric is None and self.named is None:
            job = with_fair_metric(job, self._note_once)
        return job

    def _note_once(self, text: str) -> None:
        if text not in self.notes:
            self._note(text)

    def _use(self, job: Job) -> None:
        """Train on the rows of this job from now on."""
        self.job = job
        self.digest = fingerprint(job.dataset)
        if self.plan.positive is not None:
            self.digest += f" positive {self.plan.positive}"
        if job.base.dtype != FULL:
            self.digest += f" dtype {job.base.dtype}"
        self.epochs = self.plan.epochs or recipe_epochs(len(job.dataset.train))

    def _methods_by_size(self) -> list[tuple[Method, Resolved]]:
        """The methods, those that train least first, and those that cannot share a pass with others last.

        A process keeps memory that it once had, so the memory of small methods must be measured before large ones.
        """
        resolved = []
        for method in self.plan.chosen_methods:
            try:
                resolved.append((method, self._resolved(method)))
            except UsageError as error:
                if self.plan.methods is not None:
                    raise
                self._note(f"{method.name} is left out: {error}")
        if len(resolved) < 2:
            raise UsageError(f"--methods: fewer than two can be trained on {self.base.name}")
        return sorted(resolved, key=_by_size)

    def _resolved(self, method: Method) -> Resolved:
        """What a method trains on this base; UsageError if that is nothing."""
        try:
            resolved = resolve_trials(self.base, [self._trial(method, 1.0, 0)])[0]
        except SelectionError as error:
            if method.name in METHODS:
                reason = f'"{method.name}" cannot be trained on {self.base.name} ({error})'
                raise UsageError(f"--methods: {reason}") from error
            raise unknown_method(method.name, str(error)) from error
        evaluations = resolved.trial.epochs * resolved.trial.evals_per_epoch
        if method.autofreeze and evaluations < EVALUATIONS_TO_FREEZE:
            raise UsageError(f'--methods: "{method.name}" needs {EVALUATIONS_TO_FREEZE} evaluations; raise --epochs')
        if not resolved.resolution.selection and not asks_for_nothing(method.select):
            raise UsageError(f'--methods: "{method.name}" selects nothing of {self.base.name}')
        return resolved

    # ---- what is trained

    def _trial(self, method: Method, rate: float, seed: int) -> Trial:
        job = self.job
        return Trial(
            select=method.select,
            inject=method.inject,
            head=method.head,
            init=method.init,
            pool=resolve_pool(job.base, job.task.pool("auto")),
            lr=rate,
            batch=BATCH,
            seed=seed,
            epochs=self.epochs * method.epochs_times,
            evals_per_epoch=EVALS_PER_EPOCH["published"],
            schedule="linear",
            weight_decay=0.0,
            clip=1.0,
            max_length=job.encoder.max_length,
            stride=job.encoder.stride if job.task.by_token else 0,
            train_size=len(job.train.examples),
            metric=job.task.metric,
            prefix_dropout=False,
            dropout=method.dropout,
            autofreeze=method.autofreeze,
        )

    def _rates(self, method: Method, resolved: Resolved) -> tuple[float, ...]:
        """The rates that a method tries first; a solved head has no rate, so any one will do."""
        selection = resolved.resolution.selection
        return spaced_rates(default_rates(selection, self.base.width), self.extent.rates if selection else 1)

    def _shrink(self) -> None:
        """Shrink the comparison until it fits the budget, if there is one."""
        budget = self.plan.budget_seconds
        if budget is None:
            return
        most = self.extent
        self.extent = self._fitting(most, budget)
        self._say_cut(most, self.extent)
        if self.extent.rows < most.rows:
            self._use(self._open(_cut(self.job.dataset, self.extent)))

    def _fitting(self, most: Extent, budget: float) -> Extent:
        """The extent that fits. It is stored in a file, so that a resumed run has the same one."""
        path = self.results.folder / NAME / "extent.json"
        self.extent_key = repr((self.plan, self.digest, self.base.fingerprint))
        stored = json.loads(path.read_bytes()) if path.is_file() else {}
        if stored.get("key") == self.extent_key:
            return Extent(**stored["extent"])
        speed = forecast.speed(self.results)
        extent = fit_extent(most, budget, lambda smaller: self._work(smaller, most) / speed)
        self._store_extent(extent)
        return extent

    def _store_extent(self, extent: Extent) -> None:
        text = json.dumps({"key": self.extent_key, "extent": asdict(extent)})
        files.replace(self.results.folder / NAME / "extent.json", text.encode())

    def _work(self, extent: Extent, most: Extent) -> float:
        """The floating-point operations of a comparison; those of a training grow with its rows and epochs."""
        share = extent.rows / most.rows
        if self.plan.epochs is None:
            share *= recipe_epochs(extent.rows) / self.epochs
        training = testing = 0.0
        for _, resolved in self.methods:
            trials = extent.trials if resolved.resolution.selection else extent.seeds
            training += trials * forecast.training_work(self.job, resolved)
            training += extent.seeds * forecast.gate_work(self.job, resolved)  # all rates of a seed share its gates
            testing += trials * forecast.test_work(self.job)
        return training * share + testing

    def _estimate(self) -> str:
        """The time of all trainings."""
        seconds = self._work(self.extent, self.extent) / forecast.speed(self.results)
        if seconds < 120:
            return f"{max(1, round(seconds))} s"
        minutes = seconds / 60
        return f"{minutes / 60:.1f} hours" if minutes >= 100 else f"{round(minutes)} min"

    def _say_cut(self, most: Extent, extent: Extent) -> None:
        cut = []
        for name, text in (
            ("seeds", "seeds"),
            ("rates", "rates per method"),
            ("widenings", "further rates where the best is at the edge"),
            ("rows", "training rows"),
        ):
            before, now = getattr(most, name), getattr(extent, name)
            if now < before:
                cut.append(f"{now:,} instead of {before:,} {text}")
        if cut:
            self._note(f"To fit the budget of {self.plan.budget}: {', '.join(cut)}.")

    # ---- training

    def contest(self) -> Contest:
        """Search, repeat, and gather the results."""
        began = time.monotonic()
        self._shrink()
        used = self.job.dataset
        self._note(sizes_note(used.train, used.dev, used.test))
        self.say(f"All trainings take about {self._estimate()} on this machine; --budget TIME shrinks the comparison.")
        searched = self._search()
        chosen = {name: [_best(results)] for name, results in searched.items()}
        for seed in range(1, self.extent.seeds):
            if seed > 1 and self._is_late(began, searched, chosen):
                self._note(f"The budget ends here: {seed} instead of {self.extent.seeds} seeds.")
                self.extent = replace(self.extent, seeds=seed)
                self._store_extent(self.extent)
                break
            wanted = []
            for method, _ in self.methods:
                rate = float(chosen[method.name][0].trial["lr"])
                wanted.append((method, self._trial(method, rate, seed)))
            _extend(chosen, self._results(wanted, alone=seed == TIMED_SEED))
        return self._gathered(searched, chosen)

    def _is_late(
        self, began: float, searched: Mapping[str, Sequence[Result]], chosen: Mapping[str, Sequence[Result]]
    ) -> bool:
        """Whether one more seed would exceed the budget, by what the seeds so far took, also before a stop."""
        budget = self.plan.budget_seconds
        if budget is None:
            return False
        trained = 0.0
        for name, results in chosen.items():
            trained += sum(result.cost["seconds"] for result in (*searched[name], *results[1:]))
        last = sum(results[-1].cost["seconds"] for results in chosen.values())
        return max(time.monotonic() - began, trained) + last > budget

    def _search(self) -> dict[str, list[Result]]:
        """The results of all rates of every method on the first seed."""
        wanted = []
        for method, resolved in self.methods:
            wanted += [(method, self._trial(method, rate, 0)) for rate in self._rates(method, resolved)]
        searched = self._results(wanted)
        for _ in range(self.extent.widenings):
            wanted = []
            for method, _ in self.methods:
                rate = _further_rate(searched[method.name])
                if rate is not None:
                    wanted.append((method, self._trial(method, rate, 0)))
            _extend(searched, self._results(wanted))
        return searched

    def _results(self, wanted: Sequence[tuple[Method, Trial]], alone: bool = False) -> dict[str, list[Result]]:
        """The results of trials by method, trained where they are missing; `alone`: one after the other."""
        owners: dict[Trial, Method] = {}  # methods that are equal share a trial
        for method, trial in wanted:
            owners.setdefault(trial, method)
        keys = {trial: key_of(trial_table(trial), self.digest, self.base.fingerprint) for trial in owners}
        for group in passes(resolve_trials(self.base, owners), 1 if alone else None):
            missing = [resolved for resolved in group if not self.results.has(keys[resolved.trial])]
            if missing:
                self._train(missing, owners, keys)
        by_method: dict[str, list[Result]] = {}
        for method, trial in wanted:
            result = self.results.read(keys[trial])
            if result is not None:
                by_method.setdefault(method.name, []).append(result)
                if "bytes" in result.cost:
                    self.timed.add(method.name)
        return by_method

    def _train(self, group: Sequence[Resolved], owners: Mapping[Trial, Method], keys: Mapping[Trial, str]) -> None:
        """Train one pass and write its results."""
        trials = tuple(resolved.trial for resolved in group)
        names = tuple(keys[trial] for trial in trials)
        work = Pass(
            opening=self._opening(),
            points=tuple(self._point(owners[trial], trial) for trial in trials),
            trials=trials,
            keys=names,
            folder=self.results.pass_folder(NAME, self.base.name, names),
            work=sum(forecast.trial_work(self.job, resolved) for resolved in group),
            memory=forecast.memory(self.job, group),
            threads=None,
            seconds=self.checkpoint_seconds,
        )

        def watch(_: int, step: int, total: int, runners: Any) -> None:
            self.watch(self.pass_number, step, total, runners)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstantPrediction)  # of a rate that is too large: its score says it
            done = perform_on(self.job, work, watch, gap=False)
        self.pass_number += 1
        by_method: dict[str, list[Result]] = {}
        for trial, (result, outcome) in zip(trials, done, strict=True):
            method = owners[trial]
            by_method.setdefault(method.name, []).append(self._with_prediction_costs(method, result, outcome.delta))
        self.results.commit(work.folder, list(chain.from_iterable(by_method.values())))
        for name, results in by_method.items():
            self.say(_line(name, results))

    def _point(self, method: Method, trial: Trial) -> Point:
        return Point(method.name, self.label, None, trial.lr, trial.batch, trial.seed)

    def _opening(self) -> Opening:
        return Opening(
            base=None,
            task=self.label,
            data=None,
            split=NAME,
            size=None,
            dev_size=None,
            max_length=self.job.encoder.max_length,
        )

    # ---- what predictions cost

    def _with_prediction_costs(self, method: Method, result: Result, delta: Delta | None) -> Result:
        """The result; the first result of each method gets the costs of its predictions."""
        if delta is None or result.trial["seed"] != 0 or method.name in self.timed:
            return result
        self.timed.add(method.name)
        return replace(result, cost={**result.cost, **self._prediction_costs(delta)})

    def _prediction_costs(self, delta: Delta) -> dict[str, float]:
        """Size of the delta, seconds per text, and how much longer a mixed batch takes than one of a single delta."""
        assert self.job.dataset.test is not None
        texts = _texts(self.job.dataset.test)
        size = len(delta.encode())
        predictor = Predictor(delta, self.base)
        singles = [_answering(predictor, text) for text in texts]
        alone = statistics.median(_fastest(*singles))
        count = int(max(2, min(MIXED, len(texts), MIXED_BYTES // size)))
        together = MixedPredictor([delta] * count, self.base)
        one, mixed = _fastest(
            lambda: together.outputs([(0, text) for text in texts]),
            lambda: together.outputs([(n % count, text) for n, text in enumerate(texts)]),
        )
        return {"bytes": size, "predict": alone, "mixed": mixed / one, "mixed_deltas": count}

    # ---- the outcome

    def _gathered(self, searched: Mapping[str, list[Result]], chosen: Mapping[str, list[Result]]) -> Contest:
        trained = {method.name: resolved.resolution.selection.count for method, resolved in self.methods}
        contestants = []
        for method in self.plan.chosen_methods:
            name = method.name
            if name not in trained:  # it was left out
                continue
            contestant = Contestant(method, tuple(searched[name]), tuple(chosen[name]), trained[name])
            contestants.append(contestant)
            if contestant.at_edge:
                self._note(f"{name}: the best rate, {contestant.rate:g}, is at the edge of those tried.")
        first = contestants[0].chosen[0]
        return Contest(
            data=self.label,
            source=self.path,
            base=self.base.name,
            base_given=None,
            kind=self.job.task.kind,
            metric=self.job.task.metric,
            rows=first.rows,
            baseline=first.majority,
            epochs=self.epochs,
            batch=BATCH,
            extent=self.extent,
            contestants=tuple(contestants),
            notes=tuple(self.notes),
            options=self._options(),
        )

    def _options(self) -> tuple[str, ...]:
        words = []
        for name in SHARED_OPTIONS:
            value = getattr(self.plan, name)
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return tuple(words)


def _cut(dataset: Dataset, extent: Extent) -> Dataset:
    train = dataset.train.take(subset(dataset.train, dataset.kind, extent.rows, 0))
    dev = dataset.dev
    if extent.dev_rows < len(dev):
        dev = dev.take(subset(dev, dataset.kind, extent.dev_rows, 0))
    return replace(dataset, train=train, dev=dev)


def _best(results: Sequence[Result]) -> Result:
    """The result with the best dev score; the first if all diverged."""
    return max(results, key=lambda result: -1.0 if (dev := result.score("dev")) is None else dev)


def _rates_of(results: Sequence[Result]) -> list[float]:
    return [float(result.trial["lr"]) for result in results]


def _texts(examples: Examples) -> list[Any]:
    """The first texts as a predictor takes them."""
    chosen = examples.take(range(min(TIMED, len(examples))))
    texts = [list(text) if isinstance(text, tuple) else text for text in chosen.texts]
    return texts if chosen.pairs is None else list(zip(texts, chosen.pairs, strict=True))


def _answering(predictor: Predictor, text: Any) -> Callable[[], object]:
    return lambda: list(predictor.answers([text]))


def _fastest(*actions: Callable[[], object]) -> list[float]:
    """The seconds of each action, the fastest of REPEATS; they take turns, so that other load slows all of them."""
    took: list[list[float]] = [[] for _ in actions]
    for repeat in range(REPEATS + 1):
        for action, seconds in zip(actions, took, strict=True):
            began = time.perf_counter()
            action()
            if repeat:  # the first one warms up
                seconds.append(time.perf_counter() - began)
    return [min(seconds) for seconds in took]


def _extend(results: dict[str, list[Result]], more: Mapping[str, Sequence[Result]]) -> None:
    for name, further in more.items():
        results[name] += further


def _by_size(pair: tuple[Method, Resolved]) -> tuple[bool, bool, bool, int]:
    method, resolved = pair
    selection = resolved.resolution.selection
    return selection.matrix_share > SCATTERED, selection.learned is not None, method.autofreeze, selection.count


def _further_rate(results: Sequence[Result]) -> float | None:
    """The next rate to try, if the best one is at the edge of those tried; else None."""
    best = _best(results)
    return None if best.score("dev") is None else wider_rate(_rates_of(results), float(best.trial["lr"]))


def _line(name: str, results: Sequence[Result]) -> str:
    """One line on finished trials of a method."""
    best = _best(results)
    score = best.score("dev")
    shown = "diverged" if score is None else f"best dev {100 * score:.1f}"
    rates = ", ".join(f"{result.trial['lr']:g}" for result in results)
    how = "solved" if asks_for_nothing(best.trial["select"]) else f"rate{'s' if len(results) > 1 else ''} {rates}"
    seconds = sum(result.cost["seconds"] for result in results)
    return f"{name}, seed {best.trial['seed']}, {how}: {shown}, {seconds:.0f} s"
