"""Few entries of a matrix: exact against dense autograd, at the cost of the entries, lanes apart."""

from __future__ import annotations

import pytest
import torch

from bitfit.bank import sparse
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.bank.sparse import Patch
from bitfit.delta.delta import Delta
from bitfit.model.language import select
from bitfit.model.resolution import resolve_starts
from bitfit.model.task_model import Model
from packing import PACKED, POOLS, STREAMS, assert_close, by_name, learn, rows, tiny_base
from support import meta_of

SELECTIONS = {
    0: "random(all, 300)",
    1: "rowcol(all, 400)",
    2: "bias + random(W_m2 + W_q + W_emb, 60) + rowcol(W_m3 + W_k, 90)",
}


@pytest.fixture(autouse=True)
def every_mask_is_sparse(monkeypatch):
    monkeypatch.setattr(sparse, "SCATTERED", 1.0)


def bank_of(model, selections=SELECTIONS, init="keep"):
    lanes = []
    for k, text in selections.items():
        starts = resolve_starts(model.anatomy, init, k)
        lanes.append(lane_to_train(model, select(model.anatomy, text, k), starts=starts, seed=k))
    bank = Bank(model, lanes)
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(3)), alpha=0.05)
    return bank


def dense_gradients(bank, k, batch, streams):
    """The gradients of whole tensors: the stock model with the lane's tensors as they are, every entry a leaf."""
    whole = {name: tensor.detach().clone().requires_grad_() for name, tensor in bank._effective(k).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bank, "_effective", lambda _: whole)
        learn(bank, bank.stock_logits({k: batch[k]}, streams))
    return {name: tensor.grad.reshape(-1) for name, tensor in whole.items()}


def assert_lanes_equal_stock(bank, batch, streams=None):
    packed, stock = bank.logits(batch, streams), bank.stock_logits(batch, streams)
    mine = learn(bank, packed)
    indices = {k: {s.name: s.index for s in bank.lanes[k].slots if s.offset < bank.lanes[k].trained} for k in batch}
    for k in batch:
        assert_close(packed[k], stock[k])
        dense = dense_gradients(bank, k, batch, streams)
        for name, found in by_name(bank, k, mine[k]).items():
            wanted = dense[name] if indices[k][name] is None else dense[name][indices[k][name]]
            # Twice the bound of the logits: two orders of adding the same float32 terms were seen 1.03e-5 apart.
            assert float((found - wanted).abs().max()) <= 2e-5 * float(dense[name].abs().max()), name


