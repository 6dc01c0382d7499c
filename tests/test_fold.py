"""A folded delta predicts the same with a third fewer numbers, where folding holds, and is refused elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitfit import Delta, MixedPredictor, predict, train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.delta.fold import fold, serving_form, why_not
from bitfit.errors import UsageError
from bitfit.model.architectures import architecture
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.prediction.export import export
from bitfit.tasks.encode import Encoder
from support import ARCHITECTURES, meta_of, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
TEXTS = [text for text, _ in reviews(8)]
FOLDS = [name for name in ARCHITECTURES if architecture(name).no_fold is None]


def made(base, text="bias", pool="cls", seed=0):
    """A delta with values of its own."""
    model = Model(base, 3, pool)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, text, seed), seed=seed)])
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.2)
    return model, Delta(bank.tensors(0), meta_of(base, pool=model.pool))


def outputs(model, delta):
    with torch.inference_mode():
        return Bank(model, [lane_of_delta(model, delta)]).logits({0: Encoder(model.base)(TEXTS)})[0]


def numbers(delta):
    return sum(values.size for _, values in delta.entries.values())


def terms(model, delta):
    return {site.term for site in model.anatomy.sites if site.name in delta.entries}


@pytest.mark.parametrize("text", ["bias", "bias + gamma + random(all, 90)", "bias + W_m1 + W_v"])
@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
@pytest.mark.parametrize("architecture", FOLDS)
def test_a_folded_delta_predicts_the_same(bases, architecture, pool, text):
    model, delta = made(bases(architecture), text, pool)
    small = fold(delta, model)
    assert not terms(model, small) & {"b_k", "b_v", "b_LN1", "b_emb"}
    before, after = outputs(model, delta), outputs(model, small)
    assert float((before - after).abs().max()) <= 1e-6 * max(1.0, float(before.abs().max()))


def test_every_architecture_folds_or_says_why_not(bases):
    for name in ARCHITECTURES:
        base = bases(name)
        assert (why_not(base) is None) == (name in FOLDS)
        if name not in FOLDS:
            model, delta = made(base, "gamma")
            assert serving_form(delta, model) is delta
            with pytest.raises(UsageError, match="cannot be folded: its"):
                fold(delta, model)


def test_a_third_of_the_biases_is_gone(base):
    model, delta = made(base)
    assert numbers(delta) == 2 * (7 * 16 + 32) + 16 + 16  # with b_emb and b_pool
    assert numbers(fold(delta, model)) == 2 * (16 + 16 + 32 + 16) + 16  # b_q b_m1 b_m2 b_m3, and b_pool


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("b_k", set()),
        ("b_v", {"b_v"}),
        ("b_LN1", {"b_LN1"}),
        ("b_v + b_m1 + b_k", {"b_m1"}),
        ("b_LN2 + b_v", {"b_LN2", "b_v"}),
        ("b_LN2@0 + b_v@1 + b_q@1", {"b_m1", "b_q"}),
        ("random(b_v, 5) + b_q", {"b_v", "b_q"}),
        ("b_v + random(b_m1, 5)", {"b_m1"}),
        ("random(b_k, 5) + b_q", {"b_q"}),
        ("none", set()),
    ],
)
def test_a_bias_moves_only_where_the_delta_gets_smaller(base, text, left):
    model, delta = made(base, text)
    small = fold(delta, model)
    assert terms(model, small) == left and numbers(small) <= numbers(delta)
    torch.testing.assert_close(outputs(model, small), outputs(model, delta), rtol=0, atol=2e-6)


def test_what_is_folded_is_as_small_as_it_gets(base):
    model, delta = made(base)
    small = fold(delta, model)
    again = fold(small, model)
    assert all(np.array_equal(small.tensors[name], again.tensors[name]) for name in small.tensors | again.tensors)


def test_mixed_prediction_wears_the_folded_form(base, csv_file):
    deltas = [train(csv_file, base, seed=seed, lr=1e-2, epochs=1).best.delta for seed in range(2)]
    mixed = MixedPredictor(deltas, base)
    held = {slot.name for resident in mixed.residents for slot in resident.lane.slots}
    assert not any("key" in name or "value" in name for name in held)
    for number, delta in enumerate(deltas):
        found = [list(answer["scores"].values()) for answer in mixed.answers([(number, text) for text in TEXTS])]
        alone = [list(answer["scores"].values()) for answer in predict(delta, TEXTS, base)]
        np.testing.assert_allclose(found, alone, atol=1e-6)


def test_an_export_folds_on_request(base, csv_file, tmp_path):
    from transformers import AutoModelForSequenceClassification

    delta = train(csv_file, base, lr=1e-2, epochs=1).best.delta
    plain, folded = export(delta, base, tmp_path / "plain"), export(delta, base, tmp_path / "folded", fold=True)
    models = [AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in (plain, folded)]
    batch = Model(base, 2)._batch(Encoder(base)(TEXTS))
    with torch.no_grad():
        torch.testing.assert_close(*(model(**batch).logits for model in models), rtol=0, atol=1e-6)
    keys = "encoder.layer.1.attention.self.key.bias"
    assert torch.equal(models[1].base_model.state_dict()[keys], base.encoder.state_dict()[keys])
    assert "176 numbers" in (folded / "README.md").read_text() and "folded" not in (plain / "README.md").read_text()


def test_an_export_that_cannot_fold_is_refused_before_it_is_written(bases, csv_file, tmp_path):
    delta = train(csv_file, bases("albert"), lr=1e-2, epochs=1).best.delta
    with pytest.raises(UsageError, match="share their biases"):
        export(delta, bases("albert"), tmp_path / "out", fold=True)
    assert not (tmp_path / "out").exists()
