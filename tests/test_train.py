"""Training: it learns, only what is selected moves, the same trial gives the same bytes, and no work is lost."""

from __future__ import annotations

import json
import math
import os
import signal

import numpy as np
import pytest
import torch

from bitfit import files, train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.bank.packed import Packed
from bitfit.delta import safefile
from bitfit.errors import DataError, Diverged, Interrupted, UsageError, WriteError
from bitfit.model.language import select as choose
from bitfit.model.rows import Rows
from bitfit.model.task_model import Model
from bitfit.training import evaluation, loop
from bitfit.training.checkpoint import Store
from bitfit.training.loop import batch_rows, evaluation_steps, schedule
from bitfit.training.plan import Plan, Trial, default_rates
from bitfit.training.resolved import start_lane
from bitfit.training.run import passes, prepare, run_folder, run_pass
from support import StopAt, reviews

QUICK = {"lr": 1e-2, "epochs": 2}


@pytest.fixture
def larger(tmp_path):
    path = tmp_path / "larger.csv"
    path.write_text("text,label\n" + "".join(f"{t},{label}\n" for t, label in reviews(200)))
    return path


def test_bias_terms_alone_learn_the_task(base, larger):
    run = train(larger, base, pool="mean", lr=3e-2, epochs=8)
    assert run.best.dev >= 0.8 and run.majority == 0.5


def test_an_unknown_architecture_trains_by_group_and_by_pattern(tmp_path, csv_file):
    from bitfit import load_base, predict
    from bitfit.errors import SelectionError
    from support import SMALL, make_folder

    base = load_base(make_folder(tmp_path / "m", "ernie", **SMALL))
    assert base.anatomy.family == "unknown" and "b_q" in base.anatomy.missing
    for select in ("bias", "layernorm", r"re:encoder\.layer\.0\..*bias", "random(all, 99)"):
        delta = train(csv_file, base, select=select, **QUICK).best.delta
        assert predict(delta, ["good"], base)
    with pytest.raises(SelectionError, match="b_q"):
        train(csv_file, base, select="b_q", **QUICK)


def test_full_fine_tuning_does_not_train_words_that_no_text_has(base, csv_file):
    job, [trial] = prepare(csv_file, base, Plan(select="all", lr=1e-2), lambda _: None)
    lane = start_lane(job, Model(base, 2, "mean"), trial.trial, trial.resolution)
    delta = train(csv_file, base, select="all", recipe="plain", **QUICK).best.delta
    head = sum(values.size for values in delta.head.values())
    assert lane.trained < delta.meta.trained == choose(base.anatomy, "all").count + head


def test_full_fine_tuning_without_unused_words_equals_training_all_of_them(base, csv_file, monkeypatch):
    from bitfit.training import resolved

    options = {"select": "all", "recipe": "plain", "dropout": "off", **QUICK}
    delta = train(csv_file, base, **options).best.delta
    monkeypatch.setattr(resolved, "reachable", lambda job, selection: selection)
    whole = train(csv_file, base, **options).best.delta
    name = base.word_embedding
    assert not np.array_equal(delta.tensors[name], base.values(name))
    assert set(delta.tensors) == set(whole.tensors)
    for tensor, values in delta.tensors.items():
        np.testing.assert_allclose(values, whole.tensors[tensor], atol=1e-6)


def test_weight_decay_moves_words_that_no_text_has(base, csv_file):
    delta = train(csv_file, base, select="all", recipe="plain", weight_decay=0.1, **QUICK).best.delta
    assert (delta.tensors[base.word_embedding] != base.values(base.word_embedding)).any(axis=1).all()


def test_nothing_else_of_the_base_changes(base, csv_file):
    before = {name: value.clone() for name, value in base.encoder.state_dict().items()}
    train(csv_file, base, select="all", **QUICK)
    train(csv_file, base, **QUICK)
    assert all(torch.equal(before[name], value) for name, value in base.encoder.state_dict().items())


def test_the_delta_holds_what_was_selected_and_the_head(base, csv_file):
    tensors = train(csv_file, base, select="b_q@1", **QUICK).best.delta.tensors
    assert set(tensors) == {
        "encoder.layer.1.attention.self.query.bias", "head.classifier.bias", "head.classifier.weight",
    }  # fmt: skip


