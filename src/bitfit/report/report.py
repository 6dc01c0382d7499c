"""A study's report: one HTML page and one Markdown file, made from the results that are there. No torch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import files
from ..study.spec import Figure, Method, Study
from ..study.store import Results
from .figures import figures
from .findings import Findings
from .html import Cell, Grid, Html, join, page, plain, tag
from .tables import audit, costs, counted_wins, gaps, tables
from .verdicts import FAILS, HOLDS, Verdict, judge

METHOD_NOTE = (
    "Differences are paired over seed x task blocks: the same seed and data under both methods. p is corrected by Holm "
    "over all comparisons of the study. Equality is shown by an equivalence test with the margin given, because no "
    "significant difference is not equality. A claim does not hold where the data speak against it: that one is "
    "better, where the interval reaches to 0 and lies below what matters (a point, unless the claim says otherwise); "
    "that two are equal, where it excludes 0 and the mean exceeds the margin; that something is small, where it lies "
    "above the margin. Blocks of one task are not independent of that task, so a verdict speaks for these tasks and "
    "bases only."
)

KEY = (
    "Error bars and bands are 95% intervals of the mean over seeds; a diamond is the published value, a dashed line "
    "the majority class (or 0). Axes do not start at 0. Thin curves are single rounds, the bold one is their median."
)

CURVES = (
    Figure("Loss of every round", "loss", "Training and dev loss at the chosen rate."),
    Figure("Dev score of every round", "score", "At the chosen rate."),
)


def write(study: Study, results: Results, folder: Path | None = None) -> tuple[Path, Path]:
    """Write the page and the Markdown of a study; where they are."""
    place = folder or results.folder / study.name
    bases = [Findings.of(study, manifest, results) for manifest in _told_apart(results.manifests(study.name))]
    verdicts = judge(study, bases)
    html, markdown = place / "report.html", place / "report.md"
    files.replace(html, as_html(study, bases, verdicts).encode())
    files.replace(markdown, as_markdown(study, bases, verdicts).encode())
    return html, markdown


def _told_apart(manifests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bases of one name, with a part of their fingerprint."""
    names = Counter(manifest["base"]["name"] for manifest in manifests)
    return [
        manifest
        if names[(base := manifest["base"])["name"]] == 1
        else {**manifest, "base": {**base, "name": f"{base['name']} ({base['fingerprint'][:6]})"}}
        for manifest in manifests
    ]


def as_html(study: Study, bases: Sequence[Findings], verdicts: Sequence[Verdict]) -> str:
    """The page."""
    body = [
        *_head(study, bases),
        *([tag("h2", "Verdicts"), *map(_card, verdicts), tag("p", METHOD_NOTE, class_="small")] if verdicts else []),
        *_section("Tables", [grid.html() for grid in tables(study, bases)] + _wins(study, bases)),
        *_section("Figures", _drawn(study, bases)),
        *_section("Generalisation, cost, parameters", [
            part(findings).html() for findings in bases if findings.done for part in (gaps, costs, audit)
        ]),
        *_section("Protocol", _protocol(study, bases)),
        *_section("How to reproduce", _reproduce(study, bases)),
    ]  # fmt: skip
    return page(f"{study.name}: {study.title}", body)


def _section(name: str, parts: Sequence[Html]) -> list[Html]:
    return [tag("h2", name), *parts] if parts else []


def _drawn(study: Study, bases: Sequence[Findings]) -> list[Html]:
    drawn = [_figure(figure.name, figure.caption, drawing) for figure, drawing in figures(study, bases)]
    return [tag("p", KEY, class_="small"), *drawn, *_curves(study, bases)] if drawn else _curves(study, bases)


def _curves(study: Study, bases: Sequence[Findings]) -> list[Html]:
    """Loss and dev score of every round, folded, where the study has no such figure of its own."""
    own = {figure.kind for figure in study.figures}
    more = tuple(figure for figure in CURVES if figure.kind not in own)
    drawn = figures(replace(study, figures=more), [findings for findings in bases if findings.done])
    return [
        tag("details", tag("summary", figure.name), tag("p", figure.caption, class_="small"), drawing)
        for figure, drawing in drawn
        if bases
    ]


def _figure(name: str, caption: str, drawing: Html) -> Html:
    return tag("section", tag("h3", name), tag("p", caption, class_="small") if caption else "", drawing)


def _head(study: Study, bases: Sequence[Findings]) -> list[Html]:
    badges = [tag("span", text, class_="badge") for text in (f"paper: {study.paper}", *study.covers)]
    parts = [tag("h1", study.title), tag("p", study.about, class_="lead") if study.about else Html(""), join(badges)]
    if not bases:
        command = tag("code", f"bitfit study run {study.name}")
        parts.append(tag("p", "Nothing has been run yet. The tables below hold the published numbers only; ", command,
                         " fills them.", class_="empty"))  # fmt: skip
    return [*parts, *(tag("p", state(findings)) for findings in bases)]


def state(findings: Findings) -> str:
    """How far a study is on a base, in a sentence."""
    found = [result for result in findings.trials.values() if result is not None]
    done, wanted = len(found), len(findings.trials)
    lost = sum(result.status == "diverged" for result in found)
    seeds = len({point.seed for point in findings.results})
    said = (
        f"{findings.base}: {done} of {wanted} trials are done, up to {seeds} seed{'s' if seeds != 1 else ''} per cell"
    )
    return said + (f", {lost} diverged" if lost else "") + ("." if done == wanted else "; the rest is missing below.")


