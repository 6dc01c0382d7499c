"""Diff-Pruning: gates find the entries, exactly as many as asked are kept, and these alone train on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from bitfit import Plan, select, train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.cli.main import run as command
from bitfit.delta.delta import Delta
from bitfit.errors import BitfitError, Interrupted, SelectionError
from bitfit.model.audit import count
from bitfit.model.language import select as select_sites
from bitfit.model.task_model import Model
from bitfit.study import forecast
from bitfit.training import diff_pruning
from bitfit.training.checkpoint import Store
from bitfit.training.diff_pruning import HIGH, LOW, PHASE, Gates, hard_concrete, open_chance
from bitfit.training.plan import follows_recipe
from bitfit.training.run import prepare, run_pass

SELECT = "diff_pruning(all, 60)"
OPTIONS = {"select": SELECT, "lr": [1e-2, 2e-3], "epochs": 3, "batch": 8}


def gates_of(csv_file, base, structured=True, selection="bias + W_q"):
    """Gates with differences and logits of many sizes."""
    _, trials = prepare(csv_file, base, Plan(lr=1e-3), lambda _: None)
    model = Model(base, 2, "mean")
    bank = Bank(model, [lane_to_train(model, select_sites(model.anatomy, selection))])
    gates = Gates(bank, trials[0].trial, structured, 1e-3)
    generator = torch.Generator().manual_seed(3)
    gates.differences += 0.1 * torch.randn(gates.differences.shape, generator=generator)
    gates.entry.copy_(2 * torch.randn(gates.entry.shape, generator=generator))
    gates.tensor.copy_(1 + 0.3 * torch.randn(gates.tensor.shape, generator=generator))
    return gates


# ---- the formulas


def test_a_gate_and_its_derivative_are_those_of_the_formula():
    uniform = torch.linspace(0.001, 0.999, 301, dtype=torch.float64)
    logits = torch.linspace(-6, 6.1, 301, dtype=torch.float64).flip(0).requires_grad_()
    soft = 1 / (1 + torch.exp(-(uniform.log() - (1 - uniform).log() + logits)))
    expected = torch.minimum(torch.ones(()), torch.maximum(torch.zeros(()), soft * (HIGH - LOW) + LOW))
    [slope] = torch.autograd.grad(expected.sum(), logits)
    gate, found = hard_concrete(logits.detach(), uniform.logit())
    assert ((gate == 0).any(), (gate == 1).any()) == (True, True)
    torch.testing.assert_close(gate, expected.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found, slope, rtol=0, atol=1e-5)


def test_the_chance_of_an_open_gate_is_that_of_the_logistic_distribution():
    logits = np.linspace(-8, 8, 50)
    closed_below = -LOW / (HIGH - LOW)  # of the soft gate
    expected = stats.logistic.sf(np.log(closed_below / (1 - closed_below)), loc=logits)
    np.testing.assert_allclose(open_chance(torch.from_numpy(logits)).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("structured", [True, False])
def test_gradients_are_those_of_the_loss_and_the_expected_number_of_open_gates(csv_file, base, structured):
    gates = gates_of(csv_file, base, structured)
    gates.draw(7)
    generator = torch.Generator().manual_seed(7)
    tensor_noise = gates._noise(len(gates.slots), generator) if structured else None
    difference, entry, tensor = (
        t.detach().clone().double().requires_grad_()
        for t in (gates.differences[: gates.size], gates.entry, gates.tensor)
    )
    given = torch.randn(len(gates.differences), generator=torch.Generator().manual_seed(1))
    loss = torch.zeros((), dtype=torch.float64)
    values = []
    for j, slot in enumerate(gates.slots):
        part = slice(slot.offset, slot.offset + slot.size)
        noise = gates._noise(slot.size, generator).double()
        gate = (torch.sigmoid(entry[part] + noise) * 3 - 1.5).clamp(0, 1)
        chance = torch.sigmoid(entry[part])
        if structured:
            gate = gate * (torch.sigmoid(tensor[j] + tensor_noise[j].double()) * 3 - 1.5).clamp(0, 1)
            chance = chance * torch.sigmoid(tensor[j])
        values.append(gates.start[part] + gate * difference[part])
        loss = loss + (given[part] * values[-1]).sum() + gates.penalty * chance.sum()
    loss.backward()
    torch.testing.assert_close(gates.bank.values[0, : gates.size].double(), torch.cat(values).detach())
    gates.bank.gradients[0] = given
    gates.add_gradients()
    torch.testing.assert_close(gates.differences.grad[: gates.size].double(), difference.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gates.entry.grad.double(), entry.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(gates.differences.grad[gates.size :], given[gates.size :])
    if structured:
        torch.testing.assert_close(gates.tensor.grad.double(), tensor.grad, rtol=1e-5, atol=1e-5)


# ---- the projection


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("asked", [1, 17, "open", "open + 5", "all"])
def test_exactly_as_many_are_kept_and_no_open_gate_with_a_larger_difference_is_left(csv_file, base, asked, structured):
    gates = gates_of(csv_file, base, structured)
    opened = gates.open_count()
    number = {"open": opened, "open + 5": opened + 5, "all": gates.size}.get(asked, asked)
    mask = gates.project(number, None)
    assert mask.selection.count == number
    sizes = (gates.certain() * gates.differences[: gates.size]).abs()
    threshold = sizes.sort(descending=True).values[number - 1]
    for j, slot in enumerate(gates.slots):
        here = sizes[slot.offset : slot.offset + slot.size]
        kept = torch.zeros(slot.size, dtype=torch.bool)
        if slot.name in mask.selection:
            index = mask.selection.entries[slot.name]
            kept[slice(None) if index is None else torch.tensor(index)] = True
            wanted = gates.start + gates.certain() * gates.differences[: gates.size]
            assert torch.equal(mask.values[slot.name], wanted[slot.offset : slot.offset + slot.size][kept])
        assert (here[kept] >= threshold).all() and (here[~kept] <= threshold).all(), j


def test_without_any_difference_exactly_as_many_are_kept_too(csv_file, base):
    gates = gates_of(csv_file, base)
    gates.differences.zero_()
    assert gates.project(11, None).selection.count == 11


# ---- training


def encoder_entries(delta: Delta) -> dict[str, np.ndarray]:
    return {name: index for name, (index, _) in delta.entries.items()}


@pytest.mark.parametrize(
    "select_text", [SELECT, "diff_pruning_unstructured(bias + W_m2, 5%)", "diff_pruning(all@1, 9)"]
)
def test_the_mask_is_exact_and_stays_as_the_gates_left_it(base, csv_file, monkeypatch, select_text):
    masks = []
    project = Gates.project

    def remembering(self, number, record):
        masks.append(project(self, number, record))
        return masks[-1]

    monkeypatch.setattr(Gates, "project", remembering)
    run = train(csv_file, base, **{**OPTIONS, "select": select_text})
    [mask] = masks  # both rates train on from the same gates
    asked = select_sites(base.anatomy, select_text).count
    for outcome in run.trials:
        kept = encoder_entries(outcome.delta)
        assert sum(len(index) for index in kept.values()) == mask.selection.count == asked
        for name, index in kept.items():
            assert np.array_equal(index, mask.selection.entries[name])
        moved = [
            np.abs(values - mask.values[name].numpy()).max() for name, (_, values) in outcome.delta.entries.items()
        ]
        assert max(moved) > 0
        assert outcome.history.gates == mask.record and mask.record.kept == asked
        assert outcome.delta.meta.open_gates == mask.record.open / mask.record.gated
    assert any("gates were open" in note for note in run.notes)


@pytest.mark.parametrize(("phase", "step"), [(PHASE, 1), (PHASE, 10), (PHASE, 21), ("", 1), ("", 12)])
def test_an_interrupted_run_resumes_to_the_same_bytes(base, csv_file, tmp_path, phase, step):
    whole = train(csv_file, base, **OPTIONS)
    out = tmp_path / "d.safetensors"

    def stop(part, at, total, runners):
        if (runners[0].phase, at) == (phase, step):
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=stop, **OPTIONS)
    again = train(csv_file, base, out=out, resume=True, **OPTIONS)
    assert out.read_bytes() == whole.best.delta.encode()
    for one, other in zip(whole.trials, again.trials, strict=True):
        assert one.history == other.history and one.delta.encode() == other.delta.encode()


def test_a_lane_keeps_the_entries_of_its_separate_run(base, csv_file):
    options = {**OPTIONS, "seed": [0, 1]}
    together = train(csv_file, base, **options).trials
    masks = set()
    for outcome in together:
        alone = train(csv_file, base, **{**options, "lr": outcome.trial.lr, "seed": outcome.trial.seed}).best
        masks.add(str(encoder_entries(outcome.delta)))
        for name, (index, values) in outcome.delta.entries.items():
            assert np.array_equal(index, alone.delta.entries[name][0])
            np.testing.assert_allclose(values, alone.delta.entries[name][1], rtol=1e-3, atol=1e-4)
    assert len(masks) == 2  # one for each seed


def test_a_later_pass_at_another_rate_takes_the_mask_that_is_known(base, csv_file, monkeypatch):
    learned = []
    learn_mask = diff_pruning._learn_mask
    monkeypatch.setattr(diff_pruning, "_learn_mask", lambda *given: learned.append(given) or learn_mask(*given))
    job, trials = prepare(csv_file, base, Plan(**OPTIONS), lambda _: None)
    kept = []
    for trial in trials:
        (outcome,) = run_pass(job, [trial], 0, Store(None, ""), lambda *_: None, lambda _: None, {})
        kept.append(str(encoder_entries(outcome.delta)))
    assert len(learned) == 1 and len(set(kept)) == 1


def test_words_that_no_text_has_are_never_kept(base, csv_file):
    delta = train(csv_file, base, **{**OPTIONS, "select": "diff_pruning(W_emb, 400)"}).best.delta
    job, _ = prepare(csv_file, base, Plan(), lambda _: None)
    rows = encoder_entries(delta)[base.word_embedding] // base.width
    assert set(rows) <= set(job.train.rows.ids)


def test_a_strong_penalty_closes_the_gates_and_none_leaves_them_open(base, csv_file, monkeypatch):
    shares = []
    for penalty in (0.0, 1e4):
        monkeypatch.setattr(diff_pruning, "STRUCTURED_PENALTY", penalty)
        shares.append(train(csv_file, base, **{**OPTIONS, "epochs": 9}).best.delta.meta.open_gates)
    assert shares[0] > 0.8 > 0.1 > shares[1]


@pytest.mark.parametrize("architecture", ["gpt2", "distilbert"])
def test_other_architectures_learn_a_mask_too(bases, csv_file, architecture):
    delta = train(csv_file, bases(architecture), **OPTIONS).best.delta
    assert sum(len(index) for index in encoder_entries(delta).values()) == 60


def test_layers_below_the_operand_are_computed_once(base, csv_file):
    depths = set()

    def watch(part, step, total, runners):
        depths.add((runners[0].phase, runners[0].bank.frozen))

    train(csv_file, base, watch=watch, **{**OPTIONS, "select": "diff_pruning(all@last1, 9)"})
    assert depths == {(PHASE, 1), ("", 1)}


# ---- how it is asked for


def test_it_takes_the_plain_recipe():
    assert not follows_recipe(Plan(select=SELECT)) and follows_recipe(Plan())


def test_it_counts_what_will_train_and_says_that_training_finds_it(base):
    found = count(base, "diff_pruning(all, 1%)")
    assert found.selection.count == round(0.01 * select(base, "all").count)
    assert "Training determines the entries" in found.warnings[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"select": "bias + diff_pruning(all, 1%)"}, "cannot be combined with other terms at character 8"),
        ({"select": "random(diff_pruning(all, 1%), 3)"}, "cannot be combined with other terms"),
        ({"select": "(diff_pruning(all, 1%))@0"}, "cannot be combined with other terms"),
        ({"select": "random(all, count(diff_pruning(bias, 1%)))"}, "cannot be combined with other terms"),
        ({"select": "diff_pruning(diff_pruning(all, 9), 3)"}, "cannot be combined with other terms"),
        ({"select": "diff_pruning(all, -3)"}, "expected a whole number"),
        ({"select": "diff_prunning(all, 1%)"}, "Did you mean"),
        ({"init": "zero(diff_pruning(all, 1%))"}, "cannot be used in start values"),
        ({"inject": "diff_pruning(b_v, 3)"}, "cannot be used in --inject"),
    ],
)
def test_a_text_that_makes_no_sense_is_refused_before_anything_is_read(options, told):
    with pytest.raises(BitfitError, match=told) as error:
        Plan(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("amount", ["0", "0%", "1000000000"])
def test_an_amount_that_cannot_be_kept_is_refused(base, csv_file, amount):
    with pytest.raises(SelectionError, match="diff_pruning"):
        train(csv_file, base, select=f"diff_pruning(all, {amount})")


def test_entries_that_are_not_known_yet_cannot_be_looked_up(base):
    with pytest.raises(SelectionError, match="training determines the entries"):
        select(base, SELECT)


def test_inspect_tells_the_share_of_open_gates(base, csv_file, tmp_path, capsys):
    out = tmp_path / "d.safetensors"
    run = train(csv_file, base, out=out, **OPTIONS)
    assert Delta.load(out).meta.open_gates == run.best.delta.meta.open_gates
    assert command(["inspect", str(out)]) == 0
    assert "open gates" in capsys.readouterr().out


def test_a_forecast_counts_the_memory_and_the_work_of_gates(base, csv_file):
    job, learned = prepare(csv_file, base, Plan(select="diff_pruning(all, 1%)", lr=1e-3), lambda _: None)
    _, drawn = prepare(csv_file, base, Plan(select="random(all, 1%)", lr=1e-3), lambda _: None)
    entries = select(base, "all").count
    assert forecast.memory(job, learned) > forecast.memory(job, drawn) + 4 * 8 * entries
    assert forecast.trial_work(job, learned[0]) > 2 * forecast.trial_work(job, drawn[0])
