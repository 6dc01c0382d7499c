"""The `study` commands: list, show, run and report; torch is imported by `run` alone."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UsageError
from ..study import forecast, spec
from ..study.grid import Settings, tries_default_rates
from ..study.spec import Study
from ..study.store import Results
from . import show

# ---- actions


def list_(args: argparse.Namespace) -> Any:
    """All studies with what they cover and their cost."""
    studies = [spec.load(name) for name in spec.names()]
    if args.json:
        return [_listed(study) for study in studies]
    rows = []
    for study in studies:
        small, published = forecast.small_cost(study), forecast.published_cost(study)
        hours = duration(small.operations / forecast.CORE)
        rows.append((study.name, study.title, hours, duration(published.operations / forecast.GPU)))
    show.out.print(show.table(["study", "what it asks", "small", "as published"], rows, left=2))
    show.note(
        f"Small: one core with the options {shlex.join(forecast.SMALL.words())} on {forecast.SMALL_BASE}. "
        "As published: the paper's bases and all data, on a GPU with 10 TFLOP/s. --dry-run says it of your options."
    )
    return None


def _listed(study: Study) -> dict[str, Any]:
    """A study as JSON lists it; seconds are those of the small form on one core."""
    small, published = forecast.small_cost(study), forecast.published_cost(study)
    return {
        "name": study.name,
        "title": study.title,
        "paper": study.paper,
        "covers": study.covers,
        "trials": published.trials,
        "operations": published.operations,
        "small_trials": small.trials,
        "small_seconds": round(small.operations / forecast.CORE),
    }


def describe(args: argparse.Namespace) -> Any:
    """One study: protocol, tables, claims."""
    from ..report import report

    study = load(args.name)
    if args.json:
        return {"name": study.name, "title": study.title, "covers": study.covers, "protocol": dict(report.facts(study)),
                "claims": {claim.id: claim.text for claim in study.claims},
                "trials": forecast.published_cost(study).trials}  # fmt: skip
    show.out.print(f"{study.name}: {study.title}", soft_wrap=True)
    if study.covers:
        show.out.print(f"covers {', '.join(study.covers)}", soft_wrap=True)
    if study.about:
        show.out.print(study.about, soft_wrap=True)
    show.out.print(f"Cost: {report.cost_in_words(study)}.\n", soft_wrap=True)
    show.out.print(show.table(["protocol", ""], report.facts(study), left=2))
    for table in study.tables:
        rows = [(row.label, *_published_cells(row)) for row in table.rows if row.values or row.texts]
        if not rows:  # a table of our own numbers
            continue
        show.out.print()
        show.out.print(show.table(["", *table.columns], rows, f"{table.name} (published)"))
    show.out.print()
    show.out.print(show.table(["claim", ""], [(claim.id, claim.text) for claim in study.claims], left=2))
    return None


def _published_cells(row: spec.Row) -> tuple[str, ...]:
    """What a row of a paper's table prints."""
    if row.texts:
        return row.texts
    return tuple("-" if number is None else f"{number.value:g}" for number in row.numbers)


def report(args: argparse.Namespace) -> Any:
    """Write the page and the Markdown of one study, or of all studies with the summary over them."""
    from ..report import report, summary

    results = Results(args.results)
    if not args.all:
        if args.name is None:
            raise UsageError("study report: pass the NAME of a study, or --all")
        written = [report.write(load(args.name), results, args.out, args.figures)]
    else:
        if args.name is not None or args.out is not None:
            raise UsageError("study report --all writes to --results; remove NAME and --out")
        written = [summary.write(results)]
        for name in spec.names():
            if results.manifests(name):
                written.append(report.write(load(name), results, figures=args.figures))
    if args.json:
        return [{"html": str(html), "markdown": str(markdown)} for html, markdown in written]
    for html, markdown in written:
        show.out.print(f"wrote {html} and {markdown}", soft_wrap=True)
    return None


