"""Prediction files as the GLUE server takes them: a TSV per test set with the columns index and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..data import loading, sources
from ..data.named import GlueFile, NamedTask
from ..data.source import StrPath
from ..errors import DataError, UsageError
from .predictor import Predictor


def submit(
    predictor: Predictor,
    out: Path,
    *,
    task: str | None = None,
    file: Path | None = None,
    folder: StrPath | None = None,
) -> list[tuple[Path, int, int]]:
    """Answer the test sets of the delta's task; of each the file written, its rows and how many the server wants."""
    named = _task_of(predictor, task)
    written = []
    for entry, path in _test_sets(named, file, folder):
        target = out / entry.file
        files.check_target(target)
        lines = list(_lines(named, entry, predictor.answers(predictor.texts_in(path))))
        files.replace(target, ("index\tprediction\n" + "".join(lines)).encode())
        written.append((target, len(lines), entry.rows))
    return written


def _task_of(predictor: Predictor, name: str | None) -> NamedTask:
    name = name or predictor.delta.meta.name
    if name is None:
        raise UsageError("the delta was not trained on a named task; say which one it is for with --task TASK")
    task = sources.named_task(name)
    if not task.glue:
        raise UsageError(f"{task.name} is no task of GLUE, so there is no file for its server")
    if task.kind != predictor.task.kind or len(task.labels) != len(predictor.task.labels):
        raise UsageError(f"the delta answers another task than {task.name}: {predictor.task.kind}, other labels")
    return task


def _test_sets(task: NamedTask, file: Path | None, folder: StrPath | None) -> list[tuple[GlueFile, Path]]:
    if file is not None:
        return [(_entry_of(task, file), file)]
    place = sources.find(task, folder)
    found = [(entry, place.files[entry.split]) for entry in task.glue if entry.split in place.files]
    if not found:
        wanted = ", ".join(entry.split for entry in task.glue)
        raise DataError(f"{place.folder} has no {wanted} file of {task.name}; pass --file FILE")
    return found


def _entry_of(task: NamedTask, file: Path) -> GlueFile:
    named = [entry for entry in task.glue if loading.stem(file) in task.splits[entry.split]]
    if len(task.glue) > 1 and not named:
        names = ", ".join(name for entry in task.glue for name in task.splits[entry.split])
        raise UsageError(f"{file}: {task.name} has several test sets; name the file after its own: {names}")
    return (named or task.glue)[0]


def _lines(task: NamedTask, entry: GlueFile, answers: Iterable[dict[str, Any]]) -> Iterator[str]:
    for index, answer in enumerate(answers):
        yield f"{index}\t{_number(entry, answer['value']) if 'value' in answer else _word(task, answer['label'])}\n"


def _number(entry: GlueFile, value: float) -> str:
    low, high = entry.range or (value, value)
    return f"{min(max(value, low), high):.3f}"


def _word(task: NamedTask, label: str) -> str:
    """The server's word for a label; a delta of a plain file knows its labels by number."""
    if label in task.labels:
        place = task.labels.index(label)
    elif label.isdecimal() and int(label) < len(task.labels):
        place = int(label)
    else:
        raise DataError(f'the delta answers "{label}", which is no label of {task.name}: {", ".join(task.labels)}')
    return (task.answers or task.labels)[place]
