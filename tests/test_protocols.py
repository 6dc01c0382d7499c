"""Protocols: holdout, nested subsets, the generalisation gap, and the GLUE server's files."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from bitfit import Plan
from bitfit.cli.main import run
from bitfit.data import loading, named, sources, splits
from bitfit.errors import UsageError
from support import mini_rows, reviews, write_rows


@pytest.fixture
def folder(tmp_path):
    """A data set with train and dev files."""
    for name, seed in (("train", 0), ("dev", 1)):
        lines = "".join(f"{text} {i},{label}\n" for i, (text, label) in enumerate(reviews(200, seed)))
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "own" / f"{name}.csv").write_text("text,label\n" + lines)
    return tmp_path / "own"


def test_holdout_takes_a_fifth_of_train_and_tests_on_dev(folder):
    published, _ = sources.load(folder)
    held, _ = sources.load(folder, protocol="holdout")
    assert (len(held.train), len(held.dev)) == (160, 40)
    assert held.test == published.dev
    assert set(held.train.texts) | set(held.dev.texts) == set(published.train.texts)
    assert Counter(held.dev.labels) == {0: 20, 1: 20}


def test_holdout_in_low_data_splits_the_rows_that_were_drawn(folder):
    """The papers' 2,000 of RTE's 2,490 rows can only be train and validation together."""
    held, _ = sources.load(folder, protocol="holdout", train_size=50)
    published, _ = sources.load(folder, train_size=50)
    assert (len(held.train), len(held.dev)) == (40, 10)
    assert set(held.train.texts) | set(held.dev.texts) == set(published.train.texts)


def test_holdout_evaluates_ten_times_per_epoch():
    assert (Plan().evals_per_epoch, Plan(protocol="holdout").evals_per_epoch) == (2, 10)
    assert Plan(protocol="holdout", evals_per_epoch=3).evals_per_epoch == 3


def test_holdout_keeps_the_best_of_its_evaluations(folder, base):
    from bitfit import train

    run = train(folder, base, protocol="holdout", lr=3e-3, epochs=2)
    scores = [found.dev_score for found in run.best.history.evaluations]
    assert len(scores) == 20 and run.best.dev == pytest.approx(max(scores))
    assert run.best.delta.meta.trial.protocol == "holdout" and "test" in run.best.scores


@pytest.mark.parametrize("seed", [0, 1])
def test_subsets_are_exact_stratified_and_nested(seed):
    labels = [0] * 700 + [1] * 290 + [2] * 10
    texts = [f"text {i}" for i in range(1000)]
    examples = loading.Examples(texts, None, labels, list(range(1000)))
    smaller: set[int] = set()
    for size in (1, 10, 100, 500, 999, 1000):
        chosen = splits.subset(examples, "classification", size, seed)
        assert len(chosen) == len(set(chosen)) == size and smaller <= set(chosen)
        counts = Counter(labels[i] for i in chosen)
        assert all(abs(counts[k] - size * labels.count(k) / 1000) < 1 for k in range(3))
        smaller = set(chosen)


def test_another_data_seed_draws_other_rows(folder):
    drawn = [set(sources.load(folder, train_size=50, seed=seed)[0].train.texts) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_gap_is_train_minus_dev_by_the_same_code(folder, folders, tmp_path, capsys):
    words = ["train", str(folder), "--base", str(folders("bert")), "--lr", "1e-2", "--epochs", "1", "--gap"]
    assert run([*words, "--out", str(tmp_path / "d.safetensors"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gap"]["accuracy"] == pytest.approx(shown["train"]["accuracy"] - shown["dev"]["accuracy"])
    assert run([*words, "--out", str(tmp_path / "d.safetensors")]) == 0
    assert "generalisation gap: accuracy" in capsys.readouterr().out


def test_the_train_score_is_what_evaluate_says_of_the_training_file(folder, base, tmp_path):
    from bitfit import Predictor, train

    run = train(folder, base, lr=1e-2, epochs=1, gap=True, out=tmp_path / "d.safetensors")
    _, scores, _ = Predictor(tmp_path / "d.safetensors", base).evaluate(folder, "train")
    assert scores["accuracy"].value == pytest.approx(run.best.scores["train"]["accuracy"].value)


# ---- the GLUE server's files ----

GLUE = [name for name, task in named.known().items() if task.glue]
SERVER = {
    "CoLA.tsv": {"0", "1"}, "SST-2.tsv": {"0", "1"}, "MRPC.tsv": {"0", "1"}, "QQP.tsv": {"0", "1"},
    "WNLI.tsv": {"0", "1"}, "QNLI.tsv": {"entailment", "not_entailment"}, "RTE.tsv": {"entailment", "not_entailment"},
    **{f"{name}.tsv": {"entailment", "neutral", "contradiction"} for name in ("MNLI-m", "MNLI-mm", "AX")},
    "STS-B.tsv": None,
}  # fmt: skip


def check_submission(path, rows):
    """What the server wants: a header, rows numbered from 0 without gaps, and its own words (or 0 to 5)."""
    raw = path.read_bytes()
    assert b"\r" not in raw and raw.endswith(b"\n")
    header, *lines = csv.reader(raw.decode("ascii").splitlines(), delimiter="\t")
    assert header == ["index", "prediction"]
    assert [line[0] for line in lines] == [str(i) for i in range(rows)]
    words = SERVER[path.name]
    assert all(line[1] in words if words else 0 <= float(line[1]) <= 5 for line in lines)


def test_every_file_of_the_server_is_made_by_some_task():
    assert {entry.file for name in GLUE for entry in named.known()[name].glue} == set(SERVER)


@pytest.mark.filterwarnings("ignore:.*constant")  # a tiny model of one epoch may always answer the same
@pytest.mark.parametrize("name", GLUE)
def test_prediction_files_are_as_the_server_takes_them(name, mini, base, tmp_path):
    from bitfit import Predictor, train
    from bitfit.prediction import glue

    task, folder = named.known()[name], mini(name)
    for entry in task.glue:
        rows = mini_rows(task, 9, labelled=False)
        write_rows(folder / name / f"{task.splits[entry.split][-1]}.jsonl.gz", rows)
    run = train(name, base, data=str(folder), lr=1e-3, epochs=1, evals_per_epoch=1, train_size=16)
    written = glue.submit(Predictor(run.best.delta, base), tmp_path / "glue", folder=folder)
    assert [(path.name, rows, wanted) for path, rows, wanted in written] == [
        (entry.file, 9, entry.rows) for entry in task.glue
    ]
    for path, rows, _ in written:
        check_submission(path, rows)


def test_numbers_beyond_the_servers_range_are_clipped():
    from bitfit.prediction import glue

    entry = named.known()["stsb"].glue[0]
    assert [glue._number(entry, value) for value in (-0.3, 2.34567, 7.0)] == ["0.000", "2.346", "5.000"]


def test_a_plain_files_delta_submits_with_the_task_said(folders, base, tmp_path, capsys, mini):
    from bitfit import train

    folder, out = mini("mrpc"), tmp_path / "d.safetensors"
    write_rows(folder / "mrpc" / "test.jsonl.gz", mini_rows(named.known()["mrpc"], 9, labelled=False))
    train(folder / "mrpc", base, lr=1e-3, epochs=1, out=out)
    words = ["predict", str(out), "--base", str(folders("bert")), "--glue", str(tmp_path / "glue")]
    assert run([*words, "--data", str(folder)]) == 2
    assert "--task TASK" in capsys.readouterr().err
    assert run([*words, "--data", str(folder), "--task", "mrpc"]) == 0
    assert "MRPC.tsv (9 rows; the server expects 1,725)" in capsys.readouterr().out
    check_submission(tmp_path / "glue" / "MRPC.tsv", 9)


def test_a_file_of_several_test_sets_must_say_which(base, mini, tmp_path):
    from bitfit import Predictor, train
    from bitfit.prediction import glue

    folder = mini("mnli")
    predictor = Predictor(train("mnli", base, data=str(folder), lr=1e-3, epochs=1).best.delta, base)
    own = write_rows(tmp_path / "own.jsonl.gz", mini_rows(named.known()["mnli"], 4, labelled=False))
    with pytest.raises(UsageError, match="several test sets; name the file after one of them: test, test_matched"):
        glue.submit(predictor, tmp_path, file=own)
    renamed = own.rename(tmp_path / "test_mismatched.jsonl.gz")
    assert glue.submit(predictor, tmp_path, file=renamed)[0][0].name == "MNLI-mm.tsv"


# ---- the size sweep ----


def test_a_list_of_train_sizes_is_a_sweep(folder, folders, tmp_path, capsys):
    words = ["train", str(folder), "--base", str(folders("bert")), "--lr", "1e-2", "--epochs", "1"]
    words += ["--train-size", "40,20", "--out", str(tmp_path / "d.safetensors")]
    assert run([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["sizes"]
    assert [one["train_size"] for one in shown] == [20, 40]
    assert [one["delta"] for one in shown] == [str(tmp_path / f"d-{size}.safetensors") for size in (20, 40)]
    assert all((tmp_path / f"d-{size}.safetensors").is_file() for size in (20, 40))
    assert run(words) == 0
    assert "dev accuracy" in capsys.readouterr().out


def test_python_sweeps_by_its_own_name(folder, base):
    from bitfit import sweep, train

    runs = sweep(folder, base, train_size=[20, 40], lr=1e-2, epochs=1)
    assert [len(run.dataset.train) for run in runs.values()] == [20, 40]
    assert set(runs[20].dataset.train.texts) <= set(runs[40].dataset.train.texts)
    with pytest.raises(UsageError, match=r"bitfit\.sweep takes several"):
        train(folder, base, train_size=[20, 40])