def test_weight_decay_touches_selected_entries_only(base, csv_file):
    delta = train(csv_file, base, select="random(W_m2, 30)", weight_decay=0.5, **QUICK).best.delta
    entries = delta.entries
    assert sum(len(index) for name, (index, _) in entries.items()) == 30
    for name, (index, values) in entries.items():
        original = base.encoder.get_parameter(name).detach().numpy().reshape(-1)[index]
        assert not np.allclose(values, original)


def test_three_runs_give_the_same_bytes_and_another_seed_others(base, csv_file):
    first, second, third = (train(csv_file, base, seed=3, **QUICK).best.delta.encode() for _ in range(3))
    assert first == second == third != train(csv_file, base, seed=4, **QUICK).best.delta.encode()


def test_a_trial_in_a_grid_equals_the_trial_alone(base, csv_file):
    grid = train(csv_file, base, lr=[1e-2, 3e-3], seed=[0, 1], epochs=2)
    assert [(o.trial.lr, o.trial.seed) for o in grid.trials] == [(1e-2, 0), (1e-2, 1), (3e-3, 0), (3e-3, 1)]
    for outcome in grid.trials:
        alone = train(csv_file, base, lr=outcome.trial.lr, seed=outcome.trial.seed, epochs=2).best
        assert alone.dev == outcome.dev
        for name, value in alone.delta.tensors.items():
            if not name.endswith("key.bias"):  # its gradient is rounding noise, which Adam makes into full steps
                np.testing.assert_allclose(outcome.delta.tensors[name], value, rtol=1e-4, atol=1e-5)


def test_the_best_trial_by_dev_score_is_the_one_saved(base, larger, tmp_path):
    run = train(larger, base, pool="mean", lr=[1e-6, 3e-2], epochs=8, out=tmp_path / "d.safetensors")
    assert run.best.dev == max(outcome.dev for outcome in run.trials)
    assert run.best.trial.lr == 3e-2
    assert (tmp_path / "d.safetensors").read_bytes() == run.best.delta.encode()


def test_the_best_checkpoint_is_kept_not_the_last(base, csv_file):
    best = train(csv_file, base, lr=5e-2, epochs=6).best
    scores = [found.dev_score for found in best.history.evaluations]
    assert best.dev == max(scores)


def test_each_trial_keeps_its_history(base, csv_file, tmp_path):
    train(csv_file, base, lr=1e-2, epochs=2, evals_per_epoch=3, gap=True, out=tmp_path / "d.safetensors")
    path = run_folder(tmp_path / "d.safetensors") / "lr0.01-batch8-seed0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["status"] == "done" and lines[0]["trial"]["lr"] == 1e-2
    assert sum("dev_score" in line and "dev_loss" in line for line in lines) == 6
    assert 0 < sum("loss" in line for line in lines) <= 1000
    assert lines[-1]["train_score"] >= 0.5


def test_the_loss_history_has_at_most_1000_points():
    from bitfit.training.history import History
    from bitfit.training.loop import LOSS_POINTS, Runner

    runner = Runner.__new__(Runner)
    runner.pending, runner.history = [], History()
    for step in range(1, 4322):
        runner._record(step, 4321, 1.0)
    losses = runner.history.losses
    assert len(losses) <= LOSS_POINTS and losses[-1].step == 4321


def test_a_diverging_trial_stops_and_leaves_the_others(base, csv_file):
    run = train(csv_file, base, lr=[1e30, 1e-2], epochs=2)
    assert [outcome.status for outcome in run.trials] == ["diverged", "done"]
    assert run.trials[0].delta is None and run.best.trial.lr == 1e-2
    assert run.trials[0].history.diverged <= 4


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_a_lane_that_leaves_does_not_change_the_bits_of_the_others(base, csv_file, pool):
    left, stayed = (train(csv_file, base, pool=pool, lr=[1e-2, other], epochs=2).trials[0] for other in (1e30, 1e-3))
    assert all(np.array_equal(left.delta.tensors[name], value) for name, value in stayed.delta.tensors.items())


def test_no_delta_is_written_when_every_trial_diverges(base, csv_file, tmp_path):
    with pytest.raises(Diverged, match="every trial diverged"):
        train(csv_file, base, lr=1e30, epochs=1, out=tmp_path / "d.safetensors")
    assert not (tmp_path / "d.safetensors").exists()


