"""The pool "pair": each text of a pair is encoded by itself, and the head reads how the two states are related."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import bitfit
from bitfit import Delta
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.errors import DeltaError, Interrupted, UsageError
from bitfit.model.language import select
from bitfit.model.rows import by_length
from bitfit.model.task_model import Model
from bitfit.tasks import Task
from bitfit.training import recipe
from bitfit.training.recipe import APART, TOGETHER
from packing import assert_close, by_name, learn
from support import ARCHITECTURES, INJECT, WORDS, delta_of

COLUMNS = {"text": "text", "text_pair": "text_pair", "label": "label"}
TEXTS = [("good film", "the plot was very long and bad"), ("a", "a"), ("the cast is not great", "fine"), ("", "poor")]


def encoder(base, max_length=None):
    return Task.of("classification", ("a", "b")).encoder(base, max_length, apart=True)


def encoded(base, pairs=TEXTS, max_length=None):
    return encoder(base, max_length)([one for one, _ in pairs], [two for _, two in pairs])


def written_out(bank: Bank, k: int, weight: torch.Tensor, bias: torch.Tensor, pairs=TEXTS) -> torch.Tensor:
    """The outputs by the formula, from the stock model's mean states of each text."""
    model = bank.models[k]
    outputs = []
    single = Task.of("classification", ("a", "b")).encoder(model.base, None)
    with model.swapped(bank._effective(k)):
        for pair in pairs:
            states = []
            for text in pair:
                ids = torch.from_numpy(single([text]).ids)[None]
                mean = model.encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
                states.append(mean / mean.square().mean().sqrt())
            u, v = states
            outputs.append(weight @ torch.cat([u, v, (u - v).abs(), u * v]) + bias)
    return torch.stack(outputs)


def bank_of(base, architecture, lanes=1, terms=None) -> Bank:
    inject = INJECT.get(architecture, "none")
    model = Model(base, 3, "pair", inject)
    chosen = select(model.anatomy, terms or ("injected" if inject != "none" else "bias"), 0)
    bank = Bank(model, [lane_to_train(model, chosen, seed=k) for k in range(lanes)], prefix_dropout=False)
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    return bank


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_and_gradients_are_those_of_the_formula(bases, architecture):
    bank = bank_of(bases(architecture), architecture)
    found = bank.logits({0: encoded(bases(architecture))})
    gradients = learn(bank, found)[0]
    effective = bank._effective(0)
    expected = written_out(bank, 0, effective["head.classifier.weight"], effective["head.classifier.bias"])
    assert_close(found[0], expected)
    mine = by_name(bank, 0, gradients)
    theirs = by_name(bank, 0, learn(bank, {0: expected})[0])
    largest = max(float(value.abs().max()) for value in theirs.values())
    for name, value in mine.items():
        assert float((value - theirs[name]).abs().max()) <= 2e-5 * largest, name


def test_lanes_share_a_pass_and_equal_the_stock_path(base):
    bank = bank_of(base, "bert", lanes=3)
    rows = {k: encoded(base, TEXTS[: k + 1]) for k in range(3)}
    stock = bank.stock_logits(rows)
    for k, outputs in bank.logits(rows).items():
        assert_close(outputs, stock[k])


@pytest.mark.parametrize("terms", ["b_m2@last1", "none"])
def test_known_states_of_frozen_layers_give_the_same_outputs(base, terms):
    bank = bank_of(base, "bert", terms=terms)
    rows = encoded(base)
    known = bank.with_prefix(rows, by_length(rows, 2))
    assert known.known is not None
    assert_close(bank.logits({0: known})[0], bank.logits({0: rows})[0])
    some = np.array([3, 1])
    assert_close(bank.logits({0: known.take(some)})[0], bank.logits({0: rows.take(some)})[0])


def test_the_dropout_of_a_row_does_not_depend_on_its_worker(base):
    bank = bank_of(base, "bert")
    rows = encoded(base)
    together = bank.logits({0: rows}, {0: 7})[0]
    halves = [bank.logits({0: rows.share(half)}, {0: 7})[0] for half in (slice(0, 2), slice(2, 4))]
    assert_close(torch.cat(halves), together)


def test_each_text_has_the_maximum_length_for_itself(base):
    long = " ".join(WORDS)
    rows = encoded(base, [(long, "good film"), ("good", long)], max_length=8)
    assert rows.by_window.lengths.tolist() == [8, 4, 3, 8]
    assert rows.cut == 2


# ---- training


