"""The default recipe: a convex head, folds as lanes, a choice by held-out loss, one delta from all rows."""

from __future__ import annotations

import csv
import json
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bitfit import Predictor, train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.cli.main import run as command
from bitfit.data.examples import Examples
from bitfit.data.splits import folds
from bitfit.errors import Interrupted, UsageError
from bitfit.model.rows import Rows
from bitfit.model.task_model import RELATION, Model
from bitfit.tasks import KINDS, Task
from bitfit.tasks.encode import Encoded
from bitfit.tasks.metrics import ClassScore, Score, score
from bitfit.training.calibration import EXPECTED, HeldOut, best_shift, gain_is_sure
from bitfit.training.convex import (
    Split,
    States,
    cross_validated,
    known_examples,
    mean_loss,
    output_layer,
    sampled,
    scaled,
    solve,
    strengths,
    with_values,
)
from bitfit.training.evaluation import outputs
from bitfit.training.explain import Candidate, Curve, Story, calibration, sentences
from bitfit.training.job import Part, encode_part
from bitfit.training.plan import Plan, follows_recipe, recipe_epochs
from bitfit.training.recipe import _Recipe, drop_worst
from bitfit.training.run import prepare
from support import ARCHITECTURES, reviews

# A tiny random base says one class for all texts now and then, which is not what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::bitfit.tasks.texts.ConstantPrediction"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def rows_of(count: int) -> Rows:
    """As many rows of one token."""
    return Rows(np.zeros(count, np.int64), np.zeros(count, np.int64), np.arange(count + 1))


def part_of(targets: np.ndarray) -> Part:
    """A part of the data with one token and one target per example."""
    count = len(targets)
    examples = Examples(["text"] * count, None, targets.tolist(), list(range(count)))
    encoded = Encoded(rows_of(count), np.arange(count), np.zeros((0, 0), np.int64))
    return Part(examples, encoded, torch.from_numpy(targets), by_token=False)


def made_states(count: int = 60, width: int = 5, classes: int = 3) -> States:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, width, generator=generator)
    targets = (values[:, :classes] + torch.randn(count, classes, generator=generator)).argmax(1)
    nothing = torch.zeros(width, dtype=torch.float64)
    return States(part_of(targets.numpy()), values, nothing, nothing + 1, torch.zeros(width, 0, dtype=torch.float64))


@pytest.mark.parametrize("class_weights", ["none", "balanced"])
def test_the_solved_head_is_scikit_learns_logistic_regression(class_weights):
    from sklearn.linear_model import LogisticRegression

    states = made_states()
    strength = 0.1
    task = Task.of("classification", ("a", "b", "c"))
    if class_weights == "balanced":
        task = task.balanced(states.part.examples)
    head = solve(task, states, strength)
    weights = None if class_weights == "none" else class_weights
    peer = LogisticRegression(C=1 / (strength * len(states.values)), tol=1e-8, max_iter=1000, class_weight=weights)
    peer.fit(states.values.numpy(), states.part.targets.numpy())
    np.testing.assert_allclose(head.weight.numpy(), peer.coef_, atol=2e-3)


def test_balanced_classes_count_alike_in_the_loss():
    examples = Examples(["text"] * 4, None, [0, 0, 0, 1], [0, 1, 2, 3])
    task = Task.of("classification", ("common", "rare")).balanced(examples)
    losses = task.row_losses(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), rows_of(4))
    assert losses[:3].sum().item() == pytest.approx(losses[3].item())
    assert losses.mean().item() == pytest.approx(np.log(2))


