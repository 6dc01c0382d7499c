"""The options of the `study` commands: what `bitfit --help` must know of them, importing nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..study import SEARCHES
from . import values
from .parser import Parser

ENGINES = ("local", "ray")
FORMATS = ("png", "pdf")
NAME = "a study of `bitfit study list`, or a .toml file"


def add_options(it: Parser) -> None:
    """The actions and their options."""
    actions = it.add_commands("action", "ACTION")

    def action(name: str, text: str) -> Parser:
        made: Parser = actions.add_parser(name, help=text, description=text)
        made.add_argument("--json", action="store_true", help="print JSON to stdout and everything else to stderr")
        if name != "list":
            made.add_argument("name", metavar="NAME", nargs="?" if name == "report" else None, help=NAME)
        return made

    action("list", "list the studies, what they cover, and their cost with the papers' settings")
    action("show", "show protocol, published numbers and claims of a study")
    _add_run(action("run", "train the missing trials of a study; after an interruption, run the same command again"))
    one = action("report", "write the HTML page and the Markdown of a study, or of all of them with a summary")
    one.add_argument(
        "--all", action="store_true", help="every study that was run, and a summary (RESULTS/summary.html)"
    )
    one.add_argument("--figures", type=values.one_of(FORMATS), help="also save the figures for a paper: png or pdf")
    one.add_argument("--out", type=Path, help="folder for report.html and report.md (RESULTS/NAME)")
    _add_results(one)


def _add_results(it: Any) -> None:
    it.add_argument("--results", type=Path, default=Path("results"), help="folder of all results (%(default)s)")


def _add_run(it: Parser) -> None:
    it.usage = "%(prog)s NAME [options]"
    what = it.add_argument_group("what runs")
    what.add_argument("--base", action="append", help="folder or hub id; repeat it for several (the paper's)")
    what.add_argument("--data", metavar="DIR", help="folder with TASK/train.jsonl and so on ($BITFIT_DATA)")
    what.add_argument("--tasks", type=values.names, metavar="NAMES", help="comma-separated (the study's)")
    what.add_argument(
        "--methods", "--method", metavar="NAMES", action="append", help="comma-separated or repeated (the study's)"
    )
    _add_protocol(it.add_argument_group("protocol (the study's, unless changed here)"))
    run = it.add_argument_group("run")
    run.add_argument(
        "--engine",
        type=values.one_of(ENGINES),
        metavar=values.braces(ENGINES),
        default="local",
        help="local: in this process; ray: as Ray tasks",
    )
    run.add_argument("--address", help="address of a Ray cluster (Ray on this machine only)")
    run.add_argument(
        "--workers", type=values.positive, metavar="N", help="passes that Ray trains at once (one per core)"
    )
    run.add_argument(
        "--storage",
        metavar="PATH",
        help="folder or URL (s3://...) by which base, data, checkpoints and results travel; any machine can go on",
    )
    run.add_argument("--lanes", type=values.positive, metavar="N", help="maximum number of trials trained together")
    run.add_argument(
        "--threads",
        type=values.positive,
        metavar="N",
        help="CPU threads; results are bit-identical for the same number",
    )
    run.add_argument("--dry-run", action="store_true", help="show what would run, its duration and its memory")
    _add_results(run)


def _add_protocol(it: Any) -> None:
    it.add_argument(
        "--lr", type=values.rates, metavar="X,...", help="paper, auto (chosen for the base), or rates, comma-separated"
    )
    it.add_argument("--batch", type=values.positives, metavar="N,...", help="batch sizes, comma-separated")
    it.add_argument(
        "--search",
        type=values.one_of(SEARCHES),
        metavar=values.braces(SEARCHES),
        help="try all rates on the first seed only, or on all seeds",
    )
    for name, text in (
        ("seeds", "number of seeds per cell"),
        ("epochs", "passes over the training rows"),
        ("train-size", "maximum number of training rows"),
        ("dev-size", "maximum number of rows of dev and of test that are scored"),
        ("evals-per-epoch", "evaluations per epoch"),
        ("max-length", "maximum number of tokens per text"),
    ):
        it.add_argument(f"--{name}", type=values.positive, metavar="N", help=text)
