"""The named tasks: what named.toml says of each, and a user's own files of the same form through the same door."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UsageError, suggest
from .examples import Kind
from .loading import ROLES
from .readers import READERS

BUILT_IN = Path(__file__).with_name("named.toml")
PARTIAL = ("train_sample", "heldout_sample")


@dataclass(frozen=True)
class NamedTask:
    """A task as its file describes it; named.toml says what each entry means."""

    name: str
    about: str
    kind: Kind
    metric: str
    columns: Mapping[str, tuple[str, ...]]
    labels: tuple[str, ...] = ()
    hub: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    max_length: int | None = None
    average: bool = True
    glue: tuple[Mapping[str, Any], ...] = ()
    answers: tuple[str, ...] = ()

    def calls(self, folder: str) -> bool:
        """Whether a folder of this name is meant to be the task's."""
        return bare(folder) in {bare(name) for name in (self.name, *self.folders)}


def bare(name: str) -> str:
    """A name without case and punctuation: SST-2, sst_2 and sst2 are the same."""
    return re.sub(r"[\W_]", "", name.lower())


def known() -> dict[str, NamedTask]:
    """Every named task: ours, then those of the files in $BITFIT_TASKS, which may replace ours."""
    own = os.environ.get("BITFIT_TASKS", "")
    return _read_all((BUILT_IN, *(Path(part) for part in own.split(os.pathsep) if part)))


@lru_cache(maxsize=8)
def _read_all(paths: tuple[Path, ...]) -> dict[str, NamedTask]:
    return {name: task for path in paths for name, task in read(path).items()}


def find(name: str) -> NamedTask | None:
    """The task of this name, however it is spelt; None if there is none."""
    tasks = known()
    spelt = {bare(own): task for own, task in tasks.items()}
    return tasks.get(name) or spelt.get(bare(name))


def read(path: Path) -> dict[str, NamedTask]:
    """The tasks of a file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: the file of tasks cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a TOML file of tasks ({error})") from error
    return {name: _task(f"{path}, task {name}", name, table) for name, table in tables.items()}


def only_task(path: Path) -> NamedTask:
    """The one task of a file."""
    tasks = list(read(path).values())
    if len(tasks) != 1:
        raise UsageError(f"{path}: {len(tasks)} tasks where one is needed; set BITFIT_TASKS={path} and use their names")
    return tasks[0]


_SHAPES: dict[str, str] = {
    "about": "a text", "kind": "a text", "metric": "a text", "columns": "a table of lists of texts",
    "labels": "a list of texts", "hub": "a table of texts", "folders": "a list of texts",
    "splits": "a table of lists of texts", "partial": "a list of texts", "max_length": "a whole number",
    "average": "true or false", "glue": "a list of tables", "answers": "a list of texts",
}  # fmt: skip


def _task(where: str, name: str, table: object) -> NamedTask:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: must be a table")
    for key, value in table.items():
        if key not in _SHAPES:
            raise UsageError(f'{where}: no entry "{key}".{suggest(key, _SHAPES)}')
        if not _fits(value, _SHAPES[key]):
            raise UsageError(f"{where}: {key} must be {_SHAPES[key]}")
    needed = [entry.name for entry in fields(NamedTask)][1:5]
    missing = [key for key in needed if key not in table]
    if missing:
        raise UsageError(f"{where}: lacks {', '.join(missing)}")
    _check(where, table)
    values = {key: _frozen(value) for key, value in table.items()}
    values["splits"] = _with_defaults(values.get("splits", {}))
    values["partial"] = (*PARTIAL, *values.get("partial", ()))
    return NamedTask(name=name, **values)


def _check(where: str, table: dict[str, Any]) -> None:
    if table["kind"] not in READERS:
        raise UsageError(f'{where}: no kind "{table["kind"]}".{suggest(table["kind"], READERS)}')
    for role in ("text", "label"):
        if not table["columns"].get(role):
            raise UsageError(f"{where}: columns lacks {role}")
    if "hub" in table and "id" not in table["hub"]:
        raise UsageError(f"{where}: hub lacks id")
    if "answers" in table and len(table["answers"]) != len(table.get("labels", ())):
        raise UsageError(f"{where}: answers must be as many as labels")
    for entry in table.get("glue", ()):
        if not {"split", "file", "rows"} <= set(entry):
            raise UsageError(f"{where}: an entry of glue needs split, file and rows")
        if entry["split"] not in {**ROLES, **table.get("splits", {})}:
            raise UsageError(f"{where}: glue names the split {entry['split']}, which splits does not")


def _fits(value: object, shape: str) -> bool:
    if shape.startswith("a list of texts"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if shape.startswith("a list of tables"):
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if shape.startswith("a table of "):
        inner = "a list of texts" if shape.endswith("lists of texts") else "a text"
        return isinstance(value, dict) and all(_fits(item, inner) for item in value.values())
    plain: dict[str, type] = {"a text": str, "a whole number": int, "true or false": bool}
    return type(value) is plain[shape]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _with_defaults(splits: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The usual names of train, dev and test, then the task's own."""
    usual = {role: (*names, *splits.get(role, ())) for role, names in ROLES.items()}
    return usual | {role: names for role, names in splits.items() if role not in usual}