def test_class_weights_are_for_classification_only(base, tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{i}.5\n" for i in range(20)))
    with pytest.raises(UsageError, match="--class-weights balanced: regression has no such weights"):
        prepare(path, base, Plan(class_weights="balanced"), lambda _: None)


def test_inspect_says_that_the_classes_were_weighted(base, csv_file, tmp_path, capsys):
    delta = train(csv_file, base, select="none", class_weights="balanced", quiet=True).best.delta
    delta.save(tmp_path / "d.safetensors")
    assert command(["inspect", str(tmp_path / "d.safetensors")]) == 0
    assert "seed 0, balanced classes" in capsys.readouterr().out


def test_a_shrunk_head_keeps_its_direction_and_has_small_outputs():
    states = made_states()
    head = solve(Task.of("classification", ("a", "b", "c")), states, 0.1)
    small = head.shrunk(states, 0.2)
    assert torch.allclose(small.weight / small.weight.norm(), head.weight / head.weight.norm())
    assert (small(states) - small.bias).std(0).mean().item() == pytest.approx(0.2, rel=1e-3)


def test_a_sample_of_many_rows_has_the_few_that_are_held_out(monkeypatch):
    monkeypatch.setattr("bitfit.training.convex.MOST_OUTPUTS", 100)
    part = part_of(np.zeros(1000, np.int64))
    few, many = np.arange(980, 1000), np.arange(500, 1000)
    assert np.isin(few, sampled(part, few)).all() and len(sampled(part, few)) == 100
    assert np.isin(sampled(part, many), many).sum() == 25 and len(sampled(part, many)) == 100
    assert len(sampled(part)) == 100
    monkeypatch.setattr("bitfit.training.convex.MOST_OUTPUTS", 1000)
    assert np.array_equal(sampled(part, few), np.arange(1000))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_the_states_of_every_architecture_are_what_its_last_layer_sees(bases, csv_file, architecture, pool):
    from bitfit.training.convex import head_states

    job, trials = prepare(csv_file, bases(architecture), Plan(pool=pool), lambda _: None)
    what, trial = trials[0].resolution, trials[0].trial
    states = head_states(job, job.dev, what, trial.inject, trial.seed)
    model = Model(job.base, job.task.outputs, trial.pool)
    layer = output_layer(model)
    head = solve(job.task, states, 1.0)
    weight, bias = head.raw(states)
    lane = lane_to_train(model, what.selection, "full", what.starts, trial.seed)
    names = {name for name in model.head if name.startswith(layer)}
    bank = Bank(model, [with_values(lane, {f"{layer}.weight": weight, f"{layer}.bias": bias})])
    found = outputs(job, bank, [0], job.dev.rows)[0]
    expected = head(states).numpy()
    if f"{layer}.bias" not in names:  # the heads of decoders have no bias
        expected = expected - bias.numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_folds_hold_out_every_row_once_and_keep_equal_texts_together():
    texts = [f"text {i % 20}" for i in range(40)]
    examples = Examples(texts, None, [i % 2 for i in range(40)], list(range(40)))
    found = folds(examples, "classification", 4, seed=1)
    assert sorted(i for fold in found for i in fold) == list(range(40))
    for fold in found:
        assert {i for i in range(40) if texts[i] in {texts[j] for j in fold}} == set(fold)


def test_folds_spread_each_class_evenly():
    examples = Examples([f"text {i}" for i in range(40)], None, [int(i < 8) for i in range(40)], [])
    for fold in folds(examples, "classification", 4, seed=0):
        assert sum(examples.labels[i] for i in fold) == 2


def held_with(task: Task, outputs: np.ndarray, targets: np.ndarray) -> HeldOut:
    return HeldOut(task, part_of(targets), outputs.astype(np.float32))


def test_the_temperature_undoes_a_scale():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(4000, 3)) * 2
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    targets = np.array([generator.choice(3, p=row) for row in chances])
    task = Task.of("classification", ("a", "b", "c"))
    held = held_with(task, 4 * logits, targets)
    assert held.temperature == pytest.approx(4, rel=0.1)
    assert held.calibrated.calibration_error() < 0.03 < held.calibration_error()


def test_few_rows_cannot_ask_for_an_extreme_temperature():
    task = Task.of("classification", ("a", "b"))
    targets = np.arange(12) % 2
    held = held_with(task, np.stack([1.0 - 2 * targets, 2.0 * targets - 1], 1), targets)
    assert 0.5 < held.temperature < 1.65  # twelve right answers ask for 0, the prior for 1.65
    handful = held.take(np.arange(9))
    assert handful.temperature == pytest.approx(np.exp(EXPECTED))


def test_rows_of_a_class_that_the_training_lacked_do_not_change_temperature_and_loss():
    generator = np.random.default_rng(0)
    targets = np.arange(40) % 20
    outputs = generator.normal(size=(40, 20)) + 4 * np.eye(20)[targets]
    known = np.arange(40) % 5 != 0
    outputs[~known, targets[~known]] = -6.0
    task = Task.of("classification", tuple(f"class {number}" for number in range(20)))
    everything = held_with(task, outputs, targets)
    held = replace(everything, known=known)
    fair = everything.take(np.flatnonzero(known))
    assert held.unknown == 8 and held.temperature == fair.temperature < everything.temperature
    assert held.best_loss == fair.best_loss < everything.best_loss
    assert np.array_equal(held.row_losses, fair.row_losses)
    assert held.score == everything.score, "the score counts all rows"
    few = replace(everything, known=np.arange(40) < 9)
    assert few.temperature == pytest.approx(np.exp(EXPECTED))
    none = replace(everything, known=np.zeros(40, bool))
    assert none.temperature == pytest.approx(np.exp(EXPECTED)) and none.loss() == everything.loss()


def test_a_class_is_known_if_its_split_trains_on_it(base, tmp_path):
    part = part_of(np.array([0, 0, 1, 2, 2, 2]))
    splits = [Split(np.array([0, 3, 4]), np.array([1, 2, 5])), Split(np.array([1, 2, 5]), np.array([0, 3, 4]))]
    classes = Task.of("classification", ("a", "b", "c"))
    assert known_examples(classes, part, splits).tolist() == [True, True, False, True, True, True]
    assert known_examples(Task.of("regression", ()), part, splits).all()
    sets = Task.of("multilabel", ("a", "b"))
    assert sets.lacking(np.array([[1, 1], [1, 0], [0, 0]]), np.array([[1, 0], [0, 0]])).tolist() == [True, False, False]
    source = tmp_path / "rows.jsonl"
    records = [{"tokens": ["good", word], "tags": ["x", word[0]]} for word in ("xa", "xb", "y", "xc")]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    job, _ = prepare(source, base, Plan(task="tagging"), lambda _: None)
    data = encode_part(job.task, job.encoder, job.dataset.train + job.dataset.dev, job.device)
    rare = [job.task.labels.index("y") in tags for tags in data.examples.labels]
    halves = [Split(np.array([0, 1]), np.array([2, 3])), Split(np.array([2, 3]), np.array([0, 1]))]
    assert known_examples(job.task, data, halves).tolist() == [not own for own in rare]


