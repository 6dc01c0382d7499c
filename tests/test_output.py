"""Predictions keep their rows, in every format; evaluations say what was answered wrongly."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import threading

import pytest

from bitfit import Predictor, evaluate, predict
from bitfit.cli.main import run
from bitfit.errors import DataError, UsageError
from bitfit.files import writing
from bitfit.prediction.output import beside, check_output, write_rows
from support import delta_of, reviews

ROWS = [{"text": text, "label": label, "id": str(i)} for i, (text, label) in enumerate(reviews(8))]


@pytest.fixture
def delta(base):
    return delta_of(base)


@pytest.fixture
def table(tmp_path):
    """A file with texts, labels and ids."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label,id\n" + "".join(f"{r['text']},{r['label']},{r['id']}\n" for r in ROWS))
    return path


@pytest.fixture
def words(delta, folders, tmp_path):
    """The command that predicts with the delta."""
    delta.save(tmp_path / "d.safetensors")
    return ["predict", str(tmp_path / "d.safetensors"), "--base", str(folders("bert"))]


def read(path):
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(path.read_text())))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_answers_stand_beside_the_columns_of_the_file_ids_first(words, table, tmp_path, ending):
    out = tmp_path / f"out{ending}"
    assert run([*words, "--file", str(table), "--out", str(out)]) == 0
    rows = read(out)
    assert list(rows[0])[:4] == ["id", "text", "label", "predicted_label"]
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]


def test_standard_input_and_output_are_files_too(words, table, tmp_path, monkeypatch, capfdbinary):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.read_bytes())))
    assert run([*words, "--file", "-", "--out", "-"]) == 0
    piped = capfdbinary.readouterr().out
    assert run([*words, "--file", str(table), "--out", str(tmp_path / "o.csv")]) == 0
    assert piped == (tmp_path / "o.csv").read_bytes()


def test_an_unknown_ending_and_a_missing_folder_are_refused(words, tmp_path, capsys):
    assert run([*words, "good", "--out", str(tmp_path / "o.xls")]) == 2
    assert ".csv, .tsv, .jsonl, .parquet" in capsys.readouterr().err
    assert run([*words, "good", "--out", str(tmp_path / "typo" / "o.csv")]) == 2
    assert "there is no folder" in capsys.readouterr().err and not (tmp_path / "typo").exists()


def test_only_an_earlier_output_is_replaced_without_force(words, table, tmp_path, capsys):
    out = tmp_path / "o.csv"
    command = [*words, "--file", str(table), "--out", str(out)]
    assert run(command) == 0 and run(command) == 0
    out.write_text("my,own,notes\n1,2,3\n")
    assert run(command) == 2 and "--force" in capsys.readouterr().err
    assert out.read_text().startswith("my,own")
    assert run([*command, "--force"]) == 0 and out.read_text().startswith("id,text")


def test_a_symbolic_link_stays_one_and_a_pipe_is_written_to(words, tmp_path):
    link, target = tmp_path / "link.csv", tmp_path / "target.csv"
    link.symlink_to(target)
    assert run([*words, "good", "--out", str(link)]) == 0
    assert link.is_symlink() and target.read_text().startswith("text,")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    assert run([*words, "good", "--out", str(pipe)]) == 0
    reader.join(20)
    assert found[0] == target.read_text() and not pipe.is_file()


def test_an_input_is_never_the_output(table):
    with pytest.raises(UsageError, match="is the input"):
        check_output(table, table)


def test_nothing_to_write_is_an_empty_file(tmp_path):
    assert write_rows(tmp_path / "o.jsonl", []) == 0 and (tmp_path / "o.jsonl").read_bytes() == b""


def test_the_columns_of_all_rows_are_the_same_whatever_is_predicted(delta, base, tmp_path):
    rows = list(Predictor(delta, base).rows_in(labelled(tmp_path)))
    assert {row["label"] == row["predicted_label"] for row in rows} == {True, False}
    assert len({tuple(row) for row in rows}) == 1


def test_what_only_repeats_the_input_is_left_out():
    answer = {"tokens": ["a"], "tags": ["Y"], "scores": [0.5]}
    row = beside({"tokens": ["a"], "tags": ["X"]}, answer, echo=["tokens"])
    assert row == {"tokens": ["a"], "tags": ["X"], "predicted_tags": ["Y"], "scores": [0.5]}


