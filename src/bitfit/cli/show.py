"""Output to the terminal: tables and numbers. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..delta.meta import shown_score
from ..report import changemap
from ..terminal.progress import clean as clean
from ..terminal.progress import counted as counted
from ..terminal.progress import counting_bar as counting_bar
from ..terminal.progress import err as err
from ..terminal.progress import note as note
from ..terminal.progress import training_bar as training_bar

MANY_CLASSES = 20  # beyond these the scores of classes are in --json only
DEMO = "all-MiniLM-L6-v2"  # model/base.py has the same name, but would import torch

# No markup: texts, labels and file names are data and must come out unchanged.
out = Console(markup=False, highlight=False, emoji=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, left: int = 1) -> Table:
    """A plain table; the first `left` columns are aligned to the left, numbers to the right."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        grid.add_column(name, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    return grid


def percent(value: float) -> str:
    """A fraction of 1 in percent, as the papers print scores: 79.2."""
    return f"{100 * value:.1f}"


def size(count: float) -> str:
    """A number of bytes for people: 114 KB."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def seconds(value: float) -> str:
    """A duration for people: 52 s, 3.1 min."""
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.1f} min"


def run(done: Any, target: Path, took: float, base: str | None = None, resumed: bool = False) -> None:
    """Print the result of a training."""
    best, meta = done.best, done.best.delta.meta
    metric = best.trial.metric
    if len(done.trials) > 1:
        rows = []
        for outcome in done.trials:
            score = "-" if outcome.dev is None else percent(outcome.dev)
            rows.append((*_settings(outcome.trial), score, outcome.status))
        out.print(table(["rate", "batch", "seed", f"dev {metric}", ""], rows))
        if done.story is None:  # the notes of the default recipe say what it chose
            out.print(f"the best is written: {_trial_in_words(best.trial)}")
    for splits in _side_by_side(best.scores):
        out.print(_score_table({split: best.scores[split] for split in splits}))
    if best.gap:
        train, dev = (percent(best.scores[split][metric].value) for split in ("train", "dev"))
        out.print(f"generalisation gap: {metric} {percent(best.gap[metric])} ({train} on train, {dev} on dev)")
    if done.story is not None and 1 < len(done.story.classes) <= MANY_CLASSES:
        lines = []
        for row in done.story.classes:
            lines.append((row.label, f"{row.support:,}", percent(row.precision), percent(row.recall)))
        out.print(table(["class", "support", "precision", "recall"], lines))
    out.print(f"{done.baseline_name}: {metric} {percent(done.majority)} on dev")
    share = f"{meta.trained / meta.total:.3%}"
    since = " since it was resumed" if resumed else ""
    if done.story is not None:
        value, interval = score_cells(done.story.expected, metric)
        out.print(f"expected on new data: {metric} {value} ({interval})")
    if best.trial.autofreeze:
        out.print(_freezings_in_words(best.history.freezings))
    out.print(f"trained {meta.trained:,} of {meta.total:,} parameters ({share}) in {seconds(took)}{since}")
    out.print(f"wrote {clean(str(target))} ({size(target.stat().st_size)})")
    where = "" if meta.hub or meta.base == DEMO else f" --base {shlex.quote(base or 'FOLDER')}"
    from ..tasks import KINDS

    words = " ".join(f'"{text}"' for text in KINDS[meta.task].sample_input(meta.pairs))
    out.print(f"try: bitfit predict {shlex.quote(str(target))} {words}{where}", soft_wrap=True)


def sweep(runs: dict[int, Any], target: Path, took: float) -> None:
    """Print the results of a training on several sizes."""
    first = next(iter(runs.values())).best
    main = first.trial.metric
    metrics = list(dict.fromkeys([main, *first.scores["dev"]]))[:2]
    columns = ["rows"]
    for metric in metrics:
        columns += [f"dev {metric}", "95% interval"]
    lines = []
    for size, run in runs.items():
        cells = [f"{size:,}"]
        for metric in metrics:
            cells += score_cells(run.best.scores["dev"][metric], metric)
        if first.gap:
            cells.append(percent(run.best.gap[main]))
        lines.append(cells)
    if first.gap:
        columns.append(f"gap {main}")
    out.print(table(columns, lines, left=0))
    names = f"{clean(target.stem)}-ROWS{target.suffix}"
    out.print(f"wrote {counted(len(runs), 'delta')} ({names}) in {seconds(took)}")


def _side_by_side(scores: dict[str, Any]) -> list[list[str]]:
    """Which splits share a table: two at most, so that it fits the terminal."""
    shown = [split for split in scores if split != "train"]
    return [shown[i : i + 2] for i in range(0, len(shown), 2)]


def _score_table(scores: dict[str, dict[str, Any]]) -> Table:
    columns = ["metric"]
    for split in scores:
        columns += [split, "95% interval"]
    lines = []
    for metric in next(iter(scores.values())):
        cells = [metric]
        for by_metric in scores.values():
            cells += score_cells(by_metric[metric], metric)
        lines.append(cells)
    return table(columns, lines)


def score_cells(score: Any, metric: str = "accuracy") -> tuple[str, str]:
    """A score and its interval for a table: 79.2 and 76.7 to 81.5; an error in the unit of the labels."""
    value, low, high = (shown_score(metric, number) for number in (score.value, score.low, score.high))
    return value, f"{low} to {high}"


def _settings(trial: Any) -> tuple[str, str, str]:
    return f"{trial.lr:g}", str(trial.batch), str(trial.seed)


def _trial_in_words(trial: Any) -> str:
    words = "rate {}, batch {}, seed {}".format(*_settings(trial))
    if trial.class_weights != "none":
        words += f", {trial.class_weights} classes"
    return f"{words}, autofreeze" if trial.autofreeze else words


def _freezings_in_words(freezings: Sequence[Any]) -> str:
    """When --autofreeze froze how many layers."""
    if not freezings:
        return "autofreeze: no layer settled"
    steps = [f"{freezing.frozen_layers:,} at step {freezing.step:,}" for freezing in freezings]
    return f"autofreeze: lowest layers frozen: {', '.join(steps)}"


MOST_CLASSES = 12  # in a confusion matrix that is printed


def evaluation(result: Any, source: str) -> None:
    """Print the metrics with their intervals, the results by class and the confusion matrix."""
    lines = [(name, *score_cells(score, name)) for name, score in result.scores.items()]
    out.print(f"{counted(result.rows, 'row')} of {clean(source)}", soft_wrap=True)
    out.print(table(["metric", "score", "95% interval"], lines))
    if result.task.positive is not None:
        note(f'precision, recall, f1, auc and average_precision are about "{result.task.positive}"')
    if result.by_class:
        cells = []
        for row in result.by_class:
            scores = (percent(row.precision), percent(row.recall), percent(row.f1))
            cells.append((row.label, *scores, f"{row.support:,}"))
        out.print()
        out.print(table(["class", "precision", "recall", "f1", "support"], cells))
    if 0 < len(result.confusion) <= MOST_CLASSES:
        out.print()
        out.print(table(["true \\ predicted", *result.labels], _confusion(result)))


def _confusion(result: Any) -> list[list[str]]:
    rows = []
    for label, counts in zip(result.labels, result.confusion, strict=True):
        rows.append([label, *(f"{count:,}" for count in counts)])
    return rows


def tasks(entries: Sequence[dict[str, Any]]) -> None:
    """Print the named tasks and where their data is."""
    rows = [(task["name"], task["kind"], task["metric"], _where(task)) for task in entries]
    out.print(table(["task", "kind", "metric", "data"], rows, left=4))
    not_averaged = ", ".join(task["name"] for task in entries if not task["average"])
    out.print(f"(part): only some rows of the published split. Not in averages: {not_averaged or 'none'}.")


def _where(task: dict[str, Any]) -> str:
    if task["folder"] is None:
        return f"on the hub: {' '.join(task['hub'].values())}" if task["hub"] else "not found, and not on the hub"
    names = (split + (" (part)" if split in task["partial"] else "") for split in task["splits"])
    return f"{task['folder']}: {', '.join(names)}"


def audit(counts: Any) -> None:
    """Print a count of parameters by term and by part of the model."""
    lines = [(term, f"{total:,}", f"{counts.trained[term]:,}") for term, total in counts.terms.items()]
    out.print(table(["term", "total", "trained"], lines))
    parts = [(part, f"{total:,}", f"{trained:,}") for part, (total, trained) in counts.parts().items()]
    parts.append(("all", f"{counts.total:,}", f"{counts.all_trained:,}"))
    out.print()
    out.print(table(["part", "total", "trained"], parts))
    out.print(f"\n{counts.base}: {counts.all_trained / counts.total:.4%} of {counts.total:,} parameters train")
    if counts.anatomy.missing:
        note(f"not offered by this architecture: {' '.join(counts.anatomy.missing)}")
    for text in counts.warnings:
        note("warning: " + text)


def delta(loaded: Any, count: int) -> None:
    """Print the metadata of a delta and its change map; `count` is the size of its file in bytes."""
    meta = loaded.meta
    scores = {split: table[meta.metric] for split, table in meta.metrics.items() if meta.metric in table}
    facts = {
        "base": f"{meta.base} ({meta.fingerprint[:12]}), trained in {meta.dtype}",
        "task": f"{meta.task}: {', '.join(meta.labels)}" if meta.labels else meta.task,
        "select": f"{meta.select}, head {meta.head}, pool {meta.pool}, init {meta.init}",
    }
    if meta.injects:
        facts["inject"] = meta.inject
    facts["trained"] = f"{meta.trained:,} of {meta.total:,}"
    if meta.open_gates is not None:
        facts["open gates"] = f"{meta.open_gates:.2%} before the largest differences were chosen"
    if meta.trial is not None:
        facts["trial"] = _trial_in_words(meta.trial)
    facts["file"] = size(count)
    for split, score in scores.items():
        facts[split] = f"{meta.metric} {percent(score.value)}"
    out.print(table(["delta", ""], list(facts.items()), left=2))
    out.print()
    out.print(changemap.terminal(loaded.change, out.width))


def comparison(compared: Any, page: Path) -> None:
    """Print a comparison of methods."""
    # Scores and costs are two tables: together they are wider than most terminals.
    for shown, with_notes in ((slice(1, 3), True), (slice(3, None), False)):
        grid = compared.table()
        rows = []
        for cells in grid.cells:
            rows.append([cells[0].text, *(cell.plain if with_notes else cell.text for cell in cells[shown])])
        out.print(table([grid.head[0], *grid.head[shown]], rows))
        out.print()
    out.print(clean(compared.advice.text))
    if compared.command is not None:
        out.print(f"\n  {clean(compared.command)}", soft_wrap=True)
    out.print(f"\nThe same as a page: {page}", soft_wrap=True)