def test_rows_of_unknown_classes_do_not_choose_the_strength():
    states = made_states(classes=2)
    targets = states.part.targets.numpy().copy()
    targets[-12:] = 2
    others, last = np.arange(0, 48), np.arange(48, 60)
    splits = [Split(others[0::2], np.concatenate([others[1::2], last])), Split(others[1::2], others[0::2])]
    fair = [Split(others[0::2], others[1::2]), splits[1]]
    task = Task.of("classification", ("a", "b", "c"))
    job: Any = SimpleNamespace(task=task, stop=SimpleNamespace(check=lambda: None))
    states = replace(states, part=part_of(targets))
    assert cross_validated(job, states, splits).strength == cross_validated(job, states, fair).strength
    heads = [solve(task, states.take(split.train), 0.1) for split in splits]
    unseen = [states.take(np.zeros(0, np.int64)), states.take(fair[1].held)]
    assert mean_loss(task, heads, unseen) == mean_loss(task, heads[1:], unseen[1:])


def test_a_head_on_few_useless_texts_gives_more_than_one_label():
    generator = torch.Generator().manual_seed(1)
    states = replace(made_states(32, 50, 2), values=torch.randn(32, 50, generator=generator))
    states = replace(states, part=part_of(np.arange(32) % 8 // 5))  # 20 of class 0, 12 of class 1
    everything = np.arange(32)
    splits = [Split(np.setdiff1d(everything, held), held) for held in everything.reshape(4, 8)]
    task = Task.of("classification", ("a", "b"))
    job: Any = SimpleNamespace(task=task, stop=SimpleNamespace(check=lambda: None))
    assert set(cross_validated(job, states, splits).head(states).argmax(1).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("kind", "labels", "strongest"), [("classification", ("a", "b"), 1.0), ("regression", (), 30.0)]
)
def test_labels_have_no_strong_penalty(kind, labels, strongest):
    assert max(strengths(Task.of(kind, labels), made_states())) == strongest


def test_pairs_read_one_by_one_may_have_a_strong_penalty():
    pairs = scaled(made_states(width=8).part, made_states(width=8).values, RELATION)
    assert max(strengths(Task.of("classification", ("a", "b", "c")), pairs)) == 30.0


def with_a_rare_class(rows: int, seed: int = 0, metric: str = "macro_f1") -> HeldOut:
    """Outputs for two classes; the second one has a tenth of the rows."""
    generator = np.random.default_rng(seed)
    targets = (np.arange(rows) % 10 == 0).astype(np.int64)
    apart = generator.normal(size=rows) + 2 * targets - 3
    task = Task.of("classification", ("usual", "rare"), metric).with_positive("rare")
    return held_with(task, np.stack([-apart / 2, apart / 2], 1), targets)


def test_the_threshold_moves_only_for_a_rare_class():
    rare = with_a_rare_class(2000)
    assert rare.threshold > 0.3
    half = np.arange(2000) % 2
    assert held_with(rare.task, rare.outputs, half).threshold == 0


@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc"])
def test_the_threshold_serves_the_metric(metric):
    held = with_a_rare_class(2000, metric=metric)
    assert (held.threshold != 0) is (metric == "f1")
    assert (held.calibrated.score == held.score) is (metric != "f1")


def test_the_expected_score_is_not_that_of_rows_the_threshold_is_fitted_on():
    test = with_a_rare_class(20_000, seed=100)
    expected, fitted, real = [], [], []
    for seed in range(30):
        held = with_a_rare_class(40, seed)
        expected.append(held.calibrated.score)
        fitted.append(macro_f1(held, held.threshold))
        real.append(macro_f1(test, held.threshold * held.temperature / test.temperature))
    assert abs(np.mean(expected) - np.mean(real)) < 0.05 < np.mean(fitted) - np.mean(real)


def macro_f1(held: HeldOut, shift: float) -> float:
    """The macro F1 with a threshold."""
    outputs = held.outputs / held.temperature
    labels = held.part.targets.numpy()
    return score("macro_f1", (outputs[:, 1] + shift > outputs[:, 0]).astype(np.int64), labels, 2)


def test_a_gain_of_luck_gives_no_threshold():
    rows = np.arange(40)
    labels = (rows < 3).astype(np.int64)
    found = rows < 1
    lucky = (rows < 2) | (rows > 37)  # finds one row more, with two false alarms
    assert not gain_is_sure(labels, found, lucky, None)
    assert gain_is_sure(labels, found, labels > 0, None)


def test_the_calibration_of_a_story_is_that_of_threshold_and_temperature():
    held = with_a_rare_class(2000)
    assert held.threshold
    without = replace(held, outputs=held.outputs / np.float32(held.temperature)).calibration_error()
    shifted = held.outputs / np.float32(held.temperature) + np.float32([0, held.threshold])
    assert calibration(held).after == replace(held, outputs=shifted).calibration_error() != without


@pytest.mark.parametrize(("metric", "scored_class"), [("macro_f1", None), ("f1", 1)])
def test_the_best_shift_is_the_best_of_all_shifts(metric, scored_class):
    generator = np.random.default_rng(1)
    labels = (generator.random(80) < 0.15).astype(np.int64)
    margins = np.round(generator.normal(size=80) + labels - 2, 1)  # rounded, so that some are equal

    def shifted(shift: float) -> float:
        return score(metric, (margins + shift > 0).astype(np.int64), labels, 2, scored_class or 0)

    found = best_shift(margins, labels, scored_class)
    assert shifted(found) == pytest.approx(max(shifted(shift) for shift in np.arange(-1, 5, 0.01)))
    assert shifted(found) > shifted(0)


@pytest.mark.parametrize(
    ("given", "follows"),
    [
        ({}, True),
        ({"select": "all"}, True),
        ({"seed": 3}, True),
        ({"recipe": "plain"}, False),
        ({"lr": 1e-3}, False),
        ({"epochs": 5}, False),
        ({"batch": 8}, False),
        ({"seed": [0, 1]}, False),
        ({"protocol": "holdout"}, False),
        ({"head": "frozen"}, False),
    ],
)
def test_what_is_given_is_not_chosen(given, follows):
    assert follows_recipe(Plan(**given)) is follows


def test_few_rows_get_more_epochs():
    assert recipe_epochs(20) == 20
    assert recipe_epochs(20) > recipe_epochs(100) > recipe_epochs(1000) == recipe_epochs(100_000) == 5


@pytest.fixture
def larger(tmp_path):
    """A labelled file of 200 reviews."""
    path = tmp_path / "larger.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews(200)))
    return path


@pytest.fixture(scope="module")
def quick(monkeypatch_module):
    """The recipe with one epoch."""
    monkeypatch_module.setattr("bitfit.training.resolved.recipe_epochs", lambda rows: 1)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_the_default_is_never_worse_than_the_head_alone_on_held_out_rows(base, csv_file, quick):
    run = train(csv_file, base)
    story = run.story
    chosen = next(own for own in story.candidates if own.chosen)
    frozen = story.candidates[0]
    assert frozen.lr is None and chosen.loss <= frozen.loss + 0.1
    assert story.rows == 64 and "4 folds" in story.how
    assert run.best.delta.meta.recipe == "default"


def test_a_given_seed_means_no_folds_and_no_average(base, csv_file, quick):
    run = train(csv_file, base, seed=7)
    assert "folds" not in run.story.how and run.story.averaged == 1
    assert {outcome.trial.seed for outcome in run.trials} == {7}


def test_the_plain_recipe_has_no_story(base, csv_file):
    run = train(csv_file, base, recipe="plain", epochs=1, lr=1e-2)
    assert run.story is None and run.best.delta.meta.recipe == "plain"


def test_given_rates_and_epochs_are_those_of_the_trials(base, csv_file):
    run = train(csv_file, base, lr=[1e-2, 1e-3], epochs=2)
    assert [(outcome.trial.lr, outcome.trial.epochs) for outcome in run.trials] == [(1e-2, 2), (1e-3, 2)]


def test_the_frozen_base_gets_the_solved_head(base, csv_file):
    run = train(csv_file, base, select="none")
    assert run.story.candidates[0].chosen and len(run.story.candidates) == 1
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    texts = [row["text"] for row in rows]
    labels = [row["label"] for row in rows]
    answers = Predictor(run.best.delta, base).answers(texts)
    right = sum(answer["label"] == label for answer, label in zip(answers, labels, strict=True))
    assert right / len(texts) > 0.9


@pytest.mark.parametrize("pass_to_stop", [0, 1])
def test_an_interrupted_default_run_resumes_to_the_same_bytes(base, larger, tmp_path, monkeypatch, pass_to_stop):
    monkeypatch.setattr("bitfit.training.resolved.recipe_epochs", lambda rows: 2)
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    whole = tmp_path / "whole.safetensors"
    train(larger, base, out=whole)

    def stop(part, step, total, runners):
        if part == pass_to_stop and step == total // 2:
            raise Interrupted("now")

    out = tmp_path / "resumed.safetensors"
    with pytest.raises(Interrupted):
        train(larger, base, out=out, watch=stop, checkpoint_seconds=0)
    train(larger, base, out=out, resume=True, checkpoint_seconds=0)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("other", [{"seed": 0}, {"lanes": 2}])
def test_a_default_run_is_not_resumed_with_options_that_change_its_passes(base, csv_file, tmp_path, quick, other):
    def stop(part, step, total, runners):
        raise Interrupted("now")

    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=stop)
    with pytest.raises(UsageError, match="checkpoints of another run"):
        train(csv_file, base, out=out, resume=True, **other)


def test_the_worst_of_three_lanes_is_dropped_once_by_its_loss_at_its_best_temperature():
    generator = np.random.default_rng(0)
    targets = generator.integers(0, 2, 200)
    task = Task.of("classification", ("a", "b"))

    def held_out(outputs: np.ndarray) -> HeldOut:
        return held_with(task, outputs, targets)

    lanes: list[Any] = []
    for apart, scale in ((1.0, 20.0), (0.2, 1.0), (0.8, 1.0)):  # the first one is the best, and overconfident
        margins = scale * (generator.normal(size=200) + apart * (2 * targets - 1))
        outputs = np.stack([-margins, margins], 1).astype(np.float32)
        lanes.append(SimpleNamespace(status="running", best_outputs=outputs))
    assert max(lanes, key=lambda lane: held_out(lane.best_outputs).loss()) is lanes[0]
    drop_worst(lanes, held_out)
    drop_worst(lanes, held_out)
    assert [lane.status for lane in lanes] == ["running", "dropped", "running"]


def test_an_interrupted_run_of_many_rows_drops_the_same_lane(base, larger, tmp_path, quick, monkeypatch):
    monkeypatch.setattr("bitfit.training.recipe.FEW", 10)
    monkeypatch.setattr("bitfit.training.resolved.recipe_rates", lambda rates, rows: tuple(rates[1:]))
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    whole = tmp_path / "whole.safetensors"
    expected = [outcome.status for outcome in train(larger, base, out=whole).trials]
    assert "dropped" in expected

    def stop(part, step, total, runners):
        if "dropped" in [runner.status for runner in runners]:
            raise Interrupted("now")

    out = tmp_path / "resumed.safetensors"
    with pytest.raises(Interrupted):
        train(larger, base, out=out, watch=stop, checkpoint_seconds=0)
    resumed = train(larger, base, out=out, resume=True, checkpoint_seconds=0)
    assert [outcome.status for outcome in resumed.trials] == expected
    assert out.read_bytes() == whole.read_bytes()


def test_many_rows_hold_out_one_part_and_are_all_trained_on(base, larger, quick, monkeypatch):
    monkeypatch.setattr("bitfit.training.recipe.FEW", 10)
    monkeypatch.setattr("bitfit.training.resolved.recipe_rates", lambda rates, rows: tuple(rates[1:]))
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    run = train(larger, base)
    rows = len(run.dataset.train) + len(run.dataset.dev)
    assert run.story.rows == rows and run.story.averaged == 1 and "held out" in run.story.how
    assert [outcome.status for outcome in run.trials].count("dropped") == 1


def test_a_small_dev_file_of_a_large_train_file_is_scored(base, tmp_path, monkeypatch):
    monkeypatch.setattr("bitfit.training.convex.MOST_OUTPUTS", 6)
    for name, rows in (("train", reviews(200)), ("dev", reviews(212)[200:])):
        lines = [f"{text} {name} {number},{label}\n" for number, (text, label) in enumerate(rows)]
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(lines))
    run = train(tmp_path, base, select="none")
    assert "12 rows held out" in run.story.how and np.isfinite(run.story.candidates[0].loss)
    assert run.story.rows < 6, "the head is solved on a sample"


