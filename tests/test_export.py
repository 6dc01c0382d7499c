"""An exported folder answers in transformers as `bitfit predict` does, for every kind, pooling and architecture."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from bitfit import Delta, export, load_base, predict, train
from bitfit.errors import DeltaError
from bitfit.model.base import Base
from support import ARCHITECTURES, WORDS, delta_of, make_folder, reviews

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


@pytest.mark.parametrize("pool", ["cls", "mean", "pair"])
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


# ---- pairs whose texts are encoded by themselves: the folder's code takes apart what its tokenizer joins

PAIR = {"text": "first", "label": "label", "text_pair": "second"}
# Of 20 tokens two are special. A pair of 60 and 60 is cut by the tokenizer too.
LENGTHS = (0, 1, 17, 18, 19, 25, 60)
LONG = [*WORDS, *WORDS[3:], *WORDS[6:], *WORDS]
PAIRS = [(" ".join(LONG[:first]), " ".join(LONG[5:][:second])) for first, second in product(LENGTHS, LENGTHS)]


def pair_delta(base: Base, **changes: Any) -> Delta:
    """A delta with a head on both texts of a pair."""
    select = "all" if base.config.model_type in ("llama", "qwen2", "modernbert") else "bias"
    return delta_of(base, labels=3, pool="pair", columns=PAIR, select_text=select, **changes)


def opened(folder: Path) -> tuple[Any, Any]:
    """Tokenizer and model of a folder with code."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return tokenizer, model.eval()


def scores_of(folder: Path, pairs: list[tuple[str, str]], **options: Any) -> np.ndarray:
    """The probabilities that a folder gives pairs, in one batch."""
    tokenizer, model = opened(folder)
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt", **options)
    with torch.no_grad():
        return model(**batch).logits.softmax(-1).numpy()


def expected_of(delta: Delta, pairs: list[tuple[str, str]], base: Base) -> list[list[float]]:
    """The probabilities that bitfit gives them."""
    return [list(answer["scores"].values()) for answer in predict(delta, pairs, base)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_of_a_pair_are_cut_where_training_cut_each(bases, architecture, tmp_path):
    base = bases(architecture)
    delta = pair_delta(base)
    folder = export(delta, base, tmp_path / "out")
    expected = expected_of(delta, PAIRS, base)
    for options in ({}, {"truncation": True}, {"padding_side": "left"}):
        np.testing.assert_allclose(scores_of(folder, PAIRS, **options), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_a_pipeline_answers_pairs_of_every_kind(base, kind, tmp_path):
    delta = pair_delta(base, kind=kind)
    pipe = loaded(export(delta, base, tmp_path / "out"), "text-classification")
    found = pipe([{"text": a, "text_pair": b} for a, b in PAIRS], top_k=None, truncation=True, batch_size=8)
    for items, answer in zip(found, predict(delta, PAIRS, base), strict=True):
        expected = answer.get("scores", {"LABEL_0": answer.get("value")})
        assert {item["label"]: item["score"] for item in items} == pytest.approx(expected, abs=1e-5)


def joined_by(folder: Path, single: str, pair: str, **changes: Any) -> Base:
    """A base whose tokenizer puts its special tokens so."""
    make_folder(folder, "roberta")
    path = str(folder / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    tokens = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
    backend.save(path)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    return load_base(folder)


@pytest.mark.parametrize("changes", [{}, {"truncation_side": "left", "padding_side": "left"}], ids=["right", "left"])
def test_pairs_with_two_separators_between_them_are_taken_apart(tmp_path, changes):
    joint = "[CLS] $A [SEP] [SEP] $B [SEP]"
    base = joined_by(tmp_path / "base", "[CLS] $A [SEP]", joint, **changes)
    delta = pair_delta(base)
    folder = export(delta, base, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["pair"]["separators"] == 2
    np.testing.assert_allclose(scores_of(folder, PAIRS, truncation=True), expected_of(delta, PAIRS, base), atol=1e-5)


@pytest.mark.parametrize(
    "single, pair",
    [
        ("$A", "$A $B"),  # GPT-2
        ("[CLS] $A", "[CLS] $A [CLS] $B:1"),  # Llama, OPT
        ("$A [SEP]", "$A [SEP] $B [SEP]"),  # T5
        ("[CLS] $A [SEP]", "[CLS] $B [SEP] $A [SEP]"),
        ("[CLS] $A [SEP]", "[CLS] $A [CLS] $B [SEP]"),
    ],
)
def test_pairs_that_cannot_be_taken_apart_are_an_error_and_nothing_is_written(tmp_path, single, pair):
    base = joined_by(tmp_path / "base", single, pair)
    with pytest.raises(DeltaError, match="could not take them apart; use bitfit predict instead"):
        export(pair_delta(base), base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pair_without_its_special_tokens_is_an_error_that_says_so(base, tmp_path):
    tokenizer, model = opened(export(pair_delta(base), base, tmp_path / "out"))
    with pytest.raises(ValueError, match=r"with their special tokens: tokenizer\(first, second\)"):
        model(**tokenizer("good film", "the plot", add_special_tokens=False, return_tensors="pt"))


@pytest.mark.parametrize(
    "architecture, options, fold",
    [
        ("bert", {}, False),
        ("bert", {}, True),
        ("bert", {"select": "all", "lr": 1e-3}, False),
        ("bert", {"inject": "lora(W_q + W_v, 2)", "select": "injected"}, False),
        ("gpt2", {"inject": "lora(W_v, 2)", "select": "injected"}, False),
        ("bert", {"inject": "adapter(4)", "select": "injected"}, False),
        ("llama", {"inject": "bias", "select": "bias"}, False),
    ],
)
def test_the_lines_on_the_card_answer_pairs_as_predict_does(bases, architecture, options, fold, tmp_path, monkeypatch):
    base = bases(architecture)
    rows = [{"first": text, "second": "the plot", "label": label} for text, label in reviews(48)]
    settings = {"pool": "pair", "max_length": 20, "lr": 3e-2, "epochs": 1, **options}
    delta = train(rows, base, text_pair="second", **settings).best.delta
    assert delta.meta.pool == "pair"
    monkeypatch.chdir(export(delta, base, tmp_path / "out", fold=fold))
    text = Path("README.md").read_text()
    assert "cut at 20 tokens" in text and "a joint pair at 40 tokens" in text
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    lines = re.search(r"```python\n(.*?)```", text, re.S)[1]
    scope: dict[str, Any] = {}
    exec(lines.replace('["first text"], ["second text"]', f"{firsts}, {seconds}"), scope)
    np.testing.assert_allclose(scope["logits"].softmax(-1), expected_of(delta, PAIRS, base), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool", ["mean", "pair"])
def test_a_model_with_code_has_one_type_whatever_the_type_of_its_base(folders, pool, dtype, tmp_path):
    source = tmp_path / "base"
    AutoModel.from_pretrained(folders("bert")).half().save_pretrained(source)
    AutoTokenizer.from_pretrained(folders("bert")).save_pretrained(source)
    base = load_base(source)
    folder = export(delta_of(base, pool=pool, columns=PAIR), base, tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_everybody_may_read_what_is_exported(base, tmp_path):
    folder = export(delta_of(base, 0), base, tmp_path / "exported")
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}


def test_a_folder_with_its_own_code_has_no_path_of_this_machine(base, tmp_path):
    export(delta_of(base, pool="mean"), base, tmp_path / "out")
    config = (tmp_path / "out" / "config.json").read_text()
    assert "encoder_config" in config and "_name_or_path" not in config
