"""AutoFreeze: settled layers are frozen from the lowest up, and nothing else changes by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitfit import train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.cli.main import run as command
from bitfit.errors import Interrupted, UsageError
from bitfit.model.language import select
from bitfit.model.rows import by_length
from bitfit.model.task_model import Model
from bitfit.report.report import _settings
from bitfit.study.spec import Method
from bitfit.training import autofreeze
from bitfit.training import job as training_job
from bitfit.training.autofreeze import AutoFreeze, relative_move
from bitfit.training.evaluation import score_lanes
from bitfit.training.loop import Runner
from bitfit.training.plan import Plan
from bitfit.training.run import prepare
from packing import PACKED, POOLS, STREAMS, assert_close, learn, rows, tiny_base

SELECTIONS = ("bias", "bias + random(W_q + W_m3, 60)", "all")
DEPTHS = (1, 3, 0)
AUTO = {"autofreeze": True, "lr": [1e-2, 2e-3], "epochs": 4, "batch": 5, "select": "bias + random(all, 50)"}


def trained_bank(model_type, selection, pool, lanes=3):
    """Lanes with values of their own in every layer."""
    model = Model(tiny_base(model_type), 3, pool)
    chosen = select(model.anatomy, selection, 0)
    bank = Bank(model, [lane_to_train(model, chosen, seed=k) for k in range(lanes)], prefix_dropout=False)
    generator = torch.Generator().manual_seed(3)
    bank.values += 0.05 * torch.randn(bank.values.shape, generator=generator)
    return bank


def frozen_entries(bank, k):
    """A mask of the lane's trained values that are frozen."""
    mask = torch.zeros(bank.lanes[k].trained, dtype=torch.bool)
    mask[bank.entries(k, bank.model.anatomy.names_below(bank.depths[k]))] = True
    return mask


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model_type", PACKED)
def test_frozen_layers_change_no_output_and_no_other_gradient(model_type, pool, selection):
    bank = trained_bank(model_type, selection, pool)
    plain = {k: rows(k) for k in range(3)}
    before = bank.logits(plain)
    gradients = learn(bank, before)
    for k, depth in enumerate(DEPTHS):
        bank.freeze(k, depth)
    known = {k: bank.with_lane_prefix(own, by_length(own, 2), k).of_lane(k) for k, own in plain.items()}
    assert [k for k, own in known.items() if own.known is not None] == [0, 1]
    for given in (plain, known):
        after = bank.logits(given)
        found = learn(bank, after)
        for k in range(3):
            frozen = frozen_entries(bank, k)
            assert_close(after[k], before[k])
            assert not found[k][: len(frozen)][frozen].any()
            assert_close(found[k][: len(frozen)][~frozen], gradients[k][: len(frozen)][~frozen])


def test_states_go_on_from_those_of_fewer_layers_to_the_same_bits():
    bank = trained_bank("bert", "bias", "mean")
    batches = by_length(rows(2), 2)
    bank.freeze(1, 1)
    first = bank.with_lane_prefix(rows(2), batches, 1)
    bank.freeze(1, 2)
    onward = bank.with_lane_prefix(first, batches, 1)
    fresh = bank.with_lane_prefix(rows(2), batches, 1)
    assert np.array_equal(onward.known_by_lane[1].states, fresh.known_by_lane[1].states)
    assert not np.array_equal(onward.known_by_lane[1].states, first.known_by_lane[1].states)


def test_frozen_layers_have_no_dropout_and_those_above_keep_theirs():
    bank = trained_bank("bert", "bias", "mean", lanes=1)
    bank.freeze(0, 2)
    known = bank.with_lane_prefix(rows(0), by_length(rows(0), 2), 0).of_lane(0)
    one, other = bank.logits({0: rows(0)}, STREAMS)[0], bank.logits({0: known}, STREAMS)[0]
    assert_close(one, other)
    assert not torch.equal(one, bank.logits({0: rows(0)})[0])


def test_on_the_stock_path_frozen_layers_get_no_gradient(bases):
    model = Model(bases("gpt2"), 2, "mean")
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias", 0))])
    bank.freeze(0, 1)
    found = learn(bank, bank.logits({0: rows(0).take(np.array([0, 3]))}))[0]
    frozen = frozen_entries(bank, 0)
    assert not found[frozen].any() and found[~frozen].any()


# ---- the rule


def test_a_move_is_relative_to_the_way_from_the_start():
    start, last, now = torch.zeros(2), torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])
    assert relative_move(start, last, now) == pytest.approx(4 / 5)
    assert relative_move(start, start, start) == 0.0


