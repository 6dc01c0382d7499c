"""PEFT both ways: an imported folder answers as PEFT does, and PEFT answers from an exported folder as bitfit does."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bitfit import Delta, export, export_peft, import_peft
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.cli.main import run
from bitfit.delta.peft_folder import CONFIG, PICKLE, WEIGHTS
from bitfit.errors import DeltaError, ModelError, UsageError
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.serve.repository import describe
from bitfit.tasks import Task
from bitfit.tasks.encode import Encoder
from support import ARCHITECTURES, delta_of, make_folder

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out"),
    pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias term"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.*lora_B.bias"),  # of PEFT on a file that it reads well
]

TEXTS = ["good film", "the plot was very bad", "a", "not a short scene and a long film"]
TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "distilbert": ["q_lin", "v_lin", "lin1"],
    "albert": ["query", "ffn"],
    "mpnet": ["attn.q", "attn.v"],
    "deberta-v2": ["query_proj", "value_proj"],
    "llama": ["q_proj", "v_proj", "up_proj"],
    "qwen2": ["q_proj", "v_proj"],
    "opt": ["q_proj", "v_proj"],
    "modernbert": ["Wqkv", "Wi"],
}
CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


def stock(folder: Path, task_type: str, outputs: int) -> Any:
    """The class that PEFT wraps, with the base's weights."""
    torch.manual_seed(5)
    kind = getattr(transformers, CLASSES[task_type])
    return kind.from_pretrained(folder, num_labels=outputs, dtype=torch.float32).eval()


def trained(model: Any, config: Any) -> Any:
    """A PEFT model whose trained parameters have random values."""
    wrapped = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return wrapped


def adapter(folder: Path, out: Path, config: Any, outputs: int = 3) -> Any:
    """A PEFT model, saved to `out`."""
    wrapped = trained(stock(folder, config.task_type, outputs), config)
    wrapped.save_pretrained(out)
    return wrapped


def lora(architecture: str, task_type: str = "SEQ_CLS", **settings: Any) -> Any:
    targets = TARGETS.get(architecture, ["query", "value"])
    return peft.LoraConfig(**{"task_type": task_type, "r": 3, "lora_alpha": 5, "target_modules": targets, **settings})


def of_peft(model: Any, base: Any, delta: Delta) -> np.ndarray:
    """The outputs of a PEFT model for TEXTS, laid out as bitfit has them."""
    rows = encoded(base, delta)
    ids, types, mask = (torch.from_numpy(array) for array in rows.padded(base.tokenizer.pad_token_id))
    batch = {"input_ids": ids, "attention_mask": mask}
    if base.segments:
        batch["token_type_ids"] = types
    with torch.no_grad():
        output = model(**batch)
    if "start_logits" in output:
        both = torch.stack([output.start_logits, output.end_logits], -1)
        return both[mask.bool()].numpy()
    logits = output.logits
    return (logits[mask.bool()] if logits.dim() == 3 else logits).numpy()


def of_bitfit(base: Any, delta: Delta, given: Sequence[str] = TEXTS) -> np.ndarray:
    """The outputs of a delta for some texts."""
    task = Task.of_delta(delta)
    model = Model(base, task.outputs, delta.meta.pool)
    bank = Bank(model, [lane_of_delta(model, delta)])
    with torch.inference_mode():
        outputs = bank.logits({0: encoded(base, delta, given)})[0].numpy()
    return outputs * task.spread + task.center


def encoded(base: Any, delta: Delta, given: Sequence[str] = TEXTS) -> Any:
    task = Task.of_delta(delta)
    texts: list[Any] = [text.split() for text in given] if task.form == "words" else list(given)
    if delta.meta.pairs:
        texts = [("good film", text) for text in given]
    encoder = Encoder(base, delta.meta.max_length, delta.meta.stride)
    return task.encode(encoder, task.examples(texts, delta.meta.pairs)).rows


def same(base: Any, model: Any, delta: Delta) -> None:
    expected = of_peft(model, base, delta)
    assert expected.std() > 1e-3
    np.testing.assert_allclose(of_bitfit(base, delta), expected, atol=1e-5, rtol=0)


