"""The queue and the model threads: texts of any tasks share passes through the base.

The tasks take turns, text by text, until a pass has enough tokens, so a task with many texts delays only itself. A task
may occupy at most as many slots of the queue as are still free, so there is always room for another task. A model
thread computes passes itself, or has a process that does.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array
from ..model.rows import Rows
from ..prediction.host import Host, Reading, Resident
from ..tasks import Text
from .cache import Version
from .logs import log
from .metrics import Metrics
from .schemas import RequestError
from .settings import Settings
from .workers import Closable, Outputs, Worker, can_fork

Answer = dict[str, Any]
Probe = Callable[[Outputs], None]
MIN_TOKENS = 64  # a pass of fewer tokens hardly takes less time
DIGITS = 7  # of the numbers in answers: float32 has no more
STUCK = 4.0  # seconds on one pass after which a model thread counts as stuck


@dataclass(eq=False)
class Query:
    """One text for one task, from the request to the answer."""

    task: str
    where: str  # the field of the request, as in `inputs.3`: errors name it
    text: Text
    version: Version = field(init=False)  # set when the task is in memory
    reading: Reading = field(init=False)  # set when the text is tokenized
    answer: Answer = field(init=False)  # set when all chunks are computed
    job: Job = field(init=False)
    outputs: list[Array | None] = field(init=False)  # one per chunk
    queued: int = 0  # chunks that no model thread has taken
    since: float = field(default_factory=time.monotonic)

    def finish(self) -> None:
        """Form the answer from the outputs of all chunks."""
        outputs = [chunk for chunk in self.outputs if chunk is not None]
        answer = answer_of(self.version.resident, self.reading, np.concatenate(outputs))
        self.answer = {"task": self.version.name, "version": self.version.id, **answer}


@dataclass(eq=False)
class Chunk:
    """Token rows of one query, few enough for one pass: the chunks of a long text take turns with other texts."""

    query: Query
    number: int
    rows: Rows

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return len(self.rows.ids)


@dataclass(eq=False)
class Job:
    """The queries of one request, and the future that is done when all of them are."""

    queries: Sequence[Query]
    future: asyncio.Future[None]
    missing: int


def answer_of(resident: Resident, reading: Reading, outputs: Array) -> Answer:
    """The answer in the outputs for a text; an error if it cannot be formed, so that other texts are still answered."""
    if not np.isfinite(outputs).all():
        return {"error": "the task gives no finite numbers for this text"}
    try:
        answer = resident.answer(reading, outputs)
    except Exception as error:
        log("error", "an answer cannot be formed", error=f"{type(error).__name__}: {error}")
        return {"error": f"the task's answer cannot be formed ({type(error).__name__})"}
    if not math.isfinite(answer.get("value", 0.0)):
        return {"error": "the task's value is not finite"}
    return {key: _rounded(value) for key, value in answer.items()}


def _rounded(value: Any) -> Any:
    """The value with its numbers to the digits that float32 has."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


