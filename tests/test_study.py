"""Studies: files that say what the papers say, grids that are pure, runs that do each trial exactly once."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from bitfit.errors import DataError, StudyError, UsageError
from bitfit.report.findings import Findings
from bitfit.report.quantities import late_fall
from bitfit.study import grid, spec
from bitfit.study.grid import Point, Settings
from bitfit.study.manifest import BaseFacts, Entry, Frame, Manifest, RunFacts
from bitfit.study.store import Result, Results, dev_losses, standings
from support import make_folder, write_tasks

STUDIES = {name: spec.load(name) for name in spec.names()}

# Every table and figure of the four papers that a study must cover.
COVERED = [
    *(f"bitfit Table {n}" for n in (1, 2, 3, 5, 6)),
    *(f"bitfit Figure {n}" for n in range(1, 7)),
    *("bitfit tagging", "bitfit generalisation gap", "bitfit stability"),
    *(f"what-to-freeze Table {n}" for n in ("I", "II", "III")),
    *(f"what-to-freeze Figure {n}" for n in (1, 2, 3, 4, 5, 6, 7, 9, 10)),
    *("what-to-freeze wish: InitBias on all GLUE tasks", "what-to-freeze wish: re-initialise some layers"),
    *("what-to-freeze wish: re-initialise some terms", "what-to-freeze dropout mistake"),
    *(f"bitfit-plus Figure {n}" for n in range(3, 16)),
    *("bitfit-plus change against score", "bitfit-plus open question: every pair of bias terms"),
    "bitfit-plus open question: every single bias term",
    *(f"bert-tiny-imdb Table {n}" for n in (1, 2, 3)),
    "bert-tiny-imdb gap against model size",
]


# ---- what the files say


def test_every_table_and_figure_of_the_papers_is_covered_once():
    covers = [what for study in STUDIES.values() for what in study.covers]
    assert not set(COVERED) - set(covers)
    assert len(covers) == len(set(covers))


def test_a_study_is_named_as_its_file_and_its_figures_are_those_it_covers():
    for name, study in STUDIES.items():
        assert study.name == name
        shown = {item.name for item in (*study.tables, *study.figures)}
        wanted = {what.split(" ", 1)[1] for what in study.covers if what.split(" ")[1] in ("Table", "Figure")}
        assert {what for what in wanted if not any(name.startswith(what) for name in shown)} == set(), name


def test_every_claim_says_whose_it_is_and_is_decided_by_a_study_or_says_why_not():
    decided = {claim.id for study in STUDIES.values() for claim in study.claims if claim.parts or claim.untested}
    known = spec.known_claims()
    assert decided == set(known)
    assert all(claim.text and claim.paper and claim.where for claim in known.values())


@pytest.mark.parametrize(
    ("study", "table", "label", "column", "value", "deviation"),
    [
        ("bitfit-table1", "Table 1", "(V) Diff-Prune, Guo et al.", "cola", 58, None),
        ("bitfit-table1", "Table 1", "(T) BitFit", "qqp", 70.5, None),
        ("bitfit-table2", "Table 2", "Ro BitFit", "rte", 81.5, None),
        ("bitfit-table3", "Table 3", "rand 100k", "mnli-mm", 78.6, None),
        ("bitfit-rates", "Table 6", "BERT-large", "qnli", 7e-4, None),
        ("bitfit-tagging", "PTB tagging", "Ro BitFit", "ptb-pos", 97.1, None),
        ("freeze-table1", "Table I", "InitBias+BitFit 1e-3", "cola", 48.8, 14.0),
        ("freeze-table1", "Table I", "LayerNorm 5e-4", "qnli", 88.0, 0.3),
        ("freeze-low-data", "Table II", "BitFit 1e-3", "100", 11.9, 6.9),
        ("freeze-low-data", "Table III", "LayerNorm 1e-3", "200", 55.0, 5.1),
        ("plus-figure7", "Figure 7", "randbias", "average", 71.8, None),
        ("plus-figure7", "Figure 3", "Rand row/col", "mrpc", 88.6, None),
        ("tiny-imdb", "Table 3", "With BitFit", "trained", 3074, None),
    ],
)
def test_published_numbers_are_the_papers(study, table, label, column, value, deviation):
    found = next(t for t in STUDIES[study].tables if t.name == table)
    row = next(r for r in found.rows if r.label == label)
    number = row.numbers[found.columns.index(column)]
    assert (number.value, number.deviation) == (value, deviation)


def test_cells_the_text_does_not_give_are_empty():
    figure = next(t for t in STUDIES["plus-figure7"].tables if t.name == "Figure 7")
    assert next(r for r in figure.rows if r.label == "g_LN1").numbers[:3] == (None, None, None)
    curves = STUDIES["bitfit-squad"].tables[0]
    assert all(value is None for row in curves.rows for value in row.numbers)


def test_published_averages_are_those_of_their_rows():
    table = next(t for t in STUDIES["plus-figure7"].tables if t.name == "Figure 7")
    for row in table.rows:
        *tasks, average = row.numbers
        if all(tasks):
            assert average.value == pytest.approx(sum(n.value for n in tasks) / 3, abs=0.06), row.label


MINIMAL = """
name = "mine"
title = "t"
paper = "own"
covers = []
tasks = ["rte"]
[protocol]
model = "m"
bases = ["b"]
[[methods]]
name = "BitFit"
select = "bias"
rates = [1e-3]
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('select = "bias"', 'select = "bais"'), 'mine.toml: methods[0]: select = \'bais\':'),
        (('rates = [1e-3]', 'rates = "1e-3"'), "mine.toml: methods[0].rates: must be a list, not a text"),
        (('rates = [1e-3]', 'rates = [1e-3]\nrats = 1'), 'methods[0]: no entry "rats". Did you mean "rates"?'),
        (('title = "t"\n', ""), 'mine.toml: "title" is missing'),
        (('bases = ["b"]', 'bases = ["b"]\nepochs = 0'), "mine.toml: protocol: epochs = 0: must be a whole number"),
        (('title = "t"', "title = t"), "mine.toml: not TOML"),
        (('tasks = ["rte"]', 'tasks = ["rte", "rte"]'), 'mine.toml: tasks: "rte" occurs twice'),
        (('rates = [1e-3]', 'rates = [1e-3]\n[[claims]]\nid = "C1"\ntext = "t"\nparts = [{ test = "equal", a = "B" }]'),
         'mine.toml: claim C1: no "B".'),
    ],
)  # fmt: skip
def test_a_wrong_study_file_is_one_error_that_names_file_and_key(tmp_path, change, says):
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL.replace(*change))
    with pytest.raises(StudyError) as error:
        spec.load(str(path))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_users_own_file_is_a_study_like_ours(tmp_path):
    (tmp_path / "mine.toml").write_text(MINIMAL)
    assert spec.load(str(tmp_path / "mine.toml")).methods[0].select == "bias"


