"""Data from memory: frames, data sets, lists and pairs of lists are read as files are, and nothing else is."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from bitfit import evaluate, predict, train
from bitfit.data import loading
from bitfit.data.memory import files_of
from bitfit.errors import DataError
from support import delta_of, reviews

ROWS = [{"id": i, "text": text, "label": label} for i, (text, label) in enumerate(reviews(40))]
TEXTS = [row["text"] for row in ROWS]
LABELS = [row["label"] for row in ROWS]


def loaded(data: Any) -> Any:
    return loading.load(files_of(data))


def frame(kind: str) -> Any:
    """The rows as a frame of pandas or polars."""
    return pytest.importorskip(kind).DataFrame(ROWS)


class Dataset(list):
    """What of datasets.Dataset is used here."""

    features: dict[str, Any] = {}  # noqa: RUF012


Dataset.__module__ = "datasets.arrow_dataset"


def hub_dataset() -> Any:
    """The rows with class numbers, as the hub's data sets have them."""
    numbers = {"negative": 0, "positive": 1}
    dataset = Dataset({**row, "label": numbers[row["label"]]} for row in ROWS)
    dataset.features = {"label": types.SimpleNamespace(int2str=["negative", "positive"].__getitem__), "text": object()}
    return dataset


FORMS = {
    "pandas": lambda: frame("pandas"),
    "polars": lambda: frame("polars"),
    "datasets": hub_dataset,
    "dicts": lambda: ROWS,
    "texts and labels": lambda: (TEXTS, LABELS),
    "arrays": lambda: (np.array(TEXTS), np.array(LABELS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_memory_is_the_data_set_of_the_same_file(form, tmp_path):
    path = tmp_path / "f.csv"
    path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS))
    expected, found = loading.load(path), loaded(FORMS[form]())
    assert (found.train.texts, found.train.labels) == (expected.train.texts, expected.train.labels)
    assert (found.dev.texts, found.labels, found.kind) == (expected.dev.texts, expected.labels, expected.kind)


def test_splits_are_found_by_their_names():
    dataset = loaded({"train": ROWS[:24], "validation": ROWS[24:32], "test": ROWS[32:], "extra": ROWS[:8]})
    assert (len(dataset.train), len(dataset.dev), len(dataset.test)) == (24, 8, 8)
    assert len(dataset.more["extra"]) == 8


def test_pairs_words_and_several_labels_are_told_by_their_types():
    pairs = loaded(([(text, "and this") for text in TEXTS], LABELS))
    assert pairs.columns.text_pair == "sentence2" and pairs.train.pairs
    words = [text.split() for text in TEXTS]
    assert loaded((words, [["ADJ" if word == "good" else "X" for word in own] for own in words])).kind == "tagging"
    assert loaded((TEXTS, [["a", "b"], ["b"]] * 20)).kind == "multilabel"
    assert loaded((TEXTS, np.linspace(0, 1, 40))).kind == "regression"


def test_what_is_missing_in_a_frame_is_missing_in_the_data():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": [*TEXTS, None], "label": [*LABELS, "positive"], "n": [*range(40), np.nan]})
    table.loc[3, "label"] = None
    dataset = loaded(table)
    assert len(dataset.train) + len(dataset.dev) == 39
    assert any("the data with no label (line 4)" in note for note in dataset.notes)


def test_training_takes_data_in_memory(base):
    run = train((TEXTS, LABELS), base, lr=1e-2, epochs=1)
    assert run.best.delta.labels == ("negative", "positive")


@pytest.mark.parametrize("data", [3, None, {}, {"text": ["a"]}, [], ["a", "b"], (1, 2), ("ab", "cd"), object, {1, 2}])
def test_anything_else_is_a_type_error_that_names_what_is_taken(data):
    with pytest.raises(TypeError, match=r"a pandas or polars DataFrame, a datasets\.Dataset"):
        files_of(data)


def test_texts_and_labels_of_unlike_length_are_an_error():
    with pytest.raises(DataError, match="40 texts and 39 labels"):
        files_of((TEXTS, LABELS[1:]))


# ---- the real package, where it is installed


def real_dataset(rows: Any = ROWS) -> Any:
    """The rows as a datasets.Dataset with numbered classes."""
    datasets = pytest.importorskip("datasets", reason="needs the hub extra")
    features = datasets.Features(
        id=datasets.Value("int64"),
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["negative", "positive"]),
    )
    return datasets.Dataset.from_list(rows, features=features)


def test_a_real_data_set_gives_the_names_of_its_classes():
    found = loaded(real_dataset())
    assert found.labels == ("negative", "positive")
    assert sorted(found.train.texts + found.dev.texts) == sorted(TEXTS)


def test_the_splits_of_a_real_data_set_dict_are_train_dev_and_test():
    datasets = pytest.importorskip("datasets", reason="needs the hub extra")
    splits = {"train": ROWS[:20], "validation": ROWS[20:30], "test": ROWS[30:]}
    found = loaded(datasets.DatasetDict({name: real_dataset(rows) for name, rows in splits.items()}))
    assert (len(found.train), len(found.dev), len(found.test)) == (20, 10, 10)


def test_a_real_data_set_is_trained_on_evaluated_and_answered(base):
    dataset = real_dataset()
    delta = train(dataset, base, lr=1e-2, epochs=1, threads=1).best.delta
    assert evaluate(delta, dataset, base).rows == len(ROWS)
    answers = predict(delta, dataset, base)
    assert type(answers) is type(dataset)
    assert answers["id"][:] == dataset["id"][:]
    assert set(answers["predicted_label"]) <= {"negative", "positive"}


def test_predictions_keep_rows_of_every_form(base):
    delta = train((TEXTS, LABELS), base, lr=1e-2, epochs=1).best.delta
    answers = predict(delta, TEXTS, base)
    rows = predict(delta, ROWS, base)
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert [row["predicted_label"] for row in rows] == [answer["label"] for answer in answers]
    assert predict(delta, (TEXTS, LABELS), base) == answers
    assert predict(delta, tuple(TEXTS[:2]), base) == predict(delta, TEXTS[:2], base)


def test_a_pandas_frame_keeps_its_index(base):
    delta = train((TEXTS, LABELS), base, lr=1e-2, epochs=1).best.delta
    given = frame("pandas").set_index("id").iloc[::-1]
    assert predict(delta, given, base).index.equals(given.index)


def test_data_by_split_is_evaluated_and_answered_split_by_split(base):
    datasets = pytest.importorskip("datasets", reason="needs the hub extra")
    splits = datasets.DatasetDict({"train": real_dataset(ROWS[:30]), "validation": real_dataset(ROWS[30:])})
    delta = train(splits, base, lr=1e-2, epochs=1, threads=1).best.delta
    assert evaluate(delta, splits, base, split="dev").rows == 10
    assert evaluate(delta, {"test": ROWS[:7], "train": ROWS}, base).rows == 7
    with pytest.raises(DataError, match=r'no split "test"; name one with split=: train, validation'):
        evaluate(delta, splits, base)
    answers = predict(delta, splits, base)
    assert type(answers) is datasets.DatasetDict
    assert answers["validation"]["id"][:] == splits["validation"]["id"][:]


@pytest.mark.parametrize("texts", [3, None, b"ab", {"text": "a"}, [1], [None], [b"ab"]])
def test_what_predict_does_not_take_is_a_type_error(base, texts):
    with pytest.raises(TypeError, match=r"predict takes|a text is a string"):
        predict(delta_of(base), texts, base)
