"""What several machines reach: any path that fsspec knows, such as s3://bucket/folder or a network drive.

`Storage` is a folder to read and write; `matching`, `stamp`, `tail` and `fetch` only read.
"""

from __future__ import annotations

import glob
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import UsageError, WriteError

# An object appears in these stores when it is complete. Elsewhere a file is written under another name and renamed.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"}
PART = ".part-"  # what begins the names of files that are not complete
# What drivers call the version of a file, or the time of its last change.
STAMPS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "last_commit", "mtime", "LastModified", "last_modified",
    "Last-Modified", "modificationTime", "modify", "created",
)  # fmt: skip
URL = re.compile(r"(?!file:)([A-Za-z][A-Za-z0-9+.-]+):/+(?=[^/])")  # one letter is a drive of Windows
USER = re.compile(r"(?<=://)[^/\s]*@")
QUERY = re.compile(r"(https?://[^?\s]*)\?[^\s'\"]*")
SETTINGS = re.compile(r"\?[^/\s]*=[^\s'\"]*")  # the query of other URLs, where ? alone is part of a pattern


class StorageError(WriteError, OSError):
    """A storage that cannot be reached, read or written; an OSError for those who can go on without it."""


def url_of(path: str) -> str | None:
    """The URL that a path is; None for a path of this machine. pathlib makes s3:/bucket of s3://bucket."""
    found = URL.match(path)
    if found is None or os.path.exists(path):  # noqa: PTH110 (Path.exists fails where a name is too long)
        return None
    return f"{found[1]}://{path[found.end() :]}"


def shown(text: str) -> str:
    """A text for messages: its URLs without user, password and query."""
    return SETTINGS.sub("", QUERY.sub(r"\1", USER.sub("", text)))


# ---- a folder


class Storage:
    """Files by name below one folder; names have slashes on every system."""

    def __init__(self, url: str) -> None:
        self._system, self._root = _driver(url, "--storage ")
        protocols = self._system.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._whole = bool(protocols & OBJECT_STORES)
        # Drivers forget the user and the host of some URLs.
        self.url: str = url if "://" in url else self._system.unstrip_protocol(self._root)
        with self._errors():
            if self._whole:  # an error if the bucket is missing; drivers would create one with a mistyped name
                self._system.find(self._path(PART))
            else:
                self._system.makedirs(self._root, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is no such file."""
        with self._errors():
            try:
                content: bytes = self._system.cat_file(self._path(name))
                return content
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file: other machines see all of it, or what was there before."""
        with self._errors(), self._target(name) as path:
            self._system.pipe_file(path, content)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file into the storage."""
        with self._errors(), self._target(name) as target:
            self._system.put_file(str(path), target)

    def download(self, name: str, path: Path) -> None:
        """Copy a file of the storage to a local path."""
        with self._errors():
            _copy(self._system, self._path(name), path)

    def names(self, folder: str) -> list[str]:
        """The names of all files in a folder and below it, sorted."""
        with self._errors():
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
        with self._errors(), suppress(FileNotFoundError):
            self._system.invalidate_cache()  # else files that other machines wrote stay
            self._system.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _target(self, name: str) -> _Target:
        return _Target(self._system, self._path(name), self._whole)

    def _errors(self) -> Any:
        return _driver_errors(f"--storage {self.url}")


class _Target:
    """A file that is being written: `with` gives the path to write to; it has its name when the block ends."""

    def __init__(self, system: Any, path: str, whole: bool) -> None:
        folder, _, name = path.rpartition("/")
        self._system = system
        self._path = path
        self._folder = folder
        self._written = path if whole else f"{folder}/{PART}{uuid.uuid4().hex[:12]}-{name}"

    def __enter__(self) -> str:
        if self._written != self._path:  # object stores have no folders
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


# ---- files to read


def matching(url: str) -> dict[str, str]:
    """The files that a URL names: a file, those in a folder, or those that fit its * and ?.

    URL of a file -> its path below the folder that all of them are in.
    """
    system, path = _driver(url)
    parts = path.rstrip("/").split("/")
    with _driver_errors(url):
        system.invalidate_cache()
        if glob.has_magic(path):
            found = system.glob(path, detail=True)
            fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        elif system.isfile(path):
            found = {path: system.info(path)}
            fixed = len(parts) - 1
        else:
            found = {info["name"]: info for info in system.ls(path, detail=True)} if system.exists(path) else {}
            fixed = len(parts)
    # Drivers forget the user and the host of some URLs, so the folder is taken from the URL as it was given.
    given = url.rstrip("/").split("/")
    folder = "/".join(given[: len(given) - len(parts) + fixed])
    files = {}
    for name in sorted(found):
        if found[name]["type"] == "file":
            below = "/".join(name.split("/")[fixed:])
            # A signature of a web address must not become part of file names.
            files[f"{folder}/{below}"] = below.partition("?")[0] if url.startswith("http") else below
    return files


def stamp(url: str) -> list[int | str]:
    """What changes when the file changes: its size, and its version or time if the driver knows one."""
    system, path = _driver(url)
    with _driver_errors(url):
        info = system.info(path)
    versions = [str(info[name]) for name in STAMPS if info.get(name) is not None]
    return [info["size"], *versions[:1]]


def tail(url: str, count: int) -> bytes:
    """The last bytes of a file; all of a shorter one."""
    system, path = _driver(url)
    with _driver_errors(url):
        count = min(count, system.info(path)["size"])
        content: bytes = system.cat_file(path, start=-count) if count else b""
    return content


def fetch(url: str, path: Path) -> None:
    """Copy a file to a local path."""
    system, source = _driver(url)
    with _driver_errors(url):
        _copy(system, source, path)


def _copy(system: Any, source: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:12]}.part")
    try:
        system.get_file(source, str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _driver(url: str, option: str = "") -> tuple[Any, str]:
    """The file system behind a URL, and the path in it."""
    from fsspec.core import url_to_fs  # torch and huggingface_hub bring it

    try:
        system, path = url_to_fs(url)
        return system, path
    except (ImportError, ValueError) as error:  # they say what to install, or which kinds of URL there are
        raise UsageError(f"{option}{shown(url)}: {_first_line(error)}") from error


@contextmanager
def _driver_errors(what: str) -> Iterator[None]:
    """Make one kind of error of those of the drivers, which have classes of their own, such as botocore's."""
    try:
        yield
    except Exception as error:
        raise StorageError(f"{shown(what)}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])
