"""Pairs in exported models: the tokenizer joins the two texts, and the modeling code takes them apart again."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..delta.delta import Delta
from ..errors import DeltaError
from ..model.base import Base
from ..tasks import Task
from .modeling_bitfit import texts_of_pairs


def joint_length(max_length: int) -> int:
    """Where a tokenizer may cut a joint pair of texts that are cut at `max_length` each.

    It cuts the longer text first, so that neither loses a token that the model reads.
    """
    return 2 * max_length


def split_settings(delta: Delta, base: Base, task: Task, tokenizer: Any) -> dict[str, int]:
    """How `texts_of_pairs` takes the tokenizer's pairs apart; DeltaError if they would not be as in training."""
    length = delta.meta.max_length
    firsts, seconds = _probes(length)
    encoder = task.encoder(base, length, apart=True)
    rows = encoder(firsts, seconds).by_window
    settings = {
        "separator": int(rows.ids[rows.starts[1] - 1]),  # the last token of a text
        "separators": tokenizer.num_special_tokens_to_add(pair=True) - 2,  # between the texts
        "padding": int(tokenizer.pad_token_id),
        "max_length": length,
    }
    expected = rows.padded(settings["padding"])
    if settings["separators"] > 0 and not rows.types.any() and _reads(tokenizer, firsts, seconds, settings, expected):
        return settings
    what = f"the tokenizer of {base.name} joins two texts so that an exported model could not take them apart"
    raise DeltaError(f"{what}; use bitfit predict instead")


def _probes(length: int) -> tuple[list[str], list[str]]:
    """First and second texts of pairs: short, empty and too long ones."""
    long = "a long text " * length
    return ["the first text", "", "a text", long, "a text"], ["a second one", "a text", "", "a text", long]


def _reads(tokenizer: Any, firsts: list[str], seconds: list[str], settings: dict[str, int], expected: Any) -> bool:
    """Whether the texts of the pairs are read as expected."""
    ids, _, mask = expected
    batch = tokenizer(firsts, seconds, padding=True, truncation=True, return_attention_mask=True, return_tensors="pt")
    try:
        found_ids, found_mask = texts_of_pairs(batch["input_ids"], batch["attention_mask"], **settings)
    except ValueError:  # there is no separator
        return False
    return np.array_equal(found_ids.numpy(), ids) and np.array_equal(found_mask.numpy(), mask)
