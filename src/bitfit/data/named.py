"""The named tasks: those of named.toml, and those of a user's files in the same format."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import values
from ..errors import UsageError, suggest
from .columns import normalised
from .examples import Kind
from .loading import ROLES
from .readers import READERS

BUILT_IN = Path(__file__).with_name("named.toml")
PARTIAL = ("train_sample", "heldout_sample")


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub."""

    id: str
    config: str | None = None
    revision: str | None = None

    def names(self) -> dict[str, str]:
        """Those of id, config and revision that are set."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class GlueFile:
    """A file of predictions that the GLUE server takes."""

    split: str
    file: str
    rows: int
    range: tuple[float, float] | None = None  # the numbers that the server accepts


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A task as its file describes it; named.toml explains the entries."""

    name: str
    about: str
    kind: Kind
    metric: str
    columns: Mapping[str, tuple[str, ...]]
    labels: tuple[str, ...] = ()
    hub: HubSource | None = None
    folders: tuple[str, ...] = ()
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    max_length: int | None = None
    average: bool = True
    glue: tuple[GlueFile, ...] = ()
    answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in READERS:
            raise ValueError(f'no kind "{self.kind}".{suggest(self.kind, READERS)}')
        for role in ("text", "label"):
            if not self.columns.get(role):
                raise ValueError(f'columns: "{role}" is missing')
        if self.answers and len(self.answers) != len(self.labels):
            raise ValueError("answers: there must be one for each label")
        for file in self.glue:
            if file.split not in {**ROLES, **self.splits}:
                raise ValueError(f'glue: no split "{file.split}" in splits')

    def calls(self, folder: str) -> bool:
        """Whether a folder of this name holds the task."""
        return normalised(folder) in {normalised(name) for name in (self.name, *self.folders)}


def known() -> dict[str, NamedTask]:
    """Every named task: the built-in ones, then those of the files in $BITFIT_TASKS, which may replace them."""
    paths = os.environ.get("BITFIT_TASKS", "").split(os.pathsep)
    return _read_all((BUILT_IN, *(Path(path) for path in paths if path)))


@lru_cache(maxsize=8)
def _read_all(paths: tuple[Path, ...]) -> dict[str, NamedTask]:
    tasks: dict[str, NamedTask] = {}
    for path in paths:
        tasks |= read(path)
    return tasks


def find(name: str) -> NamedTask | None:
    """The task of this name, ignoring case and punctuation; None if there is none."""
    tasks = known()
    by_normalised_name = {normalised(task_name): task for task_name, task in tasks.items()}
    return tasks.get(name) or by_normalised_name.get(normalised(name))


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
        raise UsageError(f"{path}: contains {len(tasks)} tasks, not one; set BITFIT_TASKS={path} and use their names")
    return tasks[0]


def _task(where: str, name: str, table: Any) -> NamedTask:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: must be a table")
    if "name" in table:
        raise UsageError(f"{where}: the name of a task is its heading; remove the entry name")
    task = values.read(NamedTask, {**table, "name": name}, where, UsageError)
    return replace(task, splits=_with_defaults(task.splits), partial=(*PARTIAL, *task.partial))


def _with_defaults(splits: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The usual names of train, dev and test, followed by those that the task adds."""
    merged = {role: (*names, *splits.get(role, ())) for role, names in ROLES.items()}
    for role, names in splits.items():
        merged.setdefault(role, names)
    return merged
