"""Texts that share rows of the stock model get the answers and gradients that padding would give them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitfit.bank import row_sharing as sharing
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.bank.row_sharing import RowAssignment
from bitfit.model.architectures import architecture
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.tasks.encode import Encoder
from support import ARCHITECTURES, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
TEXTS = sorted((text for text, _ in reviews(12)), key=len)
TEXTS = [TEXTS[0], "good", TEXTS[-1], "a bad film", TEXTS[3], TEXTS[-2], "the", TEXTS[5]]


SHARING = [name for name in ARCHITECTURES if architecture(name).row_sharing is not None]


def learn(base, pool, pair):
    model = Model(base, 3, pool)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "all"))])
    rows = {0: Encoder(base)(TEXTS, TEXTS[::-1] if pair else None)}
    logits = bank.stock_logits(rows)[0]
    logits.square().sum().backward()
    slots = bank.lanes[0].slots
    return logits.detach(), {s.name: bank.gradients[0, s.offset : s.offset + s.size].clone() for s in slots}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
@pytest.mark.parametrize("architecture", SHARING)
def test_shared_rows_equal_padded_ones(bases, architecture, pool, pair, monkeypatch):
    base, seen = bases(architecture), []
    watch = base.encoder.register_forward_hook(lambda *call: seen.append(call[2].last_hidden_state.shape[0]))
    shared = learn(base, pool, pair)
    monkeypatch.setattr(sharing, "MOST_ROWS", 0.0)
    padded = learn(base, pool, pair)
    watch.remove()
    assert seen[0] < seen[1] == len(TEXTS)
    torch.testing.assert_close(shared[0], padded[0], rtol=1e-5, atol=1e-6)
    noise = {site.name for site in base.anatomy.sites if site.term == "b_k" and site.whole}
    for name, expected in padded[1].items():
        difference = float((shared[1][name] - expected).abs().max())
        assert name in noise or difference <= 1e-5 * max(float(expected.abs().max()), 1e-2), name


def test_every_text_has_its_places_and_no_row_is_longer_than_the_longest():
    lengths = np.array([3, 9, 1, 4, 9, 5, 2])
    assignment = RowAssignment.of(lengths)
    assert assignment.rows == 4 and assignment.text.shape == (4, 9)
    assert np.bincount(assignment.text[assignment.text >= 0]).tolist() == lengths.tolist()
    back = assignment.back.reshape(len(lengths), 9)
    for i, length in enumerate(lengths):
        assert (assignment.text.reshape(-1)[back[i]] == i).all()
        assert (assignment.source[back[i, :length]] == i * 9 + np.arange(length)).all()
        assert (np.diff(back[i, :length]) == 1).all() and back[i, 0] // 9 == back[i, length - 1] // 9


def test_texts_of_one_length_stay_padded(bases):
    base, seen = bases("gpt2"), []
    watch = base.encoder.register_forward_pre_hook(
        lambda *call: seen.append(call[2]["attention_mask"].dim()), with_kwargs=True
    )
    model = Model(base, 2)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "none"))])
    bank.logits({0: Encoder(base)(["good film", "bad plot"])})
    watch.remove()
    assert seen == [2]


def test_windows_and_convolutions_over_tokens_keep_padding(bases):
    for name in ARCHITECTURES:
        assert (sharing.row_sharing_of(bases(name).config) is not None) == (name in SHARING)
    encoder = bases("qwen2").encoder
    before = encoder.config.layer_types
    encoder.config.layer_types = ["full_attention", "sliding_attention"]
    assert sharing.row_sharing_of(encoder.config) is None
    encoder.config.layer_types = before


def test_a_text_does_not_see_its_neighbours(bases):
    base = bases("albert")
    model = Model(base, 2, "mean")
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "none"))])
    outputs = [bank.logits({0: Encoder(base)([*TEXTS[:-1], text])})[0] for text in (TEXTS[-1], TEXTS[-1][::-1])]
    torch.testing.assert_close(outputs[0][:-1], outputs[1][:-1], rtol=0, atol=1e-6)
    assert not torch.allclose(outputs[0][-1], outputs[1][-1])
