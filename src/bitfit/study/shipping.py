"""Folders that travel to the nodes of a cluster: by Ray's object store or by a storage, once per node.

A node keeps a folder in its cache ($BITFIT_CACHE, or bitfit in the user's cache folder) under the digest of the
contents, so that the next pass or study finds it there. All workers of a node map the weights from that one copy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..data import sources
from ..data.named import find
from ..data.storage import Storage
from ..errors import DataError, ModelError
from ..model.base import locate, make_mappable
from .passes import Engine, Pass, Progress
from .store import Result, slug

LOG = "fetched"  # has a line for every time that the folder was fetched to this node
Get = Callable[[Any], bytes]
"""The bytes behind a reference to Ray's object store."""


@dataclass(frozen=True)
class Parcel:
    """A folder on its way: the digest of its contents and where each file is.

    A file is a name in the storage `url`; without a storage it is a reference to Ray's object store.
    """

    name: str
    digest: str
    files: Mapping[str, Any]
    url: str | None = None


@dataclass(frozen=True)
class Shipment:
    """What a pass needs on a bare node; None where the node finds it by itself (on the hub)."""

    base: Parcel | None
    data: Parcel | None

    def plain(self) -> dict[str, Any]:
        """The shipment as plain values: a node with another version of bitfit can receive these."""
        return {key: None if parcel is None else vars(parcel).copy() for key, parcel in vars(self).items()}

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Shipment:
        """The shipment of plain values."""
        parcels = {key: None if value is None else Parcel(**value) for key, value in table.items()}
        return cls(**parcels)


# ---- packing


class Shipping:
    """Packs the base and the data of passes, each of them once."""

    def __init__(self, ray: Any = None, storage: Storage | None = None) -> None:
        self._ray = ray
        self._storage = storage
        self._packed: dict[Path, Parcel] = {}

    def shipment(self, work: Pass) -> Shipment:
        """The base and the data of a pass."""
        source, name = locate(work.opening.base)
        base = self._pack(Path(source), name, _index("base", name)) if Path(source).is_dir() else None
        folder = data_folder(work.opening.task, work.opening.data)
        data = None if folder is None else self._pack(folder, folder.name, _index("data", work.opening.task))
        return Shipment(base, data)

    def _pack(self, folder: Path, name: str, index: str) -> Parcel:
        """A folder as a parcel; `index` is the name by which other machines find it in the storage."""
        if folder not in self._packed:
            self._packed[folder] = (
                self._put(folder, name) if self._storage is None else self._store(folder, name, index)
            )
        return self._packed[folder]

    def _put(self, folder: Path, name: str) -> Parcel:
        digests = _digests(folder)
        files = {inside: self._ray.put((folder / inside).read_bytes()) for inside in digests}
        return Parcel(name, _digest_of(digests), files)

    def _store(self, folder: Path, name: str, index: str) -> Parcel:
        """Put a folder into the storage, unless it came from there."""
        assert self._storage is not None
        known = _indexed(self._storage, index)
        if known is not None and folder.resolve() == _folder_of(known).resolve():
            return known
        digests = _digests(folder)
        digest = _digest_of(digests)
        files = {inside: f"inputs/{digest[:16]}/{inside}" for inside in digests}
        stored = set(self._storage.names(f"inputs/{digest[:16]}"))
        for inside, where in files.items():
            if where not in stored:
                self._storage.upload(folder / inside, where)
        parcel = Parcel(name, digest, files, self._storage.url)
        self._storage.write(index, json.dumps(asdict(parcel)).encode())  # last: it says that all files are there
        return parcel


def data_folder(task_name: str, data: str | None) -> Path | None:
    """The folder on this machine that has the data of a task; None if there is none."""
    task = find(task_name)
    found = None if task is None else sources.local(task, data)
    return None if found is None else found.folder


def _digests(folder: Path) -> dict[str, str]:
    """The files of a folder with the digests of their contents."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _digest_of(digests: Mapping[str, str]) -> str:
    """The digest of a folder."""
    text = "".join(f"{inside} {digest}\n" for inside, digest in digests.items())
    return hashlib.sha256(text.encode()).hexdigest()


def _index(kind: str, name: str) -> str:
    """The file in a storage that says which parcel has the latest contents of a base, or of a task's data."""
    return f"inputs/{kind}/{slug(name)}.json"


def _indexed(storage: Storage, index: str) -> Parcel | None:
    text = storage.read(index)
    return None if text is None else replace(Parcel(**json.loads(text)), url=storage.url)


def storing_inputs(engine: Engine, storage: Storage) -> Engine:
    """The engine, with the base and the data of its passes put into a storage first, for other machines."""
    shipping = Shipping(storage=storage)

    def run(works: Sequence[Pass], progress: Progress) -> Iterator[tuple[Pass, list[Result]]]:
        for work in works:
            shipping.shipment(work)
        yield from engine(works, progress)

    return run


# ---- unpacking


def unpacked(work: Pass, shipment: Shipment, get: Get) -> Pass:
    """The pass with the base and the data that were shipped, on this node."""
    opening = work.opening
    if shipment.base is not None:
        opening = replace(opening, base=str(unpack(shipment.base, get, make_mappable)))
    if shipment.data is not None:
        opening = replace(opening, data=str(unpack(shipment.data, get).parent))
    return replace(work, opening=opening)


def unpack(parcel: Parcel, get: Get | None = None, prepare: Callable[[Path], None] | None = None) -> Path:
    """The folder of a parcel on this node. One process fetches it and prepares it, the others wait."""
    import fcntl

    target = _folder_of(parcel)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / LOG).open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        temporary = target.parent / ".part"
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        _fetch(parcel, temporary, get)
        if prepare is not None:
            prepare(temporary)
        temporary.rename(target)
        log.write(f"{parcel.name}\n")
    return target


def _folder_of(parcel: Parcel) -> Path:
    """Where a node keeps a parcel."""
    return sources.cache() / "nodes" / parcel.digest[:16] / parcel.name


def _fetch(parcel: Parcel, folder: Path, get: Get | None) -> None:
    """Copy the files of a parcel into a folder."""
    storage = None if parcel.url is None else Storage(parcel.url)
    for inside, where in parcel.files.items():
        path = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        if storage is not None:
            storage.download(where, path)
        else:
            assert get is not None
            path.write_bytes(get(where))


# ---- what another machine put into the storage


def base_here(storage: Storage, base: str | None) -> str | None:
    """The base as given if this machine has it, else the folder of that name from the storage."""
    try:
        source, name = locate(base)
        if Path(source).is_dir():
            return base
    except ModelError:
        name = Path(base or "").name
    parcel = _indexed(storage, _index("base", name))
    return base if parcel is None else str(unpack(parcel, prepare=make_mappable))


def data_here(storage: Storage, tasks: Sequence[str], data: str | None) -> dict[str, str]:
    """The folders of the tasks whose data only the storage has."""
    folders = {}
    for task in tasks:
        try:
            missing = data_folder(task, data) is None
        except DataError:  # the folder that was named is on another machine
            missing = True
        parcel = _indexed(storage, _index("data", task)) if missing else None
        if parcel is not None:
            folders[task] = str(unpack(parcel).parent)
    return folders