# ---- from PEFT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_lora_folder_answers_as_peft_does(bases, folders, architecture, tmp_path):
    saved = {"deberta-v2": ["pooler"], "modernbert": ["head"]}.get(architecture)
    model = adapter(folders(architecture), tmp_path / "peft", lora(architecture, modules_to_save=saved))
    same(bases(architecture), model, import_peft(tmp_path / "peft", bases(architecture)))


@pytest.mark.parametrize("task_type", ["TOKEN_CLS", "QUESTION_ANS"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "electra", "mpnet"])
def test_a_head_on_tokens_answers_as_peft_does(bases, folders, architecture, task_type, tmp_path):
    outputs = 4 if task_type == "TOKEN_CLS" else 2
    model = adapter(folders(architecture), tmp_path / "peft", lora(architecture, task_type), outputs)
    same(bases(architecture), model, import_peft(tmp_path / "peft", bases(architecture)))


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": "all"},
        {"bias": "lora_only"},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"lora_bias": True},
        {"rank_pattern": {"layer.0.attention.self.query": 5}, "alpha_pattern": {"value": 9}},
        {"layers_to_transform": [1]},
        {"modules_to_save": ["classifier", "pooler"]},
        {"modules_to_save": ["classifier", "LayerNorm"]},
        {"init_lora_weights": "gaussian"},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_settings_of_lora_are_carried_over(base, folders, settings, tmp_path):
    model = adapter(folders("bert"), tmp_path / "peft", lora("bert", **settings))
    same(base, model, import_peft(tmp_path / "peft", base))


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "llama"])
def test_a_beft_folder_answers_as_peft_does(bases, folders, architecture, tmp_path):
    targets = [*TARGETS.get(architecture, ["query", "value"])]
    model = adapter(folders(architecture), tmp_path / "peft", peft.BeftConfig("SEQ_CLS", target_modules=targets))
    delta = import_peft(tmp_path / "peft", bases(architecture))
    same(bases(architecture), model, delta)
    assert (delta.inject != "none") == (architecture == "llama")


def test_pairs_of_texts_answer_as_peft_does(base, folders, tmp_path):
    model = adapter(folders("bert"), tmp_path / "peft", lora("bert"))
    delta = import_peft(tmp_path / "peft", base, pairs=True)
    assert delta.meta.pairs
    same(base, model, delta)


def test_one_output_is_regression(base, folders, tmp_path):
    model = adapter(folders("bert"), tmp_path / "peft", lora("bert"), outputs=1)
    delta = import_peft(tmp_path / "peft", base)
    assert delta.meta.task == "regression"
    same(base, model, delta)


def test_several_labels_at_once_are_said_by_the_user(base, folders, tmp_path):
    adapter(folders("bert"), tmp_path / "peft", lora("bert"))
    delta = import_peft(tmp_path / "peft", base, task="multilabel", labels=["x", "y", "z"])
    assert (delta.meta.task, delta.labels) == ("multilabel", ("x", "y", "z"))


def test_what_was_trained_is_said_in_the_selection_language(base, folders, tmp_path):
    adapter(folders("bert"), tmp_path / "peft", lora("bert", bias="lora_only", layers_to_transform=[1]))
    delta = import_peft(tmp_path / "peft", base)
    assert delta.inject == "lora(W_q@1 + W_v@1, 3, 5)"
    assert delta.meta.select == "injected + b_q@1 + b_v@1"
    assert set(delta.change) >= {"A_q", "B_q", "b_q"}


def test_an_imported_delta_is_saved_and_read_like_any_other(base, folders, tmp_path):
    adapter(folders("bert"), tmp_path / "peft", lora("bert"))
    delta = import_peft(tmp_path / "peft", base)
    delta.save(tmp_path / "delta.safetensors")
    loaded = Delta.load(tmp_path / "delta.safetensors")
    np.testing.assert_array_equal(of_bitfit(base, loaded), of_bitfit(base, delta))
    assert loaded.meta.score is None


def test_an_imported_delta_is_served_without_a_score(base, folders, tmp_path):
    schemas = pytest.importorskip("bitfit.serve.schemas")
    adapter(folders("bert"), tmp_path / "peft", lora("bert"))
    delta = import_peft(tmp_path / "peft", base)
    shown = schemas.TaskInfo(**describe("imported", delta, 1000))
    assert (shown.score, shown.interval) == (None, None)