def test_an_unknown_study_suggests_the_right_one():
    with pytest.raises(StudyError, match='Did you mean "bitfit-table3"'):
        spec.load("bitfit-tabl3")


# ---- the grid


def suits(method):
    """Rates that suit a base, made up."""
    return (4e-4, 1e-3, 2e-3, 4e-3)


def test_the_grid_is_a_pure_function_of_the_study():
    study = STUDIES["freeze-low-data"]
    once, again = (grid.search(study, Settings(), study.protocol.bases[0], suits) for _ in range(2))
    assert once == again and len(once) == len(set(once)) == 10 * 2 * 6 * 7


def test_rates_are_the_papers_on_the_papers_base_and_suit_any_other():
    study = STUDIES["bitfit-table3"]
    method = study.method("BitFit")
    assert grid.rates(study, Settings(), method, "rte", "google-bert/bert-base-cased", suits) == method.rates
    assert 4e-3 in grid.rates(study, Settings(), method, "rte", "all-MiniLM-L6-v2", suits)
    assert grid.rates(study, Settings(lr=(1.0,)), method, "rte", "x", suits) == (1.0,)


def test_a_train_size_caps_sizes_without_repeating_any():
    study = STUDIES["freeze-low-data"]
    assert [s for t, s in grid.tasks_and_sizes(study, Settings(train_size=1000)) if t == "rte"] == [1000, 500, 200, 100]


def test_the_second_stage_takes_the_rate_its_first_seed_chose():
    study = replace(STUDIES["bitfit-table3"], tasks=("rte",), methods=STUDIES["bitfit-table3"].methods[1:2])
    first = grid.search(study, Settings(seeds=3), "x", suits)
    scores = {point: (0.9 if point.lr == 2e-3 else 0.5) for point in first}
    assert [(p.lr, p.seed) for p in grid.repeat(study, Settings(seeds=3), scores)] == [(2e-3, 1), (2e-3, 2)]


