"""A study's report: one HTML page and one Markdown file, made from the stored results. No torch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from .. import files
from ..model.grafts import injects
from ..study import forecast
from ..study.manifest import Manifest
from ..study.spec import Figure, Method, Study
from ..study.store import Results
from . import drawing
from . import figures as figures_of
from .findings import Findings
from .page import Grid, markup, plain, render
from .published import published
from .statistics import Place
from .tables import audit, by_rate, costs, counted_wins, gaps, published_tables, tables
from .verdicts import GENERAL_BASES, GENERAL_PLACES, GENERAL_TASKS, OPEN, Comparison, Verdict, judge

MOST_LEFT_OUT = 3  # places that a table names one by one
PLACE_NOTE = "A place is one task on one base."
METHOD = (
    PLACE_NOTE,
    "The effect on a place is the mean difference over seeds, with the same seed and data under both methods. Its "
    "interval comes from the seeds and from a paired bootstrap over the test rows.",
    "The effect over places is a random-effects mean. Its interval is the wider of two: Hartung and Knapp's, and one "
    "that adds the variance between tasks and between bases, because places of one task or one base are not "
    "independent.",
    "A claim holds, is refuted, or makes no difference that matters, each by a one-sided test; otherwise it is open. "
    "'As good as' means worse by less than the margin.",
    "Levels are corrected over the claims of the study (Holm). The interval shown is the one at the corrected level.",
    f"A general verdict needs at least {GENERAL_PLACES} places from {GENERAL_TASKS} tasks and {GENERAL_BASES} bases; "
    "an outlined verdict speaks for its places only. A claim about one base is tested on that base.",
    "A place counts if the methods, averaged, beat the majority class beyond their interval. A comparison leaves out a "
    "place where neither of its two methods does. A gap, a curve or a change map counts only if its method does.",
    "Rates and checkpoints are chosen on dev and judged on test rows that no choice has seen. A cell whose best rate "
    "is the smallest or largest tried is left out.",
)
WHERE = "Commands run with $BITFIT_DATA set to the folder of the data and $BITFIT_MODELS to the folder of the bases."
CURVES = (
    Figure("Loss of every seed", "loss", "Training and dev loss."),
    Figure("Dev score of every seed", "score", ""),
)
CSS = {
    "holds": "holds",
    "refuted": "refuted",
    "no difference that matters": "small-difference",
    "open": "open",
}


@dataclass(frozen=True)
class Drawing:
    """A panel as a page needs it."""

    title: str
    words: str
    svg: Any


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with its panels."""

    name: str
    caption: str
    key: str
    drawings: list[Drawing]
    remark: str = ""  # what it shows instead, where its tasks were not run


def read(study: Study, results: Results) -> list[Findings]:
    """The findings of a study, base by base, the smallest first."""
    manifests = sorted(results.manifests(study.name), key=lambda manifest: manifest.base.parameters)
    return [Findings.of(study, manifest, results) for manifest in _distinct(manifests)]


def write(study: Study, results: Results, folder: Path | None = None, figures: str | None = None) -> tuple[Path, Path]:
    """Write the page and the Markdown of a study and return their paths; `figures` (png or pdf) saves figures too."""
    figures_of.check(study)
    target = folder or results.folder / study.name
    bases = read(study, results)
    verdicts = judge(study, bases, published(study))
    html, markdown = target / "report.html", target / "report.md"
    files.replace(html, as_html(study, bases, verdicts).encode())
    files.replace(markdown, as_markdown(study, bases, verdicts).encode())
    if figures is not None:
        for n, figure in enumerate(study.figures):
            if figures_of.equal_figure(figure, study.figures[:n], bases) is None:
                for panel in figures_of.panels(figure, study, bases):
                    drawing.save(panel, target / "figures", figure.name, figures)
    return html, markdown