@pytest.mark.parametrize("streams", [None, STREAMS], ids=["still", "dropout"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model_type", PACKED)
def test_entries_equal_dense_autograd(model_type, pool, streams):
    bank = bank_of(Model(tiny_base(model_type), 3, pool))
    assert all(len(bank._patches_of(k)) > 5 for k in range(3))  # the premise: these masks take the sparse path
    assert_lanes_equal_stock(bank, {k: rows(k) for k in range(3)}, streams)
    for k in range(3):
        assert_lanes_equal_stock(bank, {k: rows(k)}, streams)


def test_a_lane_of_entries_beside_a_lane_of_whole_matrices_equals_dense_autograd():
    model = Model(tiny_base("bert"), 3, "cls")
    bank = bank_of(model, {0: "random(all, 300)", 1: "W_q + W_m2 + W_emb", 2: "rowcol(all, 400)"})
    assert_lanes_equal_stock(bank, {k: rows(k) for k in range(3)})


@pytest.mark.parametrize("init", ["zero(W_q)", "reinit(random(all, 200))"])
def test_constants_beside_trained_entries_equal_dense_autograd(init):
    bank = bank_of(Model(tiny_base("bert"), 3, "mean"), init=init)
    assert_lanes_equal_stock(bank, {k: rows(k) for k in range(3)}, STREAMS)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("model_type", ["bert", "mpnet"])
def test_a_poisoned_lane_leaves_the_others_bit_for_bit(model_type, poison):
    bank = bank_of(Model(tiny_base(model_type), 3, "cls"))
    batch = {k: rows(k) for k in range(3)}
    healthy = bank.logits(batch, STREAMS)
    gradients = learn(bank, healthy)
    bank.values[1] = poison
    sick = bank.logits(batch, STREAMS)
    after = learn(bank, sick)
    assert not torch.equal(healthy[1], sick[1])
    for k in (0, 2):
        assert torch.equal(healthy[k], sick[k]) and torch.equal(gradients[k], after[k])


def test_reruns_are_bit_equal_also_after_an_evaluation():
    bank, batch = bank_of(Model(tiny_base("bert"), 3, "cls")), {k: rows(k) for k in range(3)}
    with torch.inference_mode():
        bank.logits(batch)
    outputs = [bank.logits(batch, STREAMS) for _ in range(2)]
    gradients = [learn(bank, out) for out in outputs]
    for k in batch:
        assert torch.equal(outputs[0][k], outputs[1][k]) and torch.equal(gradients[0][k], gradients[1][k])


@pytest.mark.parametrize("selections", [{0: "random(all, 0.4%)"}, SELECTIONS], ids=["alone", "three lanes"])
def test_no_tensor_of_a_matrixs_shape_is_made(selections):
    from torch.utils._python_dispatch import TorchDispatchMode

    model = Model(tiny_base("bert"), 3, "mean")
    bank = bank_of(model, selections)
    shapes = {shape for shape in model.anatomy.shapes.values() if len(shape) == 2 and shape[0] > 2}
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            new = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
            own = [t for t in new if t.untyped_storage().nbytes() == t.nbytes and t.dtype == torch.float32]
            made.extend((func, t) for t in own if tuple(t.shape) in shapes)
            return out

    batch = {k: rows(k) for k in selections if k != 1}  # lane 1 has as many tokens as the vocabulary has words
    learn(bank, bank.logits(batch, STREAMS))  # the first step makes the blocked copies of the base's matrices
    with Watch():
        learn(bank, bank.logits(batch, STREAMS))
    known = {model.original(name).data_ptr() for name in model.anatomy.shapes}
    assert [(func, t.shape) for func, t in made if t.data_ptr() not in known] == []


def test_a_served_delta_of_entries_equals_its_lane():
    model = Model(tiny_base("bert"), 3, "cls")
    bank = bank_of(model)
    meta = meta_of(model.base)
    worn = Bank(model, [lane_of_delta(model, Delta(bank.tensors(k), meta)) for k in range(3)])
    batch = {k: rows(k) for k in range(3)}
    with torch.inference_mode():
        assert all(torch.equal(worn.logits(batch)[k], bank.logits(batch)[k]) for k in batch)


def patch(index, shape=(6, 5)):
    return Patch(torch.tensor(index), shape, torch.zeros(len(index)), torch.ones(len(index)))


def test_whole_rows_and_whole_columns_are_blocks():
    rows_of, columns_of, scattered = patch([5, 6, 7, 8, 9]), patch([1, 3, 6, 8, 11, 13, 16, 18, 21, 23, 26, 28]), [1, 7]
    assert rows_of.sides[0].tolist() == [1] and rows_of.sides[1] is None
    assert columns_of.sides[0] is None and columns_of.sides[1].tolist() == [1, 3]
    assert patch(scattered).block is None and [side.tolist() for side in patch(scattered).sides] == [[0, 1], [1, 2]]


def test_many_entries_are_left_to_the_dense_path(monkeypatch):
    monkeypatch.setattr(sparse, "SCATTERED", 0.1)
    assert patch([1, 7, 13]).is_sparse and not patch([1, 7, 13, 19]).is_sparse
    assert patch([5, 6, 7, 8, 9]).is_sparse and not patch(list(range(5, 15))).is_sparse
