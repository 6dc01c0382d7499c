"""Parts of pages that are made from the code, so that they cannot disagree with it. Each function returns Markdown."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAPERS = ("bitfit", "bitfit-plus", "what-to-freeze", "bert-tiny-imdb")


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _code(text: str) -> str:
    return f"`{text}`"


# ---- the command line


def command_line() -> str:
    """Every command with its options, from the parsers."""
    from bitfit.cli.options import parser

    return "\n\n".join(_commands(parser()))


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for command in getattr(parser, "commands", {}).values():
        description = command.description or ""
        yield f"## {command.prog}\n\n{description[:1].upper()}{description[1:].replace('%%', '%')}."
        if getattr(command, "commands", None):
            yield from _commands(command)
            continue
        usage = command.format_usage().removeprefix("usage: ")
        yield f"```text\n{' '.join(usage.split())}\n```"
        yield from _options(command)


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    for group in command._action_groups:
        lines = [(_option(action), _help(action)) for action in group._group_actions if action.dest != "help"]
        if not lines:
            continue
        plain = group.title in ("positional arguments", "options")
        title = {"positional arguments": "argument", "options": "option"}.get(group.title or "", "option")
        yield (
            _table([title, "meaning"], lines) if plain else f"**{group.title}**\n\n{_table([title, 'meaning'], lines)}"
        )


def _option(action: argparse.Action) -> str:
    if not action.option_strings:
        return _code(str(action.metavar or action.dest))
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return _code(", ".join(action.option_strings) + value)


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default, "prog": "bitfit"}


def plan_fields() -> str:
    """The fields of Plan: type, default and meaning."""
    from dataclasses import fields

    from bitfit.training.plan import Option, Plan

    lines = []
    for entry in fields(Plan):
        option = Option.of(entry)
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        lines.append((_code(entry.name), _code(str(entry.type)), _code(repr(entry.default)), option.help + choices))
    return _table(["field", "type", "default", "meaning"], lines)


# ---- errors


def exit_codes() -> str:
    """The exceptions with their exit codes."""
    from bitfit import errors

    def below(kind: type, depth: int) -> Iterator[tuple[str, str, str]]:
        first = (kind.__doc__ or "").strip().splitlines()[0]
        indent = "&nbsp;&nbsp;&nbsp;&nbsp;" * depth
        yield f"{indent}{_code(kind.__name__)}", str(kind.exit_code), first  # type: ignore[attr-defined]
        for member in kind.__subclasses__():
            yield from below(member, depth + 1)

    return _table(["class", "exit code", "meaning"], below(errors.BitfitError, 0))


# ---- models

SHOWN = ("bert", "distilbert", "mpnet", "gpt2", "llama", "modernbert")
TERMS = {
    "q": "W_q, b_q",
    "k": "W_k, b_k",
    "v": "W_v, b_v",
    "m1": "W_m1, b_m1",
    "LN1": "g_LN1, b_LN1",
    "m2": "W_m2, b_m2",
    "m3": "W_m3, b_m3",
    "LN2": "g_LN2, b_LN2",
}


def term_names() -> str:
    """The terms beside the modules of some architectures."""
    from bitfit.model.architectures import ARCHITECTURES

    def modules(name: str, place: str) -> str:
        inside = ARCHITECTURES[name].inside
        return "<br>".join(_code(module) for module, places in inside.items() if place in places.split())

    lines = [(terms, *(modules(name, place) for name in SHOWN)) for place, terms in TERMS.items()]
    return _table(["terms", *SHOWN], [(f"{_code(line[0])}", *line[1:]) for line in lines])


def architectures() -> str:
    """What is known of each architecture."""
    from bitfit.model.architectures import ARCHITECTURES

    def paths(name: str) -> str:
        row = ARCHITECTURES[name]
        if row.packed is not None:
            return "packed: no padding"
        return "stock, short texts share rows" if row.row_sharing is not None else "stock, padded"

    def folding(name: str) -> str:
        return "yes" if ARCHITECTURES[name].no_fold is None else f"no: {ARCHITECTURES[name].no_fold}"

    lines = [(_code(name), paths(name), folding(name)) for name in sorted(ARCHITECTURES)]
    return _table(["`model_type`", "forward pass", "biases fold (`export --fold`, serving)"], lines)


# ---- the delta file


def delta_metadata() -> str:
    """The keys of a delta's metadata, with the comments of the code."""
    text = (ROOT / "src/bitfit/delta/meta.py").read_text("utf-8")
    return "\n\n".join(_fields(text, name, title) for name, title in (("Meta", "key"), ("Trial", "key of `trial`")))