def _card(verdict: Verdict) -> Html:
    kind = {HOLDS: "holds", FAILS: "fails"}.get(verdict.verdict, "open")
    head = tag(
        "p",
        tag("b", verdict.claim.id),
        " ",
        verdict.claim.text,
        " ",
        tag("span", verdict.verdict, class_=f"verdict {kind}"),
    )
    several = len(verdict.comparisons) > 1
    lines = [
        tag("li", part.says, ": ", tag("b", part.shown), _told_p(part.p), f"; {part.verdict}" if several else "",
            tag("small", f"{part.test}; {part.places}"))
        for part in verdict.comparisons
    ]  # fmt: skip
    return tag("section", head, tag("ul", *lines), class_="claim")


def _told_p(value: float | None) -> str:
    return ", too few blocks for a test" if value is None else f", p {_p(value)}"


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"= {value:.3f}"


def verdict_grid(verdicts: Sequence[Verdict]) -> Grid:
    """Every claim with its comparisons and what follows."""
    rows: list[list[Cell | str]] = []
    for verdict in verdicts:
        for n, part in enumerate(verdict.comparisons):
            p = _p(part.p).removeprefix("= ")
            rows.append([
                verdict.claim.id if n == 0 else "", verdict.claim.text if n == 0 else "", part.says,
                verdict.verdict if n == 0 else "", part.shown, p, f"{part.test}; {part.places}",
            ])  # fmt: skip
    head = ["", "claim", "comparison", "verdict", "mean difference (95% interval)", "p", "test, bases, tasks"]
    return Grid("Claims", head, rows)


def _wins(study: Study, bases: Sequence[Findings]) -> list[Html]:
    said = [counted_wins(findings, table) for table in study.tables for findings in bases]
    return [tag("p", text) for text in said if text]


def _protocol(study: Study, bases: Sequence[Findings]) -> list[Html]:
    parts = [
        Grid("The paper's protocol", ["", ""], [[name, Cell(text, "", "text")] for name, text in facts(study)]).html()
    ]
    for findings in bases:
        skipped = findings.manifest["skipped"]
        parts.append(tag("h3", f"What differs from it on {findings.base}"))
        listed = [*findings.differences, *(f"{name} was left out: {why}" for name, why in skipped.items())]
        parts.append(_list(listed) if listed else tag("p", "Nothing."))
    for title, texts in (
        ("The text leaves open", study.protocol.not_stated),
        ("Numbers of the papers that contradict each other", study.contradictions),
    ):
        if texts:
            parts += [tag("h3", title), _list(texts)]
    return parts


def _list(texts: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", text) for text in texts))


def facts(study: Study) -> list[tuple[str, str]]:
    """The protocol as names and texts."""
    protocol = study.protocol
    splits = {
        "dev": "train and dev as published",
        "holdout": "0.8/0.2 of train as train and dev, the published dev as test",
        "test": "scored on test",
    }
    rounds = ", ".join(f"{task} {count}" for task, count in protocol.rounds_by_task.items())
    return [
        ("model", f"{protocol.model} (cased: {protocol.cased})"),
        ("optimiser", f"{protocol.optimiser}, {protocol.schedule} rate, weight decay {protocol.weight_decay:g}"),
        ("batch sizes", ", ".join(map(str, protocol.batch))),
        ("epochs", f"{protocol.epochs}, {protocol.evals_per_epoch} evaluations each; the best checkpoint counts"),
        ("rounds", f"{protocol.rounds}" + (f" ({rounds})" if rounds else "")),
        ("split", splits[protocol.split]),
        ("maximum length", str(protocol.max_length)),
        *((method.name, _settings(method)) for method in study.methods),
    ]  # fmt: skip


def _settings(method: Method) -> str:
    rates = ", ".join(f"{rate:g}" for rate in method.rates)
    return f"{method.select}; head {method.head}; init {method.init}; dropout {method.dropout}; rates {rates}"


def _reproduce(study: Study, bases: Sequence[Findings]) -> list[Html]:
    parts = []
    for findings in bases:
        manifest = findings.manifest
        seeds = sorted({point.seed for point in findings.results})
        versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
        base = manifest["base"]
        parts += [
            *(tag("p", tag("code", shlex.join(run["command"]))) for run in manifest["runs"]),
            tag("p", f"Data read: {_digests(manifest)}.", class_="small"),
            tag("p", f"{base['name']} ({base['fingerprint']}, {base['layers']} layers, {base['width']} wide, "
                     f"{base['parameters']:,} parameters); {versions}; {manifest['threads']} threads; seeds "
                     f"{', '.join(map(str, seeds))}.", class_="small"),
        ]  # fmt: skip
    return parts or [tag("p", tag("code", f"bitfit study run {study.name}"))]


def _digests(manifest: Mapping[str, Any]) -> str:
    found = {task: frame.get("data", "") for run in manifest["runs"] for task, frame in run["frames"].items()}
    return ", ".join(f"{task} {digest}".rstrip() for task, digest in found.items()) or "none"


def as_markdown(study: Study, bases: Sequence[Findings], verdicts: Sequence[Verdict]) -> str:
    """The same tables in Markdown."""
    parts = [f"# {plain(study.title)}\n", plain(study.about) + "\n" if study.about else ""]
    parts += [plain(state(findings)) + "\n" for findings in bases] or ["Nothing has been run yet.\n"]
    parts += [verdict_grid(verdicts).markdown()] if verdicts else []
    parts += [grid.markdown() for grid in tables(study, bases)]
    parts += [part(findings).markdown() for findings in bases if findings.done for part in (gaps, costs, audit)]
    for findings in bases:
        parts.append(f"### What differs from the protocol on {plain(findings.base)}\n")
        parts.append("".join(f"- {plain(text)}\n" for text in findings.differences) or "Nothing.\n")
        commands = [shlex.join(run["command"]) for run in findings.manifest["runs"]]
        parts += [f"Reproduce: `{command.replace('`', '')}`\n" for command in commands]
    return "\n".join(part for part in parts if part)
