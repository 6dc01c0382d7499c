"""Decoding of files into lines of text: compression, encodings, and files that are not text."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError, UsageError
from .source import DataFile

# First bytes -> format. They count more than the name of the file.
SIGNATURES = {
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive (or an Excel or Word document)",
    b"\x1f\x8b": "compressed by gzip; add .gz to its name",
    b"PAR1": "a Parquet file; name it .parquet",
    b"\xd0\xcf\x11\xe0": "an old Excel or Word document",
    b"SQLite format 3": "an SQLite database",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"BZh": "compressed by bzip2; unpack it",
    b"\xfd7zXZ": "compressed by xz; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
}
BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
HEAD = 4096  # bytes at the start of a file that are examined

Stream = io.BufferedReader | gzip.GzipFile
WESTERN = 0.25  # the share of accented letters up to which text may be of a Western European language


@contextmanager
def opened(file: DataFile) -> Iterator[Stream]:
    """The bytes of a file, decompressed if its name ends in .gz."""
    path = file.path
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read to its end: {error}.") from error


def lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """The lines of a text file by number, with their line ends."""
    with opened(file) as stream:
        head = stream.peek(HEAD)[:HEAD]
        refuse_other_formats(file.path, head)
        encoding = check_encoding(file.encoding) or _utf16(head)
        if encoding is None:
            yield from _utf8_lines(file, stream)
            return
        if file.encoding is None:
            file.recognised = encoding.upper()
        yield from _decoded_lines(file, stream, encoding)


def check_encoding(name: str | None) -> str | None:
    """Python's name of an encoding; None for None; UsageError if Python does not know it."""
    if name is None:
        return None
    try:
        return codecs.lookup(name).name
    except LookupError as error:
        raise UsageError(f"--encoding {name}: not known; use utf-8, cp1252, latin-1 or utf-16") from error


def refuse_other_formats(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes are those of another format than text."""
    for start, what in SIGNATURES.items():
        if head.startswith(start):
            raise DataError(f"{path} is {what}, not a text file.")


def _utf16(head: bytes) -> str | None:
    """Recognise UTF-16 by its byte order mark, or by the zero bytes between ASCII characters; None if it is neither."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    start = head[:64]
    if len(start) >= 8 and not any(start[0::2]) and all(start[1::2]):
        return "utf-16-be"
    if len(start) >= 8 and not any(start[1::2]) and all(start[0::2]):
        return "utf-16-le"
    return None


def _decoded_lines(file: DataFile, stream: Stream, encoding: str) -> Iterator[tuple[int, str]]:
    line = 0
    try:
        with io.TextIOWrapper(stream, encoding, newline="\n") as texts:
            for line, text in enumerate(texts, 1):
                yield line, text.removeprefix("\ufeff") if line == 1 else text
    except UnicodeError as error:
        where = f"{file}, after line {line}" if line else str(file)
        raise DataError(f"{where}: not {encoding} text; pass another --encoding.") from error


def _utf8_lines(file: DataFile, stream: Stream) -> Iterator[tuple[int, str]]:
    """Lines of UTF-8. A file whose first line with an accent is not UTF-8 is read as cp1252, if that looks right."""
    encoding = "utf-8"
    ascii_so_far = not stream.peek(HEAD).startswith(codecs.BOM_UTF8)
    for line, raw in enumerate(stream, 1):
        if b"\0" in raw:
            position = raw.index(0) + 1
            raise DataError(f"{file}, line {line}: a NUL byte at byte {position}; save the file as UTF-8 text.")
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError as error:
            if encoding != "utf-8" or not ascii_so_far or not _looks_western(raw + stream.peek(HEAD)[:HEAD]):
                raise _not_text(file, line, raw, error) from error
            file.recognised = encoding = "cp1252"
            text = raw.decode(encoding)
        ascii_so_far = ascii_so_far and raw.isascii()
        yield line, text.removeprefix("\ufeff") if line == 1 else text


def _looks_western(sample: bytes) -> bool:
    try:
        letters = [character for character in sample.decode("cp1252") if character.isalpha()]
    except UnicodeDecodeError:
        return False
    accented = sum(not letter.isascii() for letter in letters)
    return accented <= WESTERN * len(letters)


def _not_text(file: DataFile, line: int, raw: bytes, error: UnicodeDecodeError) -> DataError:
    byte = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1}"
    problem = f"{byte} is not {error.encoding.upper()}"
    return DataError(f"{file}, line {line}: {problem}; save the file as UTF-8 or pass its --encoding.")