def _fields(text: str, name: str, title: str) -> str:
    body = re.search(rf"^class {name}.*?(?=^class|^def|^    def)", text, re.M | re.S)
    assert body is not None
    found = re.findall(r"^    (\w+): (.+?)(?: = (.+?))?(?:  # (.+))?$", body[0], re.M)
    return _table(
        [title, "type", "if absent", "meaning"],
        [(_code(k), _code(t), _code(d) if d else "", m) for k, t, d, m in found],
    )


# ---- the service


def http_routes() -> str:
    """The routes of the service with what they take and return."""
    from bitfit.serve.app import Handlers

    lines = []
    for operation in Handlers(None).operations():  # type: ignore[arg-type]
        takes = operation.request.__name__ if operation.request else "a delta file" if operation.takes_file else ""
        if operation.query is not None:
            takes = "; ".join(_parameter(name, field) for name, field in operation.query.model_fields.items())
        response = operation.response.__name__ if operation.response else "text"
        about = " ".join((operation.handler.__doc__ or "").split())
        lines.append((_code(f"{operation.method} {operation.path}"), about, takes, response))
    return _table(["route", "what it does", "takes", "returns"], lines)


def _parameter(name: str, field: Any) -> str:
    """A query parameter: its name, what it means and its default."""
    meaning = f"{field.description}, " if field.description else ""
    return f"{_code(name)} ({meaning}default {field.default!r})"


def http_schemas() -> str:
    """The fields of the requests and responses."""
    from bitfit.serve.app import Handlers
    from bitfit.serve.openapi import document

    parts = []
    for name, schema in document(Handlers(None).operations())["components"]["schemas"].items():  # type: ignore[arg-type]
        lines = []
        for field, rule in schema.get("properties", {}).items():
            needed = "yes" if field in schema.get("required", ()) else ""
            lines.append((_code(field), _type(rule), needed, rule.get("description", "")))
        about = " ".join(schema.get("description", "").split())
        parts.append(f"### {name}\n\n{about}\n\n{_table(['field', 'type', 'required', 'meaning'], lines)}")
    return "\n\n".join(parts)


def _type(rule: dict[str, object]) -> str:
    if "$ref" in rule:
        return str(rule["$ref"]).rpartition("/")[2]
    if "anyOf" in rule:
        return " or ".join(_type(each) for each in rule["anyOf"] if each.get("type") != "null")  # type: ignore[attr-defined]
    if rule.get("type") == "array":
        return f"list of {_type(rule.get('items', {}))}"  # type: ignore[arg-type]
    return str(rule.get("type", "any"))


def http_errors() -> str:
    """The status codes of errors."""
    from bitfit.serve.openapi import ERRORS

    return _table(["status", "meaning"], [(str(status), text) for status, text in ERRORS.items()])


# ---- measurements


def cost_against_full() -> str:
    """BitFit and full fine-tuning."""
    step = "BERT-base shape, rte batch 8, BitFit step against stock full fine-tuning: "
    return _measured(
        {
            "time of a step on a BERT-base shape, as a share of that of full fine-tuning": f"{step}time",
            "memory beside the weights, as a share": f"{step}activations + gradients + optimiser state",
            "the same in MB: BitFit / full fine-tuning": f"{step}those in MB",
            "loading and applying a delta": "BERT-base shape, delta: load and apply",
            "a delta file of BERT-base": "BERT-base shape, delta: file",
        }
    )


def cost_against_peft() -> str:
    """BitFit and LoRA here, and PEFT."""
    epoch = "BitFit epoch: faster than PEFT LoRA r8"
    return _measured(
        {
            "epoch of BitFit, SST-2, batch 8: faster than PEFT's LoRA of rank 8": f"MiniLM, sst2 batch 8, {epoch}",
            "the same, RTE, batch 16": f"MiniLM, rte batch 16, {epoch}",
            "step of our LoRA of rank 8: faster than PEFT's": "MiniLM, sst2 batch 8, LoRA r8 step: faster than PEFT's",
            "32 tasks of our LoRA in one batch, against one task": (
                "MiniLM (mean), sst2, 32 rows: batch of 32 tasks of LoRA r8 against a single task"
            ),
            "32 adapters of PEFT in one batch, against one; against our 32 BitFit tasks": (
                "PEFT LoRA r8 mixed, 32 adapters: against its single batch; against our 32"
            ),
        }
    )


def cost_of_mixing() -> str:
    """Many tasks in one batch, many trials in one pass."""
    return _measured(
        {
            "batch of 32 texts of 32 tasks, against 32 texts of one task": (
                "MiniLM (mean), sst2, 32 rows: batch of 32 tasks against a single task"
            ),
            "the same, with 1,024 tasks in memory": (
                "MiniLM (mean), sst2, 32 rows: batch of 32 of 1,024 tasks against a single task"
            ),
            "one more task in memory": "MiniLM (mean), sst2, 1,024 tasks from deltas to a bank: per task",
            "four rates in one pass: faster than four runs of transformers": (
                "MiniLM, sst2 batch 8, 4 rates in one pass: faster than 4 stock runs"
            ),
            "the same: faster than four runs of bitfit": (
                "MiniLM, sst2 batch 8, 4 rates in one pass: faster than 4 own runs one after the other"
            ),
        }
    )