@pytest.mark.parametrize("step", [1, 7, 8, 15])
def test_an_interrupted_run_resumes_to_the_same_bytes(base, csv_file, tmp_path, step):
    plan = {"lr": [1e-2, 2e-3], "epochs": 2, "select": "bias + random(all, 50)"}
    whole = train(csv_file, base, **plan).best.delta.encode()
    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=StopAt(step), **plan)
    assert not out.exists()
    run = train(csv_file, base, out=out, resume=True, **plan)
    assert out.read_bytes() == whole == run.best.delta.encode()
    assert not list(run_folder(out).glob("*.checkpoint"))


def test_an_interruption_inside_an_evaluation_loses_nothing(base, csv_file, tmp_path, monkeypatch):
    whole = train(csv_file, base, **QUICK).best.delta.encode()
    outputs, calls = loop.outputs, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return outputs(*given)

    out = tmp_path / "d.safetensors"
    monkeypatch.setattr(loop, "outputs", interrupted)
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, **QUICK)
    monkeypatch.undo()
    train(csv_file, base, out=out, resume=True, **QUICK)
    assert out.read_bytes() == whole


def test_a_truncated_checkpoint_falls_back_to_the_one_before(base, csv_file, tmp_path):
    whole = train(csv_file, base, **QUICK).best.delta.encode()
    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, checkpoint_seconds=0.0, watch=StopAt(9), **QUICK)
    newest = sorted(run_folder(out).glob("*.checkpoint"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="using the checkpoint before"):
        train(csv_file, base, out=out, resume=True, **QUICK)
    assert out.read_bytes() == whole


def test_checkpoints_of_another_run_are_not_resumed(base, csv_file, tmp_path):
    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=StopAt(3), **QUICK)
    with pytest.raises(UsageError, match="another run"):
        train(csv_file, base, out=out, resume=True, lr=1e-2, epochs=3)


def test_a_full_disk_leaves_the_old_delta_intact(base, csv_file, tmp_path, monkeypatch):
    out = tmp_path / "d.safetensors"
    train(csv_file, base, out=out, **QUICK)
    before = out.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.warns(UserWarning, match="no checkpoint"), pytest.raises(WriteError, match="No space left"):
        train(csv_file, base, out=out, seed=9, **QUICK)
    assert out.read_bytes() == before


def test_the_callers_random_numbers_and_handlers_are_left_alone(base, csv_file):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    handler = signal.getsignal(signal.SIGINT)
    train(csv_file, base, **QUICK)
    assert torch.equal(torch.rand(3), expected) and signal.getsignal(signal.SIGINT) is handler


def test_numbers_are_learnt_at_any_size(base, tmp_path):
    path = tmp_path / "prices.csv"
    rows = [(t, 250_000.5 + 90_000 * (label == "positive")) for t, label in reviews(64)]
    path.write_text("text,label\n" + "".join(f"{t},{price}\n" for t, price in rows))
    run = train(path, base, pool="mean", lr=2e-2, epochs=10)
    assert run.best.delta.meta.task == "regression" and run.best.dev > 0.7
    from bitfit import predict

    low, high = (answer["value"] for answer in predict(run.best.delta, ["awful bad film", "good great film"], base))
    assert 200_000 < low < high < 400_000


def test_labels_far_from_zero_keep_their_differences(base, tmp_path):
    path = tmp_path / "stamps.csv"
    rows = [(t, 1.7e9 + 5.5 * (label == "positive")) for t, label in reviews(64)]
    path.write_text("text,label\n" + "".join(f"{t},{stamp}\n" for t, stamp in rows))
    run = train(path, base, pool="mean", lr=2e-2, epochs=10)
    assert run.best.dev > 0.7


def test_histories_are_written_when_every_trial_diverges(base, csv_file, tmp_path):
    out = tmp_path / "d.safetensors"
    with pytest.raises(Diverged):
        train(csv_file, base, lr=[1e30, 1.0000001e30], epochs=1, out=out)
    assert len(list(run_folder(out).glob("*.jsonl"))) == 2


def test_a_frozen_random_head_is_said(base, csv_file):
    assert any("frozen" in note for note in train(csv_file, base, head="bias", **QUICK).notes)


def test_dropping_checkpoints_is_said(base, csv_file, tmp_path):
    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=StopAt(3), **QUICK)
    assert any("dropped" in note for note in train(csv_file, base, out=out, **QUICK).notes)


def test_resuming_with_another_grouping_is_refused(base, csv_file, tmp_path):
    plan = {"lr": [1e-2, 1e-3], "epochs": 2, "out": tmp_path / "d.safetensors"}
    with pytest.raises(Interrupted):
        train(csv_file, base, lanes=1, watch=StopAt(3), **plan)
    with pytest.raises(UsageError, match="another run"):
        train(csv_file, base, lanes=2, resume=True, **plan)


