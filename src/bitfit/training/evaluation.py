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

LANE_TOKENS = 500  # of a lane in a pass at least, so that a lane that is left alone does not compute in tiny passes


def outputs(job: Job, bank: Bank, lanes: Sequence[int], rows: Rows) -> dict[int, Array]:
    """The outputs of each lane for all rows, in the order of the rows; several workers share the batches."""
    out: dict[int, Array] = {}
    for k in lanes:
        model = bank.models[k]
        out[k] = np.zeros((model.output_count(rows), model.outputs), np.float32)
    with torch.inference_mode():
        for chosen in job.stop.checked(batches(rows, _tokens_per_lane(bank))[job.group.rank :: job.group.size]):
            batches_of = {k: rows.of_lane(k).take(chosen) for k in lanes}
            for k, logits in bank.logits(batches_of).items():
                out[k][bank.models[k].output_index(rows, chosen)] = logits.cpu().numpy()
    for k in lanes:
        job.group.merge(out[k])
    return out


def _tokens_per_lane(bank: Bank) -> int:
    # By the lanes of the bank, not by those that are scored: the bits of a lane must not depend on who else is left.
    return max(LANE_TOKENS, PASS_TOKENS // len(bank.lanes))


def batches(rows: Rows, tokens: int) -> list[Array]:
    """All row numbers, longest rows first, in batches of at most so many tokens (one row at least)."""
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
def naming(source: str) -> Iterator[None]:
    """Warnings inside begin with their source, such as a trial of several."""
    if not source:
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        warnings.warn(f"{source}: {warning.message}", warning.category, 3)


def score_lanes(
    job: Job, bank: Bank, lanes: Sequence[int], part: Part, sources: Mapping[int, str] | None = None
) -> dict[int, Scored]:
    """The predictions and every metric of each lane on a part of the data; `sources` name lanes in warnings."""
    scored = {}
    for k, logits in outputs(job, bank, lanes, part.rows).items():
        predictions = job.task.predictions(logits, part.encoded, part.examples)
        with naming((sources or {}).get(k, "")):
            scored[k] = Scored(predictions, job.task.scores(predictions, part.examples))
    return scored
