"""A safetensors file that is read without trust.

Deltas and checkpoints are both such files: named arrays, one JSON metadata entry, and inside it a SHA-256 over
everything else. Reading parses the header here, with no torch and no code from the file, because the checks a
hostile file needs (duplicate names, overlaps, sizes) have to come before any allocation.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Array, Tensors
from ..errors import DeltaError
from ..files import replace

ENTRY = "bitfit"
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
CODES = {dtype: code for code, dtype in DTYPES.items()}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_FIELDS = {"dtype", "shape", "data_offsets"}
MAX_HEADER = 16 << 20
MAX_TENSORS = 20_000
MAX_NAME = 256


def write(path: Path, tensors: Mapping[str, Array], meta: Mapping[str, Any]) -> int:
    """Write the file atomically; returns its size in bytes."""
    data = encode(tensors, meta)
    replace(path, data)
    return len(data)


def encode(tensors: Mapping[str, Array], meta: Mapping[str, Any]) -> bytes:
    """The bytes of the file: the same arrays and metadata give the same bytes."""
    names = sorted(tensors)
    arrays = {name: np.ascontiguousarray(tensors[name]) for name in names}
    signed = {**meta, "sha256": digest(arrays, meta)}
    header: dict[str, Any] = {"__metadata__": {ENTRY: _text(signed)}}
    offset = 0
    for name in names:
        array = arrays[name]
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(arrays[name].tobytes() for name in names)])


def digest(tensors: Mapping[str, Array], meta: Mapping[str, Any]) -> str:
    """SHA-256 over the metadata (without the digest) and over each array's name, type, shape and bytes."""
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    state = hashlib.sha256(_text(rest).encode())
    for name in sorted(tensors):
        array = tensors[name]
        state.update(f"\n{name} {CODES[array.dtype]} {array.shape}\n".encode())
        state.update(array.data if array.flags.c_contiguous else np.ascontiguousarray(array).data)
    return state.hexdigest()


def _text(meta: Mapping[str, Any]) -> str:
    return json.dumps(meta, sort_keys=True, allow_nan=False)


def read(path: Path, finite: bool = True) -> tuple[Tensors, dict[str, Any]]:
    """The arrays and the metadata of a file that passes every check; DeltaError otherwise."""
    try:
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "it is a folder" if path.is_dir() else "no such file")
        with path.open("rb", buffering=0) as file:
            size = _header_size(file.read(8))
            header = file.read(size) if size <= MAX_HEADER else b""
            _check_file_size(path, os.fstat(file.fileno()).st_size, header, size)
            file.seek(0)
            data = file.readall()
    except OSError as error:
        raise DeltaError(f"{path}: cannot be read ({error.strerror})") from error
    return decode(data, str(path), finite)