def test_every_epoch_sees_every_row_once_in_the_lanes_own_order():
    one = make_trial(batch=8, seed=1, epochs=2)
    first = np.concatenate([batch_rows(one, step, 61) for step in range(1, 9)])
    second = np.concatenate([batch_rows(one, step, 61) for step in range(9, 17)])
    assert sorted(first) == sorted(second) == list(range(61)) and list(first) != list(second)


def make_trial(**changes):
    plain = {
        "select": "bias", "inject": "none", "head": "full", "init": "keep", "pool": "cls", "lr": 1e-3, "batch": 8,
        "seed": 0, "epochs": 5, "evals_per_epoch": 2, "schedule": "linear", "weight_decay": 0.0, "clip": 1.0,
        "max_length": 128, "stride": 0, "train_size": None, "data_seed": 0, "protocol": "published",
        "metric": "accuracy", "prefix_dropout": False,
    }  # fmt: skip
    return Trial(**{**plain, **changes})


@pytest.mark.parametrize(("rows", "batch", "epochs", "parts"), [(61, 8, 3, 2), (5, 8, 2, 4), (80, 8, 1, 10)])
def test_evaluations_fall_inside_the_run_and_on_its_last_step(rows, batch, epochs, parts):
    trial = make_trial(batch=batch, epochs=epochs, evals_per_epoch=parts)
    steps, total = evaluation_steps(trial, rows), epochs * math.ceil(rows / batch)
    assert max(steps) == total and min(steps) >= 1 and len(steps) <= epochs * parts


def test_the_linear_schedule_warms_up_and_ends_near_zero():
    shares = [schedule("linear", step, 100) for step in range(1, 101)]
    assert shares.index(max(shares)) == 5 and max(shares) == 1.0
    assert shares[0] < 0.2 and 0 < shares[-1] < 0.02 and schedule("constant", 77, 100) == 1.0


@pytest.mark.parametrize(
    ("selection", "width", "rates"),
    [
        ("bias", 768, (1e-4, 4e-4, 7e-4, 1e-3)),
        ("bias", 384, (4e-4, 1e-3, 2e-3, 4e-3)),
        ("all", 1024, (1e-5, 2e-5, 3e-5, 5e-5)),
        ("(all)", 768, (1e-5, 2e-5, 3e-5, 5e-5)),
        ("all-W_emb", 384, (2e-5, 5e-5, 1e-4)),
        ("b_q+W_q@0", 384, (2e-5, 5e-5, 1e-4)),
        ("bias+random(all,1%)", 768, (5e-4, 1e-3, 2e-3, 5e-3)),
        ("none", 768, (1e-3, 4e-3, 1e-2)),
    ],
)
def test_default_rates_follow_what_is_selected_however_it_is_written(base, selection, width, rates):
    assert default_rates(choose(base.anatomy, selection), width) == rates


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(base, csv_file, tmp_path, monkeypatch):
    write = safefile.write

    def full(path, *rest):
        if path.suffix == ".checkpoint":
            raise WriteError(f"{path}: cannot be written (No space left on device)")
        return write(path, *rest)

    monkeypatch.setattr(safefile, "write", full)
    with pytest.warns(UserWarning, match="no checkpoint: .*No space left"):
        train(csv_file, base, lr=1e-2, epochs=1, out=tmp_path / "d.safetensors")
    assert (tmp_path / "d.safetensors").is_file()


def test_a_run_that_diverges_leaves_no_checkpoint(base, csv_file, tmp_path):
    with pytest.raises(Diverged):
        train(csv_file, base, lr=1e30, epochs=1, out=tmp_path / "d.safetensors")
    assert not list(tmp_path.rglob("*.checkpoint"))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"epochs": 0}, "--epochs"),
        ({"lr": -1.0}, "--lr"),
        ({"lr": []}, "--lr"),
        ({"batch": [8, 0]}, "--batch"),
        ({"head": "ful"}, 'Did you mean "full"'),
        ({"schedule": "cosine"}, "--schedule"),
        ({"select": "b_m4"}, 'Did you mean "b_m3"'),
        ({"init": "zero(bias"}, "init|zero"),
        ({"metric": "f2"}, 'no metric "f2"'),
        ({"max_length": 9999}, "--max-length"),
        ({"select": "none", "head": "frozen"}, "nothing is left to train"),
        ({"device": "tpu"}, "--device"),
        ({"lr": "1e-3"}, "--lr"),
        ({"epochs": 1.5}, "--epochs"),
        ({"seed": [0, 1.5]}, "--seed"),
        ({"learning_rate": 1}, 'no option "learning_rate"'),
        ({"select": 5}, "select takes a text"),
        ({"train_size": 10_000}, "10,?000"),
    ],
)
def test_wrong_settings_are_refused_with_a_reason(base, csv_file, plan, says):
    with pytest.raises((UsageError, DataError), match=says):
        train(csv_file, base, **{"lr": 1e-3, **plan})


