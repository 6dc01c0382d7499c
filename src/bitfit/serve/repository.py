"""The folder of deltas: which tasks there are, in which version, and nothing outside it.

Whoever serves the folder keeps no state of its own: a version is the digest of a file's content, so every process on
every machine gives the same file the same version.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ..delta.delta import Delta
from ..delta.safefile import decode, read_claims
from ..errors import DeltaError, UsageError
from ..files import replace

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SUFFIX = ".safetensors"
MOST_LABELS = 1 << 20  # characters of all labels of a task

Stamp = tuple[int, ...]
"""What tells one file from the next without reading it."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A task as the folder shows it."""

    name: str
    version: str
    stamp: Stamp
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """What a look at the folder found: names that appeared, changed or went, and files that cannot be used."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] | None = None


def describe(name: str, delta: Delta, size: int) -> dict[str, Any]:
    """What everybody may know of a task."""
    meta = delta.meta
    return {
        "name": name,
        "version": version_of(delta),
        "kind": meta.task,
        "labels": list(delta.labels),
        "pairs": meta.pairs,
        "metric": meta.metric,
        "score": meta.score.value,
        "interval": [meta.score.low, meta.score.high],
        "select": meta.select,
        "trained": meta.trained,
        "max_length": meta.max_length,
        "bytes": size,
    }


def version_of(delta: Delta) -> str:
    """The version of a task: the first 16 digits of its content's SHA-256."""
    return delta.meta.sha256[:16]