def judge_at(judge, runner, epoch):
    """Judge a lane after an evaluation."""
    runner.record_evaluation(int(100 * epoch), epoch, 0.0, 0.0, np.zeros(0))
    judge([runner])


def lane_with_moves(csv_file, base, moves, epochs=0.5):
    """A lane of two layers judged twice; in between its layers move by these shares of their way, in so many epochs."""
    job, trials = prepare(csv_file, base, Plan(lr=1e-3, autofreeze=True), lambda _: None)
    model = Model(job.base, 2, "mean")
    bank = Bank(model, [lane_to_train(model, trials[0].resolution.selection)], prefix_dropout=False)
    runner = Runner(trials[0].trial, bank, 0)
    judge = AutoFreeze([runner])
    flat = runner.flat.detach()
    flat += 1
    judge_at(judge, runner, 1.0)
    for layer, move in enumerate(moves):
        names = model.anatomy.names_below(layer + 1) - model.anatomy.names_below(layer)
        flat[bank.entries(0, names)] += move
    judge_at(judge, runner, 1.0 + epochs)
    return runner


@pytest.mark.parametrize(("moves", "frozen"), [((0, 0), 2), ((0, 9), 1), ((9, 0), 0), ((9, 9), 0)])
def test_settled_layers_are_frozen_from_the_lowest_up(csv_file, base, monkeypatch, moves, frozen):
    monkeypatch.setattr(autofreeze, "MOST_AT_ONCE", 1.0)
    runner = lane_with_moves(csv_file, base, moves)
    assert runner.frozen == runner.bank.depths[0] == frozen
    assert [freezing.frozen_layers for freezing in runner.history.freezings] == ([frozen] if frozen else [])


@pytest.mark.parametrize(("epochs", "frozen"), [(0.5, 0), (1.0, 1)])
def test_a_move_is_judged_by_the_time_it_took(csv_file, base, epochs, frozen):
    move = 0.33  # 0.25 of the way from the start; a training has 5 epochs, so 2.5 or 1.24 times that way in all of them
    runner = lane_with_moves(csv_file, base, (move, 9), epochs)
    assert runner.trial.epochs == 5 and runner.frozen == frozen


def test_an_evaluation_freezes_at_most_half_of_the_layers_that_still_train(base, csv_file, monkeypatch):
    all_settled(monkeypatch)
    _, trials = prepare(csv_file, base, Plan(lr=1e-3, autofreeze=True), lambda _: None)
    model = Model(tiny_base("bert"), 2, "mean")
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias", 0))], prefix_dropout=False)
    runner = Runner(trials[0].trial, bank, 0)
    judge = AutoFreeze([runner])
    frozen = []
    for number in range(4):
        judge_at(judge, runner, number / 2)
        frozen.append(runner.frozen)
    assert model.anatomy.layers == 3 and frozen == [0, 2, 3, 3]


def test_layers_below_the_selection_stay_frozen(base, csv_file, monkeypatch):
    all_settled(monkeypatch)
    _, trials = prepare(csv_file, base, Plan(lr=1e-3, autofreeze=True), lambda _: None)
    model = Model(tiny_base("bert"), 2, "mean")
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias@last1", 0))], prefix_dropout=False)
    runner = Runner(trials[0].trial, bank, 0)
    judge = AutoFreeze([runner])
    depths = []
    for number in range(3):
        judge_at(judge, runner, number / 2)
        depths.append(bank.depths[0])
    assert depths == [2, 3, 3]


# ---- training