def quality_cells() -> str:
    """The default recipe and logistic regression, cell by cell."""
    return _section("benchmarks/quality.md", "Against the linear model, cell by cell")


def quality_scores() -> str:
    """All scores of the quality benchmark."""
    return _section("benchmarks/quality.md", "Scores")


def quality_seconds() -> str:
    """What the cells of the quality benchmark took."""
    return _section("benchmarks/quality.md", "Seconds of CPU")


def _measured(figures: dict[str, str]) -> str:
    """Some figures of the benchmark page, in other words."""
    text = (ROOT / "benchmarks/results.md").read_text("utf-8")
    values = dict(re.findall(r"^\| (.+?) \| (.+?) \|", text, re.M))
    return _table(["", "measured"], [(shown, values[figure]) for shown, figure in figures.items()])


def _section(path: str, title: str) -> str:
    """What stands below a heading of a page, up to the next one."""
    text = (ROOT / path).read_text("utf-8")
    found = re.search(rf"^## {re.escape(title)}\n+(.+?)(?=\n^## |\Z)", text, re.M | re.S)
    assert found is not None, f"{path} has no section {title}"
    return found[1].strip()


# ---- the papers


def claims() -> str:
    """The claims by paper, and the studies that test each."""
    from bitfit.study import spec

    studies = [spec.load(name) for name in spec.names()]
    found = spec.known_claims()
    parts = []
    for paper in dict.fromkeys(claim.paper for claim in found.values()):
        lines = []
        for name, claim in found.items():
            if claim.paper == paper:
                tested = [_code(study.name) for study in studies if name in {each.id for each in study.claims}]
                lines.append((claim.text, claim.where, ", ".join(tested)))
        parts.append(f"### {paper}\n\n{_table(['claim', 'where it is made', 'tested by'], lines)}")
    return "\n\n".join(parts)


def verdict_counts() -> str:
    """How many claims have which verdict, from the summary over all studies."""
    text = (ROOT / "results/summary.md").read_text("utf-8")
    verdicts = re.findall(
        r"^\| [^|]+ \((?:bitfit|what-to-freeze|bert-tiny-imdb|ours)[^|]*\| ([a-z, ]+?)(?: \([^|]*)? \|", text, re.M
    )
    assert verdicts, "results/summary.md has no claims"
    counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
    return _table(["verdict here", "claims"], [(verdict, str(count)) for verdict, count in counts.items()])


def main_comparison() -> str:
    """The methods against full fine-tuning over all places, as a table and two figures, from the summary."""
    text = (ROOT / "results/summary.md").read_text("utf-8")
    found = re.search(r"^### Main comparison\n+(.+?)(?=\n^##)", text, re.M | re.S)
    assert found is not None, "results/summary.md has no main comparison"
    return found[1].strip().replace("](figures/", "](../results/figures/")


def contradictions() -> str:
    """What in a paper's text disagrees with itself, with another paper or with counted numbers."""
    return _by_paper("contradictions")


def paper_notes() -> str:
    """What to know of how the papers' numbers were made."""
    return _by_paper("notes")


def _by_paper(what: str) -> str:
    from bitfit.study import spec

    parts = []
    for paper in PAPERS:
        lines: dict[str, None] = {}
        for name in spec.names():
            study = spec.load(name)
            if study.paper == paper:
                lines.update(dict.fromkeys(getattr(study, what)))
        if lines:
            parts.append(f"**{paper}**\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def studies() -> str:
    """All studies with what they cover."""
    from bitfit.study import spec

    found = [spec.load(name) for name in spec.names()]
    return _table(
        ["study", "what it asks", "covers"],
        [(_code(study.name), study.title, ", ".join(study.covers)) for study in found],
    )


def grammar() -> str:
    """The words of the selection language that the code knows."""
    from bitfit.model.anatomy import TERMS as KNOWN
    from bitfit.model.grafts import GRAFTS
    from bitfit.model.strategies import STRATEGIES

    def summary(member: object) -> str:
        return textwrap.dedent(member.__doc__ or "").strip().splitlines()[0]

    strategies = [(_code(f"{name}(SELECTION, AMOUNT)"), summary(STRATEGIES[name])) for name in STRATEGIES]
    grafts = [(_code(name), summary(GRAFTS[name]), " ".join(map(_code, GRAFTS[name].terms))) for name in GRAFTS]
    return "\n\n".join(
        [
            "**Terms**: " + " ".join(map(_code, KNOWN)),
            _table(["strategy", "what it takes"], strategies),
            _table(["graft", "what it adds", "its terms"], grafts),
        ]
    )
