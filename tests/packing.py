"""What the tests of the packed path share: small encoders, rows of three lanes and comparisons of tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from bitfit.bank.bank import Bank
from bitfit.model.architectures import architecture
from bitfit.model.base import Base
from bitfit.model.rows import Rows
from support import ARCHITECTURES, config_of

PACKED = [name for name in ARCHITECTURES if architecture(name).packed is not None]
POOLS = ("cls", "mean", "tokens")
STREAMS = {0: 11, 1: 5, 2: 1 << 55}
LENGTHS = {0: (5, 1, 60, 9), 1: (33, 7), 2: (4, 4, 21, 2, 12, 70)}
VOCABULARY = 40
# Three layers, so that one can be frozen below and above another; weights large enough that an error shows.
SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 80,
    "initializer_range": 0.3,
}
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
)


@cache
def tiny_base(architecture: str, dropout: float = 0.1, **changes: Any) -> Base:
    """A base of three layers with random biases."""
    config = config_of(architecture, **SIZES, **dict.fromkeys(DROPOUTS, dropout), **changes)
    torch.manual_seed(0)
    encoder = AutoModelForSequenceClassification.from_config(config).base_model
    generator = torch.Generator().manual_seed(1)
    for parameter in encoder.parameters():  # biases start at zero, where a wrong one would go unnoticed
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    encoder.requires_grad_(False).eval()
    return Base(architecture, config, encoder, _numbered_words(architecture, config), frozenset(), "cls")


def _numbered_words(architecture: str, config: Any) -> Any:
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    typed = ["token_type_ids"] if architecture in ("bert", "electra") else []
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t3")),
        pad_token=f"t{config.pad_token_id}",
        unk_token="t3",
        model_input_names=["input_ids", "attention_mask", *typed],
    )


def rows(k: int) -> Rows:
    """Texts of a lane; the longer ones are pairs, their second halves of segment 1."""
    lengths = np.array(LENGTHS[k])
    generator = np.random.default_rng(k)
    types = np.concatenate([np.arange(n) >= max(8, n // 2) for n in lengths]).astype(np.int64)
    return Rows(generator.integers(4, 40, lengths.sum()), types, np.concatenate([[0], np.cumsum(lengths)]))


def learn(bank: Bank, outputs: dict[int, Tensor]) -> dict[int, Tensor]:
    """Gradients of a loss that weighs every output, by lane."""
    bank.gradients.zero_()
    losses = [(out.square() * torch.linspace(0.5, 1, out.numel()).view(out.shape)).mean() for out in outputs.values()]
    torch.stack(losses).sum().backward()
    return {k: bank.gradients[k].clone() for k in outputs}


def by_name(bank: Bank, k: int, gradient: Tensor) -> dict[str, Tensor]:
    """A lane's gradient by parameter, without b_k: there it is rounding noise."""
    noise = {site.name for site in bank.model.anatomy.sites if site.term == "b_k"}
    slots = [slot for slot in bank.lanes[k].slots if slot.offset < bank.lanes[k].trained and slot.name not in noise]
    return {slot.name: gradient[slot.offset : slot.offset + slot.size] for slot in slots}


def assert_close(one: Tensor, other: Tensor, what: str = "") -> None:
    one, other = one.detach(), other.detach()
    assert one.shape == other.shape
    scale = max(float(other.abs().max()), 1e-3)
    assert float((one - other).abs().max()) <= 1e-5 * scale, f"{what}: {one} {other}"