def test_rows_that_could_not_be_predicted_are_said(base, csv_file, quick, doubtful):
    with csv_file.open("a") as file:
        file.write("an odd one,single\n")
    run = train(csv_file, base, select="none")
    assert run.story.unknown == 1
    assert any(note.startswith("1 row could not be predicted") for note in run.notes)
    assert sum(row.support for row in run.story.classes) == 65, "the expected score counts it"
    assert run.story.suspects and "single" not in [suspect.label for suspect in run.story.suspects]


@pytest.fixture
def doubtful(monkeypatch):
    """Every row that is predicted wrongly looks wrong."""
    monkeypatch.setattr("bitfit.training.explain.SURE", 0.0)
    monkeypatch.setattr("bitfit.training.explain.DOUBTED", 1.0)


def test_json_and_suspects_tell_the_story(base, folders, csv_file, tmp_path, capsys, quick, doubtful):
    from bitfit.cli.main import run

    rows = csv_file.read_text().splitlines()
    text, label = rows[1].rsplit(",", 1)
    rows[1] = f"{text},{'negative' if label == 'positive' else 'positive'}"
    rows = [f"{row},{number}" if number else f"{row},note" for number, row in enumerate(rows)]
    csv_file.write_text("\n".join(rows) + "\n")
    suspects = tmp_path / "suspects.csv"
    words = ["train", str(csv_file), "--base", str(folders("bert")), "--out", str(tmp_path / "d.safetensors")]
    assert run([*words, "--json", "--suspects", str(suspects)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["recipe"] == "default"
    assert {"candidates", "expected", "calibration", "classes", "confusions", "curve"} <= set(shown["story"])
    low, high = shown["intervals"]["dev"]["accuracy"]
    assert low <= shown["dev"]["accuracy"] <= high
    assert shown["head_only"] == (shown["story"]["candidates"][0]["chosen"])
    assert shown["baseline"] == "always the majority" and shown["trained"] < shown["total"]
    assert any(note.startswith("Chosen by the loss") for note in shown["notes"])
    written = list(csv.DictReader(suspects.read_text().splitlines()))
    assert written and [int(row["line"]) for row in written] == [row["line"] for row in shown["story"]["suspects"]]
    for row in written:
        assert int(row["note"]) == int(row["line"]) - 1, "the columns of the file are kept"
        assert row["label"] != row["predicted"] and len(row["probability"]) <= 8
    assert run([*words, "--suspects", str(suspects)]) == 0
    assert "expected on new data: " in capsys.readouterr().out


def test_suspects_of_a_frame_have_its_index(base, csv_file, quick, doubtful):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(csv_file)
    frame.index = [f"row {number}" for number in frame.index]
    found = train(frame, base, quiet=True).story.suspects
    assert found
    for suspect in found:
        assert frame.loc[suspect.line, ["text", "label"]].tolist() == [suspect.text, suspect.label]


def test_a_plain_training_that_learns_nothing_advises_the_default_recipe(base, csv_file):
    run = train(csv_file, base, lr=1e-9, epochs=1, select="none", head="bias", quiet=True)
    assert run.best.dev <= run.majority
    assert any("remove --lr" in note for note in run.notes)


def test_studies_solve_the_head_of_a_frozen_base_whatever_the_rate(base, csv_file):
    from bitfit.training.checkpoint import Store
    from bitfit.training.run import run_pass

    plan = Plan(select="none", recipe="plain", lr=[1e-5, 1e-2], epochs=1)
    job, trials = prepare(csv_file, base, plan, lambda _: None)
    scored = {"train": job.train_sample}
    found = run_pass(job, trials, 0, Store(None, ""), lambda *_: None, lambda _: None, scored, solve_frozen=True)
    heads = [outcome.delta.tensors["head.classifier.weight"] for outcome in found]
    assert np.array_equal(*heads)
    assert {outcome.delta.meta.trial.best_step for outcome in found} == {0}
    assert found[0].scores["train"]["accuracy"].value > 0.6


def rows_of_kind(kind: str) -> list[dict[str, object]]:
    """Forty records of a kind of task; what is to be learnt is in the words."""
    records: list[dict[str, object]] = []
    for number, (text, label) in enumerate(reviews(40)):
        words = text.split()
        good = label == "positive"
        if kind == "classification":
            records.append({"text": text, "label": label})
        elif kind == "regression":
            records.append({"text": text, "label": float(good) + number / 100})
        elif kind == "multilabel":
            records.append({"text": text, "labels": ["film"] * ("film" in words) + ["good"] * good})
        elif kind == "tagging":
            records.append({"tokens": words, "tags": ["long" if len(word) > 4 else "short" for word in words]})
        else:
            answers = {"text": [words[0]], "answer_start": [0]}
            records.append({"id": str(number), "question": "good", "context": text, "answers": answers})
    return records


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # a tiny base may predict no label at all
@pytest.mark.parametrize("kind", ["regression", "multilabel", "tagging", "answering"])
@pytest.mark.parametrize("select", ["bias", "none"])
def test_the_recipe_serves_every_kind_of_task(base, tmp_path, monkeypatch, kind, select):
    monkeypatch.setattr("bitfit.training.resolved.recipe_epochs", lambda rows: 1)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in rows_of_kind(kind)))
    run = train(source, base, task=kind, select=select, out=tmp_path / "d.safetensors")
    assert run.best.delta.meta.task == kind and run.best.delta.meta.recipe == "default"
    assert run.story.rows == 40 and len(run.story.candidates) == (1 if select == "none" else 3)
    assert np.isfinite([candidate.loss for candidate in run.story.candidates]).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_loss_of_each_row_is_its_loss_alone(base, tmp_path, kind):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in rows_of_kind(kind)))
    job, _ = prepare(source, base, Plan(task=kind), lambda _: None)
    part, task = job.dev, job.task
    logits = torch.randn(len(part.targets), task.outputs, generator=torch.Generator().manual_seed(0))
    found = task.row_losses(logits, part.targets, part.rows)
    assert torch.allclose(found, Task.row_losses(task, logits, part.targets, part.rows), atol=1e-6)