class Repository:
    """The tasks in a folder: `NAME.safetensors`. Threads may share it; writing and looking take turns."""

    def __init__(self, path: str | Path, fingerprint: str, largest: int = 64 << 20) -> None:
        self.path = Path(path).resolve()
        if not self.path.is_dir():
            raise UsageError(f"{path}: no such folder; make it, or name a folder of deltas")
        self.fingerprint, self.largest = fingerprint, largest
        self.entries: dict[str, Entry] = {}
        self.refused: dict[str, tuple[Stamp, str]] = {}
        self._lock = Lock()

    def scan(self) -> Change:
        """Look at the folder again; a file at a time, so that nobody waits for the whole of a large one."""
        before, refusals = self.entries.copy(), self.refused.copy()
        files = self._files()
        known = {name: entry.stamp for name, entry in before.items()}
        known |= {name: stamp for name, (stamp, _) in refusals.items()}
        gone = [name for name in known if name not in files]
        removed = [name for name in gone if self._correct(name, before.get(name), None) and name in before]
        fresh = [name for name, stamp in files.items() if known.get(name) != stamp]
        found = {name: self._look(name, before.get(name), files[name]) for name in fresh}
        refused = {n: self.refused[n][1] for n, what in found.items() if what == "refused" and n in self.refused}
        added, changed = (tuple(n for n, what in found.items() if what == kind) for kind in ("added", "changed"))
        return Change(added, changed, tuple(removed), refused)

    def read(self, name: str) -> tuple[Entry, Delta]:
        """A task's delta as it lies there now, verified; DeltaError if it is gone or damaged."""
        seen, path = self.entries.get(name), self._inside(name)
        try:
            stamp = _stamp(path.stat())
            if stamp[1] > self.largest:
                raise DeltaError(f"{name}: its file has {stamp[1]:,} bytes, allowed are {self.largest:,}")
            entry, delta = self.verify(name, path.read_bytes(), stamp)
        except OSError as error:
            raise DeltaError(f"{name}: cannot be read ({error.strerror})") from error
        except DeltaError as error:
            if seen is not None:
                self._correct(name, seen, None, (stamp, str(error)))
            raise
        if seen is None or (seen.version, seen.stamp) == (entry.version, entry.stamp):
            return seen or entry, delta
        self._correct(name, seen, entry)
        return entry, delta

    def refuse(self, entry: Entry, why: str) -> None:
        """Hide a task whose file turned out not to fit the base."""
        self._correct(entry.name, entry, None, (entry.stamp, why))

    def verify(self, name: str, data: bytes, stamp: Stamp = ()) -> tuple[Entry, Delta]:
        """The delta in these bytes; DeltaError if anything of it cannot be trusted."""
        delta = Delta.checked(*decode(data, name), where=name)
        self._check_base(delta)
        return Entry(name, version_of(delta), stamp, describe(name, delta, len(data))), delta

    def put(self, entry: Entry, data: bytes) -> Entry | None:
        """Make verified bytes the task's file, in one step; what the task was before."""
        path = self._target(entry.name)
        with self._lock:
            before = self.entries.get(entry.name)
            stamp = _stamp(replace(path, data, secrets.token_hex(8)))
            self._show(Entry(entry.name, entry.version, stamp, entry.facts))
        return before

    def delete(self, name: str) -> Entry | None:
        """Remove a task's file; what the task was."""
        path = self._target(name)
        with self._lock:
            before = self.entries.get(name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DeltaError(f"{name}: cannot be removed ({error.strerror})") from error
            self._forget(name)
        return before

    def _files(self) -> dict[str, Stamp]:
        found = {}
        with os.scandir(self.path) as entries:
            for file in entries:
                name = file.name.removesuffix(SUFFIX)
                if name == file.name or not NAME.fullmatch(name):
                    continue
                try:
                    if file.is_symlink():
                        self._inside(name)
                    if file.is_file():
                        found[name] = _stamp(file.stat())
                except (OSError, DeltaError):
                    continue
        return found

    def _look(self, name: str, seen: Entry | None, stamp: Stamp) -> str:
        try:
            path = self._inside(name)
            delta = Delta.checked({}, read_claims(path), name)
            self._check_base(delta)
            if not re.fullmatch(r"[0-9a-f]{64}", delta.meta.sha256):
                raise DeltaError("it has no digest")
        except DeltaError as error:
            return "refused" if self._correct(name, seen, None, (stamp, str(error))) else ""
        entry = Entry(name, version_of(delta), stamp, describe(name, delta, stamp[1]))
        if not self._correct(name, seen, entry, path=path):
            return ""
        return "added" if seen is None else "changed" if seen.version != entry.version else ""

    def _check_base(self, delta: Delta) -> None:
        if sum(map(len, delta.labels)) + 8 * len(delta.labels) > MOST_LABELS:
            raise DeltaError(f"its {len(delta.labels):,} labels are too long to be listed")
        if delta.meta.fingerprint != self.fingerprint:
            raise DeltaError(f"it belongs to another base ({delta.meta.base[:60]})")

    def _show(self, entry: Entry) -> None:
        # In one step: the event loop looks without waiting, and must see the old or the new.
        self.entries[entry.name] = entry
        self.refused.pop(entry.name, None)

    def _forget(self, name: str) -> bool:
        self.refused.pop(name, None)
        return self.entries.pop(name, None) is not None

    def _correct(self, name: str, seen: Entry | None, now: Entry | None, why: tuple[Stamp, str] | None = None,
                 path: Path | None = None) -> bool:  # fmt: skip
        """Show what is there now; not if the task, or the file at `path`, was replaced or removed meanwhile."""
        with self._lock:
            if self.entries.get(name) is not seen:
                return False
            try:
                if now is not None and path is not None and _stamp(path.stat()) != now.stamp:
                    return False
            except OSError:
                return False
            self._forget(name) if now is None else self._show(now)
            if why is not None:
                self.refused[name] = why
            return True

    def _target(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no task name: {NAME.pattern}")
        return self.path / (name + SUFFIX)

    def _inside(self, name: str) -> Path:
        """Where a task's file really is: a link may lead to another place in the folder, not out of it."""
        try:
            path = self._target(name).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise DeltaError(f"{name}: its file is gone") from error
        if not path.is_relative_to(self.path):
            raise DeltaError(f"{name}: its file is a link that leads out of the folder")
        return path


def _stamp(status: os.stat_result) -> Stamp:
    # The time of the last change of any kind, too: an archive restores the others.
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
