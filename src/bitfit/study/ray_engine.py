"""The Ray engine: each pass is a Ray task, retried if its worker dies. The results are those of the local engine.

On a cluster the nodes may be bare: base and data travel through Ray's object store, once per node, and a node needs
nothing but the same bitfit. Checkpoints are written to the folder of results as the driver names it: where all nodes
see that folder, a pass whose node died goes on from its last checkpoint, else it starts again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from ..model.cluster import connect
from .passes import Engine, Pass, Progress, perform, workspace
from .shipping import Shipment, Shipping, unpacked
from .store import Result

RETRIES = 5
REPORT_SECONDS = 1.0  # between two reports of a pass on its progress


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine on the Ray cluster at `address`; without one, on a local Ray (loopback only, no dashboard)."""
    ray = connect(address, workers)
    shipping = None if address is None else Shipping(ray)

    def engine(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
        # Ray runs a task again that loses its worker; it resumes from the last checkpoint of the pass.
        task = ray.remote(num_cpus=1, max_retries=RETRIES, max_calls=0)(_perform)
        board = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
        waiting = {}
        for number, work in enumerate(works):
            needs = {"num_cpus": work.threads or 1, "memory": _memory(ray, work)}
            shipment = None if shipping is None else shipping.shipment(work)
            sent = replace(work, folder=work.folder.resolve())
            waiting[task.options(**needs).remote(sent, shipment, board, number)] = number
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=REPORT_SECONDS)
            for done in ready:
                yield works[waiting.pop(done)], _answer(ray, done)
            shares = _shares(ray, board)
            progress(sum(works[number].work * shares.get(number, 0.0) for number in waiting.values()))

    return engine


class Board:
    """An actor that knows how much of each pass is done."""

    def __init__(self) -> None:
        self.shares: dict[int, float] = {}

    def report(self, number: int, share: float) -> None:
        """Take the report of a pass."""
        self.shares[number] = share

    def read(self) -> dict[int, float]:
        """The share of each pass that is done."""
        return self.shares


def _shares(ray: Any, board: Any) -> dict[int, float]:
    try:
        found: dict[int, float] = ray.get(board.read.remote(), timeout=REPORT_SECONDS)
        return found
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return {}  # the node of the board died, or is busy; the passes report again


def _memory(ray: Any, work: Pass) -> int:
    """The memory to reserve for a pass; never more than the largest node has, where it would wait for ever."""
    largest = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    return int(min(work.memory, largest))


def _perform(work: Pass, shipment: Shipment | None, board: Any, number: int) -> list[Result]:
    import ray

    if shipment is not None:
        work = unpacked(work, shipment, ray)
    # Every worker would else come to hold the data of all tasks.
    workspace(work.opening.base).keep_only(work.opening)
    last = time.monotonic()

    def watch(part: int, step: int, total: int, runners: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            board.report.remote(number, step / total)

    return perform(work, watch)


def _answer(ray: Any, ready: Any) -> list[Result]:
    try:
        found: list[Result] = ray.get(ready)
        return found
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(getattr(error, "cause", None), Exception) else error from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise UsageError(
            f"the worker of a pass died {RETRIES + 1} times; if memory is short, use fewer --lanes"
        ) from error
