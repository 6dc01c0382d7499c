"""Injected biases: nothing changes at the start, and from there they are biases like all others."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from bitfit import Delta, Predictor, load_base, predict, train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.delta.change import change_map
from bitfit.errors import DeltaError, SelectionError, UsageError
from bitfit.model.audit import count
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.prediction.export import export
from bitfit.tasks.encode import Encoder
from support import INJECT, make_folder, reviews, tokenizer

TEXTS = [text for text, _ in reviews(6)]
# Settings under which a stock class has all or some of the biases that are injected here.
SWITCHED = {
    "llama": ("bias - layernorm", {"attention_bias": True, "mlp_bias": True}),
    "modernbert": ("bias", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
}


def bank_of(base, inject, text="bias", pool="cls", noise=0.0):
    model = Model(base, 2, pool, inject)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, text))])
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(1)), alpha=noise)
    return bank


def learn(bank, base):
    logits = bank.logits({0: Encoder(base)(TEXTS)})[0]
    logits.square().sum().backward()
    slots = bank.lanes[0].slots
    return logits.detach(), {slot.name: bank.gradients[0, slot.offset : slot.offset + slot.size] for slot in slots}


def stock(base, bank, **settings):
    """The stock class, with all values of the lane loaded by name."""
    changes = {"num_labels": 2, "pad_token_id": base.tokenizer.pad_token_id, **settings}
    config = AutoConfig.for_model(**{**base.config.to_dict(), **changes})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.base_model.load_state_dict(base.encoder.state_dict(), strict=False)
    values = {name: torch.from_numpy(value) for name, value in bank.tensors(0).items()}
    inner = {name: value for name, value in values.items() if not name.startswith("head.")}
    assert not model.base_model.load_state_dict(inner, strict=False).unexpected_keys
    model.load_state_dict({n.removeprefix("head."): v for n, v in values.items() if n not in inner}, strict=False)
    return model


@pytest.fixture
def delta(bases, csv_file):
    return train(csv_file, bases("llama"), inject="b_v", lr=3e-2, epochs=1).best.delta


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("architecture", INJECT)
def test_at_the_start_the_outputs_are_those_of_the_base_bit_for_bit(bases, architecture, pool):
    base = bases(architecture)
    with_biases, without = bank_of(base, "bias", pool=pool), bank_of(base, "none", "none", pool)
    assert len(with_biases.model.injected) > 4
    rows = {0: Encoder(base)(TEXTS)}
    assert torch.equal(with_biases.logits(rows)[0], without.logits(rows)[0])


@pytest.mark.parametrize("architecture", SWITCHED)
def test_outputs_and_gradients_are_those_of_the_stock_class_with_biases(bases, architecture):
    base, (inject, settings) = bases(architecture), SWITCHED[architecture]
    bank = bank_of(base, inject, noise=0.2)
    model = stock(base, bank, **settings)
    logits = model(**bank.model._batch(Encoder(base)(TEXTS))).logits
    logits.square().sum().backward()
    ours, gradients = learn(bank, base)
    torch.testing.assert_close(ours, logits.detach(), rtol=0, atol=1e-6)
    expected = {name: p.grad for name, p in model.base_model.named_parameters()}
    for name in bank.model.injected:
        assert expected[name].abs().max() > 1e-6 or "Wqkv" in name or "k_proj" in name
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-6)


class Shifted(torch.nn.Module):
    """A norm with a bias, written out."""

    def __init__(self, norm, bias):
        super().__init__()
        self.norm, self.bias = norm, torch.nn.Parameter(bias)

    def forward(self, x):
        return self.norm(x) + self.bias


def test_a_norm_without_a_bias_is_shifted(bases):
    base = bases("llama")
    bank = bank_of(base, "b_LN1@1", noise=0.2)
    model = stock(base, bank_of(base, "none", "none", noise=0.0))
    values = bank.tensors(0)
    model.score.weight.data = torch.from_numpy(values["head.score.weight"])
    layer = model.model.layers[1]
    layer.input_layernorm = Shifted(layer.input_layernorm, torch.from_numpy(values["layers.1.input_layernorm.bias"]))
    logits = model(**bank.model._batch(Encoder(base)(TEXTS))).logits
    logits.square().sum().backward()
    ours, gradients = learn(bank, base)
    torch.testing.assert_close(ours, logits.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        gradients["layers.1.input_layernorm.bias"], layer.input_layernorm.bias.grad, rtol=1e-4, atol=1e-6
    )


def test_outputs_and_gradients_are_those_of_pefts_beft(bases):
    import peft

    base = bases("llama")
    bank = bank_of(base, "b_v", noise=0.2)
    model = stock(base, bank_of(base, "none", "none"))
    values = bank.tensors(0)
    model.score.weight.data = torch.from_numpy(values["head.score.weight"])
    with pytest.warns(UserWarning, match="no bias"):
        theirs = peft.get_peft_model(model, peft.BeftConfig(target_modules=["v_proj"]))
    biases = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(biases) == 2
    for layer, (name, parameter) in enumerate(biases.items()):
        assert f"layers.{layer}.self_attn.v_proj" in name
        parameter.data = torch.from_numpy(values[f"layers.{layer}.self_attn.v_proj.bias"])[None].clone()
    logits = theirs(**bank.model._batch(Encoder(base)(TEXTS))).logits
    logits.square().sum().backward()
    ours, gradients = learn(bank, base)
    torch.testing.assert_close(ours, logits.detach(), rtol=0, atol=1e-6)
    for layer, parameter in enumerate(biases.values()):
        torch.testing.assert_close(
            gradients[f"layers.{layer}.self_attn.v_proj.bias"], parameter.grad.view(-1), rtol=1e-5, atol=1e-7
        )


def test_a_delta_names_injected_biases_as_the_parameters_they_would_be(delta):
    assert set(delta.entries) == {f"layers.{layer}.self_attn.v_proj.bias" for layer in range(2)}
    assert delta.meta.inject == delta.meta.trial.inject == "b_v"
    assert list(delta.change) == ["b_v"] and all(value > 0 for value in delta.change["b_v"])
    assert delta.meta.trained == 2 * 8 + 2 * 16


def test_a_shared_tensor_gets_the_injected_part_only(bases, csv_file):
    delta = train(csv_file, bases("modernbert"), inject="b_v@1", lr=3e-2, epochs=1).best.delta
    (name,) = delta.entries
    assert name == "layers.1.attn.Wqkv.bias" and delta.entries[name][0].tolist() == list(range(32, 48))
    assert delta.change["b_v"][0] is None and delta.change["b_v"][1] > 0 and "b_q" not in delta.change


@pytest.mark.parametrize("architecture", INJECT)
def test_applying_and_undoing_leave_no_trace(bases, csv_file, architecture):
    base = bases(architecture)
    delta = train(csv_file, base, inject="bias", lr=3e-2, epochs=1).best.delta
    batch = Model(base, 2)._batch(Encoder(base)(TEXTS))

    def states():
        with torch.no_grad():
            return base.encoder(**batch).last_hidden_state

    before, names = states(), set(base.encoder.state_dict())
    undo = delta.apply(base)
    changed = states()
    undo()
    assert not torch.equal(before, changed) and torch.equal(before, states())
    assert set(base.encoder.state_dict()) == names and not any(m._forward_hooks for m in base.encoder.modules())
    delta.check(base)


def test_a_file_is_read_checked_and_answers_the_same(bases, delta, tmp_path, csv_file):
    base, path = bases("llama"), tmp_path / "d.safetensors"
    delta.save(path)
    assert predict(path, TEXTS, base) == predict(delta, TEXTS, base)
    rows, scores, _ = Predictor(path, base).evaluate(csv_file)
    assert rows == 64 and 0 <= scores["accuracy"].value <= 1


def test_deltas_with_and_without_injection_share_a_batch(bases, delta, csv_file):
    base = bases("llama")
    plain = train(csv_file, base, select="gamma", lr=3e-2, epochs=1).best.delta
    requests = [((delta, plain)[i % 2], text) for i, text in enumerate(TEXTS)]
    for (own, text), answer in zip(requests, predict(requests, base=base), strict=True):
        alone = predict(own, [text], base)[0]
        np.testing.assert_allclose(list(answer["scores"].values()), list(alone["scores"].values()), atol=1e-6)


def test_lanes_with_injected_biases_equal_their_separate_runs(bases, csv_file):
    base = bases("qwen2")
    grid = train(csv_file, base, inject="b_m1 + b_LN2", lr=[1e-2, 3e-2], epochs=1)
    assert len(grid.trials[0].delta.entries) == 2 * (3 + 2)  # with the biases that Qwen2 has
    for outcome in grid.trials:
        alone = train(csv_file, base, inject="b_m1 + b_LN2", lr=outcome.trial.lr, epochs=1).best.delta
        assert alone.encode() == outcome.delta.encode()


@pytest.mark.parametrize("architecture", INJECT)
def test_counting_adds_what_is_injected(bases, architecture):
    base = bases(architecture)
    plain, grown = count(base, "bias"), count(base, "bias", inject="bias")
    added = grown.selection.count - plain.selection.count
    assert added == grown.total - plain.total == sum(map(np.prod, base.target.lacking.values())) > 0


def test_a_bare_configuration_is_counted_too(folders):
    found = count(str(folders("llama") / "config.json"), "b_v", inject="b_v")
    assert found.trained["b_v"] == 16 and found.terms["b_v"] == 16


@pytest.mark.parametrize(
    ("architecture", "inject", "message"),
    [
        ("bert", "b_v", "already"),
        ("qwen2", "b_q", "already"),
        ("llama", "W_q", "W_q is not a bias"),
        ("llama", "all", "only biases"),
        ("llama", "random(bias, 3)", "with all of its"),
        ("llama", "b_pool", "does not have the term"),
        ("llama", "b_v@7", "layers"),
    ],
)
def test_what_cannot_be_injected_is_refused(bases, architecture, inject, message):
    with pytest.raises(SelectionError, match=message):
        Model(bases(architecture), 2, inject=inject)


def test_a_base_without_biases_points_to_injection_and_injection_to_the_selection(bases, csv_file):
    with pytest.raises(UsageError, match="--inject"):
        train(csv_file, bases("llama"), lr=1e-2)
    with pytest.raises(UsageError, match="--select g_LN1 trains none"):
        train(csv_file, bases("llama"), inject="b_v", select="g_LN1", lr=1e-2)


@pytest.mark.parametrize("name", ["embed_tokens.bias", "layers.0.bias", "layers.9.self_attn.v_proj.bias", "bias"])
def test_a_bias_where_no_layer_could_have_one_is_refused(bases, delta, name):
    strange = Delta({**delta.tensors, name: np.zeros(8, np.float32)}, delta.meta)
    model = Model(bases("llama"), 2)
    with pytest.raises(DeltaError, match="does not have"):
        lane_of_delta(model, strange)


def test_the_change_map_counts_from_zero(bases):
    model = Model(bases("llama"), 2, inject="b_v")
    tensors = {f"layers.{layer}.self_attn.v_proj.bias": np.full(8, -2.0 - layer, np.float32) for layer in range(2)}
    assert change_map(model, tensors) == {"b_v": [2.0, 3.0]}


def card_logits(folder, monkeypatch):
    """Run the card's own lines, as a reader would, on our texts."""
    lines = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S).group(1)
    monkeypatch.chdir(folder)
    scope: dict = {}
    exec(lines.replace('["a text"]', repr(TEXTS)), scope)
    return scope["logits"]


