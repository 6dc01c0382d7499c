"""The queue and the model threads: texts of any tasks share passes through the base, no task at another's expense.

A thread computes itself, or has a process that does.

Tasks take turns, text by text, until a pass has its tokens; so a task that asks for much waits for itself. How much of
the queue a task may fill is as much as is still free, so that there is always room for another.
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
from .logs import log
from .metrics import Metrics
from .schemas import RequestError
from .settings import Settings
from .workers import Closable, Outputs, Worker, can_fork

Answer = dict[str, Any]
LEAST = 64  # tokens, below which a pass hardly takes less time
STUCK = 4.0  # seconds on one pass after which a model thread counts as stuck


@dataclass(eq=False)
class Job:
    """A request: its answers so far, and who waits for them."""

    future: asyncio.Future[list[Answer]]
    answers: list[Answer]
    missing: int

    @property
    def over(self) -> bool:
        """Whether nobody waits any more."""
        return self.future.done()


@dataclass(eq=False)
class Query:
    """One text of a request, in a place of the queue."""

    job: Job
    place: int
    task: str
    resident: Resident
    reading: Reading
    outputs: list[Array | None]  # of each chunk
    waiting: int  # chunks that no thread has taken
    since: float = field(default_factory=time.monotonic)

    def answer(self) -> Answer:
        """What the outputs of all its chunks mean."""
        parts = [part for part in self.outputs if part is not None]
        return answered(self.resident, self.reading, np.concatenate(parts))


def answered(resident: Resident, reading: Reading, numbers: Array) -> Answer:
    """What a text's outputs mean; an error if they mean nothing, which is its own and not of those beside it."""
    if not np.isfinite(numbers).all():
        return {"error": "the task gives no finite numbers for this text"}
    try:
        found = resident.answer(reading, numbers)
    except Exception as error:
        log("error", "an answer cannot be formed", error=f"{type(error).__name__}: {error}")
        return {"error": f"the task's answer cannot be formed ({type(error).__name__})"}
    return found if math.isfinite(found.get("value", 0.0)) else {"error": "the task's value is not finite"}


@dataclass(eq=False)
class Chunk:
    """Some token rows of a text, few enough for one pass: a long text takes turns with others, too."""

    query: Query
    number: int
    rows: Rows

    @property
    def tokens(self) -> int:
        """How much work it is."""
        return len(self.rows.ids)


