"""Scoring tables: every row of every file answered once, in order, in parts that are computed once."""

from __future__ import annotations

import csv
import json

import pytest

from bitfit import Predictor
from bitfit.cli.main import run
from bitfit.errors import DataError, UsageError
from bitfit.prediction import table
from bitfit.prediction.predictor import CHUNK
from bitfit.prediction.table import Input, Scorer, Scoring, score
from support import delta_of, reviews

pyarrow = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

TASKS = ("stars", "mood", "topic")


@pytest.fixture
def folder(tmp_path, base, folders):
    """A folder `in` of one Parquet file of several parts, one CSV and one JSON lines file; deltas of three tasks."""
    (tmp_path / "deltas").mkdir()
    for seed, name in enumerate(TASKS):
        delta_of(base, seed, labels=2 + seed).save(tmp_path / "deltas" / f"{name}.safetensors")
    (tmp_path / "in").mkdir()
    texts = [text for text, _ in reviews(2 * CHUNK + 60)]
    rows = [{"key": number, "text": text, "task": TASKS[number % 3]} for number, text in enumerate(texts)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in" / "a.parquet", row_group_size=500)
    (tmp_path / "in" / "b.csv").write_text("key,text,task\n1,good film,mood\n2,bad\n3,fine plot,stars\n")
    lines = ['{"key": 1, "text": "good film", "task": "mood"}', '{"key": 2,', '{"key": 3, "text": 5, "task": "topic"}']
    (tmp_path / "in" / "c.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def scoring(folder, folders, mixed=False, **changes):
    delta = folder / "deltas" if mixed else folder / "deltas" / "mood.safetensors"
    column = "task" if mixed else None
    return Scoring(str(delta), str(folders("bert")), task_column=column, **{"part_rows": CHUNK, **changes})


def parts(folder, stem="a"):
    return sorted((folder / "out").glob(f"{stem}-*"))


def test_every_row_is_answered_in_order_as_predict_answers_it(folder, folders, base):
    found = score(scoring(folder, folders), str(folder / "in" / "*.parquet"), folder / "out")
    rows = pq.read_table(parts(folder)).to_pylist()
    assert (found.parts, found.rows, found.errors) == (3, len(rows), 0)
    assert [row["key"] for row in rows] == list(range(2 * CHUNK + 60))
    predictor = Predictor(folder / "deltas" / "mood.safetensors", base)
    answers = list(predictor.answers([row["text"] for row in rows]))
    assert [row["label"] for row in rows] == [answer["label"] for answer in answers]
    assert [row["score"] for row in rows] == [round(answer["score"], 6) for answer in answers]
    assert [row["p(c1)"] for row in rows] == [round(answer["scores"]["c1"], 6) for answer in answers]


def test_a_column_names_the_task_of_each_row(folder, folders, base):
    score(scoring(folder, folders, mixed=True), str(folder / "in" / "a.parquet"), folder / "out")
    rows = pq.read_table(parts(folder)).to_pylist()
    for name in TASKS:
        own = [row for row in rows if row["task"] == name]
        answers = list(Predictor(folder / "deltas" / f"{name}.safetensors", base).answers(r["text"] for r in own))
        assert [row["label"] for row in own] == [answer["label"] for answer in answers]
        assert [row["score"] for row in own] == pytest.approx([answer["score"] for answer in answers], abs=1e-5)
        assert json.loads(own[0]["scores"]) == pytest.approx(answers[0]["scores"], abs=1e-5)


def test_parts_that_exist_are_not_computed_again(folder, folders, monkeypatch):
    settings, pattern = scoring(folder, folders), str(folder / "in")
    score(settings, pattern, folder / "out")
    before = {path: path.read_bytes() for path in parts(folder)}
    parts(folder)[1].unlink()
    (folder / "out" / "b-00000.csv").unlink()
    answered = []
    real = Scorer.answers
    monkeypatch.setattr(Scorer, "answers", lambda self, asked: answered.append(len(asked)) or real(self, asked))
    found = score(settings, pattern, folder / "out")
    assert answered == [CHUNK, 3]
    assert (found.parts, found.kept) == (2, 3)
    assert {path: path.read_bytes() for path in parts(folder)} == before


def test_one_bad_row_does_not_lose_its_file(folder, folders):
    found = score(scoring(folder, folders, mixed=True), str(folder / "in"), folder / "out")
    with (folder / "out" / "b-00000.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] != "" for row in rows] == [True, False, True]
    assert rows[1]["error"].startswith("3 fields (key, text, task) expected, 2 found")
    lines = [json.loads(line) for line in (folder / "out" / "c-00000.jsonl").read_text().splitlines()]
    assert [line["error"] is None for line in lines] == [True, False, True]
    assert "invalid JSON" in lines[1]["error"]
    assert found.errors == 2
    assert not found.failures


def test_an_unknown_task_and_a_text_that_fails_are_errors_of_their_rows(folder, folders, monkeypatch):
    path = folder / "in" / "b.csv"
    path.write_text("key,text,task\n1,good film,mood\n2,bad,nothing\n3,broken plot,stars\n")
    scorer = Scorer(scoring(folder, folders, mixed=True))
    real = scorer._answer

    def fails(requests):
        if any("broken" in text for _, text in requests):
            raise DataError("cannot be read")
        return real(requests)

    scorer._answer = fails
    (unit,) = table._units([Input(path, path.relative_to(folder))], scorer.scoring, folder / "out")
    assert scorer.score(unit).errors == 2
    with (folder / "out" / "in" / "b-00000.csv").open() as file:
        assert [row["error"] for row in csv.DictReader(file)] == ["", 'no task "nothing"', "cannot be read"]


def test_a_file_that_cannot_be_read_does_not_lose_the_others(folder, folders):
    (folder / "in" / "d.parquet").write_bytes(b"PAR1 nothing")
    (folder / "in" / "e.csv").write_text("key,other\n1,2\n")
    found = score(scoring(folder, folders), str(folder / "in"), folder / "out")
    assert {name.rpartition("/")[2] for name in found.failures} == {"d.parquet", "e.csv"}
    assert found.parts == 5


def test_parts_of_another_scoring_are_not_mixed_up(folder, folders):
    pattern = str(folder / "in")
    score(scoring(folder, folders), pattern, folder / "out")
    with pytest.raises(UsageError, match="the deltas or options were others"):
        score(scoring(folder, folders, mixed=True), pattern, folder / "out")
    (folder / "in" / "b.csv").write_text("key,text\n1,good\n")
    with pytest.raises(UsageError, match=r"b\.csv has changed"):
        score(scoring(folder, folders), pattern, folder / "out")
    found = score(scoring(folder, folders), pattern, folder / "out", force=True)
    assert (found.parts, found.kept) == (5, 0)
    with pytest.raises(UsageError, match="not empty"):
        score(scoring(folder, folders), pattern, folder / "in")


def test_new_files_join_an_earlier_scoring(folder, folders):
    score(scoring(folder, folders), str(folder / "in"), folder / "out")
    (folder / "in" / "d.csv").write_text("key,text\n1,good\n")
    found = score(scoring(folder, folders), str(folder / "in"), folder / "out")
    assert (found.parts, found.kept) == (1, 5)


def test_all_parts_of_a_file_have_one_schema(folder, folders):
    score(scoring(folder, folders), str(folder / "in" / "a.parquet"), folder / "out")
    schemas = [pq.read_schema(path) for path in parts(folder)]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert str(schemas[0].field("key").type) == "int64"
    assert str(schemas[0].field("error").type) == "string"


def test_the_command_scores_a_pattern(folder, folders, capsys):
    words = ["predict", str(folder / "deltas"), "--base", str(folders("bert")), "--file", str(folder / "in" / "*"),
             "--task-column", "task", "--out", str(folder / "out"), "--format", "csv"]  # fmt: skip
    assert run(words) == 0
    assert '2 rows without an answer, see the column "error"' in capsys.readouterr().out
    assert len(list((folder / "out").glob("*.csv"))) == 3
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["--file", "{in}"], "pass a folder with --out DIR"),
        (["--file", "{in}/b.csv", "--workers", "2"], "--workers is only for"),
        (["--file", "{in}/none*.csv", "--out", "{tmp}/out"], "no such files"),
        (["--file", "{in}", "--task-column", "task", "--out", "{tmp}/out"], "needs a folder of deltas"),
        (["--file", "{in}", "--address", "x", "--out", "{tmp}/out"], "--address is only for --engine ray"),
    ],
)
def test_wrong_words_are_refused(folder, folders, words, message, capsys):
    given = [word.format(**{"in": folder / "in", "tmp": folder}) for word in words]
    delta = str(folder / "deltas" / "mood.safetensors")
    assert run(["predict", delta, "--base", str(folders("bert")), *given]) in (2, 3)
    assert message in capsys.readouterr().err
