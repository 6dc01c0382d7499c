"""The folder of deltas as a repository of tasks and their versions. No file outside the folder is ever read or written.

The folder is the only state of a service. A version is the digest of a file's content, so every process on every
machine gives the same file the same version.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from ..delta.delta import Delta
from ..delta.safefile import decode, read_claims
from ..errors import DeltaError, UsageError
from ..files import replace
from ..terminal.progress import counted

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SUFFIX = ".safetensors"
MOST_LABELS = 1 << 20  # characters of all labels of a task
OTHER_BASE = "it belongs to another base"

Stamp = tuple[int, ...]
"""Times, size and inode of a file: it tells whether a file has changed without reading it."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A task in the repository."""

    name: str
    version: str
    stamp: Stamp
    info: Mapping[str, Any]  # what `/v1/tasks` shows


@dataclass
class Changes:
    """The result of a scan: tasks that appeared, changed or were removed, and files that cannot be served."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)  # reasons by file name


def describe(name: str, delta: Delta, size: int) -> dict[str, Any]:
    """What `/v1/tasks` shows of a task."""
    meta, score = delta.meta, delta.meta.score
    return {
        "name": name,
        "version": version_of(delta),
        "kind": meta.task,
        "labels": list(delta.labels),
        "pairs": meta.pairs,
        "metric": meta.metric,
        "score": None if score is None else score.value,
        "interval": None if score is None else [score.low, score.high],
        "select": meta.select,
        "trained": meta.trained,
        "max_length": meta.max_length,
        "bytes": size,
    }


def version_of(delta: Delta) -> str:
    """The version of a task: the first 16 digits of its content's SHA-256."""
    return delta.meta.sha256[:16]