def test_a_choice_compares_rates_on_the_seeds_they_share():
    def at(lr, seed):
        return Point("m", "t", None, lr, 8, seed)

    scores = {at(1e-3, 0): 0.8, at(4e-3, 0): 0.7, at(1e-3, 1): 0.1, at(1e-3, 2): 0.1}
    assert grid.choose(scores) == (1e-3, 8)
    assert grid.choose({at(1e-3, 0): None}) is None


def test_what_was_changed_of_the_protocol_is_said():
    said = grid.differences(STUDIES["bitfit-table3"], Settings(epochs=2, train_size=500), "a/base", "base")
    assert any("The base is base," in text for text in said)
    assert "Epochs: 2 instead of 20." in said and "At most 500 training rows." in said


# ---- running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny base that pools by mean, and data for every task."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"), "bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    data = write_tasks(tmp_path_factory.mktemp("data"), ("rte", "sst2", "imdb"), rows=24)
    return str(folder), str(data)


def campaign(tiny, results, **changes):
    from bitfit.study.runner import Campaign

    study = replace(STUDIES["bitfit-table3"], tasks=("sst2", "rte"))
    settings = {"epochs": 1, "seeds": 2, "methods": ("BitFit", "Frozen"), "lr": (1e-2, 1e-3), **changes}
    return Campaign(study, tiny[0], Settings(**settings), tiny[1], Results(Path(results)), threads=1)


def run(tiny, results, **changes):
    from bitfit.study.passes import local
    from bitfit.study.runner import run as go

    return go(campaign(tiny, results, **changes), local, ["bitfit"], lambda _: None, lambda *_: None)


def outcomes(folder):
    """Every result by name, without what it cost."""
    found = {path.name: json.loads(path.read_text()) for path in (Path(folder) / "trials").glob("*.json")}
    return {name: {k: v for k, v in table.items() if k != "cost"} for name, table in found.items()}


def test_a_run_makes_one_result_per_trial_and_a_rerun_none(tiny, tmp_path):
    assert run(tiny, tmp_path) == 2 * (2 + 1) + 2 * 2  # a frozen base has one rate
    assert len(outcomes(tmp_path)) == 10
    assert run(tiny, tmp_path) == 0
    assert not (tmp_path / "passes").exists()


def test_extending_a_study_trains_only_what_is_new(tiny, tmp_path):
    run(tiny, tmp_path, tasks=("sst2",), methods=("Frozen",))
    before = outcomes(tmp_path)
    assert run(tiny, tmp_path, tasks=("sst2",), methods=("Frozen",), seeds=3) == 1
    assert before.items() <= outcomes(tmp_path).items()
    run(tiny, tmp_path, tasks=("rte",), methods=("Frozen",))
    (manifest,) = Results(tmp_path).manifests("bitfit-table3")
    assert {entry.task for entry in manifest.points} == {"sst2", "rte"}


def manifest(task, epochs, method="m", differences=(), data="", base=("b", "f"), skipped=()):
    """The manifest of a run of one trial."""
    entry = Entry(method, task, None, 1.0, 8, 0, f"{task}{epochs}")
    ran = RunFacts((method, task, str(epochs)), (method,), {task: Frame(epochs, data=data)}, differences)
    facts = BaseFacts(*base)
    return Manifest(study="s", base=facts, split="dev", runs=(ran,), points=(entry,), skipped=dict(skipped))


def test_a_task_run_under_other_conditions_takes_the_place_of_its_earlier_run():
    assert manifest("t", 2).joined(manifest("t", 1, "other")) == manifest("t", 2)


def test_tasks_run_under_unlike_conditions_stand_in_one_manifest():
    both = manifest("u", 2).joined(manifest("t", 1))
    assert [entry.task for entry in both.points] == ["t", "u"]
    assert [run.frames for run in both.runs] == [{"t": Frame(1)}, {"u": Frame(2)}]


def test_what_differs_on_one_task_is_said_of_that_task():
    first = manifest("t", 1, differences=("The base is b.", "Epochs: 1 instead of 9."))
    second = manifest("u", 2, differences=("The base is b.", "Epochs: 2 instead of 9."))
    found = Findings(replace(STUDIES["bitfit-table3"], tasks=("t", "u")), second.joined(first), {})
    assert found.differences == ["The base is b.", "On t: Epochs: 1 instead of 9.", "On u: Epochs: 2 instead of 9."]