# ---- frames


def test_a_pandas_frame_comes_back_with_answers_and_its_index(base, delta):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, index=[f"r{i}" for i in range(8)])
    found = predict(delta, frame, base)
    assert found.index.equals(frame.index) and list(found.columns[:3]) == ["text", "label", "id"]
    answers = predict(delta, [row["text"] for row in ROWS], base)
    assert found["predicted_label"].tolist() == [answer["label"] for answer in answers]
    assert found["p(c0)"].tolist() == pytest.approx([answer["scores"]["c0"] for answer in answers], abs=1e-6)
    assert "predicted_label" not in frame.columns


def test_a_polars_frame_comes_back_with_answers(base, delta):
    polars = pytest.importorskip("polars")
    found = predict(delta, polars.DataFrame(ROWS), base)
    assert found.height == 8 and found.columns[:4] == ["text", "label", "id", "predicted_label"]


@pytest.mark.parametrize("texts", [5, b"good", {"text": ["good"]}])
def test_what_is_not_texts_is_a_type_error(base, delta, texts):
    with pytest.raises(TypeError, match="predict takes a text, a list of texts"):
        predict(delta, texts, base)


# ---- evaluation


def labelled(tmp_path):
    """A labelled file for a delta of classes c0 and c1."""
    path = tmp_path / "e.csv"
    path.write_text("text,label\n" + "".join(f"{r['text']},c{i % 2}\n" for i, r in enumerate(ROWS)))
    return path


def test_an_evaluation_counts_confusions_and_keeps_wrong_rows(base, delta, tmp_path):
    path = labelled(tmp_path)
    found = evaluate(delta, path, base)
    answers = [answer["label"] for answer in predict(delta, [row["text"] for row in ROWS], base)]
    wrong = [i for i, answer in enumerate(answers) if answer != f"c{i % 2}"]
    assert [row["line"] - 2 for row in found.errors] == wrong
    assert all(row["label"] != row["predicted"] for row in found.errors)
    assert all(type(row.precision) is float for row in found.by_class)
    assert sum(map(sum, found.confusion)) == 8 and sum(row.support for row in found.by_class) == 8
    assert found.confusion[0][0] + found.confusion[1][1] == 8 - len(wrong)
    assert found.scores == Predictor(delta, base).evaluate(path)[1]


def test_the_positive_class_can_be_named(base, delta, tmp_path):
    path = labelled(tmp_path)
    by_class = {row.label: row for row in evaluate(delta, path, base).by_class}
    for label in ("c0", "c1"):
        found = evaluate(delta, path, base, positive=label)
        assert found.scores["recall"].value == pytest.approx(by_class[label].recall)
    with pytest.raises(UsageError, match=r'--positive: no class "c2"'):
        evaluate(delta, path, base, positive="c2")


