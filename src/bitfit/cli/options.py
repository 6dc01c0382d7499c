"""The command line's words: every command with its options, importing nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..errors import UsageError
from ..model.anatomy import HEADS
from ..serve.settings import Settings
from ..training.plan import Plan
from .study_options import add_options as add_study


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are UsageErrors like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(prog="bitfit", description="Fine-tune a frozen transformer by changing almost nothing of it.")
    top.add_argument("--version", action="version", version=f"bitfit {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(command=name)
        return made

    it = command("demo", "real MiniLM weights on real movie reviews: train, compare, use")
    it.add_argument("--out", type=Path, default=Path("demo"), help="folder for the delta and the data (%(default)s)")

    it = command("train", "train a delta on a labelled file; several rates, batch sizes or seeds are trials")
    it.add_argument(
        "source",
        metavar="DATA",
        help="CSV, TSV, JSONL, Parquet, CoNLL-U or SQuAD JSON file (.gz too), a folder of such, or a named task",
    )
    _add_base(it)
    _add_plan(it)
    it.add_argument("--out", type=Path, help="the delta file (DATA's name.safetensors, in this folder)")
    it.add_argument("--resume", action="store_true", help="go on after an interruption")
    _add_json(it)

    it = command("predict", "answer texts, or all rows of a file as a stream")
    _add_delta(it)
    it.add_argument(
        "texts",
        metavar="TEXT",
        nargs="*",
        help="texts; for a delta of pairs two each, for answers question and context",
    )
    it.add_argument("--file", type=Path, help="a data file: the columns of training, or found anew")
    it.add_argument("--out", type=Path, help="write a CSV instead of printing")
    it.add_argument("--glue", type=Path, metavar="DIR", help="write the GLUE server's files of the task's test sets")
    it.add_argument("--task", help="with --glue: the named task, where the delta does not know it")
    _add_data(it)
    _add_columns(it, "text", "text_pair")
    _add_base(it)
    _add_json(it)

    it = command("evaluate", "score a delta on a labelled file: every metric with its 95%% interval")
    _add_delta(it)
    it.add_argument("source", metavar="DATA", help="a labelled file, a folder with a test file, or a named task")
    it.add_argument("--split", help="which file of a folder (test) or split of a named task (dev)")
    _add_data(it)
    _add_columns(it, "text", "text_pair", "label")
    _add_base(it)
    _add_json(it)

    it = command("count", "count parameters by term, with encoder, embedding, pooler and head apart")
    it.add_argument("base", metavar="BASE", nargs="?", help="folder, hub id or config.json (the demo base)")
    it.add_argument("--select", default="bias", help="what trains (%(default)s)")
    it.add_argument("--inject", default="none", help="biases added to layers that have none (%(default)s)")
    it.add_argument("--head", default="full", choices=HEADS, help="what of the head trains (%(default)s)")
    it.add_argument("--names", action="store_true", help="the papers' notation and the parameter names")
    _add_json(it)

    it = command("inspect", "say what a delta is and what changed most (the papers' change map)")
    _add_delta(it)
    it.add_argument("--plot", type=Path, metavar="F.svg", help="write the change map as SVG")
    _add_json(it)

    it = command("export", "write a plain transformers folder with a model card, the delta merged in")
    _add_delta(it)
    it.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    it.add_argument("--fold", action="store_true", help="drop the biases that others can stand for; same predictions")
    _add_base(it)

    it = command("study", "the papers' tables and figures as studies: list, show, run, report")
    add_study(it)

    it = command("serve", "serve a folder of deltas over HTTP (tokens: BITFIT_TOKEN, BITFIT_CHANGE_TOKEN or ..._FILE)")
    _add_serve(it)

    it = command("bench-serve", "put load on a service and show its throughput and a histogram of its latency")
    _add_load(it)

    it = command("tasks", "list the named tasks and where their data was found")
    _add_data(it)
    _add_json(it)

    _add_json(command("doctor", "say what is installed and which bases and data are found"))
    return top


def parse(words: list[str]) -> argparse.Namespace:
    """The command line's words, read; texts may also stand behind an option, which argparse alone refuses."""
    top = parser()
    args, more = top.parse_known_args(words)
    if more and hasattr(args, "texts") and not any(word.startswith("-") for word in more):
        args.texts += more
    elif more:
        top.error(f"unrecognized arguments: {' '.join(more)}")
    return args


def _add_base(it: argparse.ArgumentParser) -> None:
    it.add_argument("--base", help="folder or hub id of the frozen base (the demo wheel's all-MiniLM-L6-v2)")


def _add_data(it: argparse.ArgumentParser) -> None:
    it.add_argument("--data", metavar="DIR", help="folder of the named tasks' data ($BITFIT_DATA)")


def _add_delta(it: argparse.ArgumentParser) -> None:
    it.add_argument("delta", metavar="DELTA", type=Path, help="a delta file")


def _add_columns(it: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        option = "--" + name.replace("_", "-")
        it.add_argument(option, metavar="COLUMN", help=f"{name.replace('_', ' ')} column (that of training)")


def _add_json(it: argparse.ArgumentParser) -> None:
    it.add_argument("--json", action="store_true", help="JSON on stdout, everything else on stderr")


def _add_plan(it: argparse.ArgumentParser) -> None:
    for entry in fields(Plan):
        given, choices = entry.metadata, entry.metadata["choices"]
        text = given["help"].replace("%", "%%") + ("" if entry.default is None else f" ({entry.default})")
        option = f"--{entry.name.replace('_', '-')}"
        if given["read"] is bool:
            it.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=given["help"])
            continue
        it.add_argument(
            option,
            type=given["read"],
            default=argparse.SUPPRESS,
            choices=choices or None,
            metavar=None if choices else entry.name.upper(),
            help=text,
        )


def _add_serve(it: argparse.ArgumentParser) -> None:
    it.add_argument("folder", metavar="DIR", type=Path, help="the folder; NAME.safetensors is the task NAME")
    _add_base(it)
    for entry in fields(Settings):
        text = f"{entry.metadata['help']} (%(default)s)"
        it.add_argument(f"--{entry.name.replace('_', '-')}", type=type(entry.default), default=entry.default, help=text)


def _add_load(it: argparse.ArgumentParser) -> None:
    it.add_argument("url", metavar="URL", help="where it listens (token: BITFIT_TOKEN)")
    it.add_argument(
        "--clients", type=int, default=64, help="connections that ask, each one thing at a time (%(default)s)"
    )
    it.add_argument("--texts", type=int, default=1, help="texts of a request (%(default)s)")
    it.add_argument("--seconds", type=float, default=10.0, help="how long (%(default)s)")
    it.add_argument("--rate", type=float, help="requests a second over all clients (as fast as answers come)")
    it.add_argument("--file", type=Path, help="a data file with a text column (a few made-up sentences)")
    _add_columns(it, "text")
    _add_json(it)