def test_numpy_numbers_are_numbers(base, csv_file):
    run = train(csv_file, base, lr=np.array([1e-2, 1e-3]), seed=np.int64(1), epochs=np.int32(1))
    assert [outcome.trial.lr for outcome in run.trials] == [1e-2, 1e-3] and run.best.trial.seed == 1


def test_texts_that_are_cut_are_counted(base, tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "".join(f"{'very ' * 50}{t},{label}\n" for t, label in reviews(20)))
    run = train(path, base, lr=1e-3, epochs=1)
    assert any("Cut at" in note for note in run.notes)


def test_a_test_file_is_scored_once_by_the_best_trial(base, tmp_path):
    for name, seed in (("train", 0), ("dev", 1), ("test", 2)):
        lines = "".join(f"{t},{label}\n" for t, label in reviews(32, seed))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + lines)
    run = train(tmp_path, base, lr=[1e-2, 1e-3], epochs=1)
    assert "accuracy" in run.best.scores["test"] and "test" in run.best.delta.meta.metrics


def test_one_bank_holds_the_lanes_of_a_grid_and_whole_matrices_train_alone(base, csv_file):
    for select, sizes in (("bias", [4]), ("all", [1, 1, 1, 1]), ("W_q", [1, 1, 1, 1]), ("random(all, 9)", [4])):
        _, trials = prepare(csv_file, base, Plan(select=select, lr=[1, 2, 3, 4]), lambda _: None)
        assert [len(group) for group in passes(trials, None)] == sizes
    _, trials = prepare(csv_file, base, Plan(lr=[1, 2, 3], batch=[4, 8]), lambda _: None)
    assert [len(group) for group in passes(trials, 2)] == [2, 1, 2, 1]


def test_no_other_trial_joins_the_pass_of_one_that_trains_alone(base, csv_file):
    _, whole = prepare(csv_file, base, Plan(select="all", lr=1), lambda _: None)
    _, few = prepare(csv_file, base, Plan(select="bias", lr=[1, 2]), lambda _: None)
    assert whole[0].resolution.depth == few[0].resolution.depth
    assert [len(group) for group in passes(whole + few)] == [1, 2]
    assert [len(group) for group in passes(few + whole)] == [2, 1]