def test_a_rate_for_some_methods_is_said_to_be_theirs():
    first = manifest("t", 1, "m", differences=("Rates: 1.",))
    second = manifest("t", 1, "n", differences=("Rates: 2.",))
    found = Findings(replace(STUDIES["bitfit-table3"], tasks=("t",)), second.joined(first), {})
    assert found.differences == ["Rates: 1 (m).", "Rates: 2 (n)."]


def test_a_task_read_from_other_data_takes_the_place_of_its_earlier_run():
    first, second = manifest("t", 1, "m"), manifest("t", 1, "n", data="other")
    assert second.joined(first) == second


def test_what_was_left_out_before_is_still_said():
    first = manifest("t", 1, skipped={"cola": "no data"})
    assert manifest("u", 1).joined(first).skipped == {"cola": "no data"}


def test_bases_of_one_name_have_manifests_of_their_own(tmp_path):
    store, both = Results(tmp_path), ("aaaaaaaa", "bbbbbbbb")
    for fingerprint in both:
        store.write_manifest(manifest("t", 1, base=("final", fingerprint)))
    assert [found.base.fingerprint for found in store.manifests("s")] == list(both)


def printed_commands(page):
    """The commands of a report, as words."""
    found = re.findall(r"<pre><code>(.*?)</code></pre>", page, re.S)
    return [shlex.split(html.unescape(command)) for command in found]


def test_the_commands_on_a_report_run_as_printed(tiny, tmp_path, monkeypatch, capsys):
    """They find the base and the data by the two environment variables, and ask for the trials that are there."""
    from bitfit.cli.main import run as bitfit

    base = Path(tiny[0])
    monkeypatch.setenv("BITFIT_MODELS", str(base.parent))
    monkeypatch.setenv("BITFIT_DATA", tiny[1])
    monkeypatch.chdir(tmp_path)
    words = ["study", "run", "plus-figure7", "--base", base.name, "--tasks", "rte", "--method", "b_m2, b_q"]
    assert bitfit([*words, "--epochs", "1", "--seeds", "1", "--lr", "1e-2", "--train-size", "16"]) == 0
    commands = printed_commands((tmp_path / "results/plus-figure7/report.html").read_text())
    assert len(commands) == 1
    capsys.readouterr()
    for program, *rest in commands:
        assert program == "bitfit"
        assert bitfit([*rest, "--dry-run"]) == 0
        assert "0 trials in 0 passes to run, 1 done" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_shows_the_rates_and_says_when_they_are_defaults(tiny, tmp_path, monkeypatch, capsys):
    from bitfit.cli.main import run as bitfit

    monkeypatch.chdir(tmp_path)
    words = ["study", "run", "plus-figure7", "--base", tiny[0], "--data", tiny[1], "--tasks", "rte"]
    words += ["--method", "BitFit", "--epochs", "1", "--seeds", "1", "--train-size", "16", "--dry-run"]
    assert bitfit(words) == 0
    assert "--lr paper keeps the study's" in " ".join(capsys.readouterr().err.split())
    assert bitfit([*words, "--lr", "0.0123"]) == 0
    shown = capsys.readouterr()
    assert "0.0123" in shown.out and "--lr paper" not in shown.err


@pytest.mark.parametrize("name", STUDIES)
def test_the_commands_of_a_study_that_was_not_run_are_understood(name):
    from bitfit.cli.options import parse
    from bitfit.report import report

    commands = printed_commands(report.as_html(STUDIES[name], [], []))
    assert commands
    for _, *words in commands:
        assert parse(words).name == name


def test_the_steps_of_the_evidence_are_commands():
    from bitfit.cli.options import parse
    from bitfit.cli.study import chosen_methods

    script = Path(__file__).parents[1] / "results/evidence.sh"
    listed = subprocess.run(["bash", str(script), "--list"], capture_output=True, text=True, check=True)
    steps = [parse(shlex.split(line)[1:]) for line in listed.stdout.splitlines()]
    assert len(steps) > 20
    for step in steps:
        study = STUDIES[step.name]
        known = {method.name for method in study.methods}
        assert set(chosen_methods(study, step.methods) or ()) <= known
    for name in ("freeze-table1", "freeze-initbias"):
        of_study = [step for step in steps if step.name == name]
        _check_steps_decide_claims(STUDIES[name], of_study)


