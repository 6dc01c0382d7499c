"""The packed path computes what the stock path computes, lanes never meet, and dropout masks are anyone's to replay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from bitfit.bank.bank import Bank
from bitfit.bank.dropout import Draws, drop, token_keys
from bitfit.bank.lanes import Lane, lane_to_train
from bitfit.bank.layer import Linear
from bitfit.bank.packed import Packed
from bitfit.model.architectures import architecture
from bitfit.model.base import Base
from bitfit.model.language import select
from bitfit.model.task_model import Model
from packing import PACKED, POOLS, STREAMS, assert_close, by_name, learn, rows, tiny_base
from support import config_of

SELECTIONS = {0: "bias", 1: "b_q + b_m2 + g_LN1", 2: "bias + random(W_m2 + W_q + W_emb, 20)"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lane(model: Model, selection: str, k: int, head: str = "full") -> Lane:
    return lane_to_train(model, select(model.anatomy, selection, k), head, seed=k)


def unequal_lanes(model: Model) -> list[Lane]:
    return [lane(model, SELECTIONS[k], k, ("full", "bias", "frozen")[k]) for k in range(3)]


def assert_same_gradients(bank: Bank, k: int, one: Tensor, other: Tensor) -> None:
    mine, theirs = by_name(bank, k, one), by_name(bank, k, other)
    assert mine
    largest = max(float(value.abs().max()) for value in theirs.values())
    for name in mine:
        difference = float((mine[name] - theirs[name]).abs().max())
        # A few sampled entries may be small beside the terms they are the sum of, hence the floor.
        floor = (0.1 if theirs[name].numel() > 8 else 1.0) * largest
        # 1.03e-5 was seen: the order of float32 sums depends on the CPU.
        assert difference <= 2e-5 * max(float(theirs[name].abs().max()), floor), name


@pytest.mark.parametrize("streams", [None, STREAMS], ids=["still", "dropout"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model_type", PACKED)
class TestEveryArchitecture:
    def test_one_lane_equals_the_stock_model(self, model_type: str, pool: str, streams: dict[int, int] | None) -> None:
        model = Model(tiny_base(model_type), 3, pool)
        bank = Bank(model, [lane(model, "bias + gamma", 0)])
        assert Packed.supports(model)
        batch = {0: rows(2)}
        packed, stock = bank.logits(batch, streams), bank.stock_logits(batch, streams)
        assert_close(packed[0], stock[0])
        assert_same_gradients(bank, 0, learn(bank, packed)[0], learn(bank, stock)[0])

    def test_whole_matrices_equal_the_stock_model(
        self, model_type: str, pool: str, streams: dict[int, int] | None
    ) -> None:
        model = Model(tiny_base(model_type), 3, pool)
        bank = Bank(model, [lane(model, "all", 0)])
        packed, stock = bank.logits({0: rows(0)}, streams), bank.stock_logits({0: rows(0)}, streams)
        assert_close(packed[0], stock[0])
        assert_same_gradients(bank, 0, learn(bank, packed)[0], learn(bank, stock)[0])

    def test_unequal_lanes_equal_the_stock_model_and_their_own_runs(
        self, model_type: str, pool: str, streams: dict[int, int] | None
    ) -> None:
        model = Model(tiny_base(model_type), 3, pool)
        bank = Bank(model, unequal_lanes(model))
        batch = {k: rows(k) for k in range(3)}
        packed, stock = bank.logits(batch, streams), bank.stock_logits(batch, streams)
        mine, theirs = learn(bank, packed), learn(bank, stock)
        for k in range(3):
            alone = bank.logits({k: batch[k]}, streams)
            assert_close(packed[k], stock[k])
            assert_close(packed[k], alone[k])
            if bank.lanes[k].trained:
                assert_same_gradients(bank, k, mine[k], theirs[k])
                assert_same_gradients(bank, k, mine[k], learn(bank, alone)[k])

    def test_equal_selections_share_leaves_and_equal_their_own_runs(
        self, model_type: str, pool: str, streams: dict[int, int] | None
    ) -> None:
        model = Model(tiny_base(model_type), 3, pool)
        bank = Bank(model, [lane(model, "bias", k) for k in range(3)])
        bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(3)), alpha=0.05)
        for present in ([0, 1, 2], [0, 2]):
            packed = bank.logits({k: rows(k) for k in present}, streams)
            gradients = learn(bank, packed)
            for k in present:
                alone = bank.logits({k: rows(k)}, streams)
                assert_close(packed[k], alone[k])
                assert_same_gradients(bank, k, gradients[k], learn(bank, alone)[k])

    def test_reruns_are_bit_equal_and_leave_the_base_alone(
        self, model_type: str, pool: str, streams: dict[int, int] | None
    ) -> None:
        model = Model(tiny_base(model_type), 3, pool)
        before = {name: model.original(name).clone() for name in model.owners if name not in model.head}
        bank = Bank(model, unequal_lanes(model))
        batch = {k: rows(k) for k in range(3)}
        outputs = [bank.logits(batch, streams) for _ in range(2)]
        gradients = [learn(bank, out) for out in outputs]
        for k in range(3):
            assert torch.equal(outputs[0][k], outputs[1][k])
            assert torch.equal(gradients[0][k], gradients[1][k])
        for name, value in before.items():
            assert torch.equal(model.original(name), value)
            assert not model.original(name).requires_grad
            assert model.original(name).grad is None
        assert model.head_model is not None
        assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("same", [True, False], ids=["equal-lanes", "unequal-lanes"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("streams", [None, STREAMS], ids=["still", "dropout"])
@pytest.mark.parametrize("model_type", ["bert", "mpnet"])
def test_a_poisoned_lane_leaves_the_others_bit_for_bit(
    model_type: str, streams: dict[int, int] | None, pool: str, same: bool, poison: float
) -> None:
    model = Model(tiny_base(model_type), 3, pool)
    bank = Bank(model, [lane(model, "bias", k) for k in range(3)] if same else unequal_lanes(model))
    batch = {k: rows(k) for k in range(3)}
    healthy = bank.logits(batch, streams)
    gradients = learn(bank, healthy)
    bank.values[1] = poison
    sick = bank.logits(batch, streams)
    after = learn(bank, sick)
    for k in (0, 2):
        assert torch.equal(healthy[k], sick[k])
        assert torch.equal(gradients[k], after[k])


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_new", "tanh"])
@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_other_activations_than_gelu_equal_the_stock_model(model_type: str, activation: str) -> None:
    setting = architecture(model_type).activation
    model = Model(tiny_base(model_type, **{setting: activation}), 3, "mean")
    bank = Bank(model, unequal_lanes(model))
    batch = {k: rows(k) for k in range(3)}
    packed, stock = bank.logits(batch, STREAMS), bank.stock_logits(batch, STREAMS)
    mine, theirs = learn(bank, packed), learn(bank, stock)
    for k in batch:
        assert_close(packed[k], stock[k])
        assert_same_gradients(bank, k, mine[k], theirs[k])
    gelu = Model(tiny_base(model_type), 3, "mean")
    assert not torch.allclose(packed[0], Bank(gelu, unequal_lanes(gelu)).logits(batch, STREAMS)[0])


def test_other_architectures_keep_the_stock_path() -> None:
    config = config_of("albert", max_position_embeddings=80, pad_token_id=1)
    torch.manual_seed(0)
    encoder = AutoModelForSequenceClassification.from_config(copy.deepcopy(config)).base_model.eval()
    base = Base("albert", config, encoder.requires_grad_(False), tiny_base("bert").tokenizer, frozenset(), "cls")
    model = Model(base, 2)
    assert not Packed.supports(model)
    bank = Bank(model, [lane(model, "bias", 0)])
    out = [bank.logits({0: rows(0)}, {0: 7})[0] for _ in range(2)]
    assert torch.equal(*out)


def test_evaluation_works_without_gradients() -> None:
    model = Model(tiny_base("bert"), 3, "cls")
    bank = Bank(model, [lane(model, "bias", k) for k in range(2)])
    with torch.inference_mode():
        still = bank.logits({k: rows(k) for k in range(2)})
    assert torch.equal(bank.logits({k: rows(k) for k in range(2)})[1].detach(), still[1])


def test_a_selection_of_the_top_layer_keeps_no_graph_below() -> None:
    model = Model(tiny_base("bert"), 3, "mean")
    bank = Bank(model, [lane(model, "b_m3@last1", 0)])
    seen, todo = set(), [bank.logits({0: rows(0)}, STREAMS)[0].grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [below for below, _ in node.next_functions]
    assert len([node for node in seen if "_NodeBackward" in type(node).__name__]) == 1


def test_the_backward_ends_at_the_lowest_trained_site(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tiny_base("bert"), 3, "mean")
    bank = Bank(model, [lane(model, "b_m3@last1", 0)])
    went, backward = [], Linear.backward

    def watched(linear: Linear, above: Tensor, tape: Any, gradients: Any, wanted: bool, **more: Any) -> Tensor | None:
        went.append(wanted)
        return backward(linear, above, tape, gradients, wanted, **more)

    monkeypatch.setattr(Linear, "backward", watched)
    bank.logits({0: rows(0)}, STREAMS)[0].sum().backward()
    assert went == [False]


# The masks of dropout


def masks(p: float, site: int = 0, stream: int = 9) -> Tensor:
    tokens = token_keys(stream, np.arange(2000) // 40, np.arange(2000) % 40)
    return (drop(torch.ones(2000, 384), Draws(tokens, site + 1, torch.device("cpu")).hidden(site), p) > 0).double()


def standard(p: float, *place: int) -> Tensor:
    return (masks(p, *place) - (1 - p)) / (p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5, 0.7])
def test_masks_look_like_independent_coins(p: float) -> None:
    z = standard(p)
    count, width = z.shape
    assert abs(float(z.mean())) * (count * width) ** 0.5 < 4
    for mean, size in ((z.mean(0), count), (z.mean(1), width)):
        assert 0.9 < float((mean * size**0.5).std()) < 1.1
    for product, size in ((z.T @ z / count, count), (z @ z.T / width, width)):
        pairs = product[~torch.eye(len(product), dtype=torch.bool)] * size**0.5
        assert 0.97 < float(pairs.std()) < 1.03
        assert float(pairs.abs().max()) < 8
    for other in (standard(p, 1), standard(p, 0, 10)):
        assert abs(float((z * other).mean())) * (count * width) ** 0.5 < 4


def test_attention_masks_look_like_independent_coins() -> None:
    tokens = token_keys(9, np.arange(2000) // 40, np.arange(2000) % 40)
    keys = Draws(tokens, 1, torch.device("cpu")).attention(0, 12).view(50, 40, 12).transpose(1, 2)[..., None]
    z = ((drop(torch.ones(50, 12, 40, 40), keys, 0.1) > 0).double() - 0.9) / 0.3
    assert abs(float(z.mean())) * z.numel() ** 0.5 < 4
    for axis in range(4):
        flat = z.transpose(0, axis).reshape(z.shape[axis], -1)
        pairs = (flat @ flat.T)[~torch.eye(len(flat), dtype=torch.bool)] / flat.shape[1] ** 0.5
        assert 0.85 < float(pairs.std()) < 1.15


def test_dropout_replays_its_mask_in_the_backward() -> None:
    tokens = token_keys(9, np.zeros(30, np.int64), np.arange(30))
    x = torch.ones(30, 16, requires_grad=True)
    out = drop(x, Draws(tokens, 3, torch.device("cpu")).hidden(2), 0.4)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    assert set(out.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.6))}
