"""Freezing layers while they train, from the lowest up (after AutoFreeze, Liu et al. 2021).

After each evaluation a lane's layers are judged by how far their trained entries moved since the evaluation before,
relative to how far they have come from their start. A layer that at this speed would move by less than SETTLED times
that way in a whole training has settled. So it does not matter how often a lane is evaluated. The lowest layers that
have all settled, the embeddings with them, are frozen: they keep their values, the backward pass ends above them, and
their outputs for each row are computed once. A frozen layer never trains again. Each lane is judged by its own values
alone.

An evaluation freezes at most half of the layers that still train. Liu et al. do the same by freezing layers below the
median. Without this limit all layers of a lane are frozen at once: under a schedule that falls to zero they settle at
about the same time (LOG.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..bank.bank import Bank
from .history import Freezing
from .loop import Runner

SETTLED = 2.4  # LOG.md has the time and scores of others
MOST_AT_ONCE = 0.5  # of the layers that still train
LAST = "last"  # the name, in Runner.remembered, of the values at the last evaluation


class AutoFreeze:
    """Freezes the settled layers of lanes; made before the first step, called after each evaluation."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._starts = {runner.k: runner.flat.detach().clone() for runner in runners}
        self._layers = {runner.k: _entries_by_layer(runner.bank, runner.k) for runner in runners}

    def __call__(self, runners: Sequence[Runner]) -> None:
        """Judge the layers of every lane that still runs."""
        for runner in runners:
            if runner.status == "running":
                self._judge(runner)

    def _judge(self, runner: Runner) -> None:
        start, now = self._starts[runner.k], runner.flat.detach().clone()
        last = runner.remembered.get(LAST)
        runner.remembered[LAST] = now
        if last is None:  # at the first evaluation the last move is all of the move so far
            return
        before, latest = runner.history.evaluations[-2:]
        share = (latest.epoch - before.epoch) / runner.trial.epochs  # of the training
        layers = frozen = runner.bank.depths[runner.k]  # layers below the selection are frozen from the start
        training = self._layers[runner.k][layers:]
        for entries in training[: math.ceil(MOST_AT_ONCE * len(training))]:
            if relative_move(start[entries], last[entries], now[entries]) > SETTLED * share:
                break
            layers += 1
        if layers > frozen:
            runner.freeze(layers)
            runner.history.freezings.append(Freezing(runner.evaluated, layers))


def relative_move(start: Tensor, last: Tensor, now: Tensor) -> float:
    """How far values moved since `last` as a share of how far they are from their start; 0 if they never moved."""
    distance = float(torch.linalg.vector_norm(now - start))
    return float(torch.linalg.vector_norm(now - last)) / distance if distance else 0.0


def _entries_by_layer(bank: Bank, k: int) -> list[Tensor]:
    """The positions of each layer's trained entries in lane k; the embeddings belong to the lowest layer."""
    anatomy = bank.models[k].anatomy
    layers = []
    for layer in range(anatomy.layers):
        names = anatomy.names_below(layer + 1) - anatomy.names_below(layer)
        layers.append(bank.entries(k, names))
    return layers