@pytest.mark.parametrize(
    ("architecture", "inject", "pool", "switches"),
    [
        ("llama", "b_q + b_v", "cls", ["attention_bias"]),
        ("llama", "b_LN1 + b_m2 + b_other", "mean", ["mlp_bias"]),
        ("modernbert", "bias", "cls", ["attention_bias", "mlp_bias", "norm_bias"]),
        ("qwen2", "b_m1", "cls", []),
    ],
)
def test_the_lines_on_the_card_load_the_injected_biases(
    bases, csv_file, tmp_path, monkeypatch, architecture, inject, pool, switches
):
    base = bases(architecture)
    delta = train(csv_file, base, inject=inject, pool=pool, lr=3e-2, epochs=1).best.delta
    folder = export(delta, base, tmp_path / "out")
    card, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    encoder = config.get("encoder_config", config)
    assert [name for name in ("attention_bias", "mlp_bias", "norm_bias") if encoder.get(name)] == switches
    assert "differs from the base's architecture" in card and all(f"`{name}`" in card for name in switches)
    assert (folder / "modeling_bitfit.py").exists() == (inject in ("b_m1", "b_LN1 + b_m2 + b_other"))
    expected = [list(answer["scores"].values()) for answer in predict(delta, TEXTS, base)]
    np.testing.assert_allclose(card_logits(folder, monkeypatch).softmax(-1).numpy(), expected, atol=1e-6)