class Queue:
    """A queue with a limit, and the threads that work it off."""

    def __init__(self, host: Host, settings: Settings, metrics: Metrics, log: Callable[..., None]) -> None:
        self.host, self.settings, self.metrics, self.log = host, settings, metrics, log
        self._lines: OrderedDict[str, deque[Chunk]] = OrderedDict()
        self._probes: deque[Callable[[Outputs], None]] = deque()
        self._held: Counter[str] = Counter()  # texts of each task that are promised a place and not yet taken
        self._waiting = self._tokens = 0
        self._more = threading.Condition()
        self._stopping = False
        self.busy_since: dict[int, float | None] = {}
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []

    def fork(self, *open_files: Closable) -> None:
        """Give each model thread a process, where that works. No thread of any kind may have been started.

        A process closes its copies of these files: a port stays open for as long as anybody holds it.
        """
        for _ in range(self.settings.threads if can_fork(self.host) else 0):
            self._workers.append(Worker(self.host, [*open_files, *self._workers]))

    def end(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._workers:
            worker.end()

    def start(self) -> None:
        """Start the model threads."""
        for number in range(self.settings.threads):
            self.busy_since[number] = None
            self._threads.append(
                threading.Thread(target=self._run, args=(number,), name=f"model-{number}", daemon=True)
            )
            self._threads[-1].start()

    def stop(self, timeout: float) -> bool:
        """Work off the queue and end the threads; whether that took no longer than `timeout`."""
        with self._more:
            self._stopping = True
            self._more.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.end()
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return self._waiting

    @property
    def trouble(self) -> str | None:
        """What is wrong with the model threads, if anything is."""
        if not all(thread.is_alive() for thread in self._threads):
            return "a model thread has died"
        now = time.monotonic()
        if any(since is not None and now - since > STUCK for since in self.busy_since.values()):
            return "a model thread is stuck"
        return None

    @contextmanager
    def places(self, wanted: Mapping[str, int]) -> Iterator[Counter[str]]:
        """Promise places in the queue to texts of tasks, or refuse; places that `ask` did not take are given back."""
        promised = Counter(wanted)
        with self._more:
            free = self.settings.queue - self._waiting
            if promised.total() > free or any(self._held[task] + more > free for task, more in promised.items()):
                raise RequestError(429, "the queue is full; try again", retry_after=1)
            self._hold(promised)
        try:
            yield promised
        finally:
            with self._more:
                self._hold({task: -more for task, more in promised.items()})

    async def ask(self, texts: Sequence[tuple[str, Resident, Reading]], promised: Counter[str]) -> list[Answer]:
        """The answers to texts, in order; whoever cancels this takes what still waits out of the queue."""
        job = Job(asyncio.get_running_loop().create_future(), [{}] * len(texts), len(texts))
        chunks = [chunk for i, text in enumerate(texts) for chunk in self._chunks(job, i, *text)]
        with self._more:
            if self._stopping or not any(thread.is_alive() for thread in self._threads):
                raise RequestError(503, "the service is shutting down", retry_after=1)
            promised.clear()  # from here on the places are the queries'
            for chunk in chunks:
                self._lines.setdefault(chunk.query.task, deque()).append(chunk)
                self._tokens += chunk.tokens
            self._more.notify(len(chunks))
        try:
            return await job.future
        finally:
            if job.missing:
                self._drop(chunks)

    def _chunks(self, job: Job, place: int, task: str, resident: Resident, reading: Reading) -> list[Chunk]:
        rows = reading.rows
        ends = np.cumsum(rows.lengths) // self.settings.batch_tokens
        parts = [rows] if ends[-1] == 0 else [rows.take(np.flatnonzero(ends == end)) for end in np.unique(ends)]
        query = Query(job, place, task, resident, reading, [None] * len(parts), len(parts))
        return [Chunk(query, number, part) for number, part in enumerate(parts)]

    async def probe(self, resident: Resident, rows: Rows) -> None:
        """A real pass, ahead of the queue; returns when it is done."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def work(outputs: Outputs) -> None:
            outputs([(resident, rows)])
            loop.call_soon_threadsafe(done.set)

        with self._more:
            self._probes.append(work)
            self._more.notify()
        try:
            await done.wait()
        finally:
            with self._more, suppress(ValueError):
                self._probes.remove(work)

    def _hold(self, more: Mapping[str, int]) -> None:
        for task, count in more.items():
            self._held[task] += count
            self._waiting += count
            if not self._held[task]:
                del self._held[task]

    def _drop(self, chunks: Sequence[Chunk]) -> None:
        job = chunks[0].query.job
        with self._more:
            for task in {chunk.query.task for chunk in chunks} & self._lines.keys():
                line = self._lines[task]
                self._lines[task] = deque(chunk for chunk in line if chunk.query.job is not job)
                for chunk in line:  # those that no model thread has yet
                    if chunk.query.job is job:
                        self._left(chunk)

    def _left(self, chunk: Chunk) -> None:
        query = chunk.query
        self._tokens -= chunk.tokens
        query.waiting -= 1
        if not query.waiting:
            self._hold({query.task: -1})
        if not self._lines.get(query.task):
            self._lines.pop(query.task, None)

    # ---- what the model threads do ----

    def _run(self, number: int) -> None:
        computer = self._workers[number] if self._workers else self.host
        try:
            while (batch := self._next()) is not None:
                self.busy_since[number] = time.monotonic()
                self._work(batch, computer.outputs)
                self.busy_since[number] = None
        except BaseException as error:
            self.log("error", "a model thread died", error=f"{type(error).__name__}: {error}")
            raise

    def _next(self) -> list[Chunk] | Callable[[Outputs], None] | None:
        """The next probe or batch; None: the service stops and nothing waits."""
        with self._more:
            while True:
                if self._probes:
                    return self._probes.popleft()
                if not self._lines and self._stopping:
                    return None
                if not self._lines:
                    self._more.wait()
                elif self._worth_it() or not self._more.wait_for(self._worth_it, self._patience()):
                    return self._take()

    def _worth_it(self) -> bool:
        return bool(self._probes) or self._stopping or self._tokens >= self.settings.batch_tokens

    def _patience(self) -> float:
        oldest = min((line[0].query.since for line in self._lines.values()), default=0.0)
        return max(0.0, oldest + self.settings.max_wait - time.monotonic())

    def _take(self) -> list[Chunk]:
        # The others get their share, so that what came at once is worked off by all threads, busy as they may be now.
        share = min(self.settings.batch_tokens, max(LEAST, -(-self._tokens // self.settings.threads)))
        batch: list[Chunk] = []
        tokens = 0
        while self._lines and tokens < share:
            task, line = next(iter(self._lines.items()))
            if batch and tokens + line[0].tokens > self.settings.batch_tokens:
                break
            chunk = line.popleft()
            self._lines.move_to_end(task)
            self._left(chunk)
            batch.append(chunk)
            tokens += chunk.tokens
        return batch

    def _work(self, batch: list[Chunk] | Callable[[Outputs], None], outputs: Outputs) -> None:
        if callable(batch):
            try:
                batch(outputs)
            except Exception as error:  # who waits for the probe does so in vain, once
                self.log("error", "a probe failed", error=f"{type(error).__name__}: {error}")
            return
        if not batch:
            return
        began = time.monotonic()
        try:
            found = outputs([(chunk.query.resident, chunk.rows) for chunk in batch])
            answers = self._answers(batch, found)
        except Exception as error:
            self.log("error", "a pass failed", error=f"{type(error).__name__}: {error}")
            self._deliver([chunk.query for chunk in batch], None)
            return
        waited, took = began - min(chunk.query.since for chunk in batch), time.monotonic() - began
        self.metrics.passed(len(batch), sum(chunk.tokens for chunk in batch), waited, took)
        if answers:
            self._deliver(list(answers), list(answers.values()))

    def _answers(self, batch: Sequence[Chunk], outputs: Sequence[Array]) -> dict[Query, Answer]:
        """The queries that these chunks complete, answered."""
        with self._more:  # the chunks of one text may be with several threads
            done = []
            for chunk, numbers in zip(batch, outputs, strict=True):
                chunk.query.outputs[chunk.number] = numbers
                if all(part is not None for part in chunk.query.outputs):
                    done.append(chunk.query)
        return {query: query.answer() for query in done}

    def _deliver(self, queries: Sequence[Query], answers: Sequence[Answer] | None) -> None:
        def deliver() -> None:
            for i, query in enumerate(queries):
                job = query.job
                if job.over:
                    continue
                if answers is None:
                    job.future.set_exception(RequestError(500, "the pass through the base failed"))
                    continue
                job.answers[query.place] = answers[i]
                job.missing -= 1
                if not job.missing:
                    job.future.set_result(job.answers)

        queries[0].job.future.get_loop().call_soon_threadsafe(deliver)
