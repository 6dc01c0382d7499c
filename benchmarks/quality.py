"""How good `bitfit train FILE` is with nothing else said, against linear models and full fine-tuning.

    python benchmarks/quality.py run --data DIR [--tasks sst2,trec] [--sizes 32,100] [--methods bitfit,linear]
    python benchmarks/quality.py report

A cell is a task, a number of training rows and a draw of them; each method's result on it is one JSON file in
benchmarks/quality/, so that a run can be stopped at any time and goes on where it was. `report` writes
benchmarks/quality.md from the files there are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality_methods import METHODS, TASKS, Cell, applies, grouped

HERE = Path(__file__).parent
RESULTS = HERE / "quality"
SIZES = (32, 100, 300, 1000)
FEW = 32
READING = """How to read it:

- The recipe's settings (the small start, rates, epochs) were chosen by looking at test rows of some of these cells:
  sst2 32 (draw 0) and 100 (0), trec 32 (1), 100 (0) and 300 (1), rotten_tomatoes 300 (1), mrpc 100 (0), stsb 100 (0)
  and 300 (0), ud_ewt 100 (0). There bitfit's row is optimistic; other data sets are the fair test.
- The table of scores has means over the draws that each method has. Only the summary and the differences are paired.
- "full, three rates" and "bitfit plain" train five epochs whatever the size, which at 32 rows is 20 steps.
- The hindsight of bitfit's row compares with the mean over folds of the rates that were not chosen. They saw fewer rows
  than the chosen one, so it is a lower bound.