class Queue:
    """A bounded queue of chunks, and the threads that compute them."""

    def __init__(self, host: Host, settings: Settings, metrics: Metrics) -> None:
        self.host = host
        self.settings = settings
        self.metrics = metrics
        self.busy_since: dict[int, float | None] = {}
        self._changed = threading.Condition()  # guards everything below
        self._chunks: OrderedDict[str, deque[Chunk]] = OrderedDict()  # by task; the first task has the next turn
        self._probes: deque[Probe] = deque()
        self._reserved: Counter[str] = Counter()  # texts of each task that hold a slot of the queue
        self._waiting = 0  # the sum of them
        self._tokens = 0
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []

    # ---- starting and stopping ----

    def fork(self, *open_files: Closable) -> None:
        """Give each model thread a process, if the system can fork. Call it before any thread is started.

        A process closes its copies of these files: a port stays open for as long as any process holds it.
        """
        if can_fork(self.host):
            for _ in range(self.settings.threads):
                self._workers.append(Worker(self.host, [*open_files, *self._workers]))

    def kill_workers(self) -> None:
        """Kill the processes, even in the middle of a pass."""
        for worker in self._workers:
            worker.kill()

    def start(self) -> None:
        """Start the model threads."""
        for number in range(self.settings.threads):
            self.busy_since[number] = None
            thread = threading.Thread(target=self._run, args=(number,), name=f"model-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout: float) -> bool:
        """Compute what is queued and end the threads; whether that was done within `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.kill_workers()
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return self._waiting

    @property
    def trouble(self) -> str | None:
        """What is wrong with the model threads; None if they work."""
        if not all(thread.is_alive() for thread in self._threads):
            return "a model thread has died"
        now = time.monotonic()
        if any(since is not None and now - since > STUCK for since in self.busy_since.values()):
            return "a model thread is stuck"
        return None

    # ---- what the event loop does ----

    @contextmanager
    def reserve(self, counts: Mapping[str, int]) -> Iterator[Counter[str]]:
        """Reserve slots for the texts of each task, by their counts; RequestError 429 if the queue is full.

        `compute` takes over the slots that are passed to it. The others are released at the end of the block.
        """
        slots = Counter(counts)
        with self._changed:
            free = self.settings.queue - self._waiting
            if slots.total() > free or any(self._reserved[task] + count > free for task, count in slots.items()):
                raise RequestError(429, "the queue is full; try again", retry_after=1)
            for task, count in slots.items():
                self._reserve(task, count)
        try:
            yield slots
        finally:
            with self._changed:
                for task, count in slots.items():
                    self._reserve(task, -count)

    async def compute(self, queries: Sequence[Query], slots: Counter[str]) -> None:
        """Compute the answer of each query. If this is cancelled, what still waits leaves the queue."""
        job = Job(queries, asyncio.get_running_loop().create_future(), len(queries))
        chunks: list[Chunk] = []
        for query in queries:
            query.job = job
            chunks += self._split(query)
        with self._changed:
            if self._stopping or not any(thread.is_alive() for thread in self._threads):
                raise RequestError(503, "the service is shutting down", retry_after=1)
            slots.clear()  # from here on the queries hold them
            for chunk in chunks:
                self._chunks.setdefault(chunk.query.task, deque()).append(chunk)
                self._tokens += chunk.tokens
            self._changed.notify(len(chunks))
        try:
            await job.future
        finally:
            if job.missing:
                self._remove(job)

    async def probe(self, resident: Resident, rows: Rows) -> None:
        """Make a real pass, ahead of the queue; return when it is done."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def work(outputs: Outputs) -> None:
            outputs([(resident, rows)])
            loop.call_soon_threadsafe(done.set)

        with self._changed:
            self._probes.append(work)
            self._changed.notify()
        try:
            await done.wait()
        finally:
            with self._changed, suppress(ValueError):
                self._probes.remove(work)

    def _split(self, query: Query) -> list[Chunk]:
        """The rows of a query in chunks of at most `batch_tokens` tokens, or of one row."""
        rows = query.reading.rows
        numbers = np.cumsum(rows.lengths) // self.settings.batch_tokens
        by_chunk = [rows]
        if numbers[-1] > 0:
            by_chunk = [rows.take(np.flatnonzero(numbers == number)) for number in np.unique(numbers)]
        query.outputs = [None] * len(by_chunk)
        query.queued = len(by_chunk)
        return [Chunk(query, number, chunk_rows) for number, chunk_rows in enumerate(by_chunk)]

    def _reserve(self, task: str, count: int) -> None:
        self._reserved[task] += count
        self._waiting += count
        if not self._reserved[task]:
            del self._reserved[task]

    def _remove(self, job: Job) -> None:
        """Remove the chunks of a job from the queue that no model thread has taken yet."""
        with self._changed:
            for task in {query.task for query in job.queries} & self._chunks.keys():
                before = self._chunks[task]
                self._chunks[task] = deque(chunk for chunk in before if chunk.query.job is not job)
                for chunk in before:
                    if chunk.query.job is job:
                        self._dequeued(chunk)

    def _dequeued(self, chunk: Chunk) -> None:
        """Update the counts after a chunk left the queue."""
        query = chunk.query
        self._tokens -= chunk.tokens
        query.queued -= 1
        if not query.queued:
            self._reserve(query.task, -1)
        if not self._chunks.get(query.task):
            self._chunks.pop(query.task, None)

    # ---- what the model threads do ----

    def _run(self, number: int) -> None:
        computer = self._workers[number] if self._workers else self.host
        try:
            while (work := self._next()) is not None:
                self.busy_since[number] = time.monotonic()
                if callable(work):
                    self._run_probe(work, computer.outputs)
                elif work:
                    self._run_pass(work, computer.outputs)
                self.busy_since[number] = None
        except BaseException as error:
            log("error", "a model thread died", error=f"{type(error).__name__}: {error}")
            raise

    def _next(self) -> list[Chunk] | Probe | None:
        """The next probe or batch; None when the service stops and nothing waits."""
        with self._changed:
            while True:
                if self._probes:
                    return self._probes.popleft()
                if not self._chunks and self._stopping:
                    return None
                if not self._chunks:
                    self._changed.wait()
                elif self._is_worth_a_pass() or not self._changed.wait_for(self._is_worth_a_pass, self._patience()):
                    return self._take()

    def _is_worth_a_pass(self) -> bool:
        return bool(self._probes) or self._stopping or self._tokens >= self.settings.batch_tokens

    def _patience(self) -> float:
        """Seconds until the oldest text has waited for `max_wait`."""
        oldest = min((chunks[0].query.since for chunks in self._chunks.values()), default=0.0)
        return max(0.0, oldest + self.settings.max_wait - time.monotonic())

    def _take(self) -> list[Chunk]:
        """The chunks of the next pass: one of each task in turn, up to this thread's share of the queue."""
        share = max(MIN_TOKENS, -(-self._tokens // self.settings.threads))
        share = min(self.settings.batch_tokens, share)
        batch: list[Chunk] = []
        tokens = 0
        while self._chunks and tokens < share:
            task, chunks = next(iter(self._chunks.items()))
            if batch and tokens + chunks[0].tokens > self.settings.batch_tokens:
                break
            chunk = chunks.popleft()
            self._chunks.move_to_end(task)
            self._dequeued(chunk)
            batch.append(chunk)
            tokens += chunk.tokens
        return batch

    def _run_probe(self, probe: Probe, outputs: Outputs) -> None:
        try:
            probe(outputs)
        except Exception as error:  # the caller of this probe times out; the next probe works
            log("error", "a probe failed", error=f"{type(error).__name__}: {error}")

    def _run_pass(self, batch: list[Chunk], outputs: Outputs) -> None:
        started = time.monotonic()
        try:
            computed = outputs([(chunk.query.version.resident, chunk.rows) for chunk in batch])
            done = self._store(batch, computed)
            for query in done:
                query.finish()
        except Exception as error:
            log("error", "a pass failed", error=f"{type(error).__name__}: {error}")
            self._notify([chunk.query for chunk in batch], failed=True)
            return
        waited = started - min(chunk.query.since for chunk in batch)
        tokens = sum(chunk.tokens for chunk in batch)
        self.metrics.count_pass(len(batch), tokens, waited, time.monotonic() - started)
        if done:
            self._notify(done)

    def _store(self, batch: Sequence[Chunk], outputs: Sequence[Array]) -> list[Query]:
        """Store the outputs; returns the queries whose chunks are all computed now."""
        done = []
        with self._changed:  # other threads may have other chunks of the same query
            for chunk, numbers in zip(batch, outputs, strict=True):
                chunk.query.outputs[chunk.number] = numbers
                if all(computed is not None for computed in chunk.query.outputs):
                    done.append(chunk.query)
        return done

    def _notify(self, queries: Sequence[Query], failed: bool = False) -> None:
        """Tell the event loop that queries are answered, or that their pass failed."""

        def notify() -> None:
            for query in queries:
                job = query.job
                if job.future.done():
                    continue
                if failed:
                    job.future.set_exception(RequestError(500, "the pass through the base failed"))
                    continue
                job.missing -= 1
                if not job.missing:
                    job.future.set_result(None)

        queries[0].job.future.get_loop().call_soon_threadsafe(notify)