def _distinct(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The manifests; if several bases have the same name, a part of the fingerprint is added to it."""
    names = Counter(manifest.base.name for manifest in manifests)
    distinct = []
    for manifest in manifests:
        base = manifest.base
        if names[base.name] > 1:
            base = replace(base, name=f"{base.name} ({base.fingerprint[:6]})")
        distinct.append(replace(manifest, base=base))
    return distinct


# ---- the page


@dataclass(frozen=True)
class Section:
    """An additional section of a page: tables and drawings under a heading."""

    heading: str
    text: str
    grids: Sequence[Grid] = ()
    panels: Sequence[drawing.Panel] = ()

    @property
    def drawings(self) -> list[Drawing]:
        """The panels as a page needs them."""
        return [_drawing(panel) for panel in self.panels]


def as_html(
    study: Study, bases: Sequence[Findings], verdicts: Sequence[Verdict], sections: Sequence[Section] = ()
) -> str:
    """The page of a study."""
    ran = [findings for findings in bases if findings.done]
    wins = [counted_wins(findings, table) for table, findings in product(study.tables, ran)]
    return render(
        "study.html",
        title=f"{study.name}: {study.title}",
        study=study,
        covers=[text.removeprefix(f"{study.paper} ") for text in study.covers],
        states=[state(findings) for findings in bases],
        cost=cost_in_words(study),
        verdicts=[card(verdict) for verdict in verdicts],
        conditions=all_conditions(ran),
        place_note=PLACE_NOTE,
        method=METHOD,
        tables=tables(study, ran),
        published_tables=published_tables(study, ran),
        wins=[text for text in wins if text],
        figures=_figures(study, ran),
        markers=_markers(ran),
        sections=sections,
        curves=_curves(study, ran),
        details=_details(study, ran),
        protocol=protocol_grid(study),
        differences=_all_differences(bases),
        remarks=_remarks(study),
        where=WHERE,
        reproduce=_reproduce(study, bases),
    )


def _details(study: Study, bases: Sequence[Findings]) -> list[Grid]:
    """Tables of scores at every rate, generalisation gaps, costs and trained parameters, base by base."""
    grids = []
    for findings in bases:
        grids += [*by_rate(study, findings), gaps(findings), costs(findings), audit(findings)]
    return grids


def _figures(study: Study, bases: Sequence[Findings]) -> list[DrawnFigure]:
    """The figures of a study, each drawn once: several of the paper's show the same where their tasks were not run."""
    made = []
    for n, figure in enumerate(study.figures):
        earlier = figures_of.equal_figure(figure, study.figures[:n], bases)
        if earlier is None:
            made.append(drawn(figure, study, bases))
        else:
            remark = f"{_not_run(figure, bases)} The panels are those of {earlier.name}.".strip()
            made.append(DrawnFigure(figure.name, figure.caption, "", [], remark))
    return made


def drawn(figure: Figure, study: Study, bases: Sequence[Findings]) -> DrawnFigure:
    """A figure drawn for a page."""
    panels = figures_of.panels(figure, study, bases)
    drawings = [_drawing(panel) for panel in panels]
    not_run = _not_run(figure, bases)
    remark = f"{not_run} The panels show what was." if not_run else ""
    return DrawnFigure(figure.name, figure.caption, figures_of.KINDS[figure.kind].key, drawings, remark)


def _not_run(figure: Figure, bases: Sequence[Findings]) -> str:
    """A sentence on the bases where a figure shows other tasks than those it is about; empty if there are none."""
    others = figures_of.without_its_tasks(figure, bases)
    if not others:
        return ""
    names = ", ".join(findings.base for findings in others)
    return f"{', '.join(figure.tasks)} was not run on {names}."


def _drawing(panel: drawing.Panel) -> Drawing:
    return Drawing(panel.title, panel.words, markup(drawing.svg(panel.figure)))


def _curves(study: Study, bases: Sequence[Findings]) -> list[DrawnFigure]:
    """Loss and dev score of every seed, unless the study has such a figure."""
    kinds = {figure.kind for figure in study.figures}
    made = [drawn(figure, study, bases) for figure in CURVES if figure.kind not in kinds]
    return [figure for figure in made if figure.drawings]


def _markers(bases: Sequence[Findings]) -> list[str]:
    """Which mark stands for which base, where there are several."""
    if len(bases) < 2:
        return []
    names = ("circle", "square", "diamond", "triangle up", "triangle down", "plus", "cross", "star")
    return [f"{names[n % len(names)]}: {findings.base}" for n, findings in enumerate(bases)]


def state(findings: Findings) -> str:
    """A sentence on the progress of a study on a base."""
    trials = findings.trials
    done = [result for result in trials.values() if result is not None]
    diverged = sum(result.status == "diverged" for result in done)
    seeds = len({point.seed for point in findings.results})
    text = f"{findings.base}: {len(done)} of {len(trials)} trials are done, up to {_count(seeds, 'seed')} per cell"
    if diverged:
        text += f", {diverged} diverged"
    return text + ("." if len(done) == len(trials) else "; the rest is missing below.")


def all_conditions(bases: Sequence[Findings]) -> str:
    """The conditions of verdicts: rows, epochs and seeds of each task, and where the bases come from."""
    sentences = [settings_of(bases)] if bases else []
    sentences += [findings.history for findings in bases if findings.history]
    return " ".join(sentences)


def settings_of(bases: Sequence[Findings]) -> str:
    """Rows, epochs and seeds of each task; bases with equal settings stand together."""
    by_conditions: dict[str, list[str]] = {}
    for findings in bases:
        base = f"{findings.base} ({findings.parameters / 1e6:.1f}M parameters)"
        by_conditions.setdefault(_conditions(findings), []).append(base)
    return " ".join(f"{', '.join(names)} on {text}." for text, names in by_conditions.items())


def _conditions(findings: Findings) -> str:
    by_setting: dict[str, list[str]] = {}
    for task in findings.trained_tasks:
        by_setting.setdefault(_setting(findings, task), []).append(task)
    return "; ".join(f"{', '.join(tasks)}: {setting}" for setting, tasks in by_setting.items())


def _setting(findings: Findings, task: str) -> str:
    sizes = [findings.rows(task, size) for size in findings.sizes(task)]
    rows = f"{sizes[0]:,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"
    epochs = {frame.epochs for frame in findings.manifest.frames(task) if frame.epochs is not None}
    points = [point for point in findings.results if point.task == task]
    seeds = len({point.seed for point in points})
    words = [f"{rows} training rows"]
    if epochs:
        plural = "" if epochs == {1} else "s"
        words.append(f"{'/'.join(map(str, sorted(epochs)))} epoch{plural}")
    words.append(_count(seeds, "seed"))
    return ", ".join(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- verdicts in words


def card(verdict: Verdict) -> dict[str, Any]:
    """A verdict as the template shows it."""
    claim = verdict.claim
    return {
        "text": claim.text,
        "source": f"{claim.paper or 'this study'}, {claim.where}".removesuffix(", "),
        "outcome": verdict.outcome,
        "shown": outcome_in_words(verdict),
        "general": verdict.general,
        "css": CSS[verdict.outcome],
        "scope": scope_in_words(verdict),
        "parts": [_part(verdict, n) for n in range(len(verdict.comparisons))],
        "needs": verdict.needs,
    }


def _part(verdict: Verdict, n: int) -> dict[str, Any]:
    """A comparison of a verdict as the template shows it."""
    one = verdict.comparisons[n]
    return {
        "says": one.says,
        "shown": effect_in_words(one),
        "outcome": one.outcome if len(verdict.comparisons) > 1 else "",
        "details": details_in_words(one),
        "left_out": one.left_out,
        "published": _published_words(verdict, n),
    }


def outcome_in_words(verdict: Verdict) -> str:
    """The outcome, with its scope where it is not general."""
    if verdict.outcome == OPEN or verdict.general:
        return verdict.outcome
    return f"{verdict.outcome}, on these places"


def scope_in_words(verdict: Verdict) -> str:
    """The places a verdict is made on."""
    places = [place for one in verdict.comparisons if one.estimate for place in one.estimate.places]
    if not places:
        return ""
    return f"Judged on {places_in_words(places)}."


def places_in_words(places: Sequence[Place]) -> str:
    """Bases with their tasks."""
    by_base: dict[str, dict[str, None]] = {}
    for one in places:
        by_base.setdefault(one.base, {}).update(dict.fromkeys(one.all_tasks))
    return "; ".join(f"{base}: {', '.join(tasks)}" for base, tasks in by_base.items())


def effect_in_words(one: Comparison) -> str:
    """The mean effect with its interval."""
    if one.estimate is None:
        return "no place counts yet"
    unit = one.test.unit(one.part)
    interval = one.estimate.interval(one.level)
    reach = f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else ""
    return f"{one.estimate.mean:+.2f}{reach} {unit}, {_count(len(one.estimate.places), 'place')}"


def details_in_words(one: Comparison) -> str:
    """The level of the interval, what could have been seen, and the effect on each base."""
    details = []
    ps = one.ps
    estimate = one.estimate
    if estimate is not None and ps is not None:
        details.append(f"{100 * (1 - 2 * one.level):.3g}% interval")
        details.append(f"p {_p(ps.holds)} for it, {_p(ps.refuted)} against it")
        detectable = estimate.detectable(one.levels.holds)
        if detectable is not None:
            details.append(f"could have seen {detectable:.1f} {one.test.unit(one.part)}")
    elif estimate is not None or one.quantity.missing:
        details.append(f"no test: {one.why_open}")
    if len(one.by_base) > 1:
        details.append(", ".join(f"{base} {each.mean:+.2f}" for base, each in one.by_base.items()))
    return "; ".join(details)


def _left_out_in_words(one: Comparison) -> str:
    """The first places that a comparison leaves out, each with the reason."""
    shown = [f"left out: {text}" for text in one.left_out[:MOST_LEFT_OUT]]
    if len(one.left_out) > MOST_LEFT_OUT:
        shown.append(f"left out: {len(one.left_out) - MOST_LEFT_OUT:,} more")
    return "; ".join(shown)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def _published_words(verdict: Verdict, n: int) -> str:
    one = verdict.published[n] if n < len(verdict.published) else None
    if one is None or one.estimate is None:
        return ""
    why = f" ({one.why_open})" if one.why_open else ""
    return f"{effect_in_words(one)}; {one.outcome}{why}"


def verdict_grid(verdicts: Sequence[Verdict]) -> Grid:
    """Every claim with its comparisons and what follows, as a table."""
    rows = []
    for verdict in verdicts:
        source = f"{verdict.claim.paper}, {verdict.claim.where}".removesuffix(", ")
        claim = [verdict.claim.text, source, outcome_in_words(verdict)]
        if not verdict.comparisons:
            rows.append([*claim, verdict.claim.untested, "", "", ""])
        for n, one in enumerate(verdict.comparisons):
            first = claim if n == 0 else ["", "", ""]
            published = _published_words(verdict, n)
            needs = f"to decide it: {verdict.needs}" if n == 0 and verdict.needs else ""
            details = "; ".join(filter(None, (details_in_words(one), _left_out_in_words(one), needs)))
            rows.append([*first, one.says, effect_in_words(one), details, published])
    head = ["claim", "claimed by", "verdict", "comparison", "effect", "details", "the paper's own numbers"]
    return Grid("Claims", head, rows, texts=range(len(head)))


# ---- protocol


def protocol_grid(study: Study) -> Grid:
    """The protocol as a table; what the paper does not state is marked as our choice."""
    rows = [[name, text] for name, text in facts(study)]
    name = "The paper's protocol" if study.of_a_paper else "Protocol of this study"
    return Grid(name, ["setting", "value"], rows, texts=(0, 1))


def facts(study: Study) -> list[tuple[str, str]]:
    """The protocol as names and texts."""
    protocol = study.protocol
    splits = {
        "dev": "train and dev as published",
        "holdout": "0.8/0.2 of train as train and dev, the published dev as test",
        "test": "scored on test",
    }
    rounds = ", ".join(f"{task} {count}" for task, count in protocol.rounds_by_task.items())
    settings = (
        ("model", "model", f"{protocol.model} (cased: {protocol.cased})"),
        ("optimiser", "optimiser", protocol.optimiser),
        ("schedule", "schedule", f"{protocol.schedule} rate"),
        ("weight_decay", "weight decay", f"{protocol.weight_decay:g}"),
        ("clip", "gradient clipping", f"{protocol.clip:g}" if protocol.clip else "none"),
        ("batch", "batch sizes", ", ".join(map(str, protocol.batch))),
        ("epochs", "epochs", f"{protocol.epochs}"),
        ("evals_per_epoch", "evaluations per epoch", f"{protocol.evals_per_epoch}; the best checkpoint counts"),
        ("rounds", "seeds", f"{protocol.rounds}" + (f" ({rounds})" if rounds else "")),
        ("split", "split", splits[protocol.split]),
        ("max_length", "maximum length", f"{protocol.max_length}"),
    )
    rows = []
    for key, name, text in settings:
        remark = " (our choice: the paper does not say)" if key in protocol.unstated else ""
        rows.append((name, text + remark))
    for method in study.methods:
        rows.append((method.name, _settings(method)))
    return rows


def _settings(method: Method) -> str:
    """The settings of a method that are not the defaults, in words."""
    rates = _rates(method.rates)
    if method.rates_by_task:
        by_task = ", ".join(f"{task} {_rates(rates)}" for task, rates in method.rates_by_task.items())
        rates = f"{by_task}; elsewhere {rates}"
    words = [method.select, f"rates {rates}"]
    if method.head != "full":
        words.append(f"head {method.head}")
    if injects(method.inject):
        words.append(f"with {method.inject}")
    if method.epochs_times > 1:
        words.append(f"{method.epochs_times} times the epochs")
    if method.init != "keep":
        words.append(f"starts from {method.init}")
    if method.dropout != "on":
        words.append(f"dropout {method.dropout}")
    if method.autofreeze:
        words.append("settled layers are frozen")
    if method.note:
        words.append(method.note)
    return "; ".join(words)


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _differences(findings: Findings) -> list[str]:
    skipped = [f"{name} was left out: {why}" for name, why in findings.manifest.skipped.items()]
    return [*findings.differences, *skipped]


def _all_differences(bases: Sequence[Findings]) -> list[str]:
    """What differs from the protocol; what is not so on all bases names those it is about."""
    names: dict[str, list[str]] = {}
    for findings in bases:
        for text in _differences(findings):
            names.setdefault(text, []).append(findings.base)
    sentences = []
    for text, some in names.items():
        sentences.append(text if len(some) == len(bases) else f"{', '.join(some)}: {text}")
    return sentences


def _remarks(study: Study) -> list[tuple[str, Sequence[str]]]:
    named = (
        ("The text leaves open", study.protocol.not_stated),
        ("Numbers and statements of the papers that contradict each other", study.contradictions),
        ("Notes", study.notes),
    )
    return [(heading, texts) for heading, texts in named if texts]


def cost_in_words(study: Study) -> str:
    """What a study costs in a small form on one core, and as the paper did it."""
    small, published = forecast.small_cost(study), forecast.published_cost(study)
    settings = forecast.small_settings(study)
    words = (
        f"small ({settings.train_size} training rows, {settings.epochs} epochs, {settings.seeds} seeds on "
        f"{forecast.SMALL_BASE}) "
        f"about {_hours(small.operations / forecast.CORE)} of one core"
    )
    if not study.of_a_paper:
        return words
    gpu = _hours(published.operations / forecast.GPU)
    return f"{words}; as the paper did it {published.trials:,} trials, about {gpu} of a GPU with 10 TFLOP/s"


def _hours(seconds: float) -> str:
    return f"{hours(seconds)} hours"


def hours(seconds: float) -> str:
    """A duration in hours, as a number."""
    count = seconds / 3600
    return f"{count:,.0f}" if count >= 10 else f"{max(count, 0.1):.1f}"


def _reproduce(study: Study, bases: Sequence[Findings]) -> list[dict[str, Any]]:
    runs = []
    for findings in bases:
        manifest = findings.manifest
        base = manifest.base
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        seeds = ", ".join(map(str, sorted({point.seed for point in findings.results})))
        facts_of_base = (
            f"{base.name} ({base.fingerprint}, {base.layers} layers, {base.width} wide, "
            f"{base.parameters:,} parameters); {versions}; {_count(manifest.threads, 'thread')}; seeds {seeds}. "
            f"Data read: {_digests(manifest)}."
        )
        runs.append({"commands": [shlex.join(run.command) for run in manifest.runs], "facts": facts_of_base})
    return runs or [{"commands": _commands_to_start(study), "facts": ""}]


def _commands_to_start(study: Study) -> list[str]:
    """Commands for a study that was not run: small, and as the paper did it."""
    commands = [shlex.join(forecast.small_command(study))]
    return [*commands, f"bitfit study run {study.name}"] if study.of_a_paper else commands


def _digests(manifest: Manifest) -> str:
    digests = {}
    for run in manifest.runs:
        for task, frame in run.frames.items():
            digests[task] = frame.data
    return ", ".join(f"{task} {digest}".rstrip() for task, digest in digests.items()) or "none"


# ---- Markdown


def as_markdown(study: Study, bases: Sequence[Findings], verdicts: Sequence[Verdict]) -> str:
    """The same tables in Markdown."""
    ran = [findings for findings in bases if findings.done]
    parts = [f"# {plain(study.title)}\n", plain(study.about) + "\n" if study.about else ""]
    parts += [plain(state(findings)) + "\n" for findings in bases]
    if not bases:
        parts.append(f"Nothing has been run yet. Cost: {cost_in_words(study)}.\n")
    parts += [plain(all_conditions(ran)) + "\n"] if ran else []
    parts += [verdict_grid(verdicts).markdown(), PLACE_NOTE + "\n"] if verdicts else []
    parts += [table.markdown() for table in tables(study, ran)]
    parts += [grid.markdown() for grid in _details(study, ran)]
    parts.append(protocol_grid(study).markdown())
    for heading, texts in _remarks(study):
        parts.append(f"### {heading}\n")
        parts.append("".join(f"- {plain(text)}\n" for text in texts))
    if bases:
        parts.append("### What differs from the protocol\n")
        parts.append("".join(f"- {plain(text)}\n" for text in _all_differences(bases)) or "Nothing.\n")
    parts += [f"### How to reproduce\n\n{plain(WHERE)}\n"] if bases else []
    for findings in bases:
        commands = [shlex.join(run.command) for run in findings.manifest.runs]
        parts += [f"```\n{command.replace('```', '')}\n```\n" for command in commands]
    return "\n".join(part for part in parts if part)