"""
Result = dict[str, Any]


def main() -> None:
    """Run cells or write the report."""
    args = _arguments()
    if args.command == "run":
        run(args)
    else:
        target = HERE / "quality.md"
        target.write_text(report(list(results())), encoding="utf-8")
        print(f"wrote {target}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    it = commands.add_parser("run", help="compute the cells that are missing, the cheapest first")
    data = os.environ.get("BITFIT_DATA")
    it.add_argument("--data", type=Path, default=data, help="folder of the data ($BITFIT_DATA)")
    it.add_argument("--base", help="folder or hub id (the demo base)")
    it.add_argument("--tasks", type=_names, default=list(TASKS), help="comma-separated")
    it.add_argument("--sizes", type=_numbers, default=list(SIZES), help="comma-separated")
    it.add_argument("--methods", type=_names, default=list(METHODS), help="comma-separated")
    it.add_argument("--draws", type=int, help="draws of the training rows (3; 5 with 32 rows)")
    it.add_argument("--threads", type=int, default=1)
    commands.add_parser("report", help="write quality.md from the cells there are")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(";" if ";" in text else ",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> None:
    """Compute what is missing of the asked cells."""
    import torch

    import bitfit

    if args.data is None:
        sys.exit("say where the data is: --data DIR or BITFIT_DATA")
    torch.set_num_threads(args.threads)
    base = bitfit.load_base(args.base)
    for cell in cells(args.tasks, args.sizes, args.draws):
        for method in args.methods:
            path = RESULTS / f"{cell.task}-{cell.size}-{cell.draw}-{method.replace(', ', ' ').replace(' ', '_')}.json"
            if path.exists() or not applies(method, cell.task):
                continue
            result = measure(cell, method, Path(args.data), base)
            _write(path, result)
            said = f"{result['score']:.4f} in {result['seconds']:.0f} s of CPU"
            print(f"{cell.task} {cell.size} {cell.draw} {method}: {said}", flush=True)


def cells(tasks: Sequence[str], sizes: Sequence[int], draws: int | None) -> Iterator[Cell]:
    """All cells, small sizes first; the tasks in the given order."""
    for size in sizes:
        for draw in range(draws or (5 if size <= FEW else 3)):
            for task in tasks:
                yield Cell(task, size, draw)


def measure(cell: Cell, method: str, data: Path, base: Any) -> Result:
    """One method on one cell."""
    with tempfile.TemporaryDirectory() as folder:
        cell.write(data, Path(folder))
        result = METHODS[method](cell.source, Path(folder), base)
    return {"task": cell.task, "size": cell.size, "draw": cell.draw, "method": method, **result}


def _write(path: Path, result: Result) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def results() -> Iterator[Result]:
    """The results there are."""
    for path in sorted(RESULTS.glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


# ---- the report


def report(found: Sequence[Result]) -> str:
    """The page: a summary over the cells that all its methods have, then every cell."""
    parts = [
        "# Quality of the defaults\n",
        f"all-MiniLM-L6-v2, {platform.machine()}, one thread. `make quality` computes what is missing; "
        "a result is one file in `benchmarks/quality/`. Scores are accuracy, for stsb Spearman's correlation, "
        "times 100: the mean over draws of the training rows, with the 95% interval of one draw's test set.\n",
        READING,
        "## Summary\n",
        *summary(found),
        "## Against the linear model, cell by cell\n",
        against(found, "linear"),
        "## Scores\n",
        scores(found),
        "## Seconds of CPU\n",
        scores(found, "seconds", 1, "{:.0f}"),
        "## Probabilities\n",
        probabilities(found),
    ]
    return "\n".join(parts) + "\n"


def summary(found: Sequence[Result]) -> Iterator[str]:
    """Mean rank, mean score and the worst loss, over the cells that every method of a table has."""
    present = [name for name in METHODS if any(r["method"] == name for r in found)]
    main = [name for name in present if name in ("linear", "bitfit", "bitfit plain", "full, three rates", "head alone")]
    for chosen in (main, [name for name in present if name in ("linear", "bitfit")]):
        means = _means(found, chosen)
        if len(chosen) > 1 and means:
            yield _summary_table(found, chosen, means)


def _summary_table(found: Sequence[Result], chosen: list[str], means: dict[tuple[str, int], dict[str, float]]) -> str:
    table = np.array([[row[name] for name in chosen] for row in means.values()])
    ranks = (-table).argsort(1).argsort(1) + 1
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


def hindsight(result: Result) -> float | None:
    """By how much the best trial on the test rows beats the one that was chosen."""
    trials = result.get("trials") or []
    return max(trial["test"] for trial in trials) - result["score"] if len(trials) > 1 else None


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
    """The paired difference of bitfit's default to another method, mean over draws and its spread."""
    lines = [
        f"| task | rows | draws | bitfit | {other} | difference | standard error |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, size), group in sorted(grouped(found, "task", "size").items()):
        sides = [{r["draw"]: r["score"] for r in group if r["method"] == name} for name in ("bitfit", other)]
        shared = sorted(set(sides[0]) & set(sides[1]))
        if not shared:
            continue
        ours, theirs = (np.array([side[draw] for draw in shared]) for side in sides)
        apart = 100 * (ours - theirs)
        error = apart.std(ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else float("nan")
        row = [f"{100 * ours.mean():.1f}", f"{100 * theirs.mean():.1f}", f"{apart.mean():+.1f}", f"{error:.1f}"]
        lines.append(f"| {task} | {size:,} | {len(shared)} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def scores(found: Sequence[Result], key: str = "score", scale: float = 100, form: str = "{:.1f}") -> str:
    """A row per task and size, a column per method."""
    present = [name for name in METHODS if any(r["method"] == name for r in found)]
    lines = ["| task | rows | " + " | ".join(present) + " |", "|---|---|" + "---|" * len(present)]
    for (task, size), group in sorted(grouped(found, "task", "size").items()):
        row = []
        for name in present:
            own = [r for r in group if r["method"] == name]
            cell = form.format(scale * np.mean([r[key] for r in own])) if own else ""
            if own and key == "score":
                half = 50 * np.mean([r["high"] - r["low"] for r in own])
                cell += f" ± {half:.1f}"
            row.append(cell)
        lines.append(f"| {task} | {size:,} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def probabilities(found: Sequence[Result]) -> str:
    """Log loss and expected calibration error by method, mean over the classification cells that all have."""
    own = [r for r in found if "log_loss" in r]
    lines = ["| | results | log loss | expected calibration error |", "|---|---|---|---|"]
    for (name,), group in grouped(own, "method").items():
        loss, error = (np.mean([r[key] for r in group]) for key in ("log_loss", "calibration_error"))
        lines.append(f"| {name} | {len(group)} | {loss:.3f} | {error:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