def load(name: str) -> Study:
    """The study of that name; its claims and figures are checked."""
    from ..report import figures, verdicts

    study = spec.load(name)
    verdicts.check(study)
    figures.check(study)
    return study


def run(args: argparse.Namespace) -> Any:
    """Run what is missing, then write the report."""
    from ..report import report

    study = load(args.name)
    settings = Settings(
        tasks=args.tasks, methods=chosen_methods(study, args.methods), seeds=args.seeds, epochs=args.epochs,
        train_size=args.train_size, dev_size=args.dev_size, max_length=args.max_length, lr=args.lr, batch=args.batch,
        evals_per_epoch=args.evals_per_epoch, search=args.search,
    )  # fmt: skip
    if args.address and args.engine != "ray":
        raise UsageError("--address is only for --engine ray")
    results = _results(args)
    bases = []
    for base in args.base or study.protocol.bases:
        bases.append(_run_on(study, base, settings, results, args))
    if args.dry_run:
        return bases if args.json else None
    html, markdown = report.write(study, results)
    if args.json:
        return {"study": study.name, "bases": bases, "html": str(html), "markdown": str(markdown)}
    show.out.print(f"wrote {html} and {markdown}", soft_wrap=True)
    return None


def chosen_methods(study: Study, texts: list[str] | None) -> tuple[str, ...] | None:
    """The values of --methods as names; names with commas are recognised, also in the spelling b_m2+b_q."""
    if texts is None:
        return None
    known = [method.name for method in study.methods]
    chosen: list[str] = []
    for text in texts:
        parts = text.split(",")
        while parts:
            name, count = _first_method(parts, known)
            chosen.append(name)
            del parts[:count]
    return tuple(name for name in chosen if name)


def _first_method(parts: list[str], known: list[str]) -> tuple[str, int]:
    """The longest name of a method that the parts begin with, and the number of its parts.

    The spelling of the study comes first: "b_m2,b_q" is two methods where the study has them and "b_m2, b_q".
    """
    by_spelling = {_plain_spelling(name): name for name in known}
    for names, spell in (({name: name for name in known}, str.strip), (by_spelling, _plain_spelling)):
        for count in range(len(parts), 0, -1):
            name = names.get(spell(",".join(parts[:count])))
            if name is not None:
                return name, count
    return parts[0].strip(), 1


def _plain_spelling(name: str) -> str:
    """A name without spaces, its parts joined by commas."""
    return "".join(name.split()).replace("+", ",")


def _results(args: argparse.Namespace) -> Results:
    """The folder of results, with the storage that it is kept equal to, if there is one."""
    if args.storage is None:
        return Results(args.results)
    from ..data.storage import Storage
    from ..study.stored import StoredResults

    return StoredResults(args.results, Storage(args.storage))


def _run_on(study: Study, base: str, settings: Settings, results: Results, args: argparse.Namespace) -> dict[str, Any]:
    from ..study import runner
    from ..training.checkpoint import SECONDS

    folders: dict[str, str] = {}
    if args.storage is not None:
        from ..data.storage import Storage
        from ..study.shipping import base_here, data_here

        storage = Storage(args.storage)
        base = base_here(storage, base) or base
        folders = data_here(storage, settings.tasks or study.tasks, args.data)
    seconds = float(os.environ.get("BITFIT_CHECKPOINT_SECONDS", SECONDS))
    campaign = runner.Campaign(
        study, base, settings, args.data, results, args.threads, args.lanes, seconds, folders=folders
    )
    if settings.lr is None and tries_default_rates(study, settings, base):
        show.note(
            f"Rates are bitfit's defaults for {campaign.name}, which is not a base of the study; "
            "--lr paper keeps the study's."
        )
    if args.dry_run:
        return _forecast(campaign, args)
    command = ["bitfit", "study", "run", study.name, "--base", campaign.name, *settings.words()]
    with _meter(f"{study.name} on {campaign.name}", args.json) as meter:
        trained = runner.run(campaign, _engine(args), command, show.note, meter)
    for name, why in campaign.skipped.items():
        show.note(f"left out: {name}: {why}")
    before = _distinct_trials(campaign) - trained
    show.note(f"{campaign.name}: {show.counted(trained, 'trial')} trained, {before} had been trained before")
    return {"base": campaign.name, "trained": trained, "trials": len(campaign.keys), "skipped": campaign.skipped}


