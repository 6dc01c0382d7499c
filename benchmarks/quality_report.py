"""The page of the quality benchmark: targets, summaries and every cell, from the results there are."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from quality_methods import METHODS, OLD, OLD_DEFAULT, TASKS, grouped
from scipy.stats import rankdata

FEW = 32
MOST = 1000  # rows up to which the targets count
SEEDED = ("bitfit", "bitfit plain", OLD_DEFAULT)
UNSEEN = ("mnli", "qqp")  # no setting was chosen on their test rows
SETTLED = ("linear", "bitfit", "bitfit plain", "full, three rates", "head alone")  # of the first summary
READING = """How to read it:

- The recipe's settings (the small start, rates, epochs) were chosen by looking at test rows of some of these cells:
  sst2 32 (draw 0) and 100 (0), trec 32 (1), 100 (0) and 300 (1), rotten_tomatoes 300 (1), mrpc 100 (0), stsb 100 (0)
  and 300 (0), ud_ewt 100 (0); the prior of the temperature on sst2 32 (2), trec 32 (2) and 100 (1), mrpc 32 (1),
  qnli 32 (1) and rotten_tomatoes 100 (1), and for solved heads on draws 0 and 1 of six tasks; when the head alone is
  delivered, on mrpc 300 (0) and sst2 32 (0); the scales of a pair's head on draws 0 to 2 of 32 rows; the strongest
  penalty of other heads on draws 0 to 9 of sst2, trec and rotten_tomatoes and 0 to 5 of imdb, up to 300 rows. There
  bitfit's row is optimistic. No setting was chosen on mnli and qqp: they are the fair test.
- Pairs: "linear" and "full, three rates" read them as one sequence, "linear on u, v" reads two texts, bitfit tries both
  ways. "full, same recipe" does what bitfit does, with all parameters.
- Seconds are processor time, some of it beside other work, which makes it up to three times as large: do not compare
  columns.
- The table of scores has means over the draws that each method has. Only the summary and the differences are paired.
- "full, three rates" trains as many epochs as the default recipe does for the size, "bitfit plain" always five.
- The hindsight of bitfit's row compares with the mean over folds of the rates that were not chosen. They saw fewer rows
  than the chosen one, so it is a lower bound. It is 0 where the head alone was delivered and no rate is better.
"""
Result = dict[str, Any]
Row = tuple[str, str, str]


def report(found: Sequence[Result]) -> str:
    """The page: targets and summaries over the cells that all their methods have, then every cell."""
    newest = max((r["recipe"] for r in found if "recipe" in r), default=0)
    current = [r for r in found if r.get("recipe", newest) == newest]
    once = [r for r in current if "seed" not in r]
    older = len(found) - len(current)
    parts = [
        "# Quality of the defaults\n",
        f"all-MiniLM-L6-v2, {platform.machine()}, one thread. `make quality` computes what is missing; "
        "a result is one file in `benchmarks/quality/`. Scores are accuracy, for stsb Spearman's correlation, "
        "times 100: the mean over draws of the training rows, with the 95% interval of one draw's test set.\n",
        f"Version {newest} of the recipe."
        + (f" {older} results of older versions are left out." if older else "")
        + "\n",
        READING,
        "## Targets\n",
        targets([r for r in once if r["size"] <= MOST], [r for r in current if "seed" in r]),
        "## Summary\n",
        *summary(once),
        "## By number of rows\n",
        by_rows(once),
        "## Tasks that no setting was chosen on\n",
        unseen(once),
        "## Against the linear model, cell by cell\n",
        against(once, "linear"),
        "## Against full fine-tuning with three rates, cell by cell\n",
        against(once, "full, three rates"),
        "## Against the linear model on both texts of a pair, cell by cell\n",
        against(once, "linear on u, v"),
        "## Scores\n",
        scores(once),
        "## Seconds of CPU\n",
        f'"old default" is the default of the commit {OLD}, before the recipe: '
        f"`git worktree add --detach ../old {OLD}`, then `PYTHONPATH=../old/src python benchmarks/quality.py run "
        '--methods "old default"`.\n',
        scores(once, "seconds", 1, "{:.0f}"),
        "## Spread over seeds\n",
        spreads([r for r in current if "seed" in r]),
        "## Probabilities\n",
        probabilities(once),
    ]
    return "\n".join(parts) + "\n"


def targets(found: Sequence[Result], by_seed: Sequence[Result]) -> str:
    """What the default recipe is meant to reach, and what it reaches on the cells there are."""
    lines = ["| what | target | measured |", "|---|---|---|"]
    rows = (
        _against_full(found),
        _against_linear(found),
        _within_intervals(found),
        _hindsight(found),
        _few_rows(found),
        _seed_spread(by_seed),
        *_calibration(found),
    )
    for what, target, measured in rows:
        lines.append(f"| {what} | {target} | {measured or 'not measured'} |")
    return "\n".join(lines) + "\n"


def _against_full(found: Sequence[Result]) -> Row:
    apart = differences(found, "full, three rates")
    return "against full fine-tuning with three rates", "at least equal", _mean_of(apart)


def _against_linear(found: Sequence[Result]) -> Row:
    return "against the linear model", "+2 on average", _mean_of(differences(found, "linear"))


def _within_intervals(found: Sequence[Result]) -> Row:
    """A cell is worse if the difference exceeds half of the width of the linear model's interval."""
    worse = []
    for cell, apart in differences(found, "linear").items():
        group = [r for r in found if (r["task"], r["size"]) == cell and r["method"] == "linear"]
        half = 50 * float(np.mean([r["high"] - r["low"] for r in group]))
        if np.mean(apart) < -half:
            worse.append(f"{cell[0]} {cell[1]}")
    return "cells worse than the linear model by more than its interval", "none", ", ".join(worse) or "none"