@pytest.mark.parametrize("select", ["bias", "none"])
def test_the_last_step_counts_windows_not_sentences(base, tmp_path, monkeypatch, select):
    monkeypatch.setattr("bitfit.training.resolved.recipe_epochs", lambda rows: 1)
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    source = tmp_path / "rows.jsonl"
    records = []
    for record in rows_of_kind("tagging"):
        records.append({"tokens": 6 * list(record["tokens"]), "tags": 6 * list(record["tags"])})
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = train(source, base, task="tagging", max_length=16, select=select)
    trial = run.best.delta.meta.trial
    assert trial.train_rows == 40
    assert trial.best_step > 2 * 40 / trial.batch if select == "bias" else trial.best_step == 0


def test_the_head_alone_is_delivered_if_every_trial_diverges(base, csv_file, tmp_path, quick, monkeypatch):
    monkeypatch.setattr("bitfit.training.resolved.recipe_rates", lambda rates, rows: (1e30, 1e31))
    run = train(csv_file, base, out=tmp_path / "d.safetensors")
    assert [outcome.status for outcome in run.trials] == ["diverged", "diverged"]
    assert run.story.diverged == (1e30, 1e31) and [candidate.chosen for candidate in run.story.candidates] == [True]
    assert "The head alone is delivered, because no training was left." in run.notes
    assert not list(tmp_path.rglob("*.checkpoint"))
    frozen = train(csv_file, base, select="none")
    for name in ("head.classifier.weight", "head.classifier.bias"):
        assert np.array_equal(run.best.delta.tensors[name], frozen.best.delta.tensors[name])
    histories = sorted((tmp_path / "d.run").glob("lr*.jsonl"))
    assert len(histories) == 2
    assert all('"diverged": true' in path.read_text() for path in histories)


