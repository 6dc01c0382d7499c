"""Typed values from tables: every JSON or TOML table that bitfit reads becomes a dataclass here.

msgspec checks the types. It was chosen by start-up: it adds 30 ms of CPU time, pydantic 130 ms (LOG.md). It is
imported on first use, so that `bitfit --help` does not pay for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import BitfitError, suggest

Value = TypeVar("Value")

_NAMES = {
    "object": "a table",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}


def read(kind: type[Value], table: object, where: str, error: type[BitfitError]) -> Value:
    """Convert a table to a value of this dataclass; raise `error` with `where` and the key if it does not fit.

    An unknown key is an error with a suggestion. A check in the dataclass's `__post_init__` raises ValueError.
    """
    for path, key, known in _unknown_keys(kind, table):
        inside = f"{path}: " if path else ""
        raise error(f'{where}: {inside}no entry "{key}".{suggest(key, known)}')
    return read_known(kind, table, where, error)


def read_known(kind: type[Value], table: object, where: str, error: type[BitfitError]) -> Value:
    """As `read`, but unknown keys are ignored: for files that a newer bitfit may have written."""
    import msgspec

    try:
        return msgspec.convert(table, kind)
    except UnicodeError as problem:
        raise error(f"{where}: a text is not valid Unicode") from problem
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as problem:
        raise error(f"{where}: {_in_words(str(problem))}") from problem


def _unknown_keys(kind: Any, value: object, path: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Find keys of a table that its dataclass does not have: yields (path, key, known keys)."""
    arguments = get_args(kind)
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        for key, entry in value.items():
            if key in hints:
                yield from _unknown_keys(hints[key], entry, f"{path}.{key}".lstrip("."))
            else:
                yield path, str(key), list(hints)
    elif get_origin(kind) in (Union, UnionType):
        for option in arguments:
            yield from _unknown_keys(option, value, path)
    elif arguments and isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _unknown_keys(arguments[-1], entry, f"{path}.{key}".lstrip("."))
    elif arguments and isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _unknown_keys(arguments[0], entry, f"{path}[{i}]")


def _in_words(message: str) -> str:
    """Rewrite a message of msgspec in the words of a user."""
    text, _, path = message.partition(" - at ")
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        text = f'"{missing[1]}" is missing'
    expected = re.fullmatch(r"Expected `(.*)`, got `(.*)`", text)
    if expected:
        wanted = " or ".join(_NAMES.get(name, name) for name in expected[1].split(" | "))
        text = f"must be {wanted}, not {_NAMES.get(expected[2], expected[2])}"
    key = path.strip("`").removeprefix("$").lstrip(".")
    return f"{key}: {text}" if key else text
