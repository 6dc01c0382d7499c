"""Texts above the maximum length: what is read of them, and how the windows of one text become one answer."""

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
from bitfit.errors import UsageError
from bitfit.model.language import select
from bitfit.model.rows import Rows, by_length
from bitfit.model.task_model import Model
from bitfit.prediction.peft_export import export_peft
from bitfit.tasks import Task
from bitfit.tasks.encode import MOST_WINDOWS
from packing import assert_close, by_name, learn, tiny_base
from support import BAD, GOOD, WORDS, delta_of

LENGTH = 12


def encoder(base, long, stride=None, max_length=LENGTH):
    return Task.of("classification", ("a", "b")).encoder(base, max_length, stride, long)


def words(count, seed=0):
    return random.Random(seed).choices(WORDS, k=count)


def text_of(base, ids):
    return base.tokenizer.decode(ids, skip_special_tokens=True).split()


# ---- what is read


def test_windows_cover_the_whole_text(base):
    given = words(45)
    rows = encoder(base, "windows")([" ".join(given)])
    assert len(rows) == 1
    assert rows.window_counts.tolist() == [5]
    assert rows.by_window.lengths.tolist() == [12, 12, 12, 12, 7]
    assert text_of(base, rows.ids) == given


def test_windows_share_the_stride(base):
    given = words(20)
    rows = encoder(base, "windows", stride=4)([" ".join(given)])
    windows = rows.by_window
    first, second = (text_of(base, windows.take(np.array([number])).ids) for number in (0, 1))
    assert first[-4:] == second[:4]


def test_of_a_very_long_text_windows_are_read_that_spread_over_it(base):
    given = words(1000)
    rows = encoder(base, "windows")([" ".join(given), "good film"])
    assert rows.window_counts.tolist() == [MOST_WINDOWS, 1]
    assert rows.cut == 1
    read = text_of(base, rows.take(np.array([0])).ids)
    assert read[:10] == given[:10]
    assert read[-10:] == given[-10:]


def test_head_and_tail_are_the_first_and_the_last_words(base):
    given = words(45)
    rows = encoder(base, "head+tail", max_length=14)([" ".join(given)])
    assert rows.lengths.tolist() == [14]
    assert rows.cut == 1
    assert text_of(base, rows.ids) == given[:3] + given[-9:]
    assert rows.ids[0] == base.tokenizer.cls_token_id
    assert rows.ids[-1] == base.tokenizer.sep_token_id


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_short_texts_are_read_alike(bases, architecture):
    texts = ["", "good film", " ".join(words(LENGTH - 2))]
    one, *others = (encoder(bases(architecture), long)(texts) for long in ("head", "head+tail", "windows"))
    for other in others:
        assert other.windows is None
        assert other.starts.tolist() == one.starts.tolist()
        assert other.ids.tolist() == one.ids.tolist()


def test_rows_keep_their_windows_when_they_are_taken_and_joined(base):
    read = encoder(base, "windows")
    texts = [" ".join(words(count, count)) for count in (30, 3, 15)]
    rows = read(texts)
    for chosen in ([2, 0], [1], [0, 1, 2]):
        expected = read([texts[number] for number in chosen])
        taken = rows.take(np.array(chosen))
        assert taken.by_window.starts.tolist() == expected.by_window.starts.tolist()
        assert taken.starts.tolist() == expected.starts.tolist()
        assert taken.ids.tolist() == expected.ids.tolist()
    joined = Rows.join([read(texts[1:2]), read(texts[:1])])
    assert joined.window_counts.tolist() == [1, 3]


def test_a_batch_holds_so_many_windows(base):
    rows = encoder(base, "windows")([" ".join(words(count)) for count in (50, 3, 45, 3, 20)])
    batches = by_length(rows, 6)
    assert sorted(np.concatenate(batches).tolist()) == [0, 1, 2, 3, 4]
    assert [int(rows.window_counts[batch].sum()) for batch in batches] == [5, 5, 4]