def _hindsight(found: Sequence[Result]) -> Row:
    lost = [hindsight(r) for r in found if r["method"] == "bitfit"]
    known = [100 * value for value in lost if value is not None]
    measured = f"{np.mean(known):.2f} ({len(known)} results)" if known else ""
    return "loss against the best rate in hindsight", "0.5 at most", measured


def _few_rows(found: Sequence[Result]) -> Row:
    apart = differences([r for r in found if r["size"] == FEW], "linear")
    cells = [f"{task} {np.mean(values):+.1f} (draws: {len(values)})" for (task, _), values in apart.items()]
    return f"{FEW} rows, against the linear model, each task", "-1 at least, above on average", ", ".join(cells)


def _seed_spread(found: Sequence[Result]) -> Row:
    cells = []
    for (task, size), group in grouped(found, "task", "size").items():
        spreads = ", ".join(f"{_spread_of(group, name):.2f}" for name in SEEDED)
        cells.append(f"{task} {size}: {spreads}")
    what = "spread over seeds, against the plain recipe's and the old default's"
    return what, "half of the old default's at most", "; ".join(cells)


def _calibration(found: Sequence[Result]) -> list[Row]:
    known = [r for r in found if r["method"] == "bitfit" and r.get("before")]
    cells = grouped(known, "task", "size").values()
    if not cells:
        return []
    rows = []
    for key, name, target in (
        ("log_loss", "log loss", "not worse"),
        ("calibration_error", "expected calibration error", "0.05 at most, or half of before"),
    ):
        before = np.mean([np.mean([r["before"][key] for r in cell]) for cell in cells])
        after = np.mean([np.mean([r[key] for r in cell]) for cell in cells])
        measured = f"{before:.3f} before, {after:.3f} after ({len(cells)} cells)"
        rows.append((f"{name} on test rows, before and after the temperature", target, measured))
    return rows


def differences(found: Sequence[Result], other: str) -> dict[tuple[str, int], list[float]]:
    """By task and size the differences of bitfit's score to another method's, in points, draw by draw."""
    table = {}
    for cell, group in sorted(grouped(found, "task", "size").items()):
        ours = {r["draw"]: r["score"] for r in group if r["method"] == "bitfit"}
        theirs = {r["draw"]: r["score"] for r in group if r["method"] == other}
        shared = sorted(ours.keys() & theirs.keys())
        if shared:
            table[cell] = [100 * (ours[draw] - theirs[draw]) for draw in shared]
    return table


def _mean_of(apart: dict[tuple[str, int], list[float]]) -> str:
    means = [float(np.mean(values)) for values in apart.values()]
    return f"{np.mean(means):+.2f} ({len(means)} cells)" if means else ""


def summary(found: Sequence[Result]) -> Iterator[str]:
    """Mean rank, mean score and the worst loss, over the cells that every method of a table has."""
    present = [name for name in METHODS if any(r["method"] == name for r in found)]
    groups = [tuple(name for name in present if name in SETTLED), ("linear", "bitfit")]
    for other in ("full, three rates", "bitfit plain", "lora", "full, same recipe", "head alone"):
        groups.append(("linear", "bitfit", other))
    for chosen in dict.fromkeys(groups):
        means = _means(found, chosen)
        if set(chosen) <= set(present) and len(chosen) > 1 and means:
            yield _summary_table(found, chosen, means)