def test_the_epochs_of_a_lane_count_the_rows_it_sees(base, csv_file):
    job, trials = prepare(csv_file, base, Plan(lr=1e-3, epochs=2, batch=4), lambda _: None)
    model = Model(base, job.task.outputs, trials[0].trial.pool)
    bank = Bank(model, [lane_to_train(model, trials[0].resolution.selection)])
    runner = loop.Runner(trials[0].trial, bank, 0, rows=np.arange(len(job.train) // 2))
    loop.fit(job, [runner], 0, Store(None, ""), lambda *_: None)
    assert [point.epoch for point in runner.history.evaluations] == [0.5, 1.0, 1.5, 2.0]


# ---- what is computed, and how often


@pytest.fixture
def passed(monkeypatch):
    """The numbers of lanes and of texts of every pass without dropout, in order."""
    seen = []
    run = Packed.__call__

    def counting(self, rows, *given):
        if given[2] is None:
            seen.append((len(rows), sum(len(own) for own in rows)))
        return run(self, rows, *given)

    monkeypatch.setattr(Packed, "__call__", counting)
    return seen


def test_lanes_are_evaluated_in_shared_passes_and_dev_is_scored_once_per_evaluation(base, csv_file, passed):
    run_ = train(csv_file, base, lr=[1e-2, 3e-3, 1e-3], epochs=2, evals_per_epoch=2)
    assert {lanes for lanes, _ in passed} == {3}
    assert sum(texts for _, texts in passed) == 3 * 4 * len(run_.dataset.dev)


def test_training_rows_are_scored_only_for_the_gap(base, csv_file, passed):
    plain = train(csv_file, base, **QUICK)
    without = sum(texts for _, texts in passed)
    asked = train(csv_file, base, **QUICK, gap=True)
    assert "train" not in plain.best.scores and plain.best.gap == {}
    lanes = len(asked.trials)
    assert sum(texts for _, texts in passed) == 2 * without + lanes * len(asked.dataset.train)
    dev, trained = asked.best.scores["dev"]["accuracy"].value, asked.best.scores["train"]["accuracy"].value
    assert asked.best.gap["accuracy"] == trained - dev


def test_the_dev_scores_are_those_of_the_delta(base, csv_file):
    from bitfit import Predictor

    best = train(csv_file, base, **QUICK).best
    examples = best.scores["dev"]
    dev = train(csv_file, base, **QUICK).dataset.dev
    labels = [answer["label"] for answer in Predictor(best.delta, base).answers(dev.texts)]
    right = [label == best.delta.labels[gold] for label, gold in zip(labels, dev.labels, strict=True)]
    assert examples["accuracy"].value == pytest.approx(sum(right) / len(right))


def test_batches_hold_every_row_once_within_their_tokens():
    lengths = np.array([5, 9, 2, 7, 30, 1, 1])
    rows = Rows(np.zeros(lengths.sum(), np.int64), np.zeros(lengths.sum(), np.int64), np.append(0, lengths.cumsum()))
    found = evaluation.batches(rows, 12)
    assert sorted(np.concatenate(found)) == list(range(7))
    assert all(lengths[chosen].sum() <= 12 or len(chosen) == 1 for chosen in found)


def test_a_plan_is_checked_once(folders, csv_file, tmp_path, monkeypatch):
    from bitfit.cli.main import run as command

    checked = []
    check = Plan.__post_init__
    monkeypatch.setattr(Plan, "__post_init__", lambda self: checked.append(1) or check(self))
    words = ["train", str(csv_file), "--base", str(folders("bert")), "--lr", "1e-2", "--epochs", "1", "--json"]
    for more in ([], ["--train-size", "20,30"]):
        checked.clear()
        assert command([*words, *more, "--out", str(tmp_path / "d.safetensors")]) == 0
        assert len(checked) == 1


def test_a_plan_and_its_fields_are_not_given_together(base, csv_file):
    with pytest.raises(UsageError, match="not both: epochs"):
        train(csv_file, base, plan=Plan(lr=1e-2), epochs=2)


def test_trials_that_differ_in_method_share_a_pass_and_equal_their_separate_runs(base, csv_file):
    methods = {"none": "bias", "lora(W_q, 2)": "injected", "adapter(3)": "injected + layernorm"}
    job, trials = None, []
    for inject, select in methods.items():
        job, resolved = prepare(csv_file, base, Plan(select=select, inject=inject, lr=3e-3, epochs=2), lambda _: None)
        trials += resolved
    assert [len(group) for group in passes(trials)] == [3]

    def run(group):
        return run_pass(job, group, 0, Store(None, ""), lambda *_: None, lambda _: None, {})

    for together, resolved in zip(run(trials), trials, strict=True):
        (alone,) = run([resolved])
        assert together.delta.meta.trained == alone.delta.meta.trained
        assert together.delta.meta.inject == resolved.trial.inject
        assert set(together.delta.tensors) == set(alone.delta.tensors)
        for name, values in alone.delta.tensors.items():
            np.testing.assert_allclose(together.delta.tensors[name], values, rtol=1e-4, atol=1e-5)


def test_a_graft_that_would_take_others_off_the_packed_path_gets_a_pass_of_its_own(base, csv_file):
    trials = []
    for inject, select in (("none", "bias"), ("lora(W_q, 2)", "random(A_q + B_q, 5)")):
        _, resolved = prepare(csv_file, base, Plan(select=select, inject=inject, lr=1e-3), lambda _: None)
        trials += resolved
    assert [len(group) for group in passes(trials)] == [1, 1]


def test_trials_with_other_epochs_get_a_pass_of_their_own(base, csv_file):
    trials = []
    for epochs in (1, 2):
        trials += prepare(csv_file, base, Plan(lr=1e-3, epochs=epochs), lambda _: None)[1]
    assert [len(group) for group in passes(trials)] == [1, 1]