def test_a_head_that_the_folder_lacks_comes_from_the_base(folders, tmp_path):
    from bitfit import load_base

    checkpoint = tmp_path / "checkpoint"
    stock(folders("bert"), "SEQ_CLS", 3).save_pretrained(checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).write_bytes((folders("bert") / name).read_bytes())
    config = peft.LoraConfig(r=2, target_modules=["query"], auto_mapping=None)
    wrapped = trained(stock(checkpoint, "SEQ_CLS", 3), config)
    wrapped.save_pretrained(tmp_path / "peft")
    base = load_base(checkpoint)
    same(base, wrapped, import_peft(tmp_path / "peft", base, task="classification"))


def test_a_head_that_nobody_saved_is_an_error(base, folders, tmp_path):
    trained(stock(folders("bert"), "SEQ_CLS", 2), peft.LoraConfig(r=2, target_modules=["query"])).save_pretrained(
        tmp_path / "peft"
    )
    with pytest.raises(
        DeltaError, match=r"base has classifier.bias, classifier.weight.*modules_to_save=\['classifier'\]"
    ):
        import_peft(tmp_path / "peft", base, task="classification")


# ---- to PEFT


def grafted(base: Any, inject: str, text: str = "injected", pool: str = "cls", kind: str = "classification") -> Delta:
    """A delta of random values with grafts."""
    plain = delta_of(base, labels=3, pool=pool, kind=kind)
    model = Model(base, Task.of_delta(plain).outputs, plain.meta.pool, inject)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, text))])
    size = bank.lanes[0].trained
    bank.values[:, :size].add_(torch.randn(size, generator=torch.Generator().manual_seed(3)), alpha=0.2)
    return Delta(bank.tensors(0), replace(plain.meta, select=text, inject=inject))


def loaded(folder: Path, base_folder: Path, delta: Delta) -> Any:
    """The exported folder as its card says to load it."""
    config = json.loads((folder / CONFIG).read_text())
    model = stock(base_folder, config["task_type"] or "QUESTION_ANS", Task.of_delta(delta).outputs)
    return peft.PeftModel.from_pretrained(model, folder).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_answers_from_an_exported_lora_delta(bases, folders, architecture, tmp_path):
    base = bases(architecture)
    delta = grafted(base, "lora(W_q + W_v, 2) + lora(W_m2, 3, 4)")
    folder = export_peft(delta, base, tmp_path / "out")
    same(base, loaded(folder, folders(architecture), delta), delta)


@pytest.mark.parametrize(
    "text", ["bias", "b_q + b_m2", "b_LN1 + b_emb", "bias + gamma", "none", "b_m2 + random(W_q, 9)"]
)
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "albert", "deberta-v2"])
def test_peft_answers_from_an_exported_bias_delta(bases, folders, architecture, text, tmp_path):
    base = bases(architecture)
    delta = delta_of(base, labels=3, select_text=text)
    folder = export_peft(delta, base, tmp_path / "out")
    assert json.loads((folder / CONFIG).read_text())["peft_type"] == "BEFT"
    same(base, loaded(folder, folders(architecture), delta), delta)