def test_plain_transformers_loads_attention_biases_of_an_export(bases, delta, tmp_path):
    base = bases("llama")
    folder = export(delta, base, tmp_path / "out")
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    with torch.no_grad():
        logits = model.eval()(**Model(base, 2)._batch(Encoder(base)(TEXTS))).logits
    expected = [list(answer["scores"].values()) for answer in predict(delta, TEXTS, base)]
    np.testing.assert_allclose(logits.softmax(-1).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2", "opt"])
def test_a_decoders_answer_does_not_depend_on_padding(tmp_path, architecture):
    make_folder(tmp_path / "m", architecture, pad_token_id=3)
    tokenizer(0).save_pretrained(tmp_path / "m")
    base = load_base(tmp_path / "m")
    bank = bank_of(base, "none", "all")
    texts = sorted(TEXTS, key=len)
    with torch.inference_mode():
        together = bank.logits({0: Encoder(base)(texts)})[0]
        alone = torch.cat([bank.logits({0: Encoder(base)([text])})[0] for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_states_that_opt_projects_are_pooled_and_its_projections_take_biases(tmp_path):
    base = load_base(make_folder(tmp_path / "m", "opt", word_embed_proj_dim=8))
    bank = bank_of(base, "b_other", pool="mean")
    assert bank.model.injected == ["decoder.project_out.bias", "decoder.project_in.bias"]
    logits, gradients = learn(bank, base)
    assert logits.shape == (6, 2) and all(gradients[name].abs().max() > 0 for name in bank.model.injected)
