"""How good `bitfit train FILE` is with nothing else said, against linear models and full fine-tuning.

    python benchmarks/quality.py run --data DIR [--tasks sst2,trec] [--sizes 32,100] [--methods "bitfit;linear"]
    python benchmarks/quality.py seeds --data DIR [--tasks sst2,trec] [--sizes 100] [--seeds 5] [--methods bitfit]
    python benchmarks/quality.py report

A cell is a task, a number of training rows and a draw of them; each method's result on it is one JSON file in
benchmarks/quality/, so that a run can be stopped at any time and goes on where it was. `report` writes
benchmarks/quality.md from the files there are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from quality_methods import METHODS, OLD_DEFAULT, TASKS, Cell, Method, applies, read, seeded
from quality_report import FEW, SEEDED, Result, report

HERE = Path(__file__).parent
RESULTS = HERE / "quality"
SIZES = (32, 100, 300, 1000, 5000)
DEFAULT_METHODS = [name for name in METHODS if name != OLD_DEFAULT]
DEFAULT_SEEDED = [name for name in SEEDED if name != OLD_DEFAULT]


def main() -> None:
    """Run cells or write the report."""
    args = _arguments()
    if args.command == "run":
        run(args)
    elif args.command == "seeds":
        run_seeds(args)
    else:
        target = HERE / "quality.md"
        target.write_text(report(list(results())), encoding="utf-8")
        print(f"wrote {target}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cells = commands.add_parser("run", help="compute the cells that are missing, small sizes first")
    cells.set_defaults(methods=DEFAULT_METHODS)
    cells.add_argument("--draws", type=int, help="draws of the training rows (3; 5 with 32 rows)")
    seeds = commands.add_parser("seeds", help="the default and the plain recipe at several seeds, on draw 0")
    seeds.set_defaults(methods=DEFAULT_SEEDED)
    seeds.add_argument("--seeds", type=int, default=5)
    data = os.environ.get("BITFIT_DATA")
    for command, tasks, sizes in ((cells, list(TASKS), list(SIZES)), (seeds, ["sst2", "trec"], [100])):
        command.add_argument("--data", type=Path, default=data, help="folder of the data ($BITFIT_DATA)")
        command.add_argument("--base", help="folder or hub id (the demo base)")
        command.add_argument("--methods", type=_methods, help="separated by semicolons")
        command.add_argument("--tasks", type=_names, default=tasks, help="comma-separated")
        command.add_argument("--sizes", type=_numbers, default=sizes, help="comma-separated")
        command.add_argument("--threads", type=int, default=1)
    commands.add_parser("report", help="write quality.md from the cells there are")
    return parser.parse_args()


def _methods(text: str) -> list[str]:
    """Methods by name; the name of one has a comma, so semicolons separate them."""
    names = [part.strip() for part in text.split(";") if part.strip()]
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f'no method "{name}": {"; ".join(METHODS)}')
    return names


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> None:
    """Compute what is missing of the asked cells."""
    base = _ready(args)
    for cell in cells(args.tasks, args.sizes, args.draws):
        if cell.size > training_rows(args.data, cell.task):
            continue
        for method in args.methods:
            if applies(method, cell.task):
                compute(cell, method, METHODS[method], args.data, base)


def run_seeds(args: argparse.Namespace) -> None:
    """Compute what is missing of the asked cells at several seeds."""
    base = _ready(args)
    for cell in cells(args.tasks, args.sizes, 1):
        for seed in range(1, args.seeds + 1):
            for method in args.methods:
                compute(cell, method, seeded(method, seed), args.data, base, seed=seed)


def _ready(args: argparse.Namespace) -> Any:
    """The base, once the options are checked."""
    import torch

    import bitfit

    if args.data is None:
        sys.exit("say where the data is: --data DIR or BITFIT_DATA")
    torch.set_num_threads(args.threads)
    return bitfit.load_base(args.base)


def compute(cell: Cell, method: str, measure: Method, data: str | Path, base: Any, **further: int) -> None:
    """Measure one method on one cell and keep the result, unless it is there."""
    words = [cell.task, str(cell.size), str(cell.draw), method.replace(", ", " ").replace(" ", "_")]
    words += [f"{name}{value}" for name, value in further.items()]
    path = RESULTS / f"{'-'.join(words)}.json"
    if path.exists() and _is_current(path):
        return
    with tempfile.TemporaryDirectory() as folder:
        cell.write(Path(data), Path(folder))
        result = measure(cell.source, Path(folder), base)
    _write(path, {"task": cell.task, "size": cell.size, "draw": cell.draw, "method": method, **further, **result})
    print(f"{' '.join(words)}: {result['score']:.4f} in {result['seconds']:.0f} s of CPU", flush=True)


def _is_current(path: Path) -> bool:
    """Whether a result is of this version of the recipe, or of a method that does not follow it."""
    from bitfit.training.recipe import VERSION

    return json.loads(path.read_text(encoding="utf-8")).get("recipe", VERSION) == VERSION


@lru_cache
def training_rows(data: str | Path, task: str) -> int:
    """How many training rows a task has."""
    return len(read(Path(data), TASKS[task])[0])


def cells(tasks: Sequence[str], sizes: Sequence[int], draws: int | None) -> Iterator[Cell]:
    """All cells, small sizes first; the tasks in the given order."""
    for size in sizes:
        for draw in range(draws or (5 if size <= FEW else 3)):
            for task in tasks:
                yield Cell(task, size, draw)


def _write(path: Path, result: Result) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def results() -> Iterator[Result]:
    """The results there are."""
    for path in sorted(RESULTS.glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
