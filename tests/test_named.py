"""Named tasks: every one of them joins these tests by existing, on mini data made from what its entry says."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import types
from typing import ClassVar

import pytest

from bitfit.cli.main import run
from bitfit.data import named, sources
from bitfit.errors import DataError, UsageError
from support import WORDS, mini_rows, write_rows

ON_HUB = [name for name, task in named.known().items() if task.hub]
GLUE = [name for name, task in named.known().items() if task.glue]
PAPERS = {
    "cola": "matthews", "sst2": "accuracy", "mrpc": "f1", "stsb": "spearman", "qqp": "f1", "mnli": "accuracy",
    "qnli": "accuracy", "rte": "accuracy", "wnli": "accuracy", "imdb": "accuracy", "squad": "f1", "ud-pos": "accuracy",
    "ptb-pos": "accuracy", "trec": "accuracy", "rotten-tomatoes": "accuracy",
}  # fmt: skip


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_the_papers_tasks_are_known_with_their_metrics():
    assert {name: task.metric for name, task in named.known().items()} == PAPERS


def test_only_wnli_is_left_out_of_averages():
    assert [name for name, task in named.known().items() if not task.average] == ["wnli"]


@pytest.mark.parametrize("name", PAPERS)
def test_a_named_task_is_read_as_its_entry_says(name, mini, no_network):
    dataset, task = sources.load(name, folder=mini(name))
    assert (dataset.kind, len(dataset.train), len(dataset.dev)) == (task.kind, 48, 24)
    assert dataset.labels == (("ADJ", "NOUN", "NUM") if task.kind == "tagging" else task.labels)
    assert (dataset.columns.text_pair is None) == ("text_pair" not in task.columns)


@pytest.mark.parametrize("name", PAPERS)
def test_the_metric_of_a_named_task_is_one_of_its_kind(name):
    from bitfit.tasks import Task

    task = named.known()[name]
    assert Task.of(task.kind, task.labels, task.metric).metric == task.metric


@pytest.mark.parametrize("name", ["mnli", "stsb", "ud-pos", "squad"])
def test_a_named_task_trains_and_is_evaluated_by_name(name, mini, base, tmp_path, no_network):
    from bitfit import Predictor, train

    folder = mini(name)
    run = train(name, base, data=str(folder), lr=1e-3, epochs=1, evals_per_epoch=1, out=tmp_path / "d.safetensors")
    task = named.known()[name]
    assert (run.best.delta.meta.name, run.best.trial.metric) == (name, task.metric)
    assert run.best.delta.labels == run.dataset.labels
    rows, scores, _ = Predictor(tmp_path / "d.safetensors", base).evaluate(name, folder=folder)
    assert rows == 24 and scores[task.metric].value == pytest.approx(run.best.dev, abs=1e-6)


CONLLU = "1\tgood\tgood\tADJ\tJJ\t_\t0\troot\t_\t_\n2\tfilm\tfilm\tNOUN\tNN\t_\t1\tdep\t_\t_\n\n"


def test_the_originals_of_ud_are_read_under_their_own_names(tmp_path, no_network):
    folder = tmp_path / "UD_English-EWT"
    folder.mkdir()
    for split in ("train", "dev", "test"):
        with gzip.open(folder / f"en_ewt-ud-{split}.conllu.gz", "wt") as file:
            file.write(CONLLU * 4)
    dataset, _ = sources.load("ud-pos", folder=tmp_path)
    assert (len(dataset.train), dataset.labels, dataset.columns.label) == (4, ("ADJ", "NOUN"), "upos")
    assert len(dataset.test) == 4


def test_the_originals_of_squad_are_read_under_their_own_names(tmp_path, no_network):
    answer = {"text": "good", "answer_start": 2}
    questions = [{"id": str(i), "question": "which film ?", "answers": [answer]} for i in range(3)]
    article = {"title": "t", "paragraphs": [{"context": "a good film", "qas": questions}]}
    (tmp_path / "squad_v1.1_part").mkdir()
    for name in ("train-v1.1.json", "dev_subset_xquad_en.json"):
        (tmp_path / "squad_v1.1_part" / name).write_text(json.dumps({"version": "1.1", "data": [article]}))
    dataset, task = sources.load("squad", folder=tmp_path)
    assert (len(dataset.train), dataset.kind, task.max_length) == (3, "answering", 384)
    assert any("dev_subset_xquad_en.json is taken as dev; it has only some rows" in note for note in dataset.notes)


def test_a_task_without_published_split_gets_a_dev_set(mini, tmp_path):
    write_rows(tmp_path / "data" / "ptb_nltk_sample" / "all.jsonl.gz", mini_rows(named.known()["ptb-pos"], 50))
    dataset, _ = sources.load("ptb-pos", folder=tmp_path / "data")
    assert (len(dataset.train), len(dataset.dev)) == (45, 5)
    assert any("all.jsonl.gz is taken as train" in note for note in dataset.notes)


def test_labels_are_taken_by_number_or_by_name(mini, tmp_path):
    task, folder = named.known()["rte"], mini("rte")
    rows = [{**row, "label": task.labels[row["label"]]} for row in mini_rows(task, 24)]
    write_rows(folder / "rte" / "dev.jsonl.gz", rows)
    dataset, _ = sources.load("rte", folder=folder)
    assert dataset.dev.labels == dataset.train.labels[:24]


def test_a_label_beyond_the_tasks_own_is_an_error(mini):
    folder = mini("rte")
    write_rows(folder / "rte" / "dev.jsonl.gz", [{"sentence1": "a", "sentence2": "b", "label": 2}])
    with pytest.raises(DataError, match=r'line 1: label "2" is not a label of the task'):
        sources.load("rte", folder=folder)


def test_a_name_may_be_spelt_with_other_punctuation():
    assert named.find("SST-2") is named.known()["sst2"] and named.find("rotten_tomatoes").name == "rotten-tomatoes"


def test_a_partial_split_is_accepted_and_said(mini):
    dataset, _ = sources.load("mnli", folder=mini("mnli", train="train_sample", dev="dev_matched"))
    assert any("train_sample.jsonl.gz is taken as train; it has only some rows" in note for note in dataset.notes)
    assert not any("dev_matched" in note for note in dataset.notes)


def test_further_sets_are_scored_beside_dev(mini, base):
    from bitfit import train

    folder = mini("mnli", dev="dev_matched")
    write_rows(folder / "mnli" / "dev_mismatched.jsonl.gz", mini_rows(named.known()["mnli"], 12))
    write_rows(folder / "mnli" / "test_mismatched.jsonl.gz", mini_rows(named.known()["mnli"], 12, labelled=False))
    run = train("mnli", base, data=str(folder), lr=1e-3, epochs=1)
    assert set(run.best.scores) == {"dev", "dev_mismatched"}
    assert set(run.best.delta.meta.metrics) == set(run.best.scores)


def test_a_path_wins_over_a_task_of_its_name_and_says_so(mini, monkeypatch):
    monkeypatch.chdir(mini("rte"))
    dataset, task = sources.load("rte")
    assert task is None and "--task rte" in dataset.notes[0] and dataset.labels == ("0", "1")
    assert sources.load("rte", task="rte")[0].labels == ("entailment", "not_entailment")


def test_a_users_file_takes_the_settings_of_a_named_task(tmp_path):
    rows = [f"{WORDS[i]},{WORDS[-i]},{i % 2}\n" for i in range(20)]
    (tmp_path / "own.csv").write_text("a,b,y\n" + "".join(rows))
    columns = {"text": "a", "text_pair": "b", "label": "y"}
    dataset, task = sources.load(tmp_path / "own.csv", task="mrpc", **columns)
    assert (dataset.labels, task.metric) == (("not_equivalent", "equivalent"), "f1")
    with pytest.raises(DataError, match=r"no column for the text of mrpc .*pass --text with one of: a, b, y"):
        sources.load(tmp_path / "own.csv", task="mrpc")


def test_a_kind_is_taken_as_given(tmp_path):
    (tmp_path / "own.csv").write_text("text,label\n" + "".join(f"{WORDS[i]} {i},{i % 3}\n" for i in range(20)))
    assert sources.load(tmp_path / "own.csv")[0].kind == "classification"
    assert sources.load(tmp_path / "own.csv", task="regression")[0].kind == "regression"


def test_a_named_task_is_of_its_own_kind(mini):
    with pytest.raises(UsageError, match="--task regression: rte is a named task already"):
        sources.load("rte", folder=mini("rte"), task="regression")
    assert sources.load("rte", folder=mini("rte"), task="classification")[1].name == "rte"


def test_a_delta_refuses_a_named_task_of_another_kind(mini, base):
    from bitfit import Predictor, train

    delta = train("rte", base, data=str(mini("rte")), lr=1e-3, epochs=1, evals_per_epoch=1).best.delta
    with pytest.raises(DataError, match="ud-pos is a tagging task, but the delta is for classification"):
        Predictor(delta, base).evaluate("ud-pos", folder=mini("ud-pos"))


def test_an_unknown_name_suggests_the_right_one():
    with pytest.raises(DataError, match=r'nor a named task. Did you mean "cola"'):
        sources.load("colla")
    with pytest.raises(UsageError, match=r'no task "mnlii". Did you mean "mnli"'):
        sources.load("rte", task="mnlii")


def test_no_data_anywhere_lists_both_ways_at_once(mini, tmp_path, no_network):
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"DIR/rte/train.jsonl .*--data DIR .*hub \(nyu-mll/glue\): HF_HUB_OFFLINE"):
        sources.load("rte", folder=tmp_path / "data")
    with pytest.raises(DataError, match=r"--data DIR .*not on the hub"):
        sources.load("ptb-pos")


def test_a_missing_package_is_named(mini, monkeypatch, no_network):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'--data DIR .*pip install "bitfit\[hub\]"'):
        sources.load("rte")


def test_a_data_folder_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"--data .*none: no such folder"):
        sources.load("rte", folder=tmp_path / "none")
    monkeypatch.setenv("BITFIT_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"\$BITFIT_DATA .*none: no such folder"):
        sources.load("rte")


# ---- the hub ----


class Split(list):
    """A split as `datasets` gives it: rows, and the features of their columns."""

    features: ClassVar[dict] = {}


def fake_hub(monkeypatch, splits, calls):
    import huggingface_hub

    def load_dataset(source, config=None, **settings):
        calls.append((source, config, settings))
        return splits

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)


@pytest.mark.parametrize("name", ON_HUB)
def test_the_hub_is_asked_once_and_then_the_copy_is_read(name, mini, tmp_path, monkeypatch, no_network):
    task, calls = named.known()[name], []
    rows = Split(mini_rows(task, 48))
    fake_hub(monkeypatch, {"train": rows, "validation": rows, "other": rows}, calls)
    for _ in range(2):
        dataset, _ = sources.load(name)
    settings = {"revision": task.hub.revision} if task.hub.revision else {}
    assert calls == [(task.hub.id, task.hub.config, settings)]
    assert (len(dataset.train), len(dataset.dev)) == (48, 48)
    assert sorted(file.name for file in (tmp_path / "cache" / name).iterdir()) == [
        "train.jsonl.gz",
        "validation.jsonl.gz",
    ]


def test_a_hub_without_a_known_split_is_an_error(mini, monkeypatch, no_network):
    fake_hub(monkeypatch, {"other": Split(mini_rows(named.known()["rte"], 3))}, [])
    with pytest.raises(DataError, match=r"--data DIR .*none of its splits there is known"):
        sources.load("rte")


def test_the_hubs_hidden_test_labels_are_left_alone(mini, monkeypatch, no_network):
    task = named.known()["rte"]
    rows = Split(mini_rows(task, 48))
    fake_hub(monkeypatch, {"train": rows, "validation": rows, "test": Split(mini_rows(task, 9, False))}, [])
    dataset, _ = sources.load("rte")
    assert dataset.test is None and "test.jsonl.gz has no labels and is ignored." in dataset.notes


def test_tags_of_the_hub_come_by_name(mini, tmp_path, monkeypatch, no_network):
    rows = Split([{"tokens": ["a", "film"], "upos": [1, 0]}])
    names = types.SimpleNamespace(names=["NOUN", "DET"])
    rows.features = {"tokens": types.SimpleNamespace(feature="string"), "upos": types.SimpleNamespace(feature=names)}
    fake_hub(monkeypatch, {"train": rows}, [])
    place = sources.find(named.known()["ud-pos"])
    with gzip.open(place.files["train"], "rt") as file:
        assert json.loads(file.readline())["upos"] == ["DET", "NOUN"]


def test_an_unreachable_hub_is_one_line_with_both_ways(mini, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route to the hub\nand more")

    fake_hub(monkeypatch, {}, [])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(DataError, match=r"--data DIR .*\(nyu-mll/glue\): no route to the hub$"):
        sources.load("rte")


def test_an_interrupted_copy_leaves_nothing_that_looks_complete(mini, tmp_path, monkeypatch):
    def rows():
        yield {"sentence1": "a"}
        raise KeyboardInterrupt

    fake_hub(monkeypatch, {"train": rows()}, [])
    with pytest.raises(KeyboardInterrupt):
        sources.load("rte")
    assert list((tmp_path / "cache").iterdir()) == []


def test_datasets_itself_is_read_from_a_folder_it_wrote(mini, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    rows = mini_rows(named.known()["rte"], 24)
    for split in ("train", "validation"):
        (tmp_path / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    (tmp_path / "own.toml").write_text(OWN.format(hub=tmp_path / "hub"))
    monkeypatch.setenv("BITFIT_TASKS", str(tmp_path / "own.toml"))
    dataset, task = sources.load("mine")
    assert (len(dataset.train), len(dataset.dev), task.name) == (24, 24, "mine")


# ---- a user's own tasks ----

OWN = """
[mine]
about = "my own pairs"
kind = "classification"
columns = {{ text = ["sentence1"], text_pair = ["sentence2"], label = ["label"] }}
labels = ["no", "yes"]
metric = "f1"
hub = {{ id = "{hub}" }}
"""


def test_a_users_task_comes_in_by_the_same_door(tmp_path, monkeypatch, mini):
    (tmp_path / "own.toml").write_text(OWN.format(hub="x/y"))
    assert sources.named_task(str(tmp_path / "own.toml")).labels == ("no", "yes")
    monkeypatch.setenv("BITFIT_TASKS", str(tmp_path / "own.toml"))
    dataset, _ = sources.load("mine", folder=mini("mine"))
    assert dataset.labels == ("no", "yes")
    assert sources.listing(tmp_path / "data")[-1]["splits"] == {"train": "train.jsonl.gz", "dev": "dev.jsonl.gz"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('metric = "f1"', ""), 'task mine: "metric" is missing'),
        (('"f1"', "3"), "metric: must be a text, not a whole number"),
        (("metric", "metrik"), 'no entry "metrik". Did you mean "metric"'),
        (('"classification"', '"klassification"'), 'no kind "klassification". Did you mean "classification"'),
        (('label = ["label"]', "tag = []"), 'columns: "label" is missing'),
        (('id = "x/y"', 'ids = "x/y"'), 'hub: no entry "ids". Did you mean "id"'),
        (('"f1"', '"f1"\nanswers = ["one"]'), "answers: there must be one for each label"),
        (('"f1"', '"f1"\nglue = [{split = "tset", file = "f.tsv", rows = 1}]'), 'glue: no split "tset"'),
        (("[mine]", "[mine"), "not a TOML file"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, change, message):
    (tmp_path / "own.toml").write_text(OWN.format(hub="x/y").replace(*change))
    with pytest.raises(UsageError, match=message):
        named.read(tmp_path / "own.toml")


# ---- the command line ----


def test_tasks_lists_every_task_and_where_it_is(mini, capsys):
    folder = mini("qqp", train="train_sample", dev="heldout_sample")
    assert run(["tasks", "--data", str(folder), "--json"]) == 0
    found = {task["name"]: task for task in json.loads(capsys.readouterr().out)}
    assert set(found) == set(PAPERS) and found["qqp"]["partial"] == ["train", "dev"]
    assert found["rte"]["folder"] is None
    assert run(["tasks", "--data", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "train (part), dev (part)" in shown and "hub: nyu-mll/glue wnli" in shown


def test_doctor_reports_the_data_folder(mini, monkeypatch, capsys):
    folder = mini("rte")
    monkeypatch.setenv("BITFIT_DATA", str(folder))
    assert run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["BITFIT_DATA"] == str(folder) and facts["tasks with data here"] == "rte"


def test_tasks_needs_no_torch(mini):
    import subprocess

    code = "import sys; from bitfit.cli.main import run; run(['tasks']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