def read_claims(path: Path) -> dict[str, Any]:
    """The metadata of a file, unverified: for lists of many files."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            size = _header_size(start)
            data = start + (file.read(size) if size <= MAX_HEADER else b"")
        header, _ = _header(data, _unusable)
        return _metadata(header.get("__metadata__"), _unusable)
    except OSError as error:
        raise DeltaError(f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise DeltaError(f"not a usable bitfit file: {str(error)[:200]}") from error


def _unusable(why: str) -> DeltaError:
    return DeltaError(f"not a usable bitfit file: {why}")


def _header(data: bytes, refuse: Callable[[str], DeltaError]) -> tuple[dict[str, Any], int]:
    """The header of a file that begins with these bytes, and where its arrays begin."""
    if len(data) < 8:
        raise refuse("it is shorter than a header")
    size = _header_size(data[:8])
    if size > MAX_HEADER or 8 + size > len(data):
        raise refuse("it does not begin as a safetensors file does, or it is cut off")
    try:
        header = json.loads(data[8 : 8 + size].decode(), object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise refuse("its header is not JSON") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise refuse("its header is not a table of at most 20,000 arrays")
    return header, 8 + size


def _header_size(start: bytes) -> int:
    """The size of the header by the first 8 bytes of a file; more than MAX_HEADER if the file is shorter."""
    return int(struct.unpack("<Q", start)[0]) if len(start) == 8 else MAX_HEADER + 1


def _check_file_size(path: Path, file_size: int, header: bytes, header_size: int) -> None:
    """Refuse a file whose size does not match its header, before it is read into memory."""
    ends = [int(end) for end in re.findall(rb'"data_offsets":\[\d{1,15},(\d{1,15})\]', header)]
    if file_size != 8 + header_size + max(ends, default=0):
        raise DeltaError(f"{path}: not a usable bitfit file: its size does not match its header")


def decode(data: bytes, where: str, finite: bool = True) -> tuple[Tensors, dict[str, Any]]:
    """Check and parse the bytes of a file; `where` names it in errors."""

    def refuse(why: str) -> DeltaError:
        return DeltaError(f"{where}: not a usable bitfit file: {why}")

    try:
        return _decode(data, refuse, finite)
    except (ValueError, RecursionError, OverflowError) as error:
        raise refuse(str(error)[:200]) from error


def _decode(data: bytes, refuse: Callable[[str], DeltaError], finite: bool) -> tuple[Tensors, dict[str, Any]]:
    header, begin = _header(data, refuse)
    meta = _metadata(header.pop("__metadata__", None), refuse)
    tensors = _arrays(header, data, begin, refuse)
    if finite:
        _check_finite(tensors, np.frombuffer(data, np.uint8, offset=begin), refuse)
    if meta.get("sha256") != digest(tensors, meta):
        raise refuse("its digest differs from its content; the file is damaged or was edited")
    return tensors, meta


def _check_finite(tensors: Tensors, content: Array, refuse: Callable[[str], DeltaError]) -> None:
    floats = {name: array for name, array in tensors.items() if array.dtype.kind == "f"}
    # The arrays fill the content without gaps, so one check is enough if all of them are floats.
    if len(floats) == len(tensors) and np.isfinite(content.view(np.float32)).all():
        return
    for name, array in floats.items():
        if not np.isfinite(array).all():
            raise refuse(f"{name} contains NaN or infinity")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def _metadata(entry: object, refuse: Callable[[str], DeltaError]) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get(ENTRY), str):
        raise refuse("it has no bitfit metadata")
    meta = json.loads(entry[ENTRY], object_pairs_hook=_unique, parse_constant=_constant)
    if not isinstance(meta, dict):
        raise refuse("its metadata is not a table")
    if _text(meta) != entry[ENTRY]:  # the digest is of the parsed values: it would miss 1.00 instead of 1.0
        raise refuse("its metadata is not as bitfit writes it; the file was edited")
    return meta


def _arrays(header: dict[str, Any], data: bytes, start: int, refuse: Callable[[str], DeltaError]) -> Tensors:
    spans: list[tuple[int, int]] = []
    tensors: Tensors = {}
    for name, entry in header.items():
        if len(name) > MAX_NAME or not NAME.fullmatch(name):
            raise refuse(f"{name[:40]!r} is not a parameter name")
        dtype, shape, low, high = _entry(entry, name, refuse)
        count = math.prod(shape)
        if high - low != count * dtype.itemsize or start + high > len(data):
            raise refuse(f"the size of {name} does not match its shape")
        spans.append((low, high))
        flat = np.frombuffer(data, dtype, count, start + low)
        tensors[name] = flat if len(shape) == 1 else flat.reshape(shape)
    end = 0
    for low, high in sorted(spans):
        if low != end:
            raise refuse("its arrays overlap or leave gaps")
        end = high
    if start + end != len(data):
        raise refuse("it is longer than its arrays")
    return tensors


def _entry(
    entry: object, name: str, refuse: Callable[[str], DeltaError]
) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise refuse(f"the header entry of {name} is not one of safetensors")
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if entry["dtype"] not in ("F32", "I64"):
        raise refuse(f"{name} has type {str(entry['dtype'])[:20]!r}; only F32 and I64 occur in a bitfit file")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(shape) > 8 or len(offsets) != 2:
        raise refuse(f"{name} has no usable shape or offsets")
    for number in (*shape, *offsets):
        if type(number) is not int or not 0 <= number < 1 << 48:
            raise refuse(f"{name} has no usable shape or offsets")
    return DTYPES[entry["dtype"]], tuple(shape), offsets[0], offsets[1]
