"""Data-parallel training on Ray: one actor per worker, together a group of torch.distributed.

One worker of each node reads and tokenises the rows, into files that all workers of the node map: texts and tokens are
not in the memory of the workers. If a worker dies, all of them are started again and go on from the last checkpoint of
the first, so that the delta is that of an undisturbed run. The data, the base and the folder of `out` must be paths
that all nodes see.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import __version__
from ..data.on_disk import NodeRows
from ..data.sources import cache
from ..errors import UsageError
from ..model.cluster import LOOPBACK, check_version, connect
from ..terminal.progress import Say
from .checkpoint import SECONDS
from .loop import Watch
from .plan import Plan
from .run import Run, train_in_group

RESTARTS = 5
REPORT_SECONDS = 1.0  # between two reports of the first worker
CLEAN_SECONDS = 30.0  # a worker has to remove its files


@dataclass(frozen=True)
class Request:
    """What all workers are asked to do."""

    source: str
    base: str | None
    plan: Plan
    out: str
    resume: bool
    checkpoint_seconds: float
    folder: str  # for rows, below the cache of each node


def train_on_ray(
    source: str,
    base: str | None,
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    say: Say = lambda _: None,
    watch: Watch = lambda *_: None,
    checkpoint_seconds: float = SECONDS,
    address: str | None = None,
    workers: int | None = None,
) -> Run:
    """Train with several workers that share every batch; the delta is that of one process, up to rounding.

    The texts of the run's data set stay on the nodes and are removed with the workers.
    """
    ray = connect(address, workers)
    count = workers or int(ray.cluster_resources().get("CPU", 1))
    target = str(out.resolve())
    folder = hashlib.sha256(target.encode()).hexdigest()[:16]
    for attempt in range(RESTARTS + 1):
        request = Request(
            source=_absolute(source),
            base=None if base is None else _absolute(base),
            plan=plan,
            out=target,
            resume=resume or attempt > 0,
            checkpoint_seconds=checkpoint_seconds,
            folder=f"{folder}/{attempt}",
        )
        run = _attempt(ray, count, request, watch)
        if run is not None:
            for text in run.notes:
                say(text)
            return run
        say("A worker died; all of them start again from the last checkpoint.")
    raise UsageError(f"workers died {RESTARTS + 1} times; if memory is short, use fewer --lanes or --workers")


def _absolute(path: str) -> str:
    """An existing path as an absolute one; the name of a task or of a hub model stays as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def _attempt(ray: Any, count: int, request: Request, watch: Watch) -> Run | None:
    """Train with new workers; None if one of them died."""
    actor = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(Worker)  # one thread trains, one reports
    actors = [actor.remote() for _ in range(count)]
    rendezvous = ""
    try:
        ray.get([each.check.remote(__version__) for each in actors])
        leaders = _leaders(ray.get([each.node.remote() for each in actors]))
        rendezvous = ray.get(actors[0].rendezvous.remote())
        waiting = []
        for rank, each in enumerate(actors):
            waiting.append(each.train.remote(rank, count, rendezvous, request, rank in leaders))
        return _wait(ray, actors[0], waiting, watch)
    except ray.exceptions.RayActorError:
        return None
    except ray.exceptions.RayTaskError as error:
        if _lost_a_worker(error):
            return None
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, Exception) else error from None
    finally:
        _end(ray, actors)
        if rendezvous.startswith("file://"):
            Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def _leaders(nodes: list[str]) -> set[int]:
    """The first worker of each node."""
    return {nodes.index(node) for node in nodes}


def _wait(ray: Any, first: Any, waiting: list[Any], watch: Watch) -> Run:
    """Wait for all workers; if one fails, raise its error at once, because the others would wait for it forever."""
    result = waiting[0]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=REPORT_SECONDS)
        ray.get(ready)
        with suppress(ray.exceptions.GetTimeoutError):
            progress = ray.get(first.progress.remote(), timeout=REPORT_SECONDS)
            if progress is not None:
                watch(*progress)
    run: Run = ray.get(result)
    return run


def _end(ray: Any, actors: list[Any]) -> None:
    """Let the workers remove their files, then end them."""
    with suppress(ray.exceptions.RayError):
        ray.wait([each.clean.remote() for each in actors], num_returns=len(actors), timeout=CLEAN_SECONDS)
    for each in actors:
        ray.kill(each)


def _lost_a_worker(error: BaseException) -> bool:
    """Whether a worker failed because its connection to another one broke."""
    text = str(error)
    return "gloo" in text or "Connection closed by peer" in text or "Connection reset by peer" in text


class Worker:
    """One worker of a training."""

    def __init__(self) -> None:
        self._progress: tuple[Any, ...] | None = None
        self._reported = 0.0
        self._folder: Path | None = None

    def check(self, version: str) -> None:
        """Refuse to work for another version of bitfit."""
        import ray

        check_version(ray, version)

    def node(self) -> str:
        """The node that it runs on."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def rendezvous(self) -> str:
        """Where the workers of a group find each other.

        If Ray runs on this machine alone, that is a file: a TCP store would listen on every network interface.
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

    def train(self, rank: int, count: int, rendezvous: str, request: Request, leader: bool) -> Run | None:
        """Train as one of `count` workers; the first one returns the run. A leader reads the rows for its node."""
        from .group import join, leave

        if rendezvous.startswith("file://"):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        folder = cache() / "rows" / request.folder / self.node()[:16]
        if leader:
            self._folder = folder
        rows = NodeRows(folder, leader)
        group = join(rank, count, rendezvous)
        run = train_in_group(
            group,
            request.source,
            request.base,
            request.plan,
            request.out,
            request.resume,
            request.checkpoint_seconds,
            self._watch,
            rows,
        )
        leave(group)
        return run if rank == 0 else None

    def _watch(self, number: int, step: int, total: int, runners: Any) -> None:
        if step == total or time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            shown = []
            for runner in runners:
                history = SimpleNamespace(losses=runner.history.losses[-1:])
                shown.append(SimpleNamespace(phase=runner.phase, best=runner.best, history=history))
            self._progress = number, step, total, shown

    def progress(self) -> tuple[Any, ...] | None:
        """What a progress bar shows: the arguments of the last call of `_watch`."""
        return self._progress

    def clean(self) -> None:
        """Remove the rows that this worker read."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