def test_a_rejected_trial_is_scored_with_its_threshold(base, tmp_path, quick, monkeypatch):
    monkeypatch.setattr("bitfit.training.calibration.RARE", 1.0)
    monkeypatch.setattr("bitfit.training.calibration.gain_is_sure", lambda *_: True)
    monkeypatch.setattr("bitfit.training.calibration.best_shift", lambda *_: 100.0)
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    source = tmp_path / "rows.csv"
    lines = [f"{text},{label}\n" for text, label in reviews(64) if label == "positive"]
    others = [f"{text},{label}\n" for text, label in reviews(64) if label == "negative"][:8]
    source.write_text("text,label\n" + "".join(lines + others))
    run = train(source, base)
    assert len(run.trials) == 2
    expected = len(lines) / (len(lines) + len(others))  # the second class is said of every text
    assert [outcome.scores["dev"]["accuracy"].value for outcome in run.trials] == pytest.approx([expected] * 2)
    assert [candidate.score for candidate in run.story.candidates] == [run.story.expected.value] * 3


def test_few_rows_say_that_the_dev_split_is_given_up(base, csv_file, quick):
    notes = train(csv_file, base, select="none").notes
    assert any(note.startswith("Few rows, so this split is not used: 4-fold cross-validation") for note in notes)