def _check_steps_decide_claims(study, steps):
    """Claims on single tasks have three bases, unless they are marked; curves have the evaluations for a late fall."""
    for step in steps:
        curve = [[0, 0, 0]] * (step.epochs * step.evals_per_epoch)
        assert late_fall(Result("", "", "", "", "", {}, {}, 0.0, evaluations=curve)) is not None
    for claim in study.claims:
        for part in claim.parts:
            for task in part.tasks:
                bases = {step.base[0] for step in steps if task in step.tasks}
                assert len(bases) >= 3 or (claim.untested and bases), (claim.id, task)


def test_more_seeds_of_the_homework_are_trained_at_the_chosen_settings_only():
    study = STUDIES["tiny-imdb"]
    settings = Settings(seeds=3, search="first-seed", batch=(8, 32))
    first = grid.search(study, settings, "bert-tiny", suits)
    assert {point.seed for point in first} == {0}
    more = grid.repeat(study, settings, {point: point.lr * point.batch for point in first})
    assert {(point.lr, point.batch) for point in more if point.method == "With BitFit"} == {(3e-4, 32)}
    assert len(more) == 2 * len(study.methods)


def test_a_rate_that_diverges_on_most_seeds_is_not_chosen(one_result):
    def at(lr, seed):
        return Point("m", "t", None, lr, 8, seed)

    done = {at(1e-3, seed): one_result(0.8) for seed in range(3)}
    lost = {at(5e-3, seed): one_result(None) for seed in (1, 2)}
    assert grid.choose(standings(done | lost | {at(5e-3, 0): one_result(0.9)})) == (1e-3, 8)
    assert grid.choose(standings(lost)) is None


@pytest.fixture
def one_result():
    """A result by its dev score; None: diverged."""

    def make(score):
        scores = {} if score is None else {"dev": {"accuracy": [score, score, score]}}
        status = "diverged" if score is None else "done"
        return Result("k", status, "b", "t", "accuracy", {}, {"train": 8}, majority=0.5, scores=scores)

    return make


def test_a_stop_at_any_moment_ends_with_the_same_results(tiny, tmp_path):
    """Stopped at every step of every pass in turn, in process; the slow tests kill the process."""
    from bitfit.errors import Interrupted
    from bitfit.study import passes, runner

    run(tiny, tmp_path / "whole", tasks=("sst2",))
    steps, stops = 0, 0

    def stopping(works, progress):
        yield from ((work, passes.perform(work, partial(stop_sometimes, work))) for work in works)

    def stop_sometimes(work, *_):
        nonlocal steps
        steps += 1
        if steps % 2 == 0:
            passes.workspace(work.opening.base).open(work.opening).job.stop.requested = True

    while True:
        try:
            runner.run(
                campaign(tiny, tmp_path / "cut", tasks=("sst2",)), stopping, ["x"], lambda _: None, lambda *_: None
            )
            break
        except Interrupted:
            stops += 1
    assert stops > 1
    assert outcomes(tmp_path / "cut") == outcomes(tmp_path / "whole")


def test_a_kill_while_results_are_written_leaves_none_half_done(tiny, tmp_path, monkeypatch):
    store = Results(tmp_path)
    run(tiny, tmp_path, tasks=("sst2",), methods=("Frozen",))
    whole = outcomes(tmp_path)
    results = [store.read(path.stem) for path in sorted(store.trials.glob("*.json"))]
    journal = tmp_path / "passes" / "s" / "b" / "k" / "results.json"
    journal.parent.mkdir(parents=True)
    journal.write_text(json.dumps([asdict(result) for result in results]))
    for path in list(store.trials.glob("*.json"))[1:]:
        path.unlink()
    store.replay()
    assert outcomes(tmp_path) == whole and not (tmp_path / "passes").exists()


def test_a_diverged_trial_is_a_result_marked_so(tiny, tmp_path):
    run(tiny, tmp_path, tasks=("sst2",), methods=("BitFit",), lr=(1e30,), seeds=1)
    (result,) = outcomes(tmp_path).values()
    assert result["status"] == "diverged" and result["scores"] == {}
    assert run(tiny, tmp_path, tasks=("sst2",), methods=("BitFit",), lr=(1e30,), seeds=1) == 0