def _distinct_trials(campaign: Any) -> int:
    """How many trials a study has on a base; methods that are equal there share theirs."""
    return len(set(campaign.keys.values()))


def _engine(args: argparse.Namespace) -> Any:
    from ..data.storage import Storage

    storage = None if args.storage is None else Storage(args.storage)
    if args.engine == "ray":
        from ..study.ray_engine import ray_engine

        return ray_engine(args.address, args.workers, storage, show.note)
    from ..study.passes import local
    from ..study.shipping import storing_inputs

    return local if storage is None else storing_inputs(local, storage)


def _forecast(campaign: Any, args: argparse.Namespace) -> dict[str, Any]:
    from ..study.forecast import speed
    from ..study.runner import dry_run

    works = dry_run(campaign)
    pace = speed(campaign.results)
    trials = sum(len(work.trials) for work in works)
    done = _distinct_trials(campaign) - trials
    seconds = sum(work.work for work in works) / pace
    memory = max((work.memory for work in works), default=0.0)
    passes = "1 pass" if len(works) == 1 else f"{len(works):,} passes"
    if not args.json:
        title = f"{campaign.study.name} on {campaign.name}"
        show.out.print(show.table(["task", "method", "rates", "trials", "time"], _cells(works, pace), title, left=3))
        for name, why in campaign.skipped.items():
            show.note(f"left out: {name}: {why}")
        show.out.print(
            f"{show.counted(trials, 'trial')} in {passes} to run, {done} done; "
            f"about {duration(seconds)} at {pace / 1e9:.0f} GFLOP/s, up to {show.size(memory)} of memory",
            soft_wrap=True,
        )  # fmt: skip
    return {"base": campaign.name, "trials": trials, "passes": len(works), "done": done,
            "seconds": seconds, "memory": memory, "skipped": campaign.skipped}  # fmt: skip


def _cells(works: list[Any], pace: float) -> list[tuple[str, ...]]:
    """The task, method, rates, number of trials and time of each cell that would run."""
    shares: dict[tuple[str, str], list[float]] = {}
    rates: dict[tuple[str, str], set[float]] = {}
    for work in works:
        for point in work.points:
            cell = (point.task, point.method)
            shares.setdefault(cell, []).append(work.work / len(work.points))
            rates.setdefault(cell, set()).add(point.lr)
    rows: list[tuple[str, ...]] = []
    for cell, times in shares.items():
        tried = ", ".join(f"{rate:g}" for rate in sorted(rates[cell]))
        rows.append((*cell, tried, str(len(times)), duration(sum(times) / pace)))
    return rows


@contextmanager
def _meter(label: str, quiet: bool) -> Iterator[Callable[[float, float], None]]:
    """Progress over a stage of the study with the time left, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=show.err, transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task(label, total=1.0, left="")
        began = time.monotonic()
        stage_total = 0.0
        start = 0.0  # what was done when the stage began

        def meter(done: float, total: float) -> None:
            nonlocal began, stage_total, start
            if total != stage_total:  # another stage
                began = time.monotonic()
                stage_total = total
                start = done
            progressed = done - start
            left = ""
            if progressed > 0:
                left = f"{duration((time.monotonic() - began) * (total - done) / progressed)} left"
            progress.update(bar, total=total, completed=done, left=left)

        yield meter


def duration(seconds: float) -> str:
    """A duration for people: 90 s, 45 min, 12 h, 3 days."""
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:,.0f} days"


_ACTIONS = {"list": list_, "show": describe, "run": run, "report": report}


def act(args: argparse.Namespace) -> Any:
    """Run an action; returns what --json prints, or None."""
    return _ACTIONS[args.action](args)