def test_the_gap_of_an_injected_selection_is_scored(base, csv_file, quick):
    run = train(csv_file, base, inject="lora(W_q, 2)", select="injected", gap=True)
    assert set(run.best.gap) == set(run.best.scores["dev"])


def write_reviews(path, rows: list[tuple[str, str]]) -> None:
    path.write_text("text,label\n" + "".join(f"{text} {number},{label}\n" for number, (text, label) in enumerate(rows)))


def test_of_many_rows_every_label_may_look_wrong_not_only_those_held_out(base, tmp_path, doubtful, monkeypatch):
    monkeypatch.setattr("bitfit.training.recipe.FEW", 10)
    write_reviews(tmp_path / "rows.csv", reviews(80))
    run = train(tmp_path / "rows.csv", base, select="none")
    suspects = run.story.suspects
    assert "8 rows held out" in run.story.how
    assert "train" in {suspect.split for suspect in suspects}
    assert run.story.curve.rows == 60, "the learning curve holds out every row, too"


def test_suspects_of_two_files_say_which_file_they_are_in(base, folders, tmp_path, doubtful):
    from bitfit.cli.main import run

    source = tmp_path / "data"
    source.mkdir()
    write_reviews(source / "train.csv", reviews(60))
    write_reviews(source / "dev.csv", reviews(100)[60:])
    suspects = tmp_path / "suspects.csv"
    words = ["train", str(source), "--base", str(folders("bert")), "--out", str(tmp_path / "d.safetensors")]
    assert run([*words, "--select", "none", "--suspects", str(suspects)]) == 0
    written = list(csv.DictReader(suspects.read_text().splitlines()))
    assert {row["split"] for row in written} == {"train", "dev"}
    for row in written:
        line = (source / f"{row['split']}.csv").read_text().splitlines()[int(row["line"]) - 1]
        assert line == f"{row['text']},{row['label']}"


def test_suspects_of_two_frames_have_the_index_of_theirs(base, tmp_path, doubtful):
    pandas = pytest.importorskip("pandas")
    frames = {}
    for name, rows in (("train", reviews(60)), ("dev", reviews(100)[60:])):
        texts = [f"{text} {number}" for number, (text, _) in enumerate(rows)]
        labels = [label for _, label in rows]
        frames[name] = pandas.DataFrame({"text": texts, "label": labels}, [f"{name} {n}" for n in range(len(rows))])
    suspects = train(frames, base, select="none", quiet=True).story.suspects
    assert {suspect.split for suspect in suspects} == {"train", "dev"}
    for suspect in suspects:
        assert frames[suspect.split].loc[suspect.line, "text"] == suspect.text