def all_settled(monkeypatch):
    monkeypatch.setattr(autofreeze, "SETTLED", 1000.0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_frozen_entries_keep_their_values_and_others_move_on(base, csv_file, monkeypatch, weight_decay):
    all_settled(monkeypatch)
    seen = []

    def watch(part, step, total, runners):
        runner = runners[0]
        seen.append((runner.frozen, runner.flat.detach().clone(), frozen_entries(runner.bank, 0)))

    train(csv_file, base, watch=watch, weight_decay=weight_decay, **{**AUTO, "lr": 1e-2})
    last = seen[-1]
    since = [values for frozen, values, _ in seen if frozen == base.anatomy.layers]
    assert len(since) > 10 and last[2].any() and not last[2].all()
    assert all(torch.equal(values[last[2]], last[1][last[2]]) for values in since)
    assert not torch.equal(since[0][~last[2]], last[1][~last[2]])


def test_without_settled_layers_autofreeze_changes_nothing(base, csv_file, monkeypatch):
    monkeypatch.setattr(autofreeze, "SETTLED", -1.0)
    with_, without = (train(csv_file, base, **{**AUTO, "autofreeze": on}).best.delta for on in (True, False))
    assert all(np.array_equal(values, without.tensors[name]) for name, values in with_.tensors.items())
    assert with_.meta.trial.autofreeze and not without.meta.trial.autofreeze


@pytest.mark.parametrize("memory", [0, 1 << 30], ids=["computed", "kept"])
@pytest.mark.parametrize("step", [9, 12, 20, 30])
def test_an_interrupted_run_resumes_to_the_same_bytes(base, csv_file, tmp_path, monkeypatch, step, memory):
    monkeypatch.setattr(autofreeze, "SETTLED", 4.8)
    monkeypatch.setattr(training_job, "PREFIX_BYTES", memory)
    whole = train(csv_file, base, **AUTO)
    assert any(outcome.history.freezings for outcome in whole.trials)
    out = tmp_path / "d.safetensors"

    def stop(part, at, total, runners):
        if at == step:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=stop, **AUTO)
    again = train(csv_file, base, out=out, resume=True, **AUTO)
    assert out.read_bytes() == whole.best.delta.encode()
    for one, other in zip(whole.trials, again.trials, strict=True):
        assert one.history == other.history and one.delta.encode() == other.delta.encode()


def test_a_lane_freezes_as_in_its_separate_run(base, csv_file, monkeypatch):
    monkeypatch.setattr(autofreeze, "SETTLED", 4.8)
    together = train(csv_file, base, **AUTO).trials
    for outcome in together:
        alone = train(csv_file, base, **{**AUTO, "lr": outcome.trial.lr}).best
        assert outcome.history.freezings == alone.history.freezings
        for name, values in outcome.delta.tensors.items():
            np.testing.assert_allclose(values, alone.delta.tensors[name], rtol=1e-3, atol=1e-4)


def test_the_dev_score_is_that_of_the_delta(base, csv_file, monkeypatch):
    all_settled(monkeypatch)
    run = train(csv_file, base, gap=True, **AUTO)
    model = Model(base, 2, run.best.trial.pool)
    job, _ = prepare(csv_file, base, Plan(**AUTO), lambda _: None)
    bank = Bank(model, [lane_of_delta(model, run.best.delta)])
    assert score_lanes(job, bank, [0], job.dev)[0].scores == run.best.scores["dev"]
    assert score_lanes(job, bank, [0], job.train_sample)[0].scores == run.best.scores["train"]


def test_the_history_file_says_when_layers_were_frozen(base, csv_file, monkeypatch):
    all_settled(monkeypatch)
    lines = train(csv_file, base, **AUTO).best.history.lines()
    assert [line for line in lines if "frozen_layers" in line] == [
        {"step": 12, "frozen_layers": 1},
        {"step": 18, "frozen_layers": 2},
    ]


def test_train_and_inspect_say_that_layers_were_frozen(folders, csv_file, tmp_path, monkeypatch, capsys):
    all_settled(monkeypatch)
    out = str(tmp_path / "d.safetensors")
    base = ["--base", str(folders("bert")), "--out", out]
    options = ["--epochs", "4", "--batch", "5", "--lr", "1e-2", "--autofreeze"]
    assert command(["train", str(csv_file), *base, *options]) == 0
    assert "autofreeze: lowest layers frozen: 1 at step 12, 2 at step 18" in capsys.readouterr().out
    assert command(["inspect", out]) == 0
    assert "seed 0, autofreeze" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prefix_dropout": True}, "--prefix-dropout"),
        ({"select": "none"}, "--select none trains no layer"),
        ({"epochs": 1}, "needs 3, here are 2; raise --epochs or --evals-per-epoch"),
    ],
)
def test_where_autofreeze_cannot_apply_the_error_says_why(options, told):
    with pytest.raises(UsageError, match=told):
        Plan(autofreeze=True, **options)


def test_autofreeze_takes_the_plain_recipe(base, csv_file, monkeypatch):
    all_settled(monkeypatch)
    run = train(csv_file, base, autofreeze=True, select="bias")
    assert run.story is None and run.best.history.freezings


def test_a_study_row_asks_for_autofreeze():
    method = Method(name="AutoFreeze", select="bias", rates=(1e-3,), autofreeze=True)
    assert "settled layers are frozen" in _settings(method)
