"""Files written all or nothing: a reader sees the old content or the new, never half of one."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from .errors import UsageError, WriteError


def replace(path: Path, data: bytes, mark: str = "") -> os.stat_result:
    """Put `data` at `path` in one step: temporary name (with `mark`, or the process's number), sync, rename.

    The answer is of the file that was written: by the time this is over, another may have taken its place.
    """
    check_target(path)
    temporary = path.with_name(f".{path.name}.{mark or os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
        return written
    except OSError as error:
        raise WriteError(f"{path}: cannot be written ({error.strerror}); what was there before is untouched") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_target(path: Path, *inputs: Path) -> None:
    """Refuse a path that no file can be written to, or that is an input; making its folder is part of the check."""
    if any(path.resolve() == given.resolve() for given in inputs):
        raise UsageError(f"{path}: is the input; writing there would destroy it, so name another file")
    try:
        if not path.name or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "its folder is read-only")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); name another file") from error


def sync_folder(folder: Path) -> None:
    # Without it a power cut may forget the rename; Windows cannot open folders and needs none.
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
