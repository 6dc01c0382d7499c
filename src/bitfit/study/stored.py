"""Studies in a storage that several machines reach: results, checkpoints, and one run of a study at a time.

The storage has the files of a results folder (trials/, passes/, STUDY/BASE.json) and inputs/ (see shipping.py). A
worker writes checkpoints and the results of a finished pass there itself. So a run that was killed goes on from there,
on this machine or another one, and no finished pass is lost with the process that waited for it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..arrays import Tensors
from ..data.storage import Storage, shown
from ..errors import UsageError
from ..training.checkpoint import KEPT, SHARE, Store
from .manifest import Manifest
from .store import JOURNAL, Result, Results, StoredPass, load_manifest

BEAT_SECONDS = 3.0  # between two signs of life of a run
DEAD_SECONDS = 4 * BEAT_SECONDS  # without a sign of life, after which another run may begin


class StoredCheckpoints(Store):
    """Checkpoints in a local folder and in the storage; those that the storage has are fetched first."""

    def __init__(self, where: StoredPass, folder: Path, key: str, seconds: float) -> None:
        super().__init__(folder, key, seconds)
        self._storage = Storage(where.url)
        self._name = where.name
        self._stored: set[str] = set()
        for name in self._storage.names(where.name):
            if name.endswith(".checkpoint"):
                self._storage.download(name, folder / Path(name).name)
                self._stored.add(Path(name).name)

    def save(self, number: int | str, step: int, tensors: Tensors, facts: dict[str, Any], kept: int = KEPT) -> None:
        """Write a checkpoint, copy it to the storage, and remove what is not kept from both."""
        began = time.monotonic()
        super().save(number, step, tensors, facts, kept)
        try:
            self._copy()
        except OSError as error:
            warnings.warn(f"no checkpoint in the storage: {error}", UserWarning, stacklevel=2)
        self._last = time.monotonic()
        self._wait = max(self._seconds, SHARE * (self._last - began))

    def _copy(self) -> None:
        assert self.folder is not None
        here = {path.name for path in self.folder.glob("*.checkpoint")}
        for name in sorted(here - self._stored):
            self._storage.upload(self.folder / name, f"{self._name}/{name}")
            self._stored.add(name)
        for name in sorted(self._stored - here):
            self._storage.remove(f"{self._name}/{name}")
            self._stored.remove(name)


class StoredResults(Results):
    """A local folder of results that is kept equal to the one in a storage."""

    def __init__(self, folder: Path, storage: Storage) -> None:
        super().__init__(folder)
        self.storage = storage

    def stored_pass(self, folder: Path) -> StoredPass | None:
        """The folder of a pass in the storage."""
        return StoredPass(self.storage.url, folder.relative_to(self.folder).as_posix())

    def commit(self, folder: Path, results: Iterable[Result]) -> None:
        """Store the results of a finished pass, here and in the storage."""
        results = list(results)
        super().commit(folder, results)
        self._finish(folder.relative_to(self.folder).as_posix(), [result.key for result in results])

    def replay(self) -> None:
        """Fetch what other runs stored, and finish the commits of those that were killed."""
        for name in self.storage.names("trials"):
            if not (self.folder / name).is_file():
                self.storage.download(name, self.folder / name)
        for name in self.storage.names("passes"):
            if Path(name).name == JOURNAL:
                self.storage.download(name, self.folder / name)
                keys = [table["key"] for table in json.loads((self.folder / name).read_bytes())]
                self._copy_journal((self.folder / name).parent)
                self._finish(name.removesuffix(f"/{JOURNAL}"), keys)
        super().replay()

    def _finish(self, name: str, keys: Iterable[str]) -> None:
        """Put results into the storage, then remove the pass that they are of: in this order a kill loses nothing."""
        for key in keys:
            self.storage.upload(self.trials / f"{key}.json", f"trials/{key}.json")
        self.storage.remove(name)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest of a study here and to the storage, with the results of its trials that only we have."""
        path = self.manifest_path(manifest)
        name = path.relative_to(self.folder).as_posix()
        self._join_manifest(path, name)
        super().write_manifest(manifest)
        stored = set(self.storage.names("trials"))
        for entry in manifest.points:
            trial = f"trials/{entry.key}.json"
            if trial not in stored and self.has(entry.key):
                self.storage.upload(self.folder / trial, trial)
        self.storage.upload(path, name)

    def _join_manifest(self, path: Path, name: str) -> None:
        """Join the local manifest with that of the storage, which another machine may have written."""
        if self.storage.read(name) is None:
            return
        local = load_manifest(path) if path.is_file() else None
        self.storage.download(name, path)
        if local is not None:
            super().write_manifest(local)

    @contextmanager
    def locked(self, study: str) -> Iterator[None]:
        """One run of a study at a time, on all machines."""
        with super().locked(study), Lease(self.storage, f"{study}/.run").held():
            yield


class Lease:
    """A file that a run writes again and again, so that other machines know that it is alive."""

    def __init__(self, storage: Storage, name: str, beat: float = BEAT_SECONDS, dead: float = DEAD_SECONDS) -> None:
        self._storage = storage
        self._name = name
        self._beat = beat
        self._dead = dead
        self._owner = uuid.uuid4().hex
        self._count = 0
        self._ended = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no other run gives a sign of life, then give signs until the block ends."""
        self._wait_for_others()
        self._sign()
        thread = threading.Thread(target=self._keep_signing, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            self._storage.remove(self._name)

    def _wait_for_others(self) -> None:
        """Refuse while another run is alive: its sign changes. Clocks of machines are not compared."""
        first = self._storage.read(self._name)
        if first is None:
            return
        until = time.monotonic() + self._dead
        while time.monotonic() < until:
            time.sleep(self._beat / 3)
            if self._storage.read(self._name) not in (first, None):
                host = json.loads(first)["host"]
                where = shown(self._storage.url)
                raise UsageError(f"{where}: the study is being run by {host}; wait for it or stop it")

    def _sign(self) -> None:
        self._count += 1
        sign = {"host": socket.gethostname(), "owner": self._owner, "count": self._count}
        self._storage.write(self._name, json.dumps(sign).encode())

    def _keep_signing(self) -> None:
        while not self._ended.wait(self._beat):
            try:
                self._sign()
            except OSError:  # the network may come back; the study notices by itself if it does not
                continue