def test_a_task_without_data_is_left_out_and_said(tiny, tmp_path):
    from bitfit.study.runner import dry_run

    found = campaign(tiny, tmp_path, tasks=("sst2", "cola"))
    assert dry_run(found) and set(found.skipped) == {"cola"}
    with pytest.raises(DataError, match="cola"):
        dry_run(campaign(tiny, tmp_path, tasks=("cola",)))


def test_two_runs_of_a_study_at_once_are_refused(tiny, tmp_path):
    store = Results(tmp_path)
    with store.locked("bitfit-table3"), pytest.raises(UsageError, match="by another process"):
        run(tiny, tmp_path)


def test_dropout_can_be_off_or_on_in_the_first_tenth_only():
    from bitfit.training.loop import drops_out
    from bitfit.training.plan import Plan

    trial = type("T", (), {"batch": 1, "dropout": "first-tenth"})()
    assert [step for step in range(1, 41) if drops_out(trial, step, 20)] == [1, 2, 21, 22]
    trial.dropout = "off"
    assert not drops_out(trial, 1, 20)
    with pytest.raises(UsageError, match="dropout"):
        Plan(dropout="sometimes")


def test_dropout_decides_the_outcome(tiny, tmp_path):
    from bitfit import train

    data = Path(tiny[1]) / "sst2"
    on, off, tenth = (
        train(data, tiny[0], lr=1e-2, epochs=2, dropout=kind).trials[0].history for kind in ("on", "off", "first-tenth")
    )
    assert len({json.dumps(history.lines()) for history in (on, off, tenth)}) == 3


def test_the_demo_ends_with_a_page_of_its_own(tiny, tmp_path):
    from bitfit import load_base, train
    from bitfit.cli.demo import STUDY, write_page

    study, base = spec.read(STUDY), load_base(tiny[0])
    data = Path(tiny[1]) / "sst2"
    runs = [(train(data, base, select=m.select, lr=1e-2, epochs=1, gap=True), 1.0) for m in study.methods]
    text = write_page(study, base, runs, tmp_path).read_text()
    assert "Three ways to train" in text and "<svg" in text and "Nothing to draw yet" not in text


def test_the_page_of_the_demo_shows_answers_confusions_and_calibration(tiny, csv_file, tmp_path):
    from bitfit import evaluate, load_base, train
    from bitfit.cli.demo import SENTENCES, sections

    base, delta = load_base(tiny[0]), tmp_path / "d.safetensors"
    train(csv_file, base, lr=1e-2, epochs=1, out=delta)
    answers, confusions, calibration = sections(delta, csv_file, base)
    found = evaluate(delta, csv_file, base)
    assert [row[0] for row in answers.grids[0].rows] == list(SENTENCES)
    assert [row[1:] for row in confusions.grids[0].rows] == [[str(count) for count in row] for row in found.confusion]
    assert len(confusions.grids[1].rows) == min(8, len(found.errors))
    assert sum(int(row[2]) for row in calibration.grids[0].rows) == 64
    assert "<svg" in calibration.drawings[0].svg


# ---- what is read and encoded, and how often


@pytest.fixture
def fresh_workspace():
    """No data of earlier tests is at hand."""
    from bitfit.study import passes

    passes.workspace.cache_clear()
    yield
    passes.workspace.cache_clear()


@pytest.fixture
def encoded(monkeypatch, fresh_workspace):
    """The number of examples of every call of the tokenizer."""
    from bitfit.tasks.encode import Encoder

    counts, encode = [], Encoder.encode

    def counting(self, form, examples):
        counts.append(len(examples))
        return encode(self, form, examples)

    monkeypatch.setattr(Encoder, "encode", counting)
    return counts


def test_a_study_reads_and_tokenises_each_task_once_whatever_the_stages(tiny, tmp_path, monkeypatch, encoded):
    from bitfit.data import formats

    opened, read = [], formats.READERS[".jsonl"]
    monkeypatch.setitem(formats.READERS, ".jsonl", lambda path: opened.append(str(path)) or read(path))
    assert run(tiny, tmp_path, seeds=3, methods=("BitFit",)) == 2 * (2 + 2)
    assert encoded == [24, 12, 24, 12, 12, 12]  # train and dev of two tasks, then their test parts
    assert all(opened.count(path) == 2 for path in opened)  # its head, then its rows


