"""The Ray engine: each pass is a Ray task, retried if its worker dies. The results are those of the local engine.

On a cluster the nodes may be bare: base and data travel to them, once per node (shipping.py), and a node needs nothing
but the same version of bitfit. With a storage, checkpoints and results travel by it, too (stored.py). Without one,
checkpoints are written to the folder of results as the driver names it: if all nodes see that folder, a pass whose node
died goes on from its last checkpoint, else it starts again.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from .. import __version__
from ..data.sources import cache
from ..data.storage import Storage
from ..errors import UsageError
from ..model.cluster import check_version, connect
from .passes import Engine, Pass, Progress, perform, workspace
from .shipping import Shipment, Shipping, unpacked
from .store import Result

RETRIES = 5
REPORT_SECONDS = 1.0  # between two reports of a pass on its progress
Say = Callable[[str], None]


def ray_engine(
    address: str | None = None,
    workers: int | None = None,
    storage: Storage | None = None,
    say: Say = lambda _: None,
) -> Engine:
    """An engine on the Ray cluster at `address`; without one, on a local Ray (loopback only, no dashboard).

    `say` is told when nodes join and leave, and which passes lost their workers.
    """
    ray = connect(address, workers)
    shipping = None
    if address is not None or storage is not None:
        shipping = Shipping(ray, storage)
    began = False

    def engine(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
        nonlocal began
        try:
            _check_needs(ray, works)
        except UsageError as error:
            if not began:
                raise
            say(f"{error}; the study waits for such a node")  # it may be away for a minute
        began = began or len(works) > 0
        most = workers if address is not None else None  # a local Ray has as many cores as it may use
        yield from _Queue(ray, shipping, works, most or len(works), say).run(progress)

    return engine


class _Queue:
    """The passes of a stage: those that wait, those that run, and what is known of them."""

    def __init__(self, ray: Any, shipping: Shipping | None, works: Sequence[Pass], most: int, say: Say) -> None:
        self._ray = ray
        self._shipping = shipping
        self._works = works
        self._most = most
        self._say = say
        self._next = 0
        self._running: dict[Any, int] = {}  # the reference to a task -> the number of its pass
        self._nodes: dict[str, str] = {}
        # Ray runs a task again that loses its worker; it resumes from the last checkpoint of the pass.
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES, max_calls=0)(_perform)
        self._board = _on_this_node(ray, ray.remote(num_cpus=0, max_restarts=-1)(Board)).remote()
        self._attempts: dict[int, int] = {}

    def run(self, progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
        """Run all passes; yields each with its results, in any order."""
        while self._next < len(self._works) or self._running:
            self._submit()
            self._watch_nodes()
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=REPORT_SECONDS)
            for reference in ready:
                number = self._running.pop(reference)
                yield self._works[number], _answer(self._ray, reference)
            self._report(progress)

    def _submit(self) -> None:
        while self._next < len(self._works) and len(self._running) < self._most:
            work = self._works[self._next]
            shipment = None if self._shipping is None else self._shipping.shipment(work).plain()
            sent = replace(
                work, folder=work.folder.resolve(), fingerprint=workspace(work.opening.base).base.fingerprint
            )
            task = self._task.options(num_cpus=_threads(work), memory=int(work.memory))
            # Pickled here: a node with another version checks the version before it unpickles anything of ours.
            reference = task.remote(__version__, pickle.dumps(sent), shipment, self._board, self._next)
            self._running[reference] = self._next
            self._next += 1

    def _watch_nodes(self) -> None:
        """Say which nodes joined and which left since the last call."""
        alive = {}
        for node in self._ray.nodes():
            if node["Alive"]:
                alive[node["NodeID"]] = f"node {node['NodeManagerAddress']} ({node['NodeID'][:6]})"
        if self._nodes:
            for number in self._nodes.keys() - alive.keys():
                self._say(f"{self._nodes[number]} left; its passes run again elsewhere")
            for number in alive.keys() - self._nodes.keys():
                self._say(f"{alive[number]} joined")
        self._nodes = alive

    def _report(self, progress: Progress) -> None:
        """Say which passes began again, and how much is done of those that run."""
        try:
            states: dict[int, State] = self._ray.get(self._board.read.remote(), timeout=REPORT_SECONDS)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return  # the node of the board died, or is busy; the passes report again
        done = 0.0
        for number in self._running.values():
            state = states.get(number)
            if state is None:
                continue
            done += self._works[number].work * state.share
            if state.attempts > self._attempts.get(number, 1):
                task = self._works[number].opening.task
                self._say(f"{task}: a pass lost its worker and began again (attempt {state.attempts}), {state.node}")
            self._attempts[number] = state.attempts
        progress(done)


@dataclass
class State:
    """How far a pass is."""

    attempts: int = 0
    share: float = 0.0
    node: str = ""


class Board:
    """An actor that knows how far each pass is."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def begin(self, number: int, node: str) -> None:
        """A pass begins, for the first time or again."""
        state = self.states.setdefault(number, State())
        state.attempts += 1
        state.node = node

    def report(self, number: int, share: float) -> None:
        """Take the report of a pass."""
        self.states.setdefault(number, State()).share = share

    def read(self) -> dict[int, State]:
        """How far each pass is."""
        return self.states


