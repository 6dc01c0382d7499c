"""Scoring lanes: all lanes that are scored share the passes through the encoder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..arrays import Array
from ..bank.bank import PASS_TOKENS, Bank
from ..model.rows import Rows
from ..tasks.metrics import Score
from .job import Job, Part

LANE_TOKENS = 500  # tokens of a lane in a batch at least: when few lanes of a bank still run, batches must not be tiny


def outputs(job: Job, bank: Bank, lanes: Sequence[int], rows: Rows) -> dict[int, Array]:
    """The outputs of each lane for all rows, in the order of the rows; several workers divide the batches."""
    out: dict[int, Array] = {}
    for k in lanes:
        model = bank.models[k]
        out[k] = np.zeros((model.output_count(rows), model.outputs), np.float32)
    with torch.inference_mode():
        for chosen in job.stop.checked(batches(rows, _tokens_per_lane(bank))[job.group.rank :: job.group.size]):
            by_lane = {k: rows.of_lane(k).take(chosen) for k in lanes}
            for k, logits in bank.logits(by_lane).items():
                out[k][bank.models[k].output_index(rows, chosen)] = logits.cpu().numpy()
    for k in lanes:
        job.group.sum_outputs(out[k])
    return out


def _tokens_per_lane(bank: Bank) -> int:
    # By the lanes of the bank, not by those that are scored: a lane's bits must not depend on which others still run.
    return max(LANE_TOKENS, PASS_TOKENS // len(bank.lanes))


def batches(rows: Rows, tokens: int) -> list[Array]:
    """All row numbers, longest rows first, in batches of at most `tokens` tokens (one row at least)."""
    order: Array = np.argsort(-rows.lengths, kind="stable")
    groups = []
    start = 0
    while start < len(order):
        ends = np.cumsum(rows.lengths[order[start:]])
        count = max(1, int(np.searchsorted(ends, tokens, side="right")))
        groups.append(order[start : start + count])
        start += count
    return groups


@dataclass(frozen=True)
class Scored:
    """What a lane predicts on a part of the data, and every metric of it."""

    predictions: Any
    scores: dict[str, Score]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put a name, such as that of a trial, before the text of each warning inside; an empty name changes nothing."""
    if not name:
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        warnings.warn(f"{name}: {warning.message}", warning.category, 3)


def score_lanes(
    job: Job, bank: Bank, lanes: Sequence[int], part: Part, names: Mapping[int, str] | None = None
) -> dict[int, Scored]:
    """The predictions and every metric of each lane on a part of the data; `names` are the lanes' names in warnings."""
    scored = {}
    for k, logits in outputs(job, bank, lanes, part.rows).items():
        predictions = job.task.predictions(logits, part.encoded, part.examples)
        with naming((names or {}).get(k, "")):
            scored[k] = Scored(predictions, job.task.scores(predictions, part.examples))
    return scored