def _summary_table(
    found: Sequence[Result], chosen: tuple[str, ...], means: dict[tuple[str, int], dict[str, float]]
) -> str:
    table = np.array([[row[name] for name in chosen] for row in means.values()])
    ranks = rankdata(-table, axis=1)  # equal scores share a rank: the default may deliver the head alone
    lines = [f"{len(means)} cells (task and size) that all of these have:\n"]
    lines.append("| | mean score | mean rank | against linear | worst against linear | hindsight loss |")
    lines.append("|---|---|---|---|---|---|")
    for k, name in enumerate(chosen):
        cells = [f"{100 * table[:, k].mean():.2f}", f"{ranks[:, k].mean():.2f}"]
        if "linear" in chosen:
            gain = 100 * (table[:, k] - table[:, chosen.index("linear")])
            worst = list(means)[int(gain.argmin())]
            cells += [f"{gain.mean():+.2f}", f"{gain.min():+.2f} ({worst[0]}, {worst[1]})"]
        else:
            cells += ["", ""]
        lost = [hindsight(r) for r in found if r["method"] == name and (r["task"], r["size"]) in means]
        known = [value for value in lost if value is not None]
        cells.append(f"{100 * np.mean(known):.2f}" if known else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_rows(found: Sequence[Result]) -> str:
    """Mean scores by number of rows, over the tasks that every method of the table has."""
    names = ("linear", "bitfit", "full, three rates")
    lines = [f"| | rows | tasks | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    groups: dict[tuple[bool, int], list[dict[str, float]]] = {}
    for (task, size), means in sorted(_means(found, names).items()):
        groups.setdefault((TASKS[task].pair is not None, size), []).append(means)
    for (pairs, size), cells in sorted(groups.items()):
        scores = [f"{100 * np.mean([cell[name] for cell in cells]):.1f}" for name in names]
        kind = "pairs" if pairs else "single texts, tags"
        lines.append(f"| {kind} | {size:,} | {len(cells)} | {' | '.join(scores)} |")
    return "\n".join(lines) + "\n"


def unseen(found: Sequence[Result]) -> str:
    """The scores of the tasks on which no setting was chosen, and how far bitfit is from the others."""
    names = ("linear", "linear on u, v", "bitfit", "full, three rates")
    lines = [f"| task | rows | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    known = [r for r in found if r["task"] in UNSEEN and r["draw"] == 0]
    for (task, size), group in sorted(grouped(known, "task", "size").items()):
        by_method = {r["method"]: f"{100 * r['score']:.1f}" for r in group}
        lines.append(f"| {task} | {size:,} | {' | '.join(by_method.get(name, '') for name in names)} |")
    return "\n".join(lines) + "\n"


def hindsight(result: Result) -> float | None:
    """By how much the best trial on the test rows beats what was delivered; 0 if the head alone beats them all."""
    trials = result.get("trials") or []
    if len(trials) < 2:
        return None
    return max(0.0, max(trial["test"] for trial in trials) - result["score"])


def _means(found: Sequence[Result], names: Sequence[str]) -> dict[tuple[str, int], dict[str, float]]:
    """Mean scores by task and size over the draws that all of these methods have."""
    table = {}
    for (task, size), group in grouped(found, "task", "size").items():
        draws = [{r["draw"] for r in group if r["method"] == name} for name in names]
        shared = set.intersection(*draws) if draws else set()
        if shared:
            table[task, size] = {
                name: float(np.mean([r["score"] for r in group if r["method"] == name and r["draw"] in shared]))
                for name in names
            }
    return table


def against(found: Sequence[Result], other: str) -> str:
    """The paired difference of bitfit's default to another method, mean over draws and its standard error."""
    lines = ["| task | rows | draws | difference | standard error |", "|---|---|---|---|---|"]
    for (task, size), apart in differences(found, other).items():
        error = f"{np.std(apart, ddof=1) / np.sqrt(len(apart)):.1f}" if len(apart) > 1 else ""
        lines.append(f"| {task} | {size:,} | {len(apart)} | {np.mean(apart):+.1f} | {error} |")
    return "\n".join(lines) + "\n"


def spreads(found: Sequence[Result]) -> str:
    """The standard deviation of the test score over seeds, for the default and the plain recipe."""
    lines = ["| task | rows | method | seeds | mean | standard deviation |", "|---|---|---|---|---|---|"]
    for (task, size, name), group in sorted(grouped(found, "task", "size", "method").items()):
        mean = 100 * float(np.mean([r["score"] for r in group]))
        cells = [task, f"{size:,}", name, str(len(group)), f"{mean:.1f}", f"{_spread_of(group, name):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread_of(group: Sequence[Result], name: str) -> float:
    values = [100 * r["score"] for r in group if r["method"] == name]
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def scores(found: Sequence[Result], key: str = "score", scale: float = 100, form: str = "{:.1f}") -> str:
    """A row per task and size, a column per method."""
    present = [name for name in METHODS if any(r["method"] == name for r in found)]
    lines = ["| task | rows | " + " | ".join(present) + " |", "|---|---|" + "---|" * len(present)]
    for (task, size), group in sorted(grouped(found, "task", "size").items()):
        row = []
        for name in present:
            draws = [r for r in group if r["method"] == name]
            cell = form.format(scale * np.mean([r[key] for r in draws])) if draws else ""
            if draws and key == "score":
                half = 50 * np.mean([r["high"] - r["low"] for r in draws])
                cell += f" ± {half:.1f}"
            row.append(cell)
        lines.append(f"| {task} | {size:,} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def probabilities(found: Sequence[Result]) -> str:
    """Log loss and expected calibration error by method, over all its results on classes."""
    known = [r for r in found if "log_loss" in r]
    lines = ["| | results | log loss | expected calibration error |", "|---|---|---|---|"]
    for (name,), group in grouped(known, "method").items():
        loss, error = (np.mean([r[key] for r in group]) for key in ("log_loss", "calibration_error"))
        lines.append(f"| {name} | {len(group)} | {loss:.3f} | {error:.3f} |")
    return "\n".join(lines) + "\n"
