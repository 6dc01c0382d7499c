"""Products with the blocked copies of frozen matrices."""

from __future__ import annotations

import pytest
import torch

from bitfit import Model
from bitfit.bank import blocked
from bitfit.bank.bank import Bank
from bitfit.bank.blocked import BlockedMatrices
from bitfit.bank.lanes import lane_to_train
from bitfit.model.language import select
from packing import STREAMS, rows, tiny_base

needs_fast_products = pytest.mark.skipif(not blocked.has_fast_products(), reason="needs a CPU with AVX-512 and oneDNN")


@pytest.fixture
def matrices() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"q": torch.randn(24, 40), "k": torch.randn(16, 40)}


def copies(matrices: dict[str, torch.Tensor]) -> blocked.Blocked:
    values = list(matrices.values())
    found = BlockedMatrices(values).get(["q", "k"], values)
    assert found is not None
    return found


@needs_fast_products
@pytest.mark.parametrize("by_row", [False, True], ids=["one bias", "a bias for each row"])
def test_outputs_equal_the_usual_product(matrices, by_row):
    x = torch.randn(7, 40)
    bias = torch.randn(7, 40) if by_row else torch.randn(40)
    expected = torch.cat([x @ matrix.t() for matrix in matrices.values()], 1) + bias
    torch.testing.assert_close(copies(matrices).outputs(x, bias), expected, rtol=1e-5, atol=1e-5)


@needs_fast_products
def test_input_gradients_equal_the_usual_product(matrices):
    above, added = torch.randn(7, 40), torch.randn(7, 40)
    expected = added + above @ torch.cat(list(matrices.values()))
    torch.testing.assert_close(copies(matrices).input_gradients(above, added), expected, rtol=1e-5, atol=1e-5)


@needs_fast_products
def test_a_row_has_the_same_bits_among_more_rows():
    torch.manual_seed(0)
    matrix, x, bias = torch.randn(24, 1536), torch.randn(300, 1536), torch.randn(24)
    made = BlockedMatrices([matrix]).get(["m3"], [matrix])
    expected = made.outputs(x[:2], bias)
    for count in (8, 33, 300):
        assert torch.equal(made.outputs(x[:count], bias)[:2], expected)


@needs_fast_products
def test_a_matrix_that_was_changed_in_place_is_copied_again(matrices):
    kept = BlockedMatrices(list(matrices.values()))
    x, bias = torch.randn(3, 40), torch.zeros(24)
    before = kept.get(["q"], [matrices["q"]]).outputs(x, bias)
    matrices["q"].mul_(2)
    torch.testing.assert_close(kept.get(["q"], [matrices["q"]]).outputs(x, bias), 2 * before)


def test_too_large_bases_keep_the_usual_layout(matrices, monkeypatch):
    monkeypatch.setattr(blocked, "MOST_BYTES", 10)
    assert not BlockedMatrices(list(matrices.values())).usable


def test_bases_in_half_precision_keep_the_usual_layout(matrices):
    assert not BlockedMatrices([matrix.bfloat16() for matrix in matrices.values()]).usable


@needs_fast_products
def test_matrices_made_in_inference_mode_are_copied():
    with torch.inference_mode():
        matrix = torch.randn(24, 40)
    x = torch.randn(3, 40)
    product = BlockedMatrices([matrix]).get(["q"], [matrix]).outputs(x, torch.zeros(24))
    torch.testing.assert_close(product, x @ matrix.t(), rtol=1e-5, atol=1e-5)


@needs_fast_products
def test_all_banks_on_a_base_share_its_copies():
    models = [Model(fresh_base(), 3, "mean")]
    models.append(Model(models[0].base, 2, "mean"))
    kept = [bank_of(model, 1)._packed.blocked for model in models]
    assert kept[0] is kept[1]
    assert kept[0] is not bank_of(Model(fresh_base(), 3, "mean"), 1)._packed.blocked


@needs_fast_products
def test_a_lane_that_replaces_a_matrix_does_not_use_its_copy():
    model = Model(fresh_base(), 3, "mean")
    bank = bank_of(model, 1, "W_m1")
    bank.logits({0: rows(0)}, STREAMS)[0].sum().backward()
    names = set().union(*bank._packed.blocked._made)
    assert any("key" in name for name in names)
    assert not any("attention.output.dense" in name for name in names)


def fresh_base():
    """A base with an encoder that no other test uses."""
    return tiny_base.__wrapped__("bert")


def bank_of(model: Model, lanes: int, text: str = "bias") -> Bank:
    selection = select(model.anatomy, text)
    return Bank(model, [lane_to_train(model, selection, seed=k) for k in range(lanes)])


@needs_fast_products
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_training_step_is_the_same_with_and_without_copies(pool, monkeypatch):
    gradients = []
    for fast in (True, False):
        monkeypatch.setattr(blocked, "has_fast_products", lambda fast=fast: fast)
        bank = bank_of(Model(fresh_base(), 3, pool), 2)
        assert bank._packed.blocked.usable == fast
        bank.logits({k: rows(k) for k in range(2)}, STREAMS)[0].sum().backward()
        gradients.append(bank.gradients.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().max() > 0
