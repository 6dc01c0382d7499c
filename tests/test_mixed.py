"""One batch, many tasks: each text is answered under the delta it names, as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bitfit import Delta, MixedPredictor, Predictor, predict
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.bank.packed import Packed
from bitfit.errors import DeltaError, UsageError
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.tasks.encode import Encoder
from support import ARCHITECTURES, delta_of, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
TEXTS = [text for text, _ in reviews(12)]


def every_kind(base: Any) -> list[Delta]:
    pair = {"text": "a", "label": "y", "text_pair": "b"}
    return [
        delta_of(base, 0),
        delta_of(base, 1),
        delta_of(base, 2, labels=5, pool="mean"),
        delta_of(base, 3, labels=0, pool="mean", max_length=6),
        delta_of(base, 4, labels=3, select_text="b_q + g_LN1", columns=pair),
        delta_of(base, 5, select_text="bias + random(all, 40)"),
        delta_of(base, 6, pool="mean", select_text="random(bias, 20)"),
        delta_of(base, 7, select_text="W_q@0 + bias"),
        delta_of(base, 8, select_text="none"),
        delta_of(base, 9, pool="pair", columns=pair),
    ]


def requests_of(deltas: list[Delta]) -> list[tuple[Delta, Any]]:
    order = np.random.default_rng(0).permutation(3 * len(deltas))
    chosen = [(deltas[i % len(deltas)], TEXTS[i % len(TEXTS)]) for i in order]
    return [(d, (text, TEXTS[0]) if d.meta.pairs else text) for d, text in chosen]


def numbers(answer: dict[str, Any]) -> list[float]:
    return list(answer["scores"].values()) if "scores" in answer else [answer["value"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixed_batch_answers_as_separate_predictions_do(bases, architecture):
    base = bases(architecture)
    deltas = (
        every_kind(base)
        if architecture == "bert"
        else [delta_of(base, 0), delta_of(base, 1, 3), delta_of(base, 2, 0, "mean")]
    )
    requests = requests_of(deltas)
    for (delta, text), answer in zip(requests, predict(requests, base=base), strict=True):
        alone = predict(delta, [text], base)[0]
        assert answer.keys() == alone.keys()
        np.testing.assert_allclose(numbers(answer), numbers(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "electra", "mpnet"])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_heads_of_one_shape_run_together_and_equal_the_stock_model(bases, architecture, pool, monkeypatch):
    base = bases(architecture)
    model = Model(base, 3, pool)
    bank = Bank(model, [lane_of_delta(model, delta_of(base, k, 3, pool)) for k in range(4)])
    rows = {k: Encoder(base)(TEXTS[k : 2 * k + 1]) for k in (3, 0, 2)}
    calls = []
    classify = Model.classify
    monkeypatch.setattr(Model, "classify", lambda self, texts: calls.append(len(texts)) or classify(self, texts))
    with torch.inference_mode():
        mixed = bank.logits(rows)
        stock = bank.stock_logits(rows)
    assert calls == [8] and list(mixed) == [3, 0, 2]
    for k, own in stock.items():
        torch.testing.assert_close(mixed[k], own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_a_poisoned_task_leaves_the_others_bit_for_bit(base, poison):
    deltas = [delta for delta in every_kind(base) if not delta.meta.pairs]
    mixed = MixedPredictor(deltas, base)
    requests = [(i % len(deltas), TEXTS[i % len(TEXTS)]) for i in range(3 * len(deltas))]
    healthy = mixed.outputs(requests)
    for sick in (1, 2, 4):
        mixed.residents[sick].lane.start.fill_(poison)
    for (number, _), before, after in zip(requests, healthy, mixed.outputs(requests), strict=True):
        assert number in (1, 2, 4) or np.array_equal(before, after)


def test_a_batch_looks_only_at_the_lanes_it_names(base, monkeypatch):
    model = Model(base, 2, "cls")
    bank = Bank(model, [lane_of_delta(model, delta_of(base, k)) for k in range(40)])
    looked: set[int] = set()
    effective = Bank._effective
    monkeypatch.setattr(Bank, "_effective", lambda self, k, *rest: looked.add(k) or effective(self, k, *rest))
    with torch.inference_mode():
        bank.logits({k: Encoder(base)(TEXTS[:1]) for k in (7, 31)})
    assert looked == {7, 31}


def test_resident_tasks_hold_their_values_once(base):
    model = Model(base, 2, "mean")
    bank = Bank(model, [lane_of_delta(model, delta_of(base, k, pool="mean")) for k in range(8)])
    assert len({id(lane.slots) for lane in bank.lanes}) == len({id(form) for form in bank._layouts}) == 1
    assert all(lane.start.numel() == 0 for lane in bank.lanes) and not bank._leaves
    assert bank.gradients.numel() == 0


def test_lanes_read_from_a_file_and_from_memory_have_one_form(base, tmp_path):
    delta = delta_of(base, 0)
    shuffled = Delta(dict(reversed(delta.tensors.items())), delta.meta)
    model = Model(base, 2, "cls")
    bank = Bank(model, [lane_of_delta(model, delta), lane_of_delta(model, shuffled)])
    assert bank._layouts[0] is bank._layouts[1] and torch.equal(bank.values[0], bank.values[1])


def test_an_evaluation_before_the_first_step_does_not_stop_training(base):
    model = Model(base, 2, "cls")
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias"), seed=k) for k in range(2)])
    rows = {k: Encoder(base)(TEXTS[:3]) for k in range(2)}
    with torch.inference_mode():
        bank.logits(rows)
    sum(out.square().sum() for out in bank.logits(rows, {0: 1, 1: 2}).values()).backward()
    assert bank.gradients.abs().sum(1).gt(0).all()


def test_lanes_of_other_bases_are_refused(bases):
    models = [Model(bases("bert"), 2), Model(bases("electra"), 2)]
    lanes = [lane_to_train(model, select(model.anatomy, "none")) for model in models]
    with pytest.raises(UsageError, match="same base"):
        Bank(models, lanes)
    with pytest.raises(DeltaError, match=r"electra.*bert"):
        predict([(delta_of(bases("bert"), 0), "good"), (delta_of(bases("electra"), 0), "good")], base=bases("bert"))


def test_files_and_deltas_mix_and_nothing_gives_nothing(base, tmp_path):
    first, second = delta_of(base, 0), delta_of(base, 1, 3, "mean")
    path = tmp_path / "first.safetensors"
    first.save(path)
    answers = predict([(str(path), "good film"), (second, "bad"), (path, "good film")], base=base)
    assert answers[0] == answers[2] and answers[0]["scores"].keys() == {"c0", "c1"} and len(answers[1]["scores"]) == 3
    assert answers[0]["score"] == pytest.approx(Predictor(first, base).answers(["good film"]).__next__()["score"])
    assert predict([], base=base) == []


def test_a_call_that_is_neither_form_is_refused(base):
    delta = delta_of(base, 0)
    with pytest.raises(UsageError, match="not both"):
        predict([(delta, "good")], ["good"], base)
    with pytest.raises(TypeError, match="a delta and texts"):
        predict(delta, base=base)
    with pytest.raises(UsageError, match="single texts"):
        predict([(delta, ("good", "bad"))], base=base)


def test_other_architectures_mix_lane_by_lane(bases):
    assert not Packed.supports(Model(bases("albert"), 2, "cls"))
    assert len(predict([(delta_of(bases("albert"), k, k + 2), "good") for k in range(3)], base=bases("albert"))) == 3
