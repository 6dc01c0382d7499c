"""Which tasks are in memory: loaded when first asked for; the longest unused leave when memory runs out."""

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
    """One version of a task in memory. Who holds it can ask it, whatever becomes of the task."""

    name: str
    id: str
    resident: Resident


class Cache:
    """The tasks in memory, under a budget. Used by the event loop alone; files are read by the executor."""

    def __init__(self, host: Host, repository: Repository, budget: int, metrics: Metrics, executor: Executor) -> None:
        self.host, self.repository, self.budget, self.metrics = host, repository, budget, metrics
        self._executor = executor
        self._versions: OrderedDict[str, Version] = OrderedDict()
        self._loading: dict[tuple[str, str], asyncio.Task[Version]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._versions)

    def entry(self, name: str, field: str | None = None) -> Entry:
        """A task as the folder shows it; a refusal if there is none."""
        if not NAME.fullmatch(name):
            raise RequestError(422, f"a task name must match {NAME.pattern}", field)
        found = self.repository.entries.get(name)
        if found is None:
            reason = self.repository.refused.get(name)
            why = f"its file was refused: {reason[1]}" if reason else "no such task"
            raise RequestError(404, f"{name}: {why}", field)
        return found

    async def version(self, name: str, field: str | None = None) -> Version:
        """The task's present version, from memory or from its file."""
        entry = self.entry(name, field)
        held = self._versions.get(name)
        if held is not None and held.id == entry.version:
            self._versions.move_to_end(name)
            return held
        key = (name, entry.version)
        if key not in self._loading:
            task = self._loading[key] = asyncio.create_task(self._load(name))
            task.add_done_callback(lambda _: self._loading.pop(key))
        try:
            return await asyncio.shield(self._loading[key])
        except BitfitError as error:
            raise RequestError(404, f"{name}: its file was refused: {error}", field) from error

    def keep(self, version: Version) -> None:
        """Hold a version in memory as its task's latest, and let others go if there is no more room."""
        self.drop(version.name)
        self._versions[version.name] = version
        self.bytes += version.resident.bytes
        while self.bytes > self.budget and len(self._versions) > 1:
            self.drop(next(iter(self._versions)))
            self.metrics.evictions.inc()

    def drop(self, name: str) -> None:
        """Let a task's version go."""
        gone = self._versions.pop(name, None)
        if gone is not None:
            self.bytes -= gone.resident.bytes

    def sweep(self) -> None:
        """Let go of what the folder no longer has."""
        for name, version in list(self._versions.items()):
            entry = self.repository.entries.get(name)
            if entry is None or entry.version != version.id:
                self.drop(name)

    async def _load(self, name: str) -> Version:
        version = await asyncio.get_running_loop().run_in_executor(self._executor, self._read, name)
        self.metrics.loads.inc()
        now = self.repository.entries.get(name)
        if now is not None and now.version == version.id:
            self.keep(version)
        return version

    def _read(self, name: str) -> Version:
        entry, delta = self.repository.read(name)
        try:
            return Version(name, entry.version, self.host.admit(delta))
        except BitfitError as error:
            self.repository.refuse(entry, str(error))
            raise