# ---- the outputs of a text, and their gradients


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2"])
def test_outputs_and_gradients_are_those_of_the_mean_over_windows(bases, architecture, pool):
    base = bases(architecture)
    model = Model(base, 3, pool)
    terms = "b_m2 + b_LN1" if architecture == "gpt2" else "bias"
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, terms, 0), seed=k) for k in range(2)])
    read = encoder(base, "windows")
    batch = {k: read([" ".join(words(count, count + k)) for count in (30, 5, 17)]) for k in range(2)}
    found = bank.logits(batch)
    gradients = learn(bank, found)
    for k, rows in batch.items():
        # Independent: each window by itself as the only row of a bank, and the mean written out.
        windows = rows.by_window
        separate = [bank.stock_logits({k: windows.take(np.array([number]))})[k][0] for number in range(len(windows))]
        lengths = windows.lengths.tolist()
        expected = []
        number = 0
        for count in (3, 1, 2):
            own = range(number, number + count)
            expected.append(sum(lengths[i] * separate[i] for i in own) / sum(lengths[i] for i in own))
            number += count
        assert_close(found[k], torch.stack(expected))
        other = learn(bank, {k: torch.stack(expected)})[k]
        mine, theirs = by_name(bank, k, gradients[k]), by_name(bank, k, other)
        largest = max(float(value.abs().max()) for value in theirs.values())
        for name, value in mine.items():
            assert float((value - theirs[name]).abs().max()) <= 2e-5 * largest, name


def test_known_states_of_frozen_layers_give_the_same_outputs():
    base = tiny_base("bert", 0.0)
    for terms in ("b_m2@last1", "none"):
        model = Model(base, 2, "mean")
        bank = Bank(model, [lane_to_train(model, select(model.anatomy, terms, 0), seed=0)], prefix_dropout=False)
        lengths = np.array([9, 9, 4, 7, 9])
        windows = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.random.default_rng(0).integers(4, 40, lengths.sum())
        rows = Rows(ids, np.zeros_like(ids), windows[[0, 3, 5]], windows=windows)
        known = bank.with_prefix(rows, by_length(rows, 2))
        assert known.known is not None
        assert_close(bank.logits({0: known})[0], bank.logits({0: rows})[0])
        one = np.array([1])
        assert_close(bank.logits({0: known.take(one)})[0], bank.logits({0: rows.take(one)})[0])


# ---- training and answering


@pytest.fixture(scope="module")
def late():
    """Texts whose label only their last words tell."""
    draw = random.Random(0)
    rows = []
    for number in range(96):
        label = number % 2
        text = [*draw.choices(WORDS[6:], k=24), *draw.choices(GOOD if label else BAD, k=6)]
        rows.append({"text": " ".join(text), "label": ("bad", "good")[label]})
    return rows


def trained(base, rows, long, **options):
    plan = {"max_length": LENGTH, "select": "none", "pool": "mean", "threads": 1, **options}
    return bitfit.train(rows, base, long=long, **plan).best.delta


def test_windows_and_tails_learn_what_the_head_does_not_tell(base, late):
    scores = {}
    for long in ("head", "head+tail", "windows"):
        scores[long] = bitfit.evaluate(trained(base, late, long), late, base).score.value
    assert scores["head"] < 0.8
    assert min(scores["head+tail"], scores["windows"]) > 0.95


def test_bias_terms_are_trained_on_windows(base, late):
    delta = trained(base, late, "windows", select="bias", lr=[1e-2, 2e-2], epochs=8)
    assert bitfit.evaluate(delta, late, base).score.value > 0.9


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_other_kinds_of_texts_read_windows(base, late, kind):
    values = {"regression": (0.5, 7.25), "multilabel": ("a", "a|b")}[kind]
    rows = [{"text": row["text"], "label": values[row["label"] == "good"]} for row in late]
    delta = trained(base, rows, "windows", task=kind)
    assert bitfit.evaluate(delta, rows, base).score.value > 0.8


