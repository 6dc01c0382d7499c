"""The service behind the routes: from a request to its answers, and the life of folder, memory and model threads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from ..errors import BitfitError, DeltaError, UsageError, WriteError
from ..model.base import Base
from ..prediction.host import Host, Reading, Resident
from ..tasks import Text
from .cache import Cache, Version
from .logs import log
from .metrics import Metrics
from .queue import STUCK, Answer, Queue, answered
from .repository import Entry, Repository
from .schemas import PredictRequest, RequestError
from .settings import Settings

INLINE = 4000  # characters that are tokenized at once; more are handed to another thread
LAST = 4.0  # seconds that a model thread has for its last pass
LONGEST = 30.0  # seconds between looks at a folder that takes long
UPLOADS = 2  # deltas received at the same time
TRIAL = "a text"

Asked = tuple[str, str, Text]
"""A task, the field that names it, and a text."""
Ready = tuple[str, Resident, Reading]
"""A task, the version that will answer, and the text as it reads it."""


class Service:
    """One base, the tasks of one folder, and everybody who asks."""

    def __init__(self, base: Base, repository: Repository, settings: Settings) -> None:
        self.settings, self.repository = settings, repository
        self.metrics = Metrics()
        self.host = Host(base)
        self.queue = Queue(self.host, settings, self.metrics, log)
        self.executor = ThreadPoolExecutor(3, "bitfit-files")  # a look at the folder may hold one of them for long
        self.cache = Cache(self.host, repository, settings.memory << 20, self.metrics, self.executor)
        self.stopping = False
        self.asked = 0  # requests being answered
        self.receiving = 0  # bytes of requests that are arriving
        self._uploads = asyncio.Semaphore(UPLOADS)
        self._plain = self.host.plain()
        self._ready: asyncio.Task[str | None] | None = None
        self._ready_since = 0.0
        gauge = self.metrics.gauge
        gauge("bitfit_queue_texts", "texts that wait", lambda: self.queue.waiting)
        gauge("bitfit_requests_in_flight", "requests being answered", lambda: self.asked)
        gauge("bitfit_tasks", "tasks in the folder", lambda: len(repository.entries))
        gauge("bitfit_resident_tasks", "tasks in memory", lambda: len(self.cache))
        gauge("bitfit_resident_bytes", "bytes of the tasks in memory", lambda: self.cache.bytes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the model threads and watch the folder; at the end everything that was asked is answered first."""
        await self._scan()
        self.queue.start()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self.stopping = True
            watching.cancel()
            if not await asyncio.to_thread(self.queue.stop, LAST):
                log("error", "a model thread did not end")
            self.executor.shutdown(wait=False, cancel_futures=True)

    # ---- asking ----

    async def predict(self, ask: PredictRequest) -> list[Answer]:
        """An answer for each text, naming the version of the task that gave it."""
        if self.stopping:
            raise RequestError(503, "the service is shutting down", retry_after=1)
        self._check_count(len(ask))
        asked = list(ask.texts())
        self._check_size(asked)
        limit = self.settings.deadline if ask.deadline_ms is None else ask.deadline_ms / 1000
        self.asked += 1
        try:
            async with asyncio.timeout(min(limit, self.settings.deadline)):
                return await self._answers(asked)
        except TimeoutError as error:
            raise RequestError(504, "the deadline has passed") from error
        finally:
            self.asked -= 1

    async def _answers(self, asked: list[Asked]) -> list[Answer]:
        for name, field, _ in {task: (task, field, text) for task, field, text in reversed(asked)}.values():
            self.cache.entry(name, field)
        with self.queue.places(Counter(task for task, _, _ in asked)) as promised:
            versions: dict[str, Version] = {}
            for task, field, _ in asked:
                if task not in versions:
                    versions[task] = await self.cache.version(task, field)
            places, texts = await self._encoded(asked, versions)
            found = await self.queue.ask(texts, promised)
        answers: list[Answer] = [{}] * len(asked)
        for place, answer in zip(places, found, strict=True):
            version = versions[asked[place][0]]
            answers[place] = {"task": version.name, "version": version.id, **answer}
        return answers

    async def _encoded(self, asked: list[Asked], versions: dict[str, Version]) -> tuple[list[int], list[Ready]]:
        if sum(len(text) if isinstance(text, str) else sum(map(len, text)) for *_, text in asked) <= INLINE:
            return self._encode(asked, versions)
        return await asyncio.get_running_loop().run_in_executor(self.executor, self._encode, asked, versions)

    def _encode(self, asked: list[Asked], versions: dict[str, Version]) -> tuple[list[int], list[Ready]]:
        """The places of the texts and how their tasks read them, task by task."""
        by_task: dict[str, list[int]] = {}
        for place, (task, field, text) in enumerate(asked):
            resident = versions[task].resident
            if why := resident.task.complaint(text, resident.paired):
                raise RequestError(422, f"{task}: {why}", field)
            by_task.setdefault(task, []).append(place)
        ready: list[Ready] = []
        for task, own in by_task.items():
            resident = versions[task].resident
            ready += [(task, resident, reading) for reading in self._read(resident, [asked[place] for place in own])]
        return [place for own in by_task.values() for place in own], ready

    def _read(self, resident: Resident, asked: list[Asked]) -> list[Reading]:
        try:
            return self.host.read(resident, [text for *_, text in asked])
        except BitfitError as error:
            if len(asked) > 1:  # one by one, to know which it was
                return [reading for each in asked for reading in self._read(resident, [each])]
            raise RequestError(422, str(error), asked[0][1]) from error

    def _check_count(self, count: int) -> None:
        most = min(self.settings.max_items, self.settings.queue)
        if count > most:
            raise RequestError(413, f"{count:,} texts in one request; the most is {most:,}")

    def _check_size(self, asked: list[Asked]) -> None:
        if not asked:
            raise RequestError(422, "nothing was asked: give at least one text", "inputs")
        for _, field, text in asked:
            if _length(text) > self.settings.max_text:
                raise RequestError(413, f"a text has more than {self.settings.max_text:,} characters", field)

    # ---- changing ----

    async def put(self, name: str, data: bytes) -> tuple[Entry, bool]:
        """Make a delta the task's version, once everything of it is verified; whether the task is new."""
        loop = asyncio.get_running_loop()
        try:
            entry, version = await loop.run_in_executor(self.executor, self._verified, name, data)
        except BitfitError as error:
            raise RequestError(422, str(error), "body") from error
        try:
            before = await loop.run_in_executor(self.executor, self.repository.put, entry, data)
        except UsageError as error:
            raise RequestError(409, f"{name}: the folder cannot be written to") from error
        except WriteError as error:
            raise RequestError(507, str(error)) from error
        self.cache.keep(version)
        log("info", "task put", task=name, version=entry.version)
        return entry, before is None

    def uploading(self) -> asyncio.Semaphore:
        """A place for one upload; refused when all are taken."""
        if self.stopping:
            raise RequestError(503, "the service is shutting down", retry_after=1)
        if self._uploads.locked():
            raise RequestError(429, "too many uploads at once; try again", retry_after=1)
        return self._uploads

    async def delete(self, name: str) -> Entry:
        """Remove a task; requests that began before are still answered."""
        self.cache.entry(name, "name")
        try:
            gone = await asyncio.get_running_loop().run_in_executor(self.executor, self.repository.delete, name)
        except DeltaError as error:
            raise RequestError(409, str(error)) from error
        self.cache.drop(name)
        if gone is None:
            raise RequestError(404, f"{name}: no such task", "name")
        log("info", "task removed", task=name, version=gone.version)
        return gone

    def _verified(self, name: str, data: bytes) -> tuple[Entry, Version]:
        entry, delta = self.repository.verify(name, data)
        resident = self.host.admit(delta)
        if resident.bytes > self.cache.budget:
            raise DeltaError(f"{name}: it needs more memory than the service may use for all tasks")
        reading = self.host.read(resident, [(TRIAL, TRIAL) if resident.paired else TRIAL])[0]
        answer = answered(resident, reading, self.host.outputs([(resident, reading.rows)])[0])
        if "error" in answer:
            raise DeltaError(f"{name}: {answer['error']}")
        return entry, Version(name, entry.version, resident)

    # ---- living ----

    async def trouble(self) -> str | None:
        """Why the service should get no requests: None after a real pass through the base, not older than a second."""
        if self.stopping:
            return "shutting down"
        if self._ready is None or (self._ready.done() and time.monotonic() - self._ready_since > 1):
            self._ready, self._ready_since = asyncio.create_task(self._probe()), time.monotonic()
        return await asyncio.shield(self._ready)

    async def _probe(self) -> str | None:
        rows = self.host.read(self._plain, [TRIAL])[0].rows
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK):
                await self.queue.probe(self._plain, rows)
                return self.queue.trouble
        return self.queue.trouble or "no model thread answers"

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(self.settings.watch)
            try:
                await self._scan()
            except Exception as error:  # a network folder may be away for a while
                log("warning", "the folder cannot be looked at", error=str(error))
            # A look at a very large folder takes its time; nine tenths of it are for the requests.
            await asyncio.sleep(min(LONGEST, 9 * max(0.0, time.monotonic() - began - self.settings.watch)))

    async def _scan(self) -> None:
        change = await asyncio.get_running_loop().run_in_executor(self.executor, self.repository.scan)
        self.cache.sweep()
        for name, why in (change.refused or {}).items():
            log("warning", "file refused", task=name, reason=why)
        if change.added or change.changed or change.removed:
            counts = {kind: len(getattr(change, kind)) for kind in ("added", "changed", "removed")}
            log("info", "folder changed", **counts, tasks=len(self.repository.entries))


def _length(text: Text) -> int:
    """Characters of a text, of the longer one of a pair, or of all words of a sentence."""
    if isinstance(text, str):
        return len(text)
    return max(map(len, text)) if isinstance(text, tuple) else sum(map(len, text))
