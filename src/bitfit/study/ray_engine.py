"""The Ray engine: each pass is one Ray task, retried when its worker dies, the same results as in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UsageError
from .passes import Engine, Pass, Progress, perform, workspace
from .store import Result

RETRIES = 5
# Read when ray is imported: without clusters Ray listens on the loopback address only, on any system. (An address of
# 127.0.0.1 given to ray.init is replaced by one that other machines reach.)
LOOPBACK = "127.0.0.1"
CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine on a Ray cluster, or on a Ray of its own on this machine: loopback, no dashboard."""
    if address is None:
        os.environ.setdefault(CLUSTER, "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError('--engine ray needs Ray: pip install "bitfit[ray]"') from error
    if not ray.is_initialized():
        _connect(ray, address, workers)
    if address is None and ray.util.get_node_ip_address() != LOOPBACK:
        raise UsageError(
            "Ray was imported before and listens beyond this machine; start the study in a process of its own"
        )

    def engine(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
        # A task that loses its worker is run again by Ray, and then goes on from the pass's last checkpoint.
        task = ray.remote(num_cpus=1, max_retries=RETRIES, max_calls=0)(_perform)
        waiting = {task.remote(work): work for work in works}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(ready), _answer(ray, ready)

    return engine


def _perform(work: Pass) -> list[Result]:
    # Every worker would else come to hold the data of all tasks.
    workspace(work.opening.base).keep_only(work.opening)
    return perform(work, lambda *_: None)


def _answer(ray: Any, ready: Any) -> list[Result]:
    try:
        found: list[Result] = ray.get(ready)
        return found
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(getattr(error, "cause", None), Exception) else error from None
    except ray.exceptions.WorkerCrashedError as error:
        raise UsageError(f"a pass lost its worker {RETRIES + 1} times; is there memory enough? (--lanes)") from error


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address is not None:
        ray.init(address=address, **quiet)
        return
    ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
