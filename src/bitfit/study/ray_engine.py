"""The Ray engine: each pass is a Ray task, retried if its worker dies. The results are those of the local engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UsageError
from .passes import Engine, Pass, Progress, perform, workspace
from .store import Result

RETRIES = 5
LOOPBACK = "127.0.0.1"
# Ray reads this variable when it is imported. With "0" it listens on the loopback address only, on any system. (An
# address of 127.0.0.1 given to ray.init is replaced by one that other machines can reach.)
CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine on the Ray cluster at `address`; without one, on a local Ray (loopback only, no dashboard)."""
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
            "Ray was imported before bitfit and accepts connections from other machines; run the study in a new process"
        )

    def engine(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
        # Ray runs a task again that loses its worker; it resumes from the last checkpoint of the pass.
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
        raise UsageError(
            f"the worker of a pass died {RETRIES + 1} times; if memory is short, use fewer --lanes"
        ) from error


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address is not None:
        ray.init(address=address, **quiet)
        return
    ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