def _on_this_node(ray: Any, actor: Any) -> Any:
    """An actor that is started on the node of the driver, which does not come and go as others do."""
    strategies = import_module("ray.util.scheduling_strategies")
    here = ray.get_runtime_context().get_node_id()
    return actor.options(scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(here, soft=True))


def _check_needs(ray: Any, works: Sequence[Pass]) -> None:
    """Refuse passes for which no node has the cores or the memory, because they would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
    for work in works:
        threads = _threads(work)
        if threads > cores:
            raise UsageError(f"--threads {threads}: no node of the cluster has so many cores (at most {cores:.0f})")
        # Only nodes with the cores count: the head of a cluster often has memory, but no cores for passes.
        memory = max(node.get("memory", 0.0) for node in nodes if node.get("CPU", 0.0) >= threads)
        if work.memory > memory:
            raise UsageError(
                f"{work.opening.task}: a pass needs about {_megabytes(work.memory)} of memory, no node of the cluster "
                f"has so much (at most {_megabytes(memory)}); use fewer --lanes or a smaller --batch"
            )


def _threads(work: Pass) -> int:
    """The cores that a pass reserves."""
    return work.threads or 1


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def _perform(version: str, packed: bytes, shipment: dict[str, Any] | None, board: Any, number: int) -> list[Result]:
    """A pass, on a worker."""
    import ray

    check_version(ray, version)
    node = f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:6]})"
    board.begin.remote(number, node)
    work: Pass = pickle.loads(packed)
    if shipment is not None:
        work = unpacked(work, Shipment.of(shipment), ray.get)
    if work.stored is not None:
        work = replace(work, folder=cache() / "nodes" / "passes" / work.folder.name)
    space = workspace(work.opening.base)
    space.know_fingerprint(work.fingerprint)
    space.keep_only(work.opening)  # every worker would else come to hold the data of all tasks
    results = perform(work, _Reports(board, number))
    if work.stored is not None:
        shutil.rmtree(work.folder, ignore_errors=True)
    return results


class _Reports:
    """Tells the board how far a pass is, once in a while."""

    def __init__(self, board: Any, number: int) -> None:
        self._board = board
        self._number = number
        self._last = time.monotonic()

    def __call__(self, part: int, step: int, total: int, runners: Any) -> None:
        if time.monotonic() - self._last >= REPORT_SECONDS:
            self._last = time.monotonic()
            self._board.report.remote(self._number, step / total)


def _answer(ray: Any, ready: Any) -> list[Result]:
    try:
        results: list[Result] = ray.get(ready)
        return results
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(getattr(error, "cause", None), Exception) else error from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise UsageError(
            f"the worker of a pass died {RETRIES + 1} times; if memory is short, use fewer --lanes"
        ) from error