class Repository:
    """The tasks in a folder: `NAME.safetensors`. Threads may share it; a lock serializes changes."""

    def __init__(self, path: str | Path, fingerprint: str, largest: int = 64 << 20) -> None:
        self.path = Path(path).resolve()
        if not self.path.is_dir():
            raise UsageError(f"{path}: no such folder; create it, or pass a folder of deltas")
        self.fingerprint = fingerprint
        self.largest = largest
        self.entries: dict[str, Entry] = {}
        self.refused: dict[str, tuple[Stamp, str]] = {}  # by task: files whose content cannot be served, and why
        self.ignored: dict[str, str] = {}  # by file: those whose name or type is not that of a task, and why
        self._lock = Lock()

    def scan(self) -> Changes:
        """Update the entries from the folder. The lock is held for one file at a time, so requests do not wait."""
        changes = Changes()
        before = self.entries.copy()
        stamps = {name: stamp for name, (stamp, _) in self.refused.copy().items()}
        stamps |= {name: entry.stamp for name, entry in before.items()}
        files, ignored = self._list_files()
        for name in stamps.keys() - files.keys():
            if self._update(name, before.get(name), None) and name in before:
                changes.removed.append(name)
        for name, stamp in files.items():
            if stamps.get(name) != stamp:
                self._scan_file(name, before.get(name), stamp, changes)
        changes.unused |= {file: reason for file, reason in ignored.items() if file not in self.ignored}
        self.ignored = ignored
        return changes

    def unused(self) -> dict[str, str]:
        """The files that are not served, each with the reason."""
        refused = {name + SUFFIX: reason for name, (_, reason) in self.refused.copy().items()}
        return refused | self.ignored

    def trouble(self) -> str | None:
        """Why no task is served although the folder has delta files; None if a task is served or there is no file."""
        unused = {} if self.entries else self.unused()
        if not unused:
            return None
        files = counted(len(unused), "file")
        if all(reason.startswith(OTHER_BASE) for reason in unused.values()):
            return f"none of {files} in the folder belongs to this base"
        return f"none of {files} in the folder can be served; GET /v1/unused gives the reasons"

    def read(self, name: str) -> tuple[Entry, Delta]:
        """The verified delta in a task's file as it is now; DeltaError if it is gone or damaged."""
        seen = self.entries.get(name)
        path = self._resolve(name)
        try:
            stamp = _stamp(path.stat())
            if stamp[1] > self.largest:
                raise DeltaError(f"{name}: its file has {stamp[1]:,} bytes; the limit is {self.largest:,}")
            entry, delta = self.verify(name, path.read_bytes(), stamp)
        except OSError as error:
            raise DeltaError(f"{name}: cannot be read ({error.strerror})") from error
        except DeltaError as error:
            if seen is not None:
                self._update(name, seen, None, (stamp, str(error)))
            raise
        if seen is None:
            return entry, delta
        if (seen.version, seen.stamp) == (entry.version, entry.stamp):
            return seen, delta
        self._update(name, seen, entry)
        return entry, delta

    def refuse(self, entry: Entry, reason: str) -> None:
        """Stop serving a task whose file turned out not to fit the base."""
        self._update(entry.name, entry, None, (entry.stamp, reason))

    def verify(self, name: str, data: bytes, stamp: Stamp = ()) -> tuple[Entry, Delta]:
        """The entry and the delta in these bytes; DeltaError if a check of them fails."""
        delta = Delta.checked(*decode(data, name), where=name)
        self._check_base(delta)
        return Entry(name, version_of(delta), stamp, describe(name, delta, len(data))), delta

    def put(self, entry: Entry, data: bytes) -> Entry | None:
        """Write verified bytes as the task's file, atomically; returns the previous entry."""
        path = self._path(entry.name)
        with self._lock:
            before = self.entries.get(entry.name)
            # A link is replaced itself: an upload must not write outside the folder.
            stamp = _stamp(replace(path, data, secrets.token_hex(8), follow=False))
            self._set(Entry(entry.name, entry.version, stamp, entry.info))
        return before

    def delete(self, name: str) -> Entry | None:
        """Remove a task's file; returns the previous entry."""
        path = self._path(name)
        with self._lock:
            before = self.entries.get(name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DeltaError(f"{name}: cannot be removed ({error.strerror})") from error
            self._unset(name)
        return before

    def _list_files(self) -> tuple[dict[str, Stamp], dict[str, str]]:
        """Task -> stamp of the files with a valid name, and file -> reason of the other delta files."""
        stamps = {}
        ignored = {}
        with os.scandir(self.path) as listing:
            for file in listing:
                if file.name.startswith(".") or not file.name.lower().endswith(SUFFIX):
                    continue
                name = file.name[: -len(SUFFIX)]
                if not NAME.fullmatch(name) or not file.name.endswith(SUFFIX):
                    ignored[file.name] = _rename_hint(name)
                    continue
                try:
                    if file.is_symlink():
                        self._resolve(name)
                    if file.is_file():
                        stamps[name] = _stamp(file.stat())
                    else:
                        ignored[file.name] = "it is not a file"
                except (OSError, DeltaError) as error:
                    ignored[file.name] = str(error)
        return stamps, ignored

    def _scan_file(self, name: str, seen: Entry | None, stamp: Stamp, changes: Changes) -> None:
        try:
            path = self._resolve(name)
            delta = Delta.checked({}, read_claims(path), name)
            self._check_base(delta)
            if not re.fullmatch(r"[0-9a-f]{64}", delta.meta.sha256):
                raise DeltaError("it has no digest")
        except DeltaError as error:
            if self._update(name, seen, None, (stamp, str(error))):
                changes.unused[name + SUFFIX] = str(error)
            return
        entry = Entry(name, version_of(delta), stamp, describe(name, delta, stamp[1]))
        if not self._update(name, seen, entry, path=path):
            return
        if seen is None:
            changes.added.append(name)
        elif seen.version != entry.version:
            changes.changed.append(name)

    def _check_base(self, delta: Delta) -> None:
        if sum(map(len, delta.labels)) + 8 * len(delta.labels) > MOST_LABELS:
            raise DeltaError(f"its {len(delta.labels):,} labels are too long to be listed")
        if delta.meta.fingerprint != self.fingerprint:
            raise DeltaError(f"{OTHER_BASE} ({delta.meta.base[:60]})")

    def _set(self, entry: Entry) -> None:
        # One step each: the event loop reads without the lock and must see the old entry or the new one.
        self.entries[entry.name] = entry
        self.refused.pop(entry.name, None)

    def _unset(self, name: str) -> None:
        self.refused.pop(name, None)
        self.entries.pop(name, None)

    def _update(
        self,
        name: str,
        seen: Entry | None,
        entry: Entry | None,
        refused: tuple[Stamp, str] | None = None,
        path: Path | None = None,
    ) -> bool:
        """Replace the entry `seen` by `entry`; False if the task, or the file at `path`, has changed meanwhile."""
        with self._lock:
            if self.entries.get(name) is not seen:
                return False
            try:
                if entry is not None and path is not None and _stamp(path.stat()) != entry.stamp:
                    return False
            except OSError:
                return False
            if entry is None:
                self._unset(name)
            else:
                self._set(entry)
            if refused is not None:
                self.refused[name] = refused
            return True

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a task name: it must match {NAME.pattern}")
        return self.path / (name + SUFFIX)

    def _resolve(self, name: str) -> Path:
        """The real path of a task's file. A link may lead to another file of the folder, not out of it."""
        try:
            path = self._path(name).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise DeltaError(f"{name}: its file no longer exists") from error
        if not path.is_relative_to(self.path):
            raise DeltaError(f"{name}: its file is a link to a file outside the folder")
        return path


def _rename_hint(name: str) -> str:
    """Why this is not the name of a task, and what it could be called."""
    allowed = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:64] or "task"
    return f"a task name has lower-case letters, digits, dots and dashes: rename it to {allowed}{SUFFIX}"


def _stamp(status: os.stat_result) -> Stamp:
    # The time of the last status change, too: extracting an archive restores the other times.
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
