"""The Ray engine: each pass is a Ray task, retried if its worker dies. The results are those of the local engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UsageError
from ..model.cluster import connect
from .passes import Engine, Pass, Progress, perform, workspace
from .store import Result

RETRIES = 5


def ray_engine(address: str | None = None, workers: int | None = None) -> Engine:
    """An engine on the Ray cluster at `address`; without one, on a local Ray (loopback only, no dashboard)."""
    ray = connect(address, workers)

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
