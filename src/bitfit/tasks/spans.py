"""Entities in a tagged sentence: spans of words whose tags mark their start, inside and end.

Tags are "O" or a prefix and a type: B-PER, I-PER (BIO and IOB2), with E- or L- for the last word and S- or U- for a
single one (BIOES, BILOU). Sequences that break a scheme's rules are read as conlleval and seqeval read them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

OUTSIDE = "O"
TAG = re.compile(r"([BIELSU])-(.+)")
SAME = {"L": "E", "U": "S"}  # BILOU's letters in BIOES


class Span(NamedTuple):
    """An entity: its type, its first word and the word after its last."""

    type: str
    start: int
    end: int


def has_spans(labels: Sequence[str]) -> bool:
    """Whether these tags follow a scheme that marks entities."""
    tags = [label for label in labels if label != OUTSIDE]
    if not tags or not all(TAG.fullmatch(tag) for tag in tags):
        return False
    return any(tag[0] in "BSU" for tag in tags)


def spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence."""
    entities = []
    start = 0
    before, type_before = OUTSIDE, ""
    for number, tag in enumerate([*tags, OUTSIDE]):
        prefix, type_ = _prefix_and_type(tag)
        if before != OUTSIDE and _ends(before, type_before, prefix, type_):
            entities.append(Span(type_before, start, number))
        if prefix != OUTSIDE and _begins(before, type_before, prefix, type_):
            start = number
        before, type_before = prefix, type_
    return entities


def _prefix_and_type(tag: str) -> tuple[str, str]:
    match = TAG.fullmatch(tag)
    if match is None:
        return OUTSIDE, ""
    return SAME.get(match[1], match[1]), match[2]


def _ends(before: str, type_before: str, prefix: str, type_: str) -> bool:
    return before in "ES" or prefix in ("B", "S", OUTSIDE) or type_before != type_


def _begins(before: str, type_before: str, prefix: str, type_: str) -> bool:
    return prefix in "BS" or before in ("E", "S", OUTSIDE) or type_before != type_
