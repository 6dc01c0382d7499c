"""Every command with its options. Importing this module must stay cheap: no torch, no numpy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from .. import __version__
from ..delta.meta import LONG
from ..model.anatomy import HEADS
from ..model.dtypes import DTYPES
from ..model.grafts import NONE
from ..serve.settings import Settings
from ..training import plan
from ..training.plan import Option, Plan
from . import values
from .parser import Parser
from .study_options import ENGINES
from .study_options import add_options as add_study

Group = Any  # a parser or a group of its options: argparse has no public name for both

# Groups of `bitfit train --help`; an option that is in none of them is about the optimisation.
TRAIN_GROUPS = {
    "data": (
        "task",
        "text",
        "text_pair",
        "label",
        "data",
        "separator",
        "encoding",
        "train_size",
        "data_seed",
        "protocol",
        "max_length",
        "long",
        "stride",
    ),
    "what trains": ("select", "inject", "head", "init", "pool"),
    "run": ("gap", "lanes", "threads", "device", "dtype"),
}
OPTIMISATION = "optimisation"
PART_FORMATS = ("parquet", "csv", "jsonl")  # of `predict` on many files
# Groups of `bitfit serve --help`; an option that is in none of them is about the operation.
SERVE_GROUPS = {
    "address": ("host", "port"),
    "computing": ("workers", "batch_tokens", "max_wait", "memory"),
    "limits": ("queue", "deadline", "max_items", "max_text", "max_body", "max_delta"),
}
OPERATION = "operation"
DEFAULTS = "Defaults are in parentheses."
OF_DELTA = "that of the delta's training"
EXPECTED: dict[Any, str] = {
    int: values.WHOLE,
    float: values.NUMBER,
    plan.numbers: "numbers, comma-separated",
    plan.wholes: "whole numbers, comma-separated",
}
METAVARS: dict[Any, str] = {int: "N", float: "X", plan.numbers: "X,...", plan.wholes: "N,..."}
FIELD_METAVARS = {"data": "DIR", "text": "COLUMN", "text_pair": "COLUMN", "label": "COLUMN"}


def parse(words: list[str]) -> argparse.Namespace:
    """Read the words of a command line; UsageError if they are wrong."""
    top = parser()
    top.check_options(words)
    args, more = top.parse_known_args(words)
    if args.command == "predict":
        more = _take_texts(args, words, more)
    if more:
        top.commands[args.command].error(f"not understood: {' '.join(more)}")
    return args


def _take_texts(args: argparse.Namespace, words: list[str], more: list[str]) -> list[str]:
    """Add texts that argparse did not take because they follow an option or "--"; returns unknown options."""
    after_dashes = words[words.index("--") + 1 :] if "--" in words else []
    left = [word for word in more if word != "--"]
    wrong = [word for word in left if word.startswith("-") and " " not in word and word not in after_dashes]
    args.texts += [word for word in left if word not in wrong]
    return wrong


def parser() -> Parser:
    """The parser of the command line."""
    top = Parser(prog="bitfit", description="Fine-tune a frozen transformer by changing almost nothing of it.")
    top.add_argument("--version", action="version", version=f"bitfit {__version__}")
    commands = top.add_commands("command", "COMMAND")
    for name, (text, add) in COMMANDS.items():
        add(commands.add_parser(name, help=text.replace("%", "%%"), description=text, epilog=DEFAULTS))
    return top


# ---- commands


def _demo(it: Parser) -> None:
    it.add_argument("--out", type=Path, default=Path("demo"), help="folder for the delta and the data (%(default)s)")


def _train(it: Parser) -> None:
    it.usage = "%(prog)s DATA [options]"
    it.add_argument(
        "source",
        metavar="DATA",
        help="CSV, TSV, JSONL, Parquet, CoNLL or SQuAD JSON file (.gz too), a folder of such files, or a named task",
    )
    groups = {title: it.add_argument_group(title) for title in ("data", "what trains", OPTIMISATION, "run")}
    _add_base(groups["what trains"])
    for title, field in _grouped(fields(Plan), TRAIN_GROUPS, OPTIMISATION):
        _add_plan_option(groups[title], field)
    run = groups["run"]
    run.add_argument("--out", type=Path, help="the delta file (the name of DATA with .safetensors, in this folder)")
    run.add_argument(
        "--suspects", type=Path, metavar="FILE", help="write rows whose labels look wrong to this CSV file"
    )
    run.add_argument("--resume", action="store_true", help="continue after an interruption")
    _add_engine(run, "local: in this process; ray: each worker computes its rows of every batch")
    _add_json(run)


def _grouped(
    all_fields: Iterable[Field[Any]], groups: Mapping[str, Sequence[str]], rest: str
) -> Iterator[tuple[str, Field[Any]]]:
    """Fields with the group of their option, in the order of the groups; those of no group belong to `rest`."""
    by_name = {field.name: field for field in all_fields}
    for title, names in groups.items():
        for name in names:
            yield title, by_name.pop(name)
    for field in by_name.values():
        yield rest, field


def _add_plan_option(it: Group, field: Field[Any]) -> None:
    """Add the option of a field of Plan."""
    flag = f"--{field.name.replace('_', '-')}"
    option = Option.of(field)
    text = option.help.replace("%", "%%")
    if option.read is bool:
        it.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    if field.default is not None:
        text += f" ({field.default})"
    if option.choices:
        read = values.one_of(option.choices)
        metavar = values.braces(option.choices)
    else:
        read = _reader(option.read)
        metavar = METAVARS.get(option.read) or FIELD_METAVARS.get(field.name, field.name.upper())
    it.add_argument(flag, type=read, metavar=metavar, default=argparse.SUPPRESS, help=text)


def _reader(read: Any) -> values.Reader:
    return values.expecting(EXPECTED[read], read) if read in EXPECTED else read


def _compare(it: Parser) -> None:
    it.usage = "%(prog)s DATA [options]"
    it.add_argument("source", metavar="DATA", help="what `bitfit train` takes: a file, a folder or a named task")
    what = it.add_argument_group("what is compared")
    _add_base(what)
    what.add_argument(
        "--methods",
        metavar="NAMES",
        help="methods, comma-separated: bitfit, b_m2+b_q, layernorm, lora, adapters, diff-pruning, autofreeze, head, "
        "full, or selections (all of the named ones)",
    )
    for name, text in (
        ("seeds", "number of seeds for each method (3)"),
        ("rates", "number of learning rates tried on the first seed (3, and up to 2 more if the best is at an end)"),
        ("epochs", "passes over the training rows (5; more for few rows)"),
        ("train-size", "maximum number of training rows (all)"),
        ("max-length", "maximum number of tokens per text (128; 384 with a question)"),
    ):
        what.add_argument(f"--{name}", type=values.positive, metavar="N", default=argparse.SUPPRESS, help=text)
    what.add_argument(
        "--budget", metavar="TIME", help="90s, 10m or 2h: reduce seeds, then rates, then rows, to stay within this time"
    )
    data = it.add_argument_group("data")
    data.add_argument("--task", help="a named task, or a kind (recognised)")
    for name in ("text", "text_pair", "label"):
        option = "--" + name.replace("_", "-")
        data.add_argument(option, metavar="COLUMN", help=f"{name.replace('_', ' ')} column (recognised)")
    _add_data(data)
    _add_encoding(data)
    data.add_argument("--separator", metavar="TEXT", help="text between several labels of a row (| or ;)")
    data.add_argument("--metric", help="metric that is compared and picks rates (accuracy; spearman for numbers)")
    data.add_argument("--positive", metavar="LABEL", help="the positive class of two, for f1 (the rarer)")
    run = it.add_argument_group("run")
    run.add_argument("--threads", type=values.positive, metavar="N", help="CPU threads")
    run.add_argument("--device", choices=plan.DEVICES, default="auto", help="where to compute (auto)")
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the page and all results (NAME-compare, in this folder)"
    )
    _add_json(run)


def _predict(it: Parser) -> None:
    it.usage = "%(prog)s DELTA TEXT ... [options] or %(prog)s DELTA --file FILE [options]"
    _add_delta(it)
    it.add_argument(
        "texts",
        metavar="TEXT",
        nargs="*",
        help="texts; for a delta on pairs, two per input (for questions: the question and its context)",
    )
    it.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write rows as .csv, .tsv, .jsonl or .parquet; - is standard output",
    )
    _add_force(it)
    _add_base(it, OF_DELTA)
    _add_dtype(it)
    _add_json(it)
    file = it.add_argument_group("texts from a file")
    file.add_argument(
        "--file",
        type=Path,
        help="a data file (-: standard input), a folder, or a pattern such as 'rows/*.parquet' (in quotes)",
    )
    _add_columns(file, "text", "text_pair")
    _add_encoding(file)
    _add_long(it)
    many = it.add_argument_group("rows of many files, written as several files to --out DIR")
    many.add_argument(
        "--task-column", metavar="COLUMN", help="column that names the task of each row; DELTA is a folder of deltas"
    )
    many.add_argument(
        "--format",
        type=values.one_of(PART_FORMATS),
        metavar=values.braces(PART_FORMATS),
        help="format of the files (that of the input)",
    )
    _add_engine(many, "local: in this process; ray: on a pool of Ray workers")
    glue = it.add_argument_group("files for the GLUE server")
    glue.add_argument("--glue", type=Path, metavar="DIR", help="write predictions of the task's test sets to DIR")
    glue.add_argument("--task", help="the named task (that of the delta's training)")
    _add_data(glue)


def _add_engine(it: Group, text: str) -> None:
    it.add_argument(
        "--engine", type=values.one_of(ENGINES), metavar=values.braces(ENGINES), default="local", help=f"{text} (local)"
    )
    it.add_argument("--address", help="address of a Ray cluster (Ray on this machine only)")
    it.add_argument("--workers", type=values.positive, metavar="N", help="workers of --engine ray (one per core)")


def _add_force(it: Group) -> None:
    it.add_argument("--force", action="store_true", help="replace a file that is not an earlier output")


def _add_encoding(it: Group) -> None:
    it.add_argument("--encoding", help="encoding of the file: utf-8, cp1252, utf-16, ... (recognised)")


def _add_long(it: Group) -> None:
    it.add_argument(
        "--long",
        type=values.one_of(LONG),
        metavar=values.braces(LONG),
        help="what is read of a text that is too long (as in training)",
    )


def _evaluate(it: Parser) -> None:
    it.usage = "%(prog)s DELTA DATA [options]"
    _add_delta(it)
    it.add_argument("source", metavar="DATA", help="a labelled file, a folder with a test file, or a named task")
    _add_base(it, OF_DELTA)
    _add_dtype(it)
    _add_json(it)
    it.add_argument("--positive", metavar="LABEL", help="the positive class of two, for f1 (that of training)")
    _add_long(it)
    it.add_argument("--errors", type=Path, metavar="FILE", help="write the rows that are answered wrongly")
    _add_force(it)
    data = it.add_argument_group("data")
    data.add_argument("--split", help="which file of a folder (test) or split of a named task (dev)")
    _add_data(data)
    _add_columns(data, "text", "text_pair", "label")
    _add_encoding(data)


def _count(it: Parser) -> None:
    it.add_argument("base", metavar="BASE", nargs="?", help="folder, hub id or config.json (the demo base)")
    it.add_argument("--base", dest="base_option", metavar="BASE", help="the same, as other commands take it")
    it.add_argument("--select", default="bias", help="what trains (%(default)s)")
    it.add_argument("--inject", default=NONE, help="added parameters: b_v, lora(W_q, 8), adapter(64) (%(default)s)")
    it.add_argument(
        "--head",
        default="full",
        type=values.one_of(HEADS),
        metavar=values.braces(HEADS),
        help="which parameters of the head train (%(default)s)",
    )
    it.add_argument("--names", action="store_true", help="list the terms with their parameter names")
    _add_json(it)


def _inspect(it: Parser) -> None:
    _add_delta(it)
    it.add_argument("--plot", type=Path, metavar="F.svg", help="write the change map as SVG")
    _add_json(it)


def _export(it: Parser) -> None:
    _add_delta(it)
    it.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    it.add_argument("--fold", action="store_true", help="merge biases into later ones where that changes no prediction")
    it.add_argument("--peft", action="store_true", help="write a LoRA or bias delta as a PEFT folder instead")
    _add_base(it, OF_DELTA)
    _add_dtype(it)


def _import(it: Parser) -> None:
    it.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="a PEFT folder with adapter_model.safetensors, or hf:owner/name on the hub",
    )
    it.add_argument("--out", type=Path, metavar="FILE", help="the delta file (the name of DIR with .safetensors)")
    _add_base(it, "the hub id in DIR")
    _add_json(it)
    unsaid = it.add_argument_group("what PEFT does not save")
    unsaid.add_argument(
        "--labels", type=values.names, metavar="A,B,...", help="names of the classes, in order (those of the base)"
    )
    unsaid.add_argument("--task", metavar="KIND", help="kind of task (that of the folder's task type)")
    unsaid.add_argument("--pairs", action="store_true", help="inputs are two texts")
    unsaid.add_argument(
        "--max-length", type=values.positive, metavar="N", help="maximum number of tokens per text (512)"
    )


def _push(it: Parser) -> None:
    _add_delta(it)
    it.add_argument("repository", metavar="OWNER/NAME", help="the repository; created if it does not exist")
    it.add_argument("--private", action="store_true", help="create a new repository as private")
    it.add_argument("--message", metavar="TEXT", help="message of the commit")
    _add_json(it)


def _serve(it: Parser) -> None:
    it.usage = "%(prog)s DIR [options]"
    it.add_argument(
        "folder", metavar="DIR", type=Path, help="folder of deltas; NAME.safetensors is served as task NAME"
    )
    _add_base(it, "that of the first delta in DIR")
    _add_dtype(it)
    groups = {title: it.add_argument_group(title) for title in (*SERVE_GROUPS, OPERATION)}
    for title, field in _grouped(fields(Settings), SERVE_GROUPS, OPERATION):
        kind = type(field.default)
        groups[title].add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_reader(kind),
            metavar=METAVARS.get(kind, field.name.upper()),
            default=field.default,
            help=f"{field.metadata['help']} (%(default)s)",
        )


def _bench_serve(it: Parser) -> None:
    it.add_argument("url", metavar="URL", help="address of the service (token: BITFIT_TOKEN)")
    it.add_argument(
        "--clients",
        type=values.integer,
        metavar="N",
        default=64,
        help="connections, one request at a time (%(default)s)",
    )
    it.add_argument("--texts", type=values.integer, metavar="N", default=1, help="texts per request (%(default)s)")
    it.add_argument("--seconds", type=values.number, metavar="X", default=10.0, help="duration (%(default)s)")
    it.add_argument(
        "--rate",
        type=values.number,
        metavar="X",
        help="requests per second of all clients together (as many as possible)",
    )
    it.add_argument("--file", type=Path, help="a data file with a text column (a few built-in sentences)")
    _add_columns(it, "text")
    _add_json(it)


def _tasks(it: Parser) -> None:
    _add_data(it)
    _add_json(it)


def _doctor(it: Parser) -> None:
    _add_json(it)


COMMANDS: dict[str, tuple[str, Any]] = {
    "demo": ("train MiniLM on movie reviews with three methods, compare them and use the result", _demo),
    "train": ("train a delta on a labelled file; several rates, batch sizes or seeds make several trials", _train),
    "compare": ("train several methods on a labelled file and compare their scores and costs", _compare),
    "predict": ("answer texts, or every row of a file", _predict),
    "evaluate": ("score a delta on a labelled file: every metric with its 95% interval", _evaluate),
    "count": ("count the parameters of a base, and those that a selection trains, by term", _count),
    "inspect": ("show what a delta is and which terms it changed most", _inspect),
    "export": ("write a plain transformers folder with the delta merged in, and a model card", _export),
    "import": ("read a LoRA or BEFT folder of PEFT as a delta", _import),
    "push": ("upload a delta and a model card to the Hugging Face hub (token: HF_TOKEN)", _push),
    "study": ("repeat tables and figures of the papers: list, show, run, report", add_study),
    "serve": ("serve a folder of deltas over HTTP (tokens: BITFIT_TOKEN, BITFIT_CHANGE_TOKEN or ..._FILE)", _serve),
    "bench-serve": ("put load on a service; show its throughput and latency", _bench_serve),
    "tasks": ("list the named tasks and the location of their data", _tasks),
    "doctor": ("show installed versions, the default base, and which data is available", _doctor),
}


# ---- options of several commands


def _add_base(it: Group, default: str = "all-MiniLM-L6-v2, from the demo extra") -> None:
    it.add_argument("--base", help=f"folder or hub id of the frozen base ({default})")


def _add_dtype(it: Group) -> None:
    it.add_argument(
        "--dtype",
        type=values.one_of(DTYPES),
        metavar=values.braces(DTYPES),
        help="data type in which the base is stored (that of training)",
    )


def _add_data(it: Group) -> None:
    it.add_argument("--data", metavar="DIR", help="folder with the data of named tasks ($BITFIT_DATA)")


def _add_delta(it: Group) -> None:
    it.add_argument("delta", metavar="DELTA", type=Path, help="a delta file, or hf:owner/name[@revision] on the hub")


def _add_columns(it: Group, *names: str) -> None:
    for name in names:
        option = "--" + name.replace("_", "-")
        it.add_argument(option, metavar="COLUMN", help=f"{name.replace('_', ' ')} column (that of training)")


def _add_json(it: Group) -> None:
    it.add_argument("--json", action="store_true", help="print JSON to stdout and everything else to stderr")