def test_the_setting_stays_in_the_file(base, late, tmp_path):
    delta = trained(base, late, "windows", stride=3)
    delta.save(tmp_path / "long.safetensors")
    loaded = Delta.load(tmp_path / "long.safetensors")
    assert (loaded.meta.long, loaded.meta.stride) == ("windows", 3)
    texts = [row["text"] for row in late[:5]]
    assert bitfit.predict(tmp_path / "long.safetensors", texts, base) == bitfit.predict(delta, texts, base)


def test_a_file_that_earlier_versions_would_misread_has_another_format(base):
    assert delta_of(base).meta.table()["format"] == 1
    assert "long" not in delta_of(base).meta.table()
    assert delta_of(base, long="windows").meta.table()["format"] == 2


def test_the_answer_to_a_text_is_the_mean_over_its_windows(base):
    delta = delta_of(base, labels=0, long="windows", max_length=LENGTH)
    given = words(30)
    values = []
    sizes = []
    for start in range(0, 30, LENGTH - 2):
        part = given[start : start + LENGTH - 2]
        values.append(bitfit.predict(delta, " ".join(part), base)[0]["value"])
        sizes.append(len(part) + 2)
    found = bitfit.predict(delta, " ".join(given), base)[0]["value"]
    assert found == pytest.approx(np.average(values, weights=sizes), rel=1e-5)


def test_deltas_that_read_long_texts_otherwise_answer_together(base):
    deltas = [delta_of(base, seed, long=long, max_length=LENGTH) for seed, long in enumerate(("head", "windows"))]
    texts = [" ".join(words(count, count)) for count in (40, 5, 26)]
    mixed = bitfit.predict([(delta, text) for text in texts for delta in deltas], base=base)
    for number, delta in enumerate(deltas):
        for one, other in zip(mixed[number::2], bitfit.predict(delta, texts, base), strict=True):
            assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)


def test_predict_and_evaluate_may_read_otherwise_than_the_delta_says(base, late):
    delta = delta_of(base, max_length=LENGTH)
    rows = [{"text": row["text"], "label": f"c{number % 2}"} for number, row in enumerate(late)]
    other = replace(delta, meta=replace(delta.meta, long="windows"))
    assert bitfit.evaluate(delta, rows, base, long="windows").scores == bitfit.evaluate(other, rows, base).scores
    assert bitfit.evaluate(delta, rows, base, long="head").scores == bitfit.evaluate(delta, rows, base).scores


# ---- where it does not apply


@pytest.mark.parametrize("kind", ["tagging", "answering"])
def test_kinds_that_read_windows_anyway_refuse_it(base, kind):
    with pytest.raises(UsageError, match=f"--long windows: {kind} reads every long input in windows"):
        Task.of(kind, ("a", "b") if kind == "tagging" else ()).encoder(base, None, None, "windows")


def test_pairs_refuse_it(base):
    rows = [{"sentence1": "good film", "sentence2": f"plot {n}", "label": "ab"[n % 2]} for n in range(40)]
    with pytest.raises(UsageError, match=r"--long windows: only single texts .* pairs"):
        bitfit.train(rows, base, long="windows")
    pair = delta_of(base, columns={"text": "a", "label": "y", "text_pair": "b"})
    with pytest.raises(UsageError, match="--long windows: the delta is for pairs of texts"):
        bitfit.evaluate(pair, [{"a": "x", "b": "y", "y": "c0"}], base, long="windows")


def test_a_stride_needs_windows(base):
    with pytest.raises(UsageError, match=r"--stride 3: .* only with --long windows"):
        encoder(base, "head", 3)


def test_an_unknown_word_is_refused_with_the_known_ones(base):
    with pytest.raises(UsageError, match=r'no "window"\. Did you mean "windows"'):
        bitfit.train([{"text": "a", "label": "b"}], base, long="window")
    with pytest.raises(UsageError, match=r'no "window"\. Did you mean "windows"'):
        bitfit.evaluate(delta_of(base), [{"text": "a", "label": "c0"}], base, long="window")


@pytest.mark.parametrize("write", [bitfit.export, export_peft])
def test_export_refuses_what_transformers_would_cut(base, tmp_path, write):
    with pytest.raises(UsageError, match="was trained with --long windows"):
        write(delta_of(base, long="windows"), base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