def test_rows_in_memory_are_evaluated_as_a_file_is(base, delta, tmp_path):
    path = labelled(tmp_path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert evaluate(delta, rows, base).scores == evaluate(delta, path, base).scores


def test_evaluate_prints_classes_and_writes_errors(words, base, tmp_path, capsys):
    path, errors = labelled(tmp_path), tmp_path / "errors.jsonl"
    command = ["evaluate", *words[1:2], str(path), *words[2:], "--errors", str(errors)]
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert "true \\ predicted" in shown and "average_precision" in shown and "8 rows" in shown
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == len(read(errors)) and found["by_class"]["c0"]["support"] == 4


def test_errors_keep_the_columns_of_their_rows(delta, base, tmp_path):
    path = tmp_path / "e.csv"
    path.write_text("text,label,id\n" + "".join(f"{r['text']},c{i % 2},row {i}\n" for i, r in enumerate(ROWS)))
    errors = evaluate(delta, path, base).errors
    assert errors
    for error in errors:
        number = int(error["id"].removeprefix("row "))
        assert next(iter(error)) == "id" and error["line"] == number + 2
        assert (error["text"], error["label"]) == (ROWS[number]["text"], f"c{number % 2}")
        assert error["predicted"] != error["label"] and error["score"] == float(f"{error['score']:.6g}")


def test_errors_of_a_frame_have_its_index_and_the_names_of_its_columns(delta, base):
    pandas = pytest.importorskip("pandas")
    rows = [{"question": row["text"], "category": f"c{i % 2}"} for i, row in enumerate(ROWS)]
    names = [f"row {i}" for i in range(len(rows))]
    errors = evaluate(delta, pandas.DataFrame(rows, index=names), base, text="question", label="category").errors
    assert errors
    for error in errors:
        assert list(error)[:4] == ["index", "question", "category", "predicted"] and "line" not in error
        assert rows[names.index(error["index"])]["category"] == error["category"] != error["predicted"]
    assert [error["index"] for error in evaluate(delta, rows, base, text="question", label="category").errors] == [
        names.index(error["index"]) for error in errors
    ]


def test_errors_do_not_replace_the_data(words, table, folders, capsys):
    before = table.read_bytes()
    command = ["evaluate", words[1], str(table), "--base", str(folders("bert")), "--errors", str(table), "--force"]
    assert run(command) == 2 and "is the input" in capsys.readouterr().err
    assert table.read_bytes() == before


def test_a_file_without_labels_says_so_even_if_a_column_looks_like_one(delta, base, tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("text,source\n" + "".join(f"{row['text']},web\n" for row in ROWS))
    with pytest.raises(DataError, match=r'no column "label".*bitfit predict, which needs no labels'):
        evaluate(delta, path, base)


def test_rows_of_one_class_leave_scores_undefined_and_that_is_said(delta, base):
    rows = [{"text": row["text"], "label": "c1"} for row in ROWS]
    assert any('Every row is "c1": auc' in note for note in evaluate(delta, rows, base).notes)


def test_a_json_list_may_come_from_standard_input(words, monkeypatch, capsys):
    rows = json.dumps([{"id": "a", "text": "good film"}, {"id": "b", "text": "bad film"}]).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows)))
    assert run([*words, "--file", "-", "--json", "--out", "-"]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def test_standard_input_is_called_so_in_errors(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a,b\n1,2\n")))
    assert run([*words, "--file", "-"]) == 3
    assert capsys.readouterr().err.startswith("bitfit: standard input")


def test_a_pipe_behind_a_link_is_written_to(tmp_path):
    """As /dev/stdout is: a link to an open file that has no path."""
    reader, writer = os.pipe()
    link = tmp_path / "link"
    link.symlink_to(f"/proc/self/fd/{writer}")
    with writing(link) as file:
        file.write(b"rows")
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"rows"


@pytest.mark.parametrize("option", ["out", "suspects", "errors", "plot"])
def test_no_output_replaces_a_file_of_somebody_else(option, words, table, folders, tmp_path, capsys):
    other = tmp_path / "other.csv"
    other.write_text("name,born\nAda,1815\n")
    base = ["--base", str(folders("bert"))]
    commands = {
        "out": ["train", str(table), *base, "--out", str(other)],
        "suspects": ["train", str(table), *base, "--suspects", str(other), "--out", str(tmp_path / "x.safetensors")],
        "errors": ["evaluate", words[1], str(labelled(tmp_path)), *base, "--errors", str(other)],
        "plot": ["inspect", words[1], "--plot", str(other)],
    }
    assert run(commands[option]) == 2
    assert f"{other}: exists and is not" in capsys.readouterr().err
    assert other.read_text() == "name,born\nAda,1815\n"


@pytest.mark.parametrize("command", ["train", "export", "inspect", "evaluate"])
def test_a_mistyped_folder_is_not_created(command, words, table, folders, tmp_path, capsys):
    base = ["--base", str(folders("bert"))]
    target = tmp_path / "no" / "file.csv"
    commands = {
        "train": ["train", str(table), *base, "--out", str(target)],
        "export": ["export", words[1], *base, "--out", str(target)],
        "inspect": ["inspect", words[1], "--plot", str(target)],
        "evaluate": ["evaluate", words[1], str(table), *base, "--errors", str(target)],
    }
    assert run(commands[command]) == 2
    assert f"there is no folder {target.parent}" in capsys.readouterr().err and not target.parent.exists()