@pytest.mark.parametrize(
    ("full", "spread", "helps"), [(0.74, 0.025, False), (0.76, 0.025, True), (0.76, 0.0, False), (0.70, 0.01, False)]
)
def test_more_rows_help_if_the_gain_exceeds_the_error_of_both_scores(full, spread, helps):
    assert Curve(100, 0.70, spread, full).helps is helps


def test_the_baseline_is_scored_on_the_rows_that_the_folds_hold_out(base, tmp_path):
    rows = [(f"{text} {number}", "a" if number < 26 else "b") for number, (text, _) in enumerate(reviews(40))]
    write_reviews(tmp_path / "rows.csv", rows)
    run = train(tmp_path / "rows.csv", base, select="none")
    assert run.majority == pytest.approx(26 / 40), "of the four rows of the split that is not used, three are a"


def a_story(**facts: Any) -> Story:
    facts = {
        "how": "4 folds",
        "metric": "accuracy",
        "expected": Score(0.5, 0.4, 0.6),
        "rows": 12,
        "averaged": 1,
    } | facts
    return Story(**facts)


def test_a_training_with_a_larger_loss_than_the_head_only_is_not_said_to_have_the_smallest():
    frozen = Candidate("the head alone", None, 0.5, 0.75)
    chosen = Candidate("learning rate 0.001", 1e-3, 0.6, 0.5, chosen=True)
    [line] = [line for line in sentences(a_story(candidates=(frozen, chosen))) if line.startswith("Chosen")]
    assert "The loss of the head only is smaller" in line


def test_the_threshold_names_its_class():
    classes = (ClassScore("ham", 1.0, 1.0, 1.0, 9), ClassScore("spam", 1.0, 1.0, 1.0, 1))
    head = Candidate("the head alone", None, 0.5, 0.75, chosen=True)
    lines = sentences(a_story(candidates=(head,), classes=classes, threshold=0.4))
    assert 'A class is rare, so +0.40 is added to the output of "spam".' in lines


def test_training_rows_that_are_all_the_same_text_are_explained_by_the_dev_rows(base, tmp_path):
    rows = [{"text": "the same", "label": float(number)} for number in range(12)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant prediction has no correlation
        run = train(tmp_path, base, task="regression", select="none", quiet=True)
    assert run.story.curve.rows == 12 and run.story.suspects == ()


def test_the_last_step_of_a_search_is_not_the_one_after_which_a_lane_is_dropped(base, tmp_path, quick, monkeypatch):
    monkeypatch.setattr("bitfit.training.resolved.recipe_rates", lambda rates, rows: tuple(rates[1:]))
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    write_reviews(tmp_path / "train.csv", reviews(40))
    write_reviews(tmp_path / "dev.csv", reviews(50)[40:])
    run = train(tmp_path, base)
    assert run.best.delta.meta.trial.best_step == 40 / 8


def test_no_trial_is_shown_as_the_best_if_the_head_alone_is_delivered(base, tmp_path, quick, monkeypatch):
    write_reviews(tmp_path / "train.csv", reviews(16))
    for name in ("dev", "test"):
        write_reviews(tmp_path / f"{name}.csv", reviews(24)[16:])
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: True)
    assert "bold" not in train(tmp_path, base)._repr_html_()
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    assert train(tmp_path, base)._repr_html_().count("bold") == 1


@pytest.mark.parametrize(
    ("pool", "rows", "gain", "head_only"),
    [
        ("mean", 20, 1.0, False),  # so few rows cannot tell
        ("mean", 50, 0.01, False),  # less than half a standard error
        ("mean", 50, 1.0, True),
        ("mean", 100, 0.01, True),
        ("mean", 100, -0.01, False),
        ("pair", 20, 0.01, True),  # of pairs read one by one the smaller loss decides, however few there are
        ("pair", 20, -0.01, False),
    ],
)
def test_the_head_only_is_chosen_by_its_loss_and_with_few_rows_by_a_margin(pool, rows, gain, head_only):
    losses = np.random.default_rng(0).normal(size=rows)
    losses -= losses.mean()
    held = np.arange(rows)
    head = SimpleNamespace(row_losses=losses * 0, known=np.ones(rows, bool))
    trained = HeldOut(Task.of("classification", ("a", "b")), part_of(np.zeros(rows, np.int64)), np.zeros((rows, 2)))
    object.__setattr__(trained, "row_losses", losses + gain)
    recipe = SimpleNamespace(held=held, sample=held, head_only=head, model=SimpleNamespace(pool=pool))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitfit.training.recipe.replace", lambda same, **_: same)
        assert _Recipe._frozen_is_better(recipe, trained) is head_only