def test_data_beyond_the_limit_is_dropped_and_encoded_again(tiny, tmp_path, monkeypatch, encoded):
    from bitfit.study import passes

    monkeypatch.setattr(passes, "KEPT_TOKENS", 1)
    assert run(tiny, tmp_path, seeds=1, methods=("BitFit",)) == 2 * 2
    assert len(encoded) == 2 * (2 + 3)  # each task to plan its passes, then with its test part to train them


def test_the_test_part_is_encoded_once_for_all_trials(tiny, tmp_path, encoded):
    from bitfit.study.passes import local
    from bitfit.study.runner import Campaign
    from bitfit.study.runner import run as go

    study = replace(STUDIES["tiny-imdb"], tasks=("imdb",))
    settings = Settings(epochs=1, seeds=2, lr=(1e-2, 1e-3), batch=(8,), methods=("Without BitFit", "With BitFit"))
    found = Campaign(study, tiny[0], settings, tiny[1], Results(tmp_path))
    go(found, local, ["bitfit"], lambda _: None, lambda *_: None)
    assert len(encoded) == 3


def test_train_sizes_count_examples_not_windows(tiny, tmp_path, fresh_workspace):
    from bitfit.study.runner import Campaign

    data = write_tasks(tmp_path / "data", ("ud-pos",), rows=24)
    study = replace(STUDIES["bitfit-tagging"], tasks=("ud-pos",))
    settings = Settings(epochs=1, seeds=1, lr=(1e-2,), max_length=6)
    found = Campaign(study, tiny[0], settings, str(data), Results(tmp_path / "r"))
    for work in found.plan(found.search()):
        job = found.workspace.open(work.opening).job
        assert len(job.train) > len(job.train.examples) == 24
        assert {trial.train_size for trial in work.trials} == {24}


def test_a_pass_leaves_the_number_of_threads_as_it_was(tiny, tmp_path):
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(tiny, tmp_path, tasks=("sst2",), methods=("Frozen",), seeds=1, lr=(1e-2,))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---- data and rates


def opened(tiny, **changes):
    from bitfit.study import data
    from bitfit.study.data import Opening

    asked = {"base": None, "task": "sst2", "data": tiny[1], "split": "dev", "size": None, "dev_size": None}
    opening = Opening(**{**asked, "max_length": 16, **changes})
    return data.dataset(data.read(opening.task, opening.data), opening)


def test_training_rows_are_drawn_anew_for_every_seed_and_scored_rows_are_not(tiny):
    first, second = (opened(tiny, size=8, seed=seed) for seed in (0, 1))
    assert first.train.texts != second.train.texts
    assert first.dev.texts == second.dev.texts and first.test.texts == second.test.texts


def test_without_labelled_test_rows_half_of_dev_is_held_out(tiny, tmp_path):
    shutil.copytree(tiny[1], tmp_path / "data")
    for path in (tmp_path / "data" / "sst2").glob("test*"):
        path.unlink()
    tiny = tiny[0], str(tmp_path / "data")
    found = opened(tiny)
    assert abs(len(found.dev) - len(found.test)) <= 1
    whole = opened(tiny, split="holdout").test  # the published dev
    assert sorted([*found.dev.lines, *found.test.lines]) == sorted(whole.lines)


def test_a_trial_stores_the_result_of_every_test_row(tiny, tmp_path):
    run(tiny, tmp_path, tasks=("sst2",), methods=("Frozen",), seeds=1, lr=(1e-2,))
    (path,) = (tmp_path / "trials").glob("*.json")
    result = Results(tmp_path).read(path.stem)
    rows = result.rows_of("test")
    assert len(rows) == result.rows["test"]
    assert rows.columns[0].mean() == pytest.approx(result.score("test"), abs=1e-4)


def at_rate(lr, seed=0):
    return Point("BitFit", "rte", None, lr, 8, seed)


@pytest.mark.parametrize(("best", "further"), [(4e-3, [1.2e-2]), (1e-3, [3.3e-4]), (2e-3, [])])
def test_a_search_whose_best_rate_is_at_an_edge_goes_one_rate_further(best, further):
    scores = {at_rate(lr): 0.9 if lr == best else 0.5 for lr in (1e-3, 2e-3, 4e-3)}
    wider = grid.widen(STUDIES["bitfit-table3"], Settings(), "a-base", scores)
    assert [point.lr for point in wider] == further


