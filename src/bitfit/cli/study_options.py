"""The options of the `study` commands: what `bitfit --help` must know of them, importing nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..study import SEARCHES

ENGINES = ("local", "ray")
NAME = "a study of `bitfit study list`, or your own .toml file"


def add_options(it: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = it.add_subparsers(metavar="ACTION", required=True, parser_class=type(it), dest="action")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.add_argument("--json", action="store_true", help="JSON on stdout, everything else on stderr")
        if name != "list":
            made.add_argument("name", metavar="NAME", help=NAME)
        return made

    action("list", "the studies, what they cover and what they would cost as the papers did them")
    action("show", "protocol, published numbers and claims of a study")
    _add_run(action("run", "run what is missing of a study; the same command goes on after a stop"))
    one = action("report", "write the HTML page and the Markdown of a study")
    one.add_argument("--out", type=Path, help="folder for report.html and report.md (RESULTS/NAME)")
    _add_results(one)


def _add_results(it: argparse.ArgumentParser) -> None:
    it.add_argument("--results", type=Path, default=Path("results"), help="folder of all results (%(default)s)")


def _add_run(it: argparse.ArgumentParser) -> None:
    it.add_argument("--engine", choices=ENGINES, default="local", help="local: in this process; ray: Ray tasks")
    it.add_argument("--address", help="of a Ray cluster; without it Ray runs on this machine only")
    it.add_argument("--workers", type=_whole, help="passes that Ray trains at once (one per core)")
    it.add_argument("--base", action="append", help="folder or hub id, several times for several (the paper's)")
    it.add_argument("--data", help="folder with TASK/train.jsonl and so on ($BITFIT_DATA)")
    it.add_argument("--tasks", type=_names, help="comma-separated (the study's)")
    it.add_argument("--method", action="append", dest="methods", help="only this method, several times for several")
    it.add_argument("--lr", type=_rates, help="paper, auto (what suits the base) or rates, comma-separated")
    it.add_argument("--batch", type=_wholes, help="batch sizes, comma-separated")
    for name, text in (
        ("seeds", "rounds of each cell"),
        ("epochs", "passes over the training rows"),
        ("train-size", "training rows at most"),
        ("dev-size", "rows of dev and test that are scored at most"),
        ("evals-per-epoch", "evaluations per epoch"),
        ("max-length", "tokens per text"),
        ("threads", "CPU threads; the same number gives the same bits"),
        ("lanes", "trials trained together at most"),
    ):
        it.add_argument(f"--{name}", type=_whole, help=text)
    it.add_argument("--search", choices=SEARCHES, help="try all rates on the first seed only, or on all seeds")
    it.add_argument("--dry-run", action="store_true", help="say what would run, how long and how much memory")
    _add_results(it)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _whole(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...] | str:
    return text if text in ("paper", "auto") else tuple(float(part) for part in text.split(","))
