"""Scoring tables on Ray: a pool of workers, each with the base and the deltas loaded once, takes unit after unit.

Ray Data hands out the units, restarts a worker that died and repeats its unit. A worker writes its parts itself, all or
nothing, so that a repeated unit replaces a part by the same part. Inputs and outputs must be paths that all nodes of
the cluster see.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from ..errors import BitfitError
from ..model.cluster import connect
from .table import Engine, Scored, Scorer, Scoring, Unit


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine on the Ray cluster at `address`; without one, on a local Ray (loopback only, no dashboard)."""
    ray = connect(address, workers)
    import_module("ray.data")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def engine(scoring: Scoring, units: Sequence[Unit]) -> Iterator[Scored]:
        Scorer(scoring)  # what is wrong with a delta or the base is said here, before workers start
        count = min(workers or int(ray.cluster_resources().get("CPU", 1)), len(units))
        numbers = ray.data.from_items(list(range(len(units))), override_num_blocks=len(units))
        results = numbers.map_batches(
            Worker,
            fn_constructor_args=(scoring, tuple(units)),
            compute=ray.data.ActorPoolStrategy(size=count),
            batch_size=None,
            num_cpus=1,
        )
        try:
            for row in results.iter_rows():
                yield row["scored"]
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, BitfitError) else error from None

    return engine


class Worker:
    """Scores units by their numbers."""

    def __init__(self, scoring: Scoring, units: Sequence[Unit]) -> None:
        self.units = units
        self.scorer = Scorer(scoring)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Scored]]:
        """The results of a batch of units."""
        return {"scored": [self.scorer.score(self.units[int(number)]) for number in batch["item"]]}
