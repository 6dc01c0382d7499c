"""Data-parallel training on Ray: one actor per worker, together a group of torch.distributed.

If a worker dies, all of them are started again and go on from the last checkpoint of the first, so that the delta is
the one of an undisturbed run. The data, the base and the folder of `out` must be paths that all nodes see.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..model.cluster import LOOPBACK, connect
from .checkpoint import SECONDS
from .job import Note
from .plan import Plan
from .run import Run, train_in_group

RESTARTS = 5


def train_on_ray(
    source: str,
    base: str | None,
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    say: Note = lambda _: None,
    checkpoint_seconds: float = SECONDS,
    address: str | None = None,
    workers: int | None = None,
) -> Run:
    """Train with several workers that share every batch; the delta is that of one process, up to rounding."""
    ray = connect(address, workers)
    count = workers or int(ray.cluster_resources().get("CPU", 1))
    absolute = str(Path(source).resolve()) if Path(source).exists() else source
    where = str(Path(base).resolve()) if base is not None and Path(base).exists() else base
    request = (absolute, where, plan, str(out.resolve()))
    for attempt in range(RESTARTS + 1):
        run = _attempt(ray, count, (*request, resume or attempt > 0, checkpoint_seconds))
        if run is not None:
            for text in run.notes:
                say(text)
            return run
        say("A worker died; all of them start again from the last checkpoint.")
    raise UsageError(f"workers died {RESTARTS + 1} times; if memory is short, use fewer --lanes or --workers")


def _attempt(ray: Any, count: int, request: tuple[Any, ...]) -> Run | None:
    """Train with new workers; None if one of them died."""
    actor = ray.remote(num_cpus=1, max_restarts=0)(Worker)
    actors = [actor.remote() for _ in range(count)]
    meeting = ""
    try:
        meeting = ray.get(actors[0].meeting.remote(count))
        waiting = [each.train.remote(rank, count, meeting, request) for rank, each in enumerate(actors)]
        found = waiting[0]
        while waiting:  # the first that fails ends the wait for the others, which would wait for it
            ready, waiting = ray.wait(waiting, num_returns=1)
            ray.get(ready)
        run: Run = ray.get(found)
        return run
    except ray.exceptions.RayActorError:
        return None
    except ray.exceptions.RayTaskError as error:
        if _lost_a_worker(error):
            return None
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, Exception) else error from None
    finally:
        for each in actors:
            ray.kill(each)
        if meeting.startswith("file://"):
            Path(meeting.removeprefix("file://")).unlink(missing_ok=True)


def _lost_a_worker(error: BaseException) -> bool:
    """Whether a worker failed because its connection to another one broke."""
    text = str(error)
    return "gloo" in text or "Connection closed by peer" in text or "Connection reset by peer" in text


class Worker:
    """One worker of a training."""

    def meeting(self, count: int) -> str:
        """Where the workers of a group find each other.

        On a Ray of this machine alone that is a file: the other way would listen on every network.
        """
        import ray

        address = ray.util.get_node_ip_address()
        if address == LOOPBACK:
            handle, path = tempfile.mkstemp(prefix="bitfit-group-")
            os.close(handle)
            Path(path).unlink()
            return f"file://{path}"
        with socket.socket() as free:
            free.bind((address, 0))
            return f"tcp://{address}:{free.getsockname()[1]}"

    def train(self, rank: int, count: int, meeting: str, request: tuple[Any, ...]) -> Run | None:
        """Train as one of `count` workers; the first one returns the run."""
        from .group import join, leave

        if meeting.startswith("file://"):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        group = join(rank, count, meeting)
        run = train_in_group(group, *request)
        leave(group)
        return run if rank == 0 else None
