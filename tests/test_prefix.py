"""The frozen prefix: computed once, reused in every epoch, and never another result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitfit import train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.bank.packed import Packed
from bitfit.errors import Interrupted
from bitfit.model.language import select
from bitfit.model.resolution import resolve_starts
from bitfit.model.rows import by_length
from bitfit.model.task_model import Model
from bitfit.training import job as training_job
from bitfit.training import run as training
from packing import PACKED, POOLS, STREAMS, assert_close, learn, rows, tiny_base

FROZEN = {"none": 3, "bias@last1": 2, "b_m2@1 + b_q@2": 1, "bias": 0, "random(W_q@last2, 9)": 1}


def bank_of(model_type, selection, pool, lanes=3, init="keep"):
    model = Model(tiny_base(model_type), 3, pool)
    chosen, starts = select(model.anatomy, selection, 0), resolve_starts(model.anatomy, init, 0)
    made = [lane_to_train(model, chosen, starts=starts, seed=k) for k in range(lanes)]
    return Bank(model, made, prefix_dropout=False)


@pytest.mark.parametrize("streams", [None, STREAMS], ids=["still", "dropout"])
@pytest.mark.parametrize("selection", FROZEN)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model_type", PACKED)
def test_known_rows_give_the_outputs_and_gradients_of_unknown_ones(model_type, pool, selection, streams):
    bank = bank_of(model_type, selection, pool)
    assert bank.frozen == FROZEN[selection]
    plain = {k: rows(k) for k in range(3)}
    known = {k: bank.with_prefix(own, by_length(own, 2)) for k, own in plain.items()}
    assert all((own.known is not None) == (bank.frozen > 0) for own in known.values())
    without, by = bank.logits(plain, streams), bank.logits(known, streams)
    expected, found = learn(bank, without), learn(bank, by)
    for k in range(3):
        assert_close(by[k], without[k])
        assert_close(found[k], expected[k])


@pytest.mark.parametrize("pool", POOLS)
def test_without_dropout_a_frozen_prefix_changes_nothing(pool):
    bank = bank_of("bert", "bias@last1", pool)
    for k, out in bank.logits({k: rows(k) for k in range(3)}).items():
        assert_close(out, bank.stock_logits({k: rows(k)})[k])


def test_only_the_frozen_layers_are_without_dropout():
    bank = bank_of("bert", "bias@last1", "mean", lanes=1)
    whole = Bank(bank.model, [lane_to_train(bank.model, select(bank.model.anatomy, "bias@last1"))])
    outputs = [b.logits({0: rows(0)}, STREAMS)[0] for b in (bank, whole)]
    still = bank.logits({0: rows(0)})[0]
    assert not torch.equal(*outputs) and not torch.equal(outputs[0], still)
    top = [Packed(bank.model)._sites(layer) for layer in (0, 2, 3)]
    assert top == [1, 7, 10]  # sites above keep their numbers, and so their masks


def test_taking_known_rows_takes_their_states():
    for selection in ("none", "bias@last1"):
        bank = bank_of("bert", selection, "mean", lanes=1)
        known = bank.with_prefix(rows(2), by_length(rows(2), 3))
        chosen = np.array([4, 0, 5])
        assert_close(bank.logits({0: known.take(chosen)})[0], bank.logits({0: rows(2).take(chosen)})[0])


def test_start_values_below_the_selection_leave_nothing_frozen_above_them():
    assert bank_of("bert", "bias@last1", "cls", lanes=1, init="zero(b_q@1)").frozen == 1
    assert bank_of("bert", "none", "cls", lanes=1, init="reinit(b_emb)").frozen == 0


def test_a_trained_pooler_freezes_every_layer():
    assert bank_of("bert", "b_pool", "cls", lanes=1).frozen == 3


def deltas(csv_file, base, out=None, **options):
    settings = {"select": "bias@last1", "lr": [1e-2, 1e-3], "epochs": 3, "batch": 5} | options
    run = train(csv_file, base, out=out, **settings)
    return [trial.delta for trial in run.trials], run


def same(one, other):
    return all(np.array_equal(a.tensors[n], b.tensors[n]) for a, b in zip(one, other, strict=True) for n in a.tensors)


@pytest.mark.parametrize("select", ["none", "bias@last1"])
def test_training_is_the_same_where_the_states_do_not_fit(base, csv_file, monkeypatch, select):
    cached, _ = deltas(csv_file, base, select=select)
    monkeypatch.setattr(training_job, "PREFIX_BYTES", 0)
    uncached, _ = deltas(csv_file, base, select=select)
    for one, other in zip(cached, uncached, strict=True):
        for name, value in one.tensors.items():
            np.testing.assert_allclose(value, other.tensors[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("select", ["none", "bias@last1"])
def test_each_training_row_passes_the_frozen_layers_once(base, csv_file, monkeypatch, select):
    seen = []
    once = Packed._prefix

    def counted(packed, layout, *rest):
        seen.append(len(layout.lengths))
        return once(packed, layout, *rest)

    monkeypatch.setattr(Packed, "_prefix", counted)
    _, run = deltas(csv_file, base, select=select)
    assert sum(seen) == len(run.dataset.train) + len(run.dataset.dev)


def test_a_run_is_the_same_byte_for_byte_also_when_interrupted(base, csv_file, tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path in paths[:2]:
        deltas(csv_file, base, path)

    def stop(part, step, total, runners):
        if step == 7:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        deltas(csv_file, base, paths[2], watch=stop)
    deltas(csv_file, base, paths[2], resume=True)
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()


def test_prefix_dropout_restores_dropout_everywhere(base, csv_file):
    first, again, other = (deltas(csv_file, base, prefix_dropout=on)[0] for on in (True, True, False))
    assert same(first, again) and not same(first, other)
    assert first[0].meta.trial.prefix_dropout is True


def frozen_layers(job, trial):
    """The frozen prefix of a trial that is trained alone."""
    model = Model(job.base, job.task.outputs, trial.pool)
    lane = lane_to_train(model, select(model.anatomy, trial.select, trial.seed))
    return Bank(model, [lane], prefix_dropout=False).frozen


@pytest.mark.parametrize("pool", ["cls", "mean"])  # the pooler is a part of the samples under cls only
def test_lanes_of_unlike_prefix_never_share_a_pass(base, csv_file, pool):
    plan = training.Plan(select="random(bias, 2)", pool=pool, lr=1e-3, seed=list(range(38, 50)))
    job, trials = training.prepare(csv_file, base, plan, lambda _: None)
    for group in training.passes(trials):
        assert len({frozen_layers(job, resolved.trial) for resolved in group}) == 1


def test_the_depth_that_groups_trials_is_the_one_that_is_trained(base, csv_file):
    plan = training.Plan(select="random(bias, 2)", pool="mean", init="zero(b_q@1)", lr=1e-3, seed=list(range(38, 50)))
    _, trials = training.prepare(csv_file, base, plan, lambda _: None)
    for resolved in trials:
        model = Model(base, 2, "mean")
        what = resolved.resolution
        lane = lane_to_train(model, what.selection, starts=what.starts, seed=resolved.trial.seed)
        assert Bank(model, [lane], prefix_dropout=False).frozen == what.depth
