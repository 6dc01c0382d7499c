"""The bank: a lane is the stock model under the lane's values, and nothing else of the base moves."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.delta.change import change_map
from bitfit.delta.delta import INDEX
from bitfit.model.language import select
from bitfit.model.resolution import resolve_starts
from bitfit.model.task_model import Model
from bitfit.tasks.encode import Encoder
from support import ARCHITECTURES, INJECT, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def rows_of(base, count=6, pair=False):
    texts = [text for text, _ in reviews(count)]
    return Encoder(base)(texts, texts[::-1] if pair else None)


def bank_of(base, text="bias", pool="cls", seeds=(0,), inject=None, init="keep", **options):
    model = Model(base, 3, pool, inject or INJECT.get(base.config.model_type, "none"))
    lanes = []
    for seed in seeds:
        starts = resolve_starts(model.anatomy, init, seed)
        lanes.append(lane_to_train(model, select(model.anatomy, text, seed), starts=starts, seed=seed, **options))
    return Bank(model, lanes)


def stock_logits(base, bank, rows):
    """What plain transformers says with the lane's values loaded by name."""
    from transformers import AutoModelForSequenceClassification

    config = type(base.config).from_dict({**base.config.to_dict(), "num_labels": 3})
    stock = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    stock.base_model.load_state_dict(base.encoder.state_dict())
    values = {name: torch.from_numpy(value) for name, value in bank.tensors(0).items()}
    own = {name.removeprefix("head."): value for name, value in values.items() if name.startswith("head.")}
    stock.load_state_dict(own, strict=False)
    inner = {name: value for name, value in values.items() if not name.startswith(("head.",)) and "." in name}
    stock.base_model.load_state_dict(
        {n: v for n, v in inner.items() if not n.endswith((".index", ".value"))}, strict=False
    )
    with torch.no_grad():
        return stock(**bank.model._batch(rows)).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_lane_equals_stock_transformers(bases, architecture):
    base = bases(architecture)
    bank, rows = bank_of(base, "bias + gamma", inject="none"), rows_of(base)
    with torch.no_grad():
        for slot in bank.lanes[0].slots:
            bank.values[0, slot.offset : slot.offset + slot.size] += 0.1 * torch.randn(slot.size)
        ours = bank.logits({0: rows})[0]
    torch.testing.assert_close(ours, stock_logits(base, bank, rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("text", ["bias", "random(all, 40)", "b_q + g_LN1", "all", "none"])
def test_gradients_equal_autograd_on_the_stock_model(bases, architecture, text):
    base = bases(architecture)
    bank, rows = bank_of(base, text), rows_of(base)
    bank.logits({0: rows})[0].square().sum().backward()
    expected = stock_gradients(bank, rows)
    for slot in bank.lanes[0].slots:
        wanted = expected[slot.name] if slot.index is None else expected[slot.name][slot.index]
        found = bank.gradients[0, slot.offset : slot.offset + slot.size]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def stock_gradients(bank, rows):
    """The gradient of every parameter of a plain copy of the model that has the lane's values, by autograd."""
    whole = copy.deepcopy(bank.model.head_model)
    encoder, values = whole.base_model, bank.tensors(0)
    parameters = {}
    for name, parameter in encoder.named_parameters():
        parameters[name] = parameter.requires_grad_()
    for name in bank.model.head:
        if name.startswith("head."):
            owner, _, leaf = name.removeprefix("head.").rpartition(".")
            parameters[name] = torch.nn.Parameter(torch.from_numpy(values[name].copy()))
            whole.get_submodule(owner)._parameters[leaf] = parameters[name]
    for name in bank.model.injected:
        module = encoder.get_submodule(name.removesuffix(".bias"))
        parameters[name] = torch.zeros(bank.model.anatomy.shapes[name], requires_grad=True)
        module.register_forward_hook(lambda _, __, out, bias=parameters[name]: out + bias)
    whole(**bank.model._batch(rows)).logits.square().sum().backward()
    return {name: parameter.grad.reshape(-1) for name, parameter in parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_leaving_the_bank_gives_the_base_back_untouched(bases, architecture):
    base = bases(architecture)
    before = {name: value.clone() for name, value in base.encoder.state_dict().items()}
    bank = bank_of(base, "bias + random(all, 50)")
    bank.values.add_(1.0)
    bank.logits({0: rows_of(base)}, {0: 7})
    after = base.encoder.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not base.encoder.training and not any(p.requires_grad for p in base.encoder.parameters())


def test_a_lane_among_others_equals_its_separate_run(base):
    together, rows = bank_of(base, "random(all, 99)", seeds=(0, 1, 2)), rows_of(base)
    streams = {0: 5, 1: 6, 2: 7}
    logits = together.logits(dict.fromkeys(range(3), rows), streams)
    torch.stack([value.square().sum() for value in logits.values()]).sum().backward()
    for k in range(3):
        alone = bank_of(base, "random(all, 99)", seeds=(k,))
        own = alone.logits({0: rows}, {0: streams[k]})[0]
        own.square().sum().backward()
        torch.testing.assert_close(own, logits[k], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(alone.gradients[0], together.gradients[k], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_a_poisoned_lane_leaves_the_others_bit_for_bit(base, poison):
    rows, streams = rows_of(base), {0: 1, 1: 2}
    clean, dirty = bank_of(base, seeds=(0, 1)), bank_of(base, seeds=(0, 1))
    dirty.values[0] = poison
    results = []
    for bank in (clean, dirty):
        logits = bank.logits({0: rows, 1: rows}, streams)
        torch.stack([value.sum() for value in logits.values()]).sum().backward()
        results.append((logits[1].detach(), bank.gradients[1]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_the_same_stream_gives_the_same_dropout_and_another_another(base):
    bank, rows = bank_of(base), rows_of(base)
    first, again, other = (bank.logits({0: rows}, {0: stream})[0] for stream in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_segment_ids_of_pairs_reach_the_model(base):
    bank, rows = bank_of(base), rows_of(base, pair=True)
    flat = type(rows)(rows.ids, np.zeros_like(rows.types), rows.starts)
    with torch.no_grad():
        assert not torch.equal(bank.logits({0: rows})[0], bank.logits({0: flat})[0])


def test_a_frozen_head_is_kept_but_not_trained(base):
    bank = bank_of(base, head="frozen")
    head = [slot for slot in bank.lanes[0].slots if slot.name.startswith("head.")]
    assert head and all(slot.offset >= bank.lanes[0].trained for slot in head)
    assert "head.classifier.weight" in bank.tensors(0)


def test_a_bias_head_trains_the_bias_alone(base):
    lane = bank_of(base, "none", head="bias").lanes[0]
    assert [s.name for s in lane.slots if s.offset < lane.trained] == ["head.classifier.bias"]


def test_zeroed_start_values_are_in_the_lane_and_in_the_delta(base):
    bank = bank_of(base, "b_q", init="zero(bias)")
    tensors = bank.tensors(0)
    name = "encoder.layer.1.output.dense.bias"
    assert not tensors[name].any() and not tensors["encoder.layer.0.attention.self.query.bias"].any()


def test_reinitialised_entries_outside_the_selection_are_constants(base):
    bank = bank_of(base, "random(W_q, 10)", init="reinit(W_q)")
    name = "encoder.layer.0.attention.self.query.weight"
    tensors = bank.tensors(0)
    index, value = tensors[name + ".index"], tensors[name + ".value"]
    original = base.encoder.get_parameter(name).detach().numpy().reshape(-1)
    assert len(index) == original.size and np.all(np.diff(index) > 0) and not np.allclose(value, original[index])
    assert bank.lanes[0].trained == 10 + sum(np.prod(shape) for shape in bank.model.head.values())


def test_what_the_checkpoint_lacks_belongs_to_the_head(tmp_path):
    from safetensors.torch import load_file, save_file

    from bitfit import load_base
    from support import make_folder

    folder = make_folder(tmp_path / "nopool", "bert")
    weights = {n: v for n, v in load_file(folder / "model.safetensors").items() if not n.startswith("pooler.")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    base = load_base(folder)
    model = Model(base, 2, "cls")
    assert "b_pool" not in model.anatomy.terms and "pooler.dense.weight" in model.head
    first, second = (lane_to_train(model, select(model.anatomy, "none"), seed=seed) for seed in (0, 1))
    assert not torch.equal(first.start, second.start)
    assert "pooler.dense.weight" not in Model(base, 2, "mean").head


def test_the_change_map_is_the_mean_absolute_change_per_term_and_layer(base):
    bank = bank_of(base, "b_q@1 + b_emb")
    bank.values[0, :16] += 0.25  # b_emb comes first in the model
    found = change_map(bank.model, bank.tensors(0))
    assert list(found) == ["b_q", "b_emb"] and found["b_q"][0] is None
    assert found["b_emb"] == [pytest.approx(0.25)] and found["b_q"][1] == 0.0


def test_the_change_of_a_sampled_vector_is_a_mean_over_all_its_entries(base):
    """1/dim(b) in the papers: what was not drawn did not change, and counts."""
    bank = bank_of(base, "each(b_q@1, 25%)")
    drawn = sum(len(tensor) for name, tensor in bank.tensors(0).items() if name.endswith(INDEX))
    bank.values[0, :drawn] += 0.5
    found = change_map(bank.model, bank.tensors(0))
    assert drawn == 4 and found["b_q"][1] == pytest.approx(0.5 * 4 / 16)


def test_slices_of_one_tensor_change_apart(bases):
    bank = bank_of(bases("gpt2"), "b_q + b_v")
    bank.values[0, :16] += 0.5
    found = change_map(bank.model, bank.tensors(0))
    assert found["b_q"][0] == pytest.approx(0.5) and found["b_v"][0] == 0.0 and "b_k" not in found


def test_a_trained_lane_and_its_delta_say_the_same(base, tmp_path):
    from bitfit import train

    path = tmp_path / "r.csv"
    path.write_text("text,label\n" + "".join(f"{t},{label}\n" for t, label in reviews(32)))
    delta = train(path, base, lr=1e-2, epochs=1, select="bias + random(all, 100)").best.delta
    model = Model(base, 2, delta.meta.pool)
    worn = Bank(model, [lane_of_delta(model, delta)])
    tensors = worn.tensors(0)
    assert tensors.keys() == delta.tensors.keys()
    assert all(np.array_equal(tensors[name], delta.tensors[name]) for name in tensors)
