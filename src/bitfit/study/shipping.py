"""Folders that travel to the nodes of a cluster: packed into Ray's object store, unpacked once per node.

A node keeps what it unpacked in its cache ($BITFIT_CACHE, or bitfit in the user's cache folder) under the digest of the
contents, so that the next pass or study finds it there.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..data import sources
from ..data.named import find
from ..errors import UsageError
from ..model.base import locate
from .data import Opening
from .passes import Pass

LOG = "unpacked"  # a line for every time that a parcel was unpacked


@dataclass(frozen=True)
class Parcel:
    """A folder in the object store."""

    name: str
    digest: str
    files: Mapping[str, Any]  # path inside the folder -> object reference of its bytes


@dataclass(frozen=True)
class Shipment:
    """What a pass needs on a bare node; None where the node finds it by itself (on the hub)."""

    version: str
    base: Parcel | None
    data: Parcel | None


class Shipping:
    """Packs the base and the data of passes, each of them once."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._packed: dict[Path, Parcel] = {}

    def shipment(self, work: Pass) -> Shipment:
        """The base and the data of a pass."""
        source, name = locate(work.opening.base)
        base = self._pack(Path(source), name) if Path(source).is_dir() else None
        task = find(work.opening.task)
        place = None if task is None else sources.local(task, work.opening.data)
        return Shipment(__version__, base, None if place is None else self._pack(place.folder, place.folder.name))

    def _pack(self, folder: Path, name: str) -> Parcel:
        if folder not in self._packed:
            state = hashlib.sha256()
            files = {}
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                inside, content = str(path.relative_to(folder)), path.read_bytes()
                state.update(f"{inside} {hashlib.sha256(content).hexdigest()}\n".encode())
                files[inside] = self._ray.put(content)
            self._packed[folder] = Parcel(name, state.hexdigest(), files)
        return self._packed[folder]


def unpacked(work: Pass, shipment: Shipment, ray: Any) -> Pass:
    """The pass with the base and the data that were shipped, on this node."""
    if shipment.version != __version__:
        node = ray.util.get_node_ip_address()
        raise UsageError(f"node {node} has bitfit {__version__}, the study runs {shipment.version}; install the same")
    opening: Opening = work.opening
    if shipment.base is not None:
        opening = replace(opening, base=str(_unpack(shipment.base, ray)))
    if shipment.data is not None:
        opening = replace(opening, data=str(_unpack(shipment.data, ray).parent))
    return replace(work, opening=opening)


def _unpack(parcel: Parcel, ray: Any) -> Path:
    """The folder of a parcel on this node. Of several processes one unpacks it, the others wait."""
    import fcntl

    place = sources.cache() / "nodes" / parcel.digest[:16]
    target = place / parcel.name
    place.mkdir(parents=True, exist_ok=True)
    with (place / LOG).open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        temporary = place / ".part"
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        for inside, reference in parcel.files.items():
            path = temporary / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(ray.get(reference))
        temporary.rename(target)
        log.write(f"{parcel.name}\n")
    return target
