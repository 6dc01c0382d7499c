"""Atomic writing of files: a reader sees the old content or the new content, never a mixture."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import UsageError, WriteError

# Errors that mean the path is wrong; the others mean that the disk or a permission is.
WRONG_PATH = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL)


def replace(path: Path, data: bytes, mark: str = "", follow: bool = True) -> os.stat_result:
    """Put `data` at `path` in one step; `follow` says whether a symbolic link is followed or replaced itself.

    Returns the status of the file that was written: when this returns, another process may have replaced it.
    """
    with writing(path, mark, follow) as file:
        file.write(data)
        file.flush()
        return os.fstat(file.fileno())


@contextmanager
def writing(path: Path, mark: str = "", follow: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` when the block ends; after an error nothing has changed.

    The name of the temporary file contains `mark`, or the process id. A symbolic link stays one: the file it points to
    is replaced, unless `follow` is False. A device or a pipe is written to directly.
    """
    check_target(path)
    direct = follow and path.exists() and not path.is_file()
    # Not resolved where it is written to directly: /dev/stdout leads to a pipe, which has no path.
    target = path.resolve() if follow and path.is_symlink() and not direct else path
    temporary = target.with_name(f".{target.name}.{mark or os.getpid()}.tmp")
    try:
        with (target if direct else temporary).open("wb") as file:
            yield file
            file.flush()
            if not direct:
                os.fsync(file.fileno())
        if not direct:
            temporary.replace(target)
            sync_folder(target.parent)
    except OSError as error:
        unchanged = "" if direct else "; what was there before is unchanged"
        raise WriteError(f"{path}: cannot be written ({error.strerror}){unchanged}") from error
    finally:
        if not direct:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """A folder to write files into that takes its place at `path` when the block ends; after an error nothing has
    changed. What exists at `path` already must be an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path}: already exists and is not empty; name another folder with --out")
    made = not path.exists()
    check_target(path / "file")  # creates the folder
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            for file in temporary.iterdir():
                file.chmod(0o644)  # safetensors writes files that only their owner can read
            path.rmdir()
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise WriteError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if made and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def check_target(path: Path, *inputs: Path) -> None:
    """Refuse a path that cannot be written to, or that is one of the inputs. Creates the folder of the path."""
    if any(path.resolve() == source.resolve() for source in inputs):
        raise UsageError(f"{path}: is the input; writing there would destroy it, so name another file")
    try:
        if not path.name or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():  # a device or a pipe, whose folder stays as it is
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "its folder is read-only")
    except OSError as error:
        error_class = UsageError if error.errno in WRONG_PATH else WriteError
        raise error_class(f"{path}: cannot be written ({error.strerror}); name another file") from error


def require_folder(path: Path) -> None:
    """Refuse a path in a folder that does not exist: more often than not its name is mistyped."""
    if not path.parent.exists():
        raise UsageError(f"{path}: there is no folder {path.parent}; create it or correct the path")


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut. Windows cannot open folders and does not need it."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
