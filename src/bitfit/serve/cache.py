"""The tasks in memory: loaded at their first request, evicted least recently used first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Executor
from dataclasses import dataclass

from ..errors import BitfitError
from ..prediction.host import Host, Resident
from .metrics import Metrics
from .repository import NAME, Entry, Repository
from .schemas import RequestError


@dataclass(frozen=True, eq=False)
class Version:
    """One version of a task in memory. It can answer for as long as someone holds it, even if the task is removed."""

    name: str
    id: str
    resident: Resident


class Cache:
    """The tasks in memory, within a budget of bytes. Only the event loop uses it; the executor reads the files."""

    def __init__(self, host: Host, repository: Repository, budget: int, metrics: Metrics, executor: Executor) -> None:
        self.host = host
        self.repository = repository
        self.budget = budget
        self.metrics = metrics
        self.bytes = 0
        self._executor = executor
        self._versions: OrderedDict[str, Version] = OrderedDict()  # least recently used first
        self._loading: dict[tuple[str, str], asyncio.Task[Version]] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def entry(self, name: str, field: str | None = None) -> Entry:
        """A task as the repository lists it; RequestError if there is none."""
        check_name(name, field)
        entry = self.repository.entries.get(name)
        if entry is None:
            refused = self.repository.refused.get(name)
            reason = "no such task" if refused is None else f"its file was refused: {refused[1]}"
            raise RequestError(404, f"{name}: {reason}", field)
        return entry

    async def version(self, name: str, field: str | None = None) -> Version:
        """The current version of a task, from memory or from its file."""
        entry = self.entry(name, field)
        cached = self._versions.get(name)
        if cached is not None and cached.id == entry.version:
            self._versions.move_to_end(name)
            return cached
        key = (name, entry.version)
        if key not in self._loading:  # requests that arrive meanwhile wait for the same load
            task = asyncio.create_task(self._load(name))
            task.add_done_callback(lambda _: self._loading.pop(key))
            self._loading[key] = task
        try:
            return await asyncio.shield(self._loading[key])
        except BitfitError as error:
            raise RequestError(404, f"{name}: its file was refused: {error}", field) from error

    def keep(self, version: Version) -> None:
        """Hold a version as the current one of its task, and evict others if the budget is exceeded."""
        self.drop(version.name)
        self._versions[version.name] = version
        self.bytes += version.resident.bytes
        while self.bytes > self.budget and len(self._versions) > 1:
            self.drop(next(iter(self._versions)))
            self.metrics.evictions.inc()

    def drop(self, name: str) -> None:
        """Remove a task from memory."""
        version = self._versions.pop(name, None)
        if version is not None:
            self.bytes -= version.resident.bytes

    def drop_outdated(self) -> None:
        """Remove every version that the repository no longer has."""
        for name, version in list(self._versions.items()):
            entry = self.repository.entries.get(name)
            if entry is None or entry.version != version.id:
                self.drop(name)

    async def _load(self, name: str) -> Version:
        version = await asyncio.get_running_loop().run_in_executor(self._executor, self._read, name)
        self.metrics.loads.inc()
        entry = self.repository.entries.get(name)
        if entry is not None and entry.version == version.id:
            self.keep(version)
        return version

    def _read(self, name: str) -> Version:
        entry, delta = self.repository.read(name)
        try:
            return Version(name, entry.version, self.host.admit(delta))
        except BitfitError as error:
            self.repository.refuse(entry, str(error))
            raise


def check_name(name: str, field: str | None) -> None:
    """RequestError if this cannot be the name of a task."""
    if not NAME.fullmatch(name):
        raise RequestError(422, f"a task name must match {NAME.pattern}", field)
