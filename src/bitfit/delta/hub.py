"""Deltas on the Hugging Face hub: `hf:owner/name`, `hf:owner/name@revision`, `hf:owner/name@revision/file.safetensors`.

The hub is contacted only if a user writes `hf:` or pushes. Messages contain no token and no address of a file, which
may be signed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import BitfitError, DeltaError, ServiceError, UsageError

MARK = "hf:"
FILE = "delta.safetensors"
SUFFIX = ".safetensors"
SECONDS = 10  # until a hub that does not answer counts as unreachable
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_FORM = "write hf:owner/name, hf:owner/name@revision or hf:owner/name/file.safetensors"


@dataclass(frozen=True)
class HubPath:
    """A delta on the hub."""

    repository: str
    revision: str | None = None
    file: str | None = None  # None: delta.safetensors, or the only safetensors file

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        file = f"/{self.file}" if self.file else ""
        return f"{MARK}{self.repository}{revision}{file}"


def is_hub_path(source: str | os.PathLike[str]) -> bool:
    """Whether a path refers to the hub."""
    return os.fspath(source).startswith(MARK)


def parse(text: str) -> HubPath:
    """Repository, revision and file of `hf:...`; UsageError if the text does not have that form."""
    body, _, revision = text.removeprefix(MARK).partition("@")
    owner, _, rest = body.partition("/")
    name, _, file = rest.partition("/")
    if not file and revision.endswith(SUFFIX):
        revision, _, file = revision.partition("/")
    repository = f"{owner}/{name}"
    proper = REPOSITORY.fullmatch(repository) and ".." not in text
    if not proper or ("@" in text and not _REVISION.fullmatch(revision)) or (file and not file.endswith(SUFFIX)):
        raise UsageError(f"{text}: is not a delta on the hub; {_FORM}")
    return HubPath(repository, revision or None, file or None)


def local_path(source: str | os.PathLike[str]) -> Path:
    """The file of a delta on this machine: downloaded into the hub's cache if the source is `hf:...`."""
    if not is_hub_path(source):
        return Path(source)
    path = _parsed(source)
    if path.file is None:
        with hub_errors(str(path)):
            path = replace(path, file=_find_file(path))
    return _download(path)


def local_folder(source: str | os.PathLike[str], files: Sequence[str]) -> Path:
    """A folder on this machine: with these files from the hub if the source is `hf:...`."""
    if not is_hub_path(source):
        return Path(source)
    path = _parsed(source)
    downloaded = [_download(replace(path, file=file)) for file in files]
    return downloaded[0].parent


def _parsed(source: str | os.PathLike[str]) -> HubPath:
    return parse(os.fspath(source).replace(os.sep, "/"))  # a Path on Windows has backslashes


def _download(path: HubPath) -> Path:
    """The local copy of a file of the hub."""
    from huggingface_hub import hf_hub_download

    assert path.file is not None
    with hub_errors(str(path)):
        return Path(hf_hub_download(path.repository, path.file, revision=path.revision, endpoint=endpoint()))


def _find_file(path: HubPath) -> str:
    """The name of a repository's delta."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        return FILE
    # One request with a time limit; listing the repository's files instead would be retried for half a minute.
    info = HfApi(endpoint=endpoint()).model_info(path.repository, revision=path.revision, timeout=SECONDS)
    names = sorted(file.rfilename for file in info.siblings or () if file.rfilename.endswith(SUFFIX))
    if FILE in names:
        return FILE
    if len(names) != 1:
        listed = f"; append /FILE with one of {', '.join(names[:10])}" if names else ""
        raise DeltaError(f"{path}: has {len(names) or 'no'} safetensors files, and none is called {FILE}{listed}")
    return names[0]


def endpoint() -> str | None:
    """The address of the hub if HF_ENDPOINT sets one; None for the default."""
    return os.environ.get("HF_ENDPOINT")


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Convert the errors of huggingface_hub into errors of bitfit, which are one line and have an exit code."""
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except BitfitError:
        raise
    except errors.GatedRepoError as error:
        raise DeltaError(f"{what}: access is restricted; request it on the repository's page on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise DeltaError(
            f"{what}: no such repository on the hub, or a private one that the token in HF_TOKEN does not open"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DeltaError(f"{what}: the repository has no such revision") from error
    except errors.LocalEntryNotFoundError as error:
        raise ServiceError(0, f"{what}: the hub cannot be reached, and the file is not in the local cache") from error
    except errors.EntryNotFoundError as error:
        raise DeltaError(f"{what}: the repository has no such file") from error
    except errors.HFValidationError as error:
        raise UsageError(f"{what}: is not a valid name on the hub; {_FORM}") from error
    except errors.OfflineModeIsEnabled as error:
        raise ServiceError(0, f"{what}: HF_HUB_OFFLINE is set, so nothing is downloaded; unset it") from error
    except errors.HfHubHTTPError as error:
        raise _refused(what, error) from error
    except Exception as error:  # of the HTTP library, which huggingface_hub has changed more than once
        network = isinstance(error, OSError) or type(error).__module__.startswith("httpx")
        said = "the hub cannot be reached" if network else "the hub's answer was not understood"
        raise ServiceError(0, f"{what}: {said} ({type(error).__name__})") from error
    finally:
        if shown:
            enable_progress_bars()


def _refused(what: str, error: Any) -> ServiceError:
    """The error for an HTTP status, with the hub's short reason but without tokens and addresses."""
    status = int(error.response.status_code)
    reason = re.sub(r"hf_\w+|https?://\S+", "...", str(error.server_message or "")).strip()
    said = f": {' '.join(reason.split())[:200]}" if reason else ""
    advice = {
        401: "; the token in HF_TOKEN is not valid",
        403: "; the token in HF_TOKEN does not allow this",
        429: "; wait and try again",
    }.get(status, "")
    return ServiceError(status, f"{what}: the hub answered {status}{said}{advice}")