def pairs_of(count, seed=0):
    """Pairs of texts that are alike or not."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        text = draw.choices(WORDS, k=6)
        other = draw.sample(text, 6) if number % 2 else draw.choices(WORDS, k=6)
        labels = ("unlike", "alike")
        rows.append({"text": " ".join(text), "text_pair": " ".join(other), "label": labels[number % 2]})
    return rows


@pytest.fixture
def embedding_base(base):
    """The base as one that declares mean pooling."""
    return replace(base, pooling="mean")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("bitfit.training.resolved.recipe_epochs", lambda rows: 2)


def test_alike_texts_are_told_from_unlike_ones(base):
    rows = pairs_of(160)
    delta = bitfit.train(rows[:120], base, pool="pair", select="none", quiet=True).best.delta
    assert delta.meta.pool == "pair"
    assert bitfit.evaluate(delta, rows[120:], base, quiet=True).score.value > 0.85


def test_few_rows_are_read_one_by_one(embedding_base, quick):
    run = bitfit.train(pairs_of(80), embedding_base, quiet=True)
    assert run.best.delta.meta.pool == "pair"
    assert {candidate.reading for candidate in run.story.candidates} == {""}
    assert any("Each text of a pair is encoded by itself" in note for note in run.notes)


@pytest.mark.parametrize("better", [TOGETHER, APART])
def test_with_many_rows_the_better_reading_is_delivered(embedding_base, quick, tmp_path, monkeypatch, better):
    monkeypatch.setattr("bitfit.training.recipe.FEW", 50)
    monkeypatch.setattr("bitfit.training.plan.FEW", 50)
    choice = recipe._Recipe.choice

    def choice_of(self):
        chosen = choice(self)
        chosen.held.__dict__["best_loss"] = 0.1 if self.name == better else 0.2
        return chosen

    monkeypatch.setattr(recipe._Recipe, "choice", choice_of)
    run = bitfit.train(pairs_of(80), embedding_base, out=tmp_path / "d.safetensors", quiet=True)
    assert len(list((tmp_path / "d.run").glob("lr*.jsonl"))) == 3, "a history for each trial"
    candidates = run.story.candidates
    assert [each.reading for each in candidates] == [TOGETHER, TOGETHER, TOGETHER, APART, APART]
    assert [each.lr is None for each in candidates] == [True, False, False, True, False]
    assert [each.reading for each in candidates if each.chosen] == [better]
    assert run.best.delta.meta.pool == ("pair" if better == APART else "mean")
    assert len(run.trials) == 3
    assert any(f"texts {better}" in note for note in run.notes)


@pytest.mark.parametrize("options", [{"pool": "mean"}, {"recipe": "plain", "epochs": 1}])
def test_a_given_pool_and_the_plain_recipe_try_no_other(embedding_base, quick, options):
    run = bitfit.train(pairs_of(40), embedding_base, quiet=True, **options)
    assert run.best.delta.meta.pool == "mean"
    assert run.story is None or {candidate.reading for candidate in run.story.candidates} == {""}


def test_a_base_without_declared_pooling_reads_one_sequence(base, quick):
    run = bitfit.train(pairs_of(40), base, quiet=True)
    assert run.best.delta.meta.pool == "cls"


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_other_kinds_of_pairs_are_read_apart(base, quick, kind):
    values = {"regression": {"alike": 4.5, "unlike": 0.25}, "multilabel": {"alike": "a|b", "unlike": "b"}}[kind]
    rows = [{**row, "label": values[row["label"]]} for row in pairs_of(120)]
    delta = bitfit.train(rows, base, task=kind, pool="pair", select="none", quiet=True).best.delta
    assert bitfit.evaluate(delta, rows, base, quiet=True).score.value > 0.7


@pytest.mark.parametrize(("few", "stopped_pass"), [(500, 0), (500, 1), (20, 0), (20, 1), (20, 2)])
def test_a_stopped_run_goes_on_to_the_same_bits(embedding_base, quick, tmp_path, monkeypatch, few, stopped_pass):
    monkeypatch.setattr("bitfit.training.recipe._Recipe._frozen_is_better", lambda *_: False)
    monkeypatch.setattr("bitfit.training.recipe.FEW", few)
    monkeypatch.setattr("bitfit.training.plan.FEW", few)
    rows = pairs_of(40)
    whole = bitfit.train(rows, embedding_base, threads=1, quiet=True).best.delta

    def stop(part, step, total, runners):
        if part == stopped_pass and step == total // 2:
            raise Interrupted("now")

    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        bitfit.train(rows, embedding_base, out=out, threads=1, watch=stop, checkpoint_seconds=0)
    resumed = bitfit.train(rows, embedding_base, out=out, resume=True, threads=1, quiet=True).best.delta
    for name, values in whole.tensors.items():
        assert np.array_equal(values, resumed.tensors[name]), name


def test_pool_pair_needs_pairs(base):
    rows = [{"text": f"good film {number}", "label": "ab"[number % 2]} for number in range(40)]
    with pytest.raises(UsageError, match="--pool pair: the rows have one text"):
        bitfit.train(rows, base, pool="pair", quiet=True)


def test_a_note_counts_the_texts_that_are_cut(base):
    rows = [{**row, "text": " ".join(WORDS)} for row in pairs_of(40)]
    notes = bitfit.train(rows, base, pool="pair", select="none", max_length=10, quiet=True).notes
    assert "train: Cut at 10 tokens: 36 of 72 texts; --max-length reads more." in notes


# ---- answering


def test_the_file_keeps_the_pool(base, tmp_path):
    delta = delta_of(base, pool="pair", columns=COLUMNS)
    delta.save(tmp_path / "pair.safetensors")
    answers = bitfit.predict(tmp_path / "pair.safetensors", TEXTS, base)
    assert Delta.load(tmp_path / "pair.safetensors").meta.pool == "pair"
    assert answers == bitfit.predict(delta, TEXTS, base)


def test_metadata_of_single_texts_with_this_pool_are_refused(base):
    with pytest.raises(DeltaError, match="pool: pair is for pairs of texts"):
        delta_of(base, pool="pair")


def test_pairs_read_in_both_ways_answer_together(base):
    deltas = [delta_of(base, 1, pool="pair", columns=COLUMNS), delta_of(base, 2, pool="mean", columns=COLUMNS)]
    mixed = bitfit.predict([(delta, pair) for pair in TEXTS for delta in deltas], base=base)
    for number, delta in enumerate(deltas):
        for one, other in zip(mixed[number::2], bitfit.predict(delta, TEXTS, base), strict=True):
            assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
