"""Label cells that hold any number of labels: lists, separated names, or a column of 0 and 1 for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError, suggest
from ..examples import Examples, Table
from ..formats import fault

SEPARATOR = re.compile(r"[|;]")
ON, OFF = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "", "none")


def label_set(path: Path, line: int, cell: object) -> tuple[str, ...]:
    """The labels of a cell: a list, or names between | or ;."""
    parts = cell if isinstance(cell, list | tuple) else SEPARATOR.split(str(cell))
    if not all(isinstance(part, str | int) for part in parts):
        raise fault(path, line, "a list of labels holds something that is neither a text nor a whole number.")
    return tuple(dict.fromkeys(name for part in parts if (name := str(part).strip())))


def chosen_columns(path: Path, line: int, values: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """The columns that hold a 1."""
    cells = {name: str(values.get(name)).strip().lower() for name in names}
    for name, cell in cells.items():
        if cell not in ON + OFF:
            raise fault(path, line, f'column "{name}" holds "{values.get(name)}", which is neither 0 nor 1.')
    return tuple(name for name, cell in cells.items() if cell in ON)


def names(table: Table) -> tuple[str, ...]:
    """All labels, sorted."""
    found = sorted({name for labels in table.labels for name in labels})
    if not found:
        raise DataError(f"{table.path}: no row has a label; there is nothing to learn.")
    return tuple(found)


def examples(table: Table, labels: Sequence[str]) -> Examples:
    """The texts with the numbers of their labels."""
    index = {name: number for number, name in enumerate(labels)}
    for line, own in zip(table.lines, table.labels, strict=True):
        for name in own:
            if name not in index:
                raise fault(table.path, line, f'label "{name}" is not in the training data.{suggest(name, labels)}')
    numbered = [tuple(sorted(index[name] for name in own)) for own in table.labels]
    return Examples(table.texts, table.pairs, numbered, table.lines)
