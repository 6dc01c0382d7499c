"""An exported folder answers in transformers as `bitfit predict` does, for every kind, pooling and architecture."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import pipeline

from bitfit import export, predict
from bitfit.errors import DeltaError
from support import ARCHITECTURES, delta_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
TEXTS = ["good film", "the plot was very bad", "a"]
HEADS_WITHOUT_BIAS = ("gpt2", "llama", "qwen2", "opt")


def loaded(folder: Any, task: str) -> Any:
    """The pipeline as the card says it is made."""
    trust = {"trust_remote_code": True} if (folder / "modeling_bitfit.py").exists() else {}
    made = pipeline(task, str(folder), **trust)
    made.model.eval()
    return made


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel"])
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pipeline_answers_texts_as_predict_does(bases, architecture, pool, kind, tmp_path):
    base = bases(architecture)
    select = "all" if architecture in ("llama", "qwen2", "modernbert") else "bias"
    delta = delta_of(base, labels=3, kind=kind, pool=pool, select_text=select)
    if (pool, kind) == ("cls", "regression") and architecture in HEADS_WITHOUT_BIAS:
        with pytest.raises(DeltaError, match="no bias for the labels' mean"):
            export(delta, base, tmp_path / "out")
        return
    pipe = loaded(export(delta, base, tmp_path / "out"), "text-classification")
    for text, answer in zip(TEXTS, predict(delta, TEXTS, base), strict=True):
        found = {item["label"]: item["score"] for item in pipe(text, top_k=None, truncation=True)}
        expected = answer.get("scores", {"LABEL_0": answer.get("value")})
        assert found == pytest.approx(expected, abs=1e-5)


# Not Qwen2: transformers replaces the tests' word tokenizer by one of its own, which knows none of the words.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "qwen2"])
def test_a_pipeline_tags_words_as_predict_does(bases, architecture, tmp_path):
    base = bases(architecture)
    delta = delta_of(base, labels=3, kind="tagging")
    pipe = loaded(export(delta, base, tmp_path / "out"), "token-classification")
    for text, answer in zip(TEXTS, predict(delta, TEXTS, base), strict=True):
        found = pipe(text)
        assert [item["entity"] for item in found] == answer["tags"]
        assert [float(item["score"]) for item in found] == pytest.approx(answer["scores"], abs=1e-5)


def test_long_texts_are_cut_where_training_cut_them(base, tmp_path):
    delta = delta_of(base, pool="mean")
    pipe = loaded(export(delta, base, tmp_path / "out"), "text-classification")
    long = "good " * 30 + "bad " * 5
    found = pipe(long, truncation=True)
    assert found[0]["score"] == pytest.approx(predict(delta, [long], base)[0]["score"], abs=1e-5)


def test_a_folder_with_its_own_code_does_not_load_as_another_model(base, tmp_path, monkeypatch):
    folder = export(delta_of(base, pool="mean"), base, tmp_path / "out")
    monkeypatch.setattr("builtins.input", lambda _: "n")
    with pytest.raises((ValueError, OSError, KeyError), match=r"(?s)trust_remote_code|bitfit"):
        pipeline("text-classification", str(folder), trust_remote_code=False)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pipeline_answers_pairs_as_predict_does(bases, architecture, pool, tmp_path):
    base = bases(architecture)
    select = "all" if architecture in ("llama", "qwen2", "modernbert") else "bias"
    columns = {"text": "text", "label": "label", "text_pair": "second"}
    delta = delta_of(base, labels=3, pool=pool, columns=columns, select_text=select)
    pipe = loaded(export(delta, base, tmp_path / "out"), "text-classification")
    for text in TEXTS:
        items = pipe({"text": text, "text_pair": "the cast is great"}, top_k=None)
        found = {item["label"]: item["score"] for item in items}
        answer = predict(delta, [(text, "the cast is great")], base)[0]
        assert found == pytest.approx(answer["scores"], abs=1e-5)


def test_everybody_may_read_what_is_exported(base, tmp_path):
    folder = export(delta_of(base, 0), base, tmp_path / "exported")
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
