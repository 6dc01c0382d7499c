"""The service behind the routes: it answers requests, changes tasks, and watches its folder and model threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from ..errors import BitfitError, DeltaError, UsageError, WriteError
from ..model.base import Base
from ..prediction.host import Host, Resident
from ..tasks import Text
from .cache import Cache, Version, check_name
from .logs import log
from .metrics import Metrics
from .queue import STUCK, Answer, Query, Queue, answer_of
from .repository import Entry, Repository
from .schemas import PredictRequest, RequestError
from .settings import Settings

MAX_INLINE = 4000  # characters that the event loop tokenizes itself; a thread tokenizes more
LAST_PASS = 4.0  # seconds that a model thread has for its last pass
MAX_PAUSE = 30.0  # seconds between scans of a folder whose scan takes long
MAX_UPLOADS = 2  # deltas received at the same time
PROBE_TEXT = "a text"


class Service:
    """One base and the tasks of one folder."""

    def __init__(self, base: Base, repository: Repository, settings: Settings) -> None:
        self.settings = settings
        self.repository = repository
        self.metrics = Metrics()
        self.host = Host(base)
        self.queue = Queue(self.host, settings, self.metrics)
        self.executor = ThreadPoolExecutor(3, "bitfit-files")  # a scan of the folder may occupy one of them for long
        self.cache = Cache(self.host, repository, settings.memory << 20, self.metrics, self.executor)
        self.stopping = False
        self.in_flight = 0  # predict requests being answered
        self.receiving = 0  # bytes of requests that are arriving
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._plain = self.host.plain()
        self._readiness: asyncio.Task[str | None] | None = None
        self._probed_at = 0.0
        add_gauge = self.metrics.add_gauge
        add_gauge("bitfit_queue_texts", "texts that wait", lambda: self.queue.waiting)
        add_gauge("bitfit_requests_in_flight", "requests being answered", lambda: self.in_flight)
        add_gauge("bitfit_tasks", "tasks in the folder", lambda: len(repository.entries))
        add_gauge("bitfit_resident_tasks", "tasks in memory", lambda: len(self.cache))
        add_gauge("bitfit_resident_bytes", "bytes of the tasks in memory", lambda: self.cache.bytes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the model threads and watch the folder. At the end every accepted request is answered first."""
        await self._scan()
        self.queue.start()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self.stopping = True
            watching.cancel()
            if not await asyncio.to_thread(self.queue.stop, LAST_PASS):
                log("error", "a model thread did not end")
            self.executor.shutdown(wait=False, cancel_futures=True)

    # ---- predicting ----

    async def predict(self, request: PredictRequest) -> list[Answer]:
        """An answer for each text; it names the version of the task that gave it."""
        if self.stopping:
            raise RequestError(503, "the service is shutting down", retry_after=1)
        queries = self._queries(request)
        deadline = self.settings.deadline
        if request.deadline_ms is not None:
            deadline = min(deadline, request.deadline_ms / 1000)
        self.in_flight += 1
        try:
            async with asyncio.timeout(deadline):
                await self._answer(queries)
        except TimeoutError as error:
            raise RequestError(504, "the deadline has passed") from error
        finally:
            self.in_flight -= 1
        return [query.answer for query in queries]

    def _queries(self, request: PredictRequest) -> list[Query]:
        """The texts of a request, within the limits of the service."""
        limit = min(self.settings.max_items, self.settings.queue)
        if len(request) > limit:
            raise RequestError(413, f"{len(request):,} texts in one request; the limit is {limit:,}")
        queries = [Query(task, where, text) for task, where, text in request.texts()]
        if not queries:
            raise RequestError(422, "inputs is empty: send at least one text", "inputs")
        for query in queries:
            if _length(query.text) > self.settings.max_text:
                raise RequestError(413, f"a text has more than {self.settings.max_text:,} characters", query.where)
        return queries

    async def _answer(self, queries: list[Query]) -> None:
        by_task: dict[str, list[Query]] = {}
        for query in queries:
            by_task.setdefault(query.task, []).append(query)
        for task, of_task in by_task.items():  # an unknown task is refused before anything else is done
            self.cache.entry(task, of_task[0].where)
        with self.queue.reserve({task: len(of_task) for task, of_task in by_task.items()}) as slots:
            for task, of_task in by_task.items():
                version = await self.cache.version(task, of_task[0].where)
                for query in of_task:
                    query.version = version
            if sum(_characters(query.text) for query in queries) <= MAX_INLINE:
                self._tokenize(by_task.values())
            else:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self.executor, self._tokenize, by_task.values())
            await self.queue.compute(queries, slots)

    def _tokenize(self, groups: Iterable[list[Query]]) -> None:
        """Read the texts of each task together."""
        for queries in groups:
            self._read(queries[0].version.resident, queries)

    def _read(self, resident: Resident, queries: list[Query]) -> None:
        try:
            readings = self.host.read(resident, [query.text for query in queries])
        except BitfitError as error:
            if len(queries) == 1:
                raise RequestError(422, f"{queries[0].task}: {error}", queries[0].where) from error
            for query in queries:  # one by one, so that the error names the wrong one
                self._read(resident, [query])
            return
        for query, reading in zip(queries, readings, strict=True):
            query.reading = reading

    # ---- changing tasks ----

    async def put(self, name: str, data: bytes) -> tuple[Entry, bool]:
        """Verify a delta and make it the current version of a task; returns its entry and whether the task is new."""
        check_name(name, "name")
        loop = asyncio.get_running_loop()
        try:
            entry, version = await loop.run_in_executor(self.executor, self._verify, name, data)
        except BitfitError as error:
            raise RequestError(422, str(error), "body") from error
        try:
            before = await loop.run_in_executor(self.executor, self.repository.put, entry, data)
        except UsageError as error:
            raise RequestError(409, f"{name}: the folder cannot be written to") from error
        except WriteError as error:
            if isinstance(error.__cause__, PermissionError):
                raise RequestError(409, f"{name}: the folder cannot be written to") from error
            raise RequestError(507, f"{name}: cannot be written; the disk may be full") from error
        self.cache.keep(version)
        log("info", "task put", task=name, version=entry.version)
        return entry, before is None

    def upload_slot(self) -> asyncio.Semaphore:
        """A slot for one upload, to be used with `async with`; RequestError 429 if all are taken."""
        if self.stopping:
            raise RequestError(503, "the service is shutting down", retry_after=1)
        if self._uploads.locked():
            raise RequestError(429, "too many uploads at once; try again", retry_after=1)
        return self._uploads

    async def delete(self, name: str) -> Entry:
        """Remove a task; returns its entry. Requests that arrived before are still answered."""
        self.cache.entry(name, "name")
        try:
            entry = await asyncio.get_running_loop().run_in_executor(self.executor, self.repository.delete, name)
        except DeltaError as error:
            raise RequestError(409, str(error)) from error
        self.cache.drop(name)
        if entry is None:
            raise RequestError(404, f"{name}: no such task", "name")
        log("info", "task removed", task=name, version=entry.version)
        return entry

    def _verify(self, name: str, data: bytes) -> tuple[Entry, Version]:
        """The entry and the version in an uploaded file, after it has answered a text."""
        entry, delta = self.repository.verify(name, data)
        resident = self.host.admit(delta)
        if resident.bytes > self.cache.budget:
            raise DeltaError(f"{name}: needs more memory than --memory allows for all tasks together")
        reading = self.host.read(resident, [(PROBE_TEXT, PROBE_TEXT) if resident.paired else PROBE_TEXT])[0]
        outputs = self.host.outputs([(resident, reading.rows)])[0]
        answer = answer_of(resident, reading, outputs)
        if "error" in answer:
            raise DeltaError(f"{name}: {answer['error']}")
        return entry, Version(name, entry.version, resident)

    # ---- watching ----

    async def trouble(self) -> str | None:
        """Why no requests should be sent here; None after a real pass through the base within the last second."""
        if self.stopping:
            return "shutting down"
        if (nothing_served := self.repository.trouble()) is not None:
            return nothing_served
        now = time.monotonic()
        if self._readiness is None or (self._readiness.done() and now - self._probed_at > 1):
            self._readiness = asyncio.create_task(self._probe())
            self._probed_at = now
        return await asyncio.shield(self._readiness)

    async def _probe(self) -> str | None:
        rows = self.host.read(self._plain, [PROBE_TEXT])[0].rows
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK):
                await self.queue.probe(self._plain, rows)
                return self.queue.trouble
        return self.queue.trouble or "no model thread answers"

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.watch)
            started = time.monotonic()
            try:
                await self._scan()
            except Exception as error:  # a network folder may be unreachable for a while
                log("warning", "the folder cannot be scanned", error=str(error))
            # The scan of a very large folder takes long: at least nine tenths of the time must remain for requests.
            await asyncio.sleep(min(MAX_PAUSE, 9 * (time.monotonic() - started)))

    async def _scan(self) -> None:
        changes = await asyncio.get_running_loop().run_in_executor(self.executor, self.repository.scan)
        self.cache.drop_outdated()
        for file, reason in changes.unused.items():
            log("warning", "file not served", file=file, reason=reason)
        if changes.added or changes.changed or changes.removed:
            log(
                "info",
                "folder changed",
                added=len(changes.added),
                changed=len(changes.changed),
                removed=len(changes.removed),
                tasks=len(self.repository.entries),
            )


def _length(text: Text) -> int:
    """Characters of a text, of the longer one of a pair, or of all words of a sentence."""
    if isinstance(text, tuple):
        return max(map(len, text))
    return _characters(text)


def _characters(text: Text) -> int:
    """Characters of a text, of both texts of a pair, or of all words."""
    return len(text) if isinstance(text, str) else sum(map(len, text))
