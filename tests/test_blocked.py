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
    found = BlockedMatrices(matrices).get(["q", "k"], list(matrices.values()))
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
def test_a_row_has_the_same_bits_among_any_number_of_rows(matrices):
    x, bias = torch.randn(300, 40), torch.randn(40)
    made = copies(matrices)
    for count in (1, 8, 33, 300):
        assert torch.equal(made.outputs(x[:count], bias)[0], made.outputs(x[:1], bias)[0])


@needs_fast_products
def test_a_matrix_that_was_changed_in_place_is_copied_again(matrices):
    kept = BlockedMatrices(matrices)
    x, bias = torch.randn(3, 40), torch.zeros(24)
    before = kept.get(["q"], [matrices["q"]]).outputs(x, bias)
    matrices["q"].mul_(2)
    torch.testing.assert_close(kept.get(["q"], [matrices["q"]]).outputs(x, bias), 2 * before)


def test_a_matrix_of_a_lane_is_not_copied(matrices):
    assert BlockedMatrices(matrices).get(["q"], [matrices["q"].clone()]) is None


def test_too_large_bases_keep_the_usual_layout(matrices, monkeypatch):
    monkeypatch.setattr(blocked, "MOST_BYTES", 10)
    assert BlockedMatrices(matrices).get(["q"], [matrices["q"]]) is None


def test_bases_in_half_precision_keep_the_usual_layout(matrices):
    half = {name: matrix.bfloat16() for name, matrix in matrices.items()}
    assert BlockedMatrices(half).get(["q"], [half["q"]]) is None


@needs_fast_products
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_training_step_is_the_same_with_and_without_copies(pool, monkeypatch):
    gradients = []
    for fast in (True, False):
        monkeypatch.setattr(blocked, "has_fast_products", lambda fast=fast: fast)
        model = Model(tiny_base("bert"), 3, pool)
        selection = select(model.anatomy, "bias")
        bank = Bank(model, [lane_to_train(model, selection, seed=k) for k in range(2)])
        bank.logits({k: rows(k) for k in range(2)}, STREAMS)[0].sum().backward()
        gradients.append(bank.gradients.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().max() > 0
