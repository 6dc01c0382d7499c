"""A folder that several machines reach: any path that fsspec knows, such as s3://bucket/folder or a network drive."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UsageError, WriteError

# An object appears in these stores when it is complete. Elsewhere a file is written under another name and renamed.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"}
PART = ".part-"  # what begins the names of files that are not complete


class Storage:
    """Files by name below one folder; names have slashes on every system."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # torch and huggingface_hub bring it

        try:
            self._system, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"--storage {url}: {str(error).splitlines()[0]}") from error
        protocols = self._system.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self.url: str = self._system.unstrip_protocol(self._root)
        try:
            self._system.makedirs(self._root, exist_ok=True)
        except OSError as error:
            raise WriteError(f"--storage {url}: cannot be written ({error})") from error

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is no such file."""
        try:
            content: bytes = self._system.cat_file(self._path(name))
            return content
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file: other machines see all of it, or what was there before."""
        with self._target(name) as path:
            self._system.pipe_file(path, content)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file into the storage."""
        with self._target(name) as target:
            self._system.put_file(str(path), target)

    def download(self, name: str, path: Path) -> None:
        """Copy a file of the storage to a local path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            self._system.get_file(self._path(name), str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """The names of all files in a folder and below it, sorted."""
        self._system.invalidate_cache()  # other machines write there, too
        try:
            paths: list[str] = self._system.find(self._path(folder))
        except FileNotFoundError:
            return []
        start = len(self._root.rstrip("/")) + 1
        names = [path[start:] for path in paths]
        return sorted(name for name in names if not Path(name).name.startswith(PART))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all its files; it may be gone already."""
        with suppress(FileNotFoundError):
            self._system.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _target(self, name: str) -> _Target:
        return _Target(self._system, self._path(name), whole=bool(self._protocols & OBJECT_STORES))


class _Target:
    """A file that is being written: `with` gives the path to write to; it has its name when the block ends."""

    def __init__(self, system: Any, path: str, whole: bool) -> None:
        folder, _, name = path.rpartition("/")
        self._system = system
        self._path = path
        self._folder = folder
        self._written = path if whole else f"{folder}/{PART}{uuid.uuid4().hex[:12]}-{name}"

    def __enter__(self) -> str:
        self._system.makedirs(self._folder, exist_ok=True)
        return self._written

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._written == self._path:
            return
        if kind is None:
            self._system.mv(self._written, self._path)
        else:
            self._discard()

    def _discard(self) -> None:
        with suppress(OSError):  # it was never made, or the storage is gone
            self._system.rm(self._written)
