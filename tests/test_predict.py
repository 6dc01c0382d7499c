"""Predicting, evaluating and exporting: the delta says the same everywhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from bitfit import Delta, Predictor, export, predict, train
from bitfit.data.examples import Columns
from bitfit.errors import DataError, DeltaError, ModelError, UsageError
from support import ARCHITECTURES, INJECT, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
TEXTS = ["good film", "a very bad plot and awful cast", "fine"]


def labelled(path, pair=False, numbers=False):
    rows = [(t, t[::-1], 1.25 * (label == "positive") if numbers else label) for t, label in reviews(32)]
    head = "text1,text2,label" if pair else "text,label"
    lines = [f"{a},{b},{c}" if pair else f"{a},{c}" for a, b, c in rows]
    path.write_text(head + "\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def delta(base, csv_file):
    return train(csv_file, base, lr=1e-2, epochs=1).best.delta


def test_answers_carry_label_score_and_all_scores(delta, base):
    answers = predict(delta, TEXTS, base)
    for answer in answers:
        assert set(answer["scores"]) == {"negative", "positive"}
        assert answer["score"] == max(answer["scores"].values()) == answer["scores"][answer["label"]]
        assert sum(answer["scores"].values()) == pytest.approx(1)


def test_an_answer_does_not_depend_on_its_neighbours(delta, base):
    together = predict(delta, TEXTS, base)
    alone = [predict(delta, [text], base)[0] for text in TEXTS]
    for a, b in zip(together, alone, strict=True):
        assert a["score"] == pytest.approx(b["score"], abs=1e-6)


def test_answers_stream(delta, base):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield "good film"

    answers = Predictor(delta, base).answers(endless())
    assert next(answers)["label"] in ("negative", "positive") and taken < 5000


def test_empty_odd_and_huge_texts_get_an_answer(delta, base):
    texts = ["", " ", "NA", "None", "\x00", "word " * 200_000, "日本語", "\u202e"]
    assert len(predict(delta, texts, base)) == len(texts)


def test_pairs_need_pairs_and_singles_singles(delta, base, tmp_path):
    paired = train(labelled(tmp_path / "p.csv", pair=True), base, lr=1e-2, epochs=1).best.delta
    assert predict(paired, [("good", "bad")], base)
    with pytest.raises(UsageError, match="pairs"):
        predict(paired, ["good"], base)
    with pytest.raises(UsageError, match="single texts"):
        predict(delta, [("good", "bad")], base)


def test_evaluating_the_training_file_gives_the_training_scores(base, csv_file, tmp_path):
    lines = csv_file.read_text().splitlines()
    for name, part in (("train", lines), ("dev", lines)):
        (tmp_path / f"{name}.csv").write_text("\n".join(part) + "\n")
    best = train(tmp_path, base, lr=1e-2, epochs=1).best
    rows, scores, _ = Predictor(best.delta, base).evaluate(tmp_path / "dev.csv")
    assert rows == 64 and scores == best.scores["dev"]


def test_an_unknown_label_in_evaluation_is_named_with_its_line(delta, base, tmp_path):
    path = tmp_path / "e.csv"
    path.write_text("text,label\ngood,positive\nbad,mixed\n")
    with pytest.raises(DataError, match=r"(?s)3.*mixed"):
        Predictor(delta, base).evaluate(path)


def test_a_missing_base_is_named(delta):
    with pytest.raises(ModelError, match=r"model folder bert.*--base"):
        Predictor(delta)


def test_the_base_of_a_delta_is_found_by_its_name_in_bitfit_models(delta, base, folders, monkeypatch):
    monkeypatch.setenv("BITFIT_MODELS", str(folders("bert").parent))
    texts = ["good", "bad"]
    assert predict(delta, texts) == predict(delta, texts, base)


@pytest.mark.parametrize("name", ["", ".", "..", "../bert", "/tmp"])
def test_a_name_in_a_delta_never_leads_out_of_bitfit_models(name, folders, monkeypatch):
    from bitfit.model.base import model_folder

    monkeypatch.setenv("BITFIT_MODELS", str(folders("bert").parent))
    assert model_folder(name) is None and model_folder(folders("bert").name) is not None


def test_a_delta_of_a_folder_never_asks_the_hub(delta, monkeypatch):
    from bitfit.prediction import predictor as prediction

    monkeypatch.setattr(prediction, "load_base", lambda *_: pytest.fail("looked for a base"))
    with pytest.raises(ModelError):
        Predictor(delta)


def test_a_base_that_wears_a_delta_is_refused_until_it_is_undone(delta, base, csv_file):
    undo = delta.apply(base)
    try:
        for use in (lambda: delta.apply(base), lambda: train(csv_file, base, lr=1e-2), lambda: Predictor(delta, base)):
            with pytest.raises(ModelError, match="still has a delta applied"):
                use()
    finally:
        undo()
    undo()
    assert predict(delta, TEXTS, base)


def test_undoing_a_delta_of_the_head_alone_frees_the_base(base, csv_file):
    train(csv_file, base, select="none", lr=1e-2, epochs=1).best.delta.apply(base)()
    base.require_clean()


def test_evaluating_a_folder_takes_its_test_file(delta, base, csv_file, tmp_path):
    lines = csv_file.read_text().splitlines()
    for name, count in (("train", 40), ("test", 21)):
        (tmp_path / "f").mkdir(exist_ok=True)
        (tmp_path / "f" / f"{name}.csv").write_text("\n".join(lines[:count]) + "\n")
    assert Predictor(delta, base).evaluate(tmp_path / "f")[0] == 20


def test_other_columns_are_taken_when_named_and_said_when_found(delta, base, tmp_path):
    path = tmp_path / "o.csv"
    path.write_text("words,mark,stars\ngood film,positive,1\nbad film,negative,2\n")
    rows, _, notes = Predictor(delta, base).evaluate(path, text="words", label="mark")
    assert rows == 2 and '"mark"' in notes[0]


@pytest.mark.parametrize("texts", [[None], [3], ["\ud800"], [("a", None)]])
def test_what_is_no_text_is_refused(delta, base, texts):
    with pytest.raises((TypeError, UsageError), match=r"text"):
        predict(delta, texts, base)


def test_the_wrong_base_is_refused_with_both_names(delta, bases):
    with pytest.raises(DeltaError, match=r"bert.*roberta"):
        Predictor(delta, bases("roberta"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("numbers", [False, True])
def test_stock_transformers_loads_an_export_and_predicts_the_same(bases, architecture, numbers, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = bases(architecture)
    select = "layernorm" if architecture in INJECT else "bias"
    source = labelled(tmp_path / "t.csv", numbers=numbers)
    best = train(source, base, select=select, pool="cls", lr=1e-2, epochs=1).best.delta
    if numbers and architecture in ("gpt2", "llama", "qwen2", "opt"):  # its head has no bias for the labels' mean
        with pytest.raises(DeltaError, match="no bias"):
            export(best, base, tmp_path / "out")
        return
    folder = export(best, base, tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    if not base.segments:
        batch.pop("token_type_ids", None)
    with torch.no_grad():
        logits = model(**batch).logits.double()
    if numbers:
        expected = [answer["value"] for answer in predict(best, TEXTS, base)]
        np.testing.assert_allclose(logits[:, 0].numpy(), expected, atol=1e-6, rtol=1e-6)
    else:
        expected = [list(answer["scores"].values()) for answer in predict(best, TEXTS, base)]
        np.testing.assert_allclose(logits.softmax(-1).numpy(), expected, atol=1e-6)
        assert model.config.id2label == {0: "negative", 1: "positive"}


@pytest.mark.parametrize("numbers", [False, True])
def test_the_lines_on_a_mean_pooled_card_predict_the_same(base, numbers, tmp_path):
    best = train(labelled(tmp_path / "t.csv", numbers=numbers), base, pool="mean", lr=1e-2, epochs=1).best.delta
    folder = export(best, base, tmp_path / "out")
    logits = torch.from_numpy(card_logits(folder, '["a text"]', TEXTS)).double()
    assert logits.shape == (3, 1 if numbers else 2)
    answers = predict(best, TEXTS, base)
    if numbers:
        np.testing.assert_allclose(logits[:, 0].numpy(), [a["value"] for a in answers], atol=1e-6)
    else:
        np.testing.assert_allclose(logits.softmax(-1).numpy(), [list(a["scores"].values()) for a in answers], atol=1e-6)


def card_logits(folder, placeholder, texts):
    """Run the card's own lines, as a reader would, on our texts."""
    lines = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S).group(1)
    script = lines.replace(placeholder, repr(texts)) + "import json; print(json.dumps(logits.tolist()))\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def test_an_export_leaves_the_base_and_a_full_folder_alone(delta, base, tmp_path):
    before = {name: value.clone() for name, value in base.encoder.state_dict().items()}
    export(delta, base, tmp_path / "out")
    assert all(torch.equal(before[n], value) for n, value in base.encoder.state_dict().items())
    with pytest.raises(UsageError, match="not empty"):
        export(delta, base, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        export(delta, base, tmp_path / "file" / "x")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_hostile_label_names_stay_text_on_the_card(base, tmp_path):
    path = tmp_path / "h.csv"
    rows = "".join(
        f"{t},{'<script>alert(1)</script>' if label == 'positive' else '`](x)'}\n" for t, label in reviews(24)
    )
    path.write_text("text,label\n" + rows)
    best = train(path, base, lr=1e-2, epochs=1).best.delta
    card = (export(best, base, tmp_path / "out") / "README.md").read_text()
    assert "<script>" not in card and "](x)" not in card


def test_a_delta_loaded_from_its_file_says_the_same(delta, base, tmp_path):
    delta.save(tmp_path / "d.safetensors")
    assert predict(Delta.load(tmp_path / "d.safetensors"), TEXTS, base) == predict(delta, TEXTS, base)


def test_an_exported_pair_task_keeps_its_segments(base, tmp_path):
    delta = train(labelled(tmp_path / "p.csv", pair=True), base, lr=1e-2, epochs=1, pool="cls").best.delta
    folder = export(delta, base, tmp_path / "model")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pair = ("good film the", "a bad one")
    batch = AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**batch).logits
    ours = predict(delta, [pair], base)[0]["scores"]
    assert logits.softmax(-1)[0].tolist() == pytest.approx(list(ours.values()), abs=1e-6)


def test_a_column_of_training_stays_when_another_is_named(delta, base, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("headline,text,verdict\n" + "a long line of words,good film,positive\n" * 3)
    assert Predictor(delta, base).columns_in(path, True, label="verdict") == Columns("text", None, "verdict")


def test_values_too_large_for_an_answer_are_an_error(delta, base):
    huge = {name: np.full_like(value, 3e38) for name, value in delta.tensors.items()}
    with pytest.raises(DeltaError, match="not finite numbers"):
        predict(Delta(huge, delta.meta), ["good film"], base)