def test_equal_scores_are_decided_by_the_dev_loss():
    results = {}
    for lr, loss in ((1e-4, 0.7), (1e-3, 0.6), (1e-2, 0.4), (1e-1, 0.5)):
        evaluations = [[1.0, loss, 0.8], [2.0, 0.1, 0.7]]  # the first one was kept
        scores = {"dev": {"accuracy": [0.8] * 3}}
        results[at_rate(lr)] = Result(
            "k", "done", "b", "t", "accuracy", {}, {}, 0.5, scores, best_epoch=1.0, evaluations=evaluations
        )
    assert grid.choose(standings(results), dev_losses(results)) == (1e-2, 8)


def test_equal_scores_without_losses_are_decided_for_the_middle_rate():
    scores = {at_rate(lr): 0.8 for lr in (1e-4, 1e-3, 1e-2)}
    assert grid.choose(scores) == (1e-3, 8)
    assert grid.choose(scores, {at_rate(1e-2): 0.1}) == (1e-3, 8)  # the losses of the others are not known
    assert not grid.widen(STUDIES["bitfit-table3"], Settings(), "a-base", scores)


def test_a_head_alone_has_one_rate_and_no_edge():
    study = STUDIES["core"]
    points = grid.search(study, Settings(tasks=("trec",), methods=("Frozen",), lr=(1e-3, 1e-2)), "x", suits)
    assert {point.lr for point in points} == {1e-3}
    result = Result("k", "done", "b", "trec", "accuracy", {}, {}, 0.5, {"dev": {"accuracy": [0.8] * 3}})
    facts = Manifest(study="core", base=BaseFacts("b", "f"), split="dev", runs=())
    found = Findings(study, facts, dict.fromkeys(points, result))
    assert not found.at_edge(("Frozen", "trec", None))


def test_rates_that_were_asked_for_are_not_widened():
    study, scores = STUDIES["bitfit-table3"], {at_rate(lr): lr for lr in (1e-3, 2e-3)}
    assert not grid.widen(study, Settings(lr=(1e-3, 2e-3)), "a-base", scores)
    assert not grid.widen(study, Settings(), study.protocol.bases[0], scores)


def test_a_study_widens_its_rates_at_most_twice(tiny, tmp_path):
    from bitfit.study import runner

    found = campaign(tiny, tmp_path, tasks=("sst2",), methods=("BitFit",), seeds=1, lr="auto")
    stages = []

    def engine(works, progress):
        stages.append([point.lr for work in works for point in work.points])
        for work in works:
            results = runner_results(work)
            yield work, results

    def runner_results(work):
        return [
            Result(key, "done", "b", "sst2", "accuracy", {}, {"train": 8}, 0.5,
                   scores={"dev": {"accuracy": [min(1.0, 10 * point.lr)] * 3}}, cost={"seconds": 1.0})
            for point, key in zip(work.points, work.keys, strict=True)
        ]  # fmt: skip

    runner.run(found, engine, ["x"], lambda _: None, lambda *_: None)
    assert [len(stage) for stage in stages] == [4, 1, 1, 0]
    assert max(stages[0]) < stages[1][0] < stages[2][0]
    assert runner.dry_run(campaign(tiny, tmp_path, tasks=("sst2",), methods=("BitFit",), seeds=1, lr="auto")) == []


def test_a_method_may_add_parameters_and_train_longer(tiny, tmp_path):
    from bitfit.study.runner import Campaign

    settings = Settings(tasks=("sst2",), methods=("LoRA", "Frozen"), epochs=1, seeds=1, lr=(1e-2,))
    found = Campaign(STUDIES["core"], tiny[0], settings, tiny[1], Results(tmp_path), threads=1)
    trials = {
        point.method: trial
        for work in found.plan(found.search())
        for point, trial in zip(work.points, work.trials, strict=True)
    }
    assert trials["LoRA"].inject == STUDIES["core"].method("LoRA").inject and trials["LoRA"].epochs == 1
    assert trials["Frozen"].epochs == STUDIES["core"].method("Frozen").epochs_times


def test_a_view_without_its_part_is_said_to_be_missing():
    study = replace(STUDIES["bitfit-table3"], tasks=("mnli", "mnli-mm"))
    point = Point("BitFit", "mnli", None, 1e-3, 8, 0)
    described = manifest("mnli", 1, "BitFit")
    said = Findings(study, described, {point: None}).differences
    assert said == ["mnli-mm is not scored: the data of mnli has no part dev_mismatched."]