@pytest.mark.parametrize("kind", ["regression", "multilabel", "tagging", "answering"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert"])
def test_peft_answers_every_kind_of_task(bases, folders, architecture, kind, tmp_path):
    base = bases(architecture)
    delta = delta_of(base, labels=3, kind=kind)
    folder = export_peft(delta, base, tmp_path / "out")
    same(base, loaded(folder, folders(architecture), delta), delta)


def by_card(folder: Path, base_folder: Path, delta: Delta, text: str) -> tuple[np.ndarray, Any]:
    """What the code on the card of a folder computes for a text, and its model."""
    code = re.search(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.S)[1]
    code = code.replace(f"base = {json.dumps(delta.meta.base)}", f"base = {json.dumps(str(base_folder))}")
    code = code.replace('PeftModel.from_pretrained(model, ".")', f"PeftModel.from_pretrained(model, {str(folder)!r})")
    for sample in ('["first text"], ["second text"]', '["a question"], ["its context"]'):
        code = code.replace(sample, f'["good film"], [{text!r}]')
    code = code.replace('["a text"]', f"[{text!r}]").replace('["some", "words"]', repr(text.split()))
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope["logits"].numpy(), scope["model"]


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel", "tagging", "answering", "pairs"])
@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_the_code_on_the_card_answers_as_bitfit_does(bases, folders, architecture, kind, tmp_path):
    base, changes = bases(architecture), {}
    if kind == "pairs":
        kind, changes = "classification", {"columns": {"text": "a", "label": "label", "text_pair": "b"}}
    delta = delta_of(base, labels=3, kind=kind, **changes)
    folder = export_peft(delta, base, tmp_path / "out")
    expected = of_bitfit(base, delta, TEXTS[1:2])
    found, _ = by_card(folder, folders(architecture), delta, TEXTS[1])
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5, rtol=0)


def byte_level_folder(folder: Path, digits: bool = False) -> Path:
    """A tiny RoBERTa whose tokenizer reads bytes, and adds no space before the first word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    make_folder(folder, "roberta", vocab_size=400)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if digits:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), backend.pre_tokenizer])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<unk>", "<pad>"])
    backend.train_from_iterator(TEXTS * 20, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("digits", [False, True], ids=["one step", "two steps"])
@pytest.mark.parametrize("written_by", [export_peft, export])
def test_the_cards_read_words_with_a_space_before_each(written_by, digits, tmp_path, monkeypatch):
    from bitfit import load_base

    source = byte_level_folder(tmp_path / "base", digits)
    base = load_base(source)
    delta = delta_of(base, labels=3, kind="tagging")
    folder = written_by(delta, base, tmp_path / "out")
    expected = of_bitfit(base, delta, TEXTS[1:2])
    monkeypatch.chdir(folder)
    found, _ = by_card(folder, source, delta, TEXTS[1])
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5, rtol=0)


def test_the_card_names_every_label_as_it_is(base, folders, tmp_path):
    labels = ("C#", 'a "b" \\', "\N{GRINNING FACE} ```\n")
    delta = delta_of(base, labels=3)
    delta = Delta(delta.tensors, replace(delta.meta, labels=labels))
    folder = export_peft(delta, base, tmp_path / "out")
    _, model = by_card(folder, folders("bert"), delta, "good film")
    assert tuple(model.config.id2label[number] for number in range(3)) == labels


def test_lora_and_biases_go_into_one_folder(base, folders, tmp_path):
    delta = grafted(base, "lora(W_q + W_v, 2)", "injected + bias + g_LN1")
    folder = export_peft(delta, base, tmp_path / "out")
    same(base, loaded(folder, folders("bert"), delta), delta)


def test_injected_biases_go_into_a_beft_folder(bases, folders, tmp_path):
    base = bases("llama")
    delta = grafted(base, "b_v + b_m1")
    folder = export_peft(delta, base, tmp_path / "out")
    same(base, loaded(folder, folders("llama"), delta), delta)


@pytest.mark.parametrize("make", [lambda base: grafted(base, "lora(W_q + W_v, 2)"), lambda base: delta_of(base, 1, 3)])
def test_a_folder_that_bitfit_wrote_comes_back_with_all_that_the_delta_said(base, make, tmp_path):
    delta = make(base)
    found = import_peft(export_peft(delta, base, tmp_path / "out"), base)
    np.testing.assert_allclose(of_bitfit(base, found), of_bitfit(base, delta), atol=1e-5, rtol=0)
    for name in ("labels", "metrics", "max_length", "columns", "fingerprint", "trained"):
        assert getattr(found.meta, name) == getattr(delta.meta, name)


def test_what_the_user_says_goes_before_what_the_folder_says(base, tmp_path):
    folder = export_peft(delta_of(base, 1, 3), base, tmp_path / "out")
    found = import_peft(folder, base, task="multilabel", labels=["x", "y", "z"], max_length=10)
    assert (found.meta.task, found.labels, found.meta.max_length) == ("multilabel", ("x", "y", "z"), 10)
    assert found.meta.score is None


def test_metadata_that_contradicts_its_folder_is_an_error(base, tmp_path):
    folder = export_peft(delta_of(base, 1, 3), base, tmp_path / "out")
    lie = delta_of(base, 1, 3, kind="tagging").meta
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"bitfit": json.dumps(lie.table())})
    with pytest.raises(UsageError, match="the folder is for classification"):
        import_peft(folder, base)
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"bitfit": "{"})
    with pytest.raises(DeltaError, match="its bitfit metadata is not JSON"):
        import_peft(folder, base)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda base: delta_of(base, pool="mean"), "head on mean-pooled states; train with --pool cls"),
        (
            lambda base: delta_of(base, pool="pair", columns={"text": "a", "label": "y", "text_pair": "b"}),
            "head on two texts that are encoded apart; train with --pool cls",
        ),
        (lambda base: grafted(base, "adapter(4)"), "adapter parameters, which PEFT cannot represent"),
        (
            lambda base: grafted(base, "lora(W_q, 2)", "injected + W_q"),
            "cannot replace the matrix of .*query, which has an adapter",
        ),
        (lambda base: delta_of(base, select_text="all"), "changes the matrices of all nn.Linear layers"),
    ],
)
def test_what_peft_has_no_place_for_is_an_error_and_writes_nothing(base, make, message, tmp_path):
    with pytest.raises(DeltaError, match=message):
        export_peft(make(base), base, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_biases_of_layers_that_are_not_linear_have_no_place_in_peft(bases, tmp_path):
    with pytest.raises(DeltaError, match=r"adapts nn.Linear layers only, and gpt2 has none"):
        export_peft(delta_of(bases("gpt2")), bases("gpt2"), tmp_path / "out")


def test_a_folder_that_is_not_empty_stays_as_it_is(base, tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(UsageError, match="already exists and is not empty"):
        export_peft(delta_of(base), base, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# ---- folders that cannot be imported, or must not be


@pytest.fixture
def folder(folders: Any, tmp_path: Path) -> Path:
    """A good LoRA folder, to be spoiled."""
    adapter(folders("bert"), tmp_path / "peft", lora("bert"))
    return tmp_path / "peft"


def set_config(folder: Path, **changes: Any) -> None:
    table = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(table | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "LOHA"}, "peft_type LOHA: bitfit imports LORA and BEFT"),
        ({"task_type": "CAUSAL_LM"}, "task type CAUSAL_LM; bitfit imports SEQ_CLS, TOKEN_CLS, QUESTION_ANS"),
        ({"use_dora": True}, "sets use_dora, which a delta cannot represent"),
        ({"layer_replication": [[0, 2]]}, "sets layer_replication"),
        ({"trainable_token_indices": [1]}, "sets trainable_token_indices"),
        ({"setting_of_tomorrow": 1}, "sets setting_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "moves some of the base's weights"),
        ({"r": 4}, r"has shape \(3, 16\), but bert.* takes \(4, 16\)"),
        ({"r": "3"}, "r: must be a whole number, not a text"),
        ({"r": 1 << 40}, "r and lora_alpha: must be above 0"),
        ({"lora_alpha": []}, "lora_alpha: must be a number, not a list"),
        ({"bias": "some"}, "bias: must be one of none, all, lora_only"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "is not a plain module name"),
        ({"peft_type": None}, "peft_type: must be a text, not nothing"),
    ],
)
def test_settings_that_cannot_be_carried_over_are_one_line(base, folder, changes, message):
    set_config(folder, **changes)
    with pytest.raises(DeltaError, match=message) as error:
        import_peft(folder, base)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../bert", "/etc", "~/models", "a/b/c", "http://host/x", "", "./", "a\\b"])
def test_a_path_in_a_folder_is_not_followed(folder, name):
    set_config(folder, base_model_name_or_path=name)
    with pytest.raises(ModelError, match=r"is not a hub id; pass --base FOLDER"):
        import_peft(folder)


@pytest.mark.parametrize("revision", [None, "main", "v2"])
def test_another_revision_of_the_base_is_not_replaced_by_the_newest(folder, monkeypatch, base, revision):
    set_config(folder, base_model_name_or_path="owner/name", revision=revision)
    monkeypatch.setattr("bitfit.prediction.peft_import.load_base", lambda name: base)
    if revision == "v2":
        with pytest.raises(ModelError, match=r"trained on revision 'v2' of owner/name; .* pass --base FOLDER"):
            import_peft(folder)
        assert import_peft(folder, base).meta.task == "classification"
    else:
        assert import_peft(folder).meta.task == "classification"


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("base_model.model.bert.embeddings.word_embeddings.lora_embedding_A", torch.ones(3, 64), "LoRA on embeddings"),
        ("base_model.model.bert.encoder.layer.0.attention.self.query.lora_magnitude_vector", torch.ones(16), "DoRA"),
        ("base_model.model.bert.encoder.layer.9.attention.self.query.bias", torch.ones(16), "has no parameter for"),
        ("base_model.model.classifier.bias", torch.ones(4), r"has shape \(4,\), but bert.* takes \(3,\)"),
        ("base_model.model.classifier.bias", torch.full((3,), torch.nan), "contains NaN or infinity"),
        ("base_model.model.classifier.bias", torch.ones(3, dtype=torch.int64), "has type I64; a delta holds floats"),
        ("classifier.bias", torch.ones(3), "is not the name of a tensor of PEFT"),
        ("base_model.model.../../x", torch.ones(3), "is not the name of a tensor of PEFT"),
        (
            "base_model.model.bert.pooler.dense.lora_A.weight",
            torch.ones(3, 16),
            "dense has no A or no B",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(base, folder, name, tensor, message):
    save_file({**load_file(folder / WEIGHTS), name: tensor}, folder / WEIGHTS)
    with pytest.raises(DeltaError, match=message) as error:
        import_peft(folder, base)
    assert "\n" not in str(error.value)


def test_a_header_that_promises_more_than_the_file_holds_is_an_error(base, folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data.replace(b'"shape":[3]', b'"shape":[9]'))
    with pytest.raises(DeltaError, match="not a usable safetensors file"):
        import_peft(folder, base)
    (folder / WEIGHTS).write_bytes(data[:-4])
    with pytest.raises(DeltaError, match="not a usable safetensors file"):
        import_peft(folder, base)


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_pickle_is_never_read(base, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / PICKLE).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DeltaError, match="is a pickle file, which can run code"):
        import_peft(folder, base)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 8}', "[" * 100_000])
def test_a_config_that_is_none_is_an_error(base, folder, text):
    (folder / CONFIG).write_text(text)
    with pytest.raises(DeltaError, match=CONFIG):
        import_peft(folder, base)


def test_a_folder_of_another_base_is_an_error(bases, folder):
    with pytest.raises(DeltaError, match="pass the right base with --base"):
        import_peft(folder, bases("roberta"))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"labels": ["a", "b"]}, "name the folder's 3 classes"),
        ({"labels": ["a", "b", "a"]}, "each once"),
        ({"task": "tagging"}, "the folder is for classification"),
    ],
)
def test_options_that_contradict_the_folder_are_usage_errors(base, folder, given, message):
    with pytest.raises(UsageError, match=message):
        import_peft(folder, base, **given)


# ---- the command line, and real weights


def test_the_commands_import_and_export(folders, folder, tmp_path, capsys):
    base, out = str(folders("bert")), str(tmp_path / "delta.safetensors")
    assert run(["import", str(folder), "--base", base, "--labels", "x,y,z", "--out", out]) == 0
    assert run(["predict", out, "good film", "--base", base, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]) == {"x", "y", "z"}
    assert run(["inspect", out]) == 0
    assert run(["export", out, "--peft", "--base", base, "--out", str(tmp_path / "again")]) == 0
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["README.md", CONFIG, WEIGHTS]
    capsys.readouterr()
    assert run(["import", str(tmp_path), "--base", base, "--out", out]) == 4
    assert capsys.readouterr().err == f"bitfit: {tmp_path}: not a PEFT folder: it has no {CONFIG}\n"
    assert run(["import", str(tmp_path / "nowhere"), "--base", base, "--out", out]) == 4
    assert capsys.readouterr().err == f"bitfit: {tmp_path / 'nowhere'}: no such folder\n"
    assert run(["export", out, "--peft", "--fold", "--base", base, "--out", str(tmp_path / "b")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["none", "all"])
def test_real_weights_answer_as_peft_does(bias, tmp_path):
    from bitfit import load_base
    from bitfit.model.base import demo_folder

    source = demo_folder()
    if source is None:
        pytest.skip("needs the demo base")
    base = load_base()
    config = lora("bert", r=8, lora_alpha=16, bias=bias, target_modules="all-linear")
    model = adapter(source, tmp_path / "peft", config)
    delta = import_peft(tmp_path / "peft", base)
    same(base, model, delta)
    folder = export_peft(delta, base, tmp_path / "out")
    same(base, loaded(folder, source, delta), delta)
