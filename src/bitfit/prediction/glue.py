"""Prediction files for the GLUE server: a TSV per test set with the columns index and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
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
    """Predict the test sets of the delta's task. Returns for each the file, its rows and the rows that are expected."""
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
        raise UsageError("the delta was not trained on a named task; pass its task with --task TASK")
    task = sources.named_task(name)
    if not task.glue:
        raise UsageError(f"{task.name} is not a task of GLUE, so the GLUE server takes no predictions for it")
    if task.kind != predictor.task.kind or len(task.labels) != len(predictor.task.labels):
        raise UsageError(f"the delta does not fit {task.name}: its kind ({predictor.task.kind}) or its labels differ")
    return task


def _test_sets(task: NamedTask, file: Path | None, folder: StrPath | None) -> list[tuple[GlueFile, Path]]:
    if file is not None:
        return [(_entry_of(task, file), file)]
    task_folder = sources.find(task, folder)
    test_sets = []
    for entry in task.glue:
        if entry.split in task_folder.files:
            test_sets.append((entry, task_folder.files[entry.split]))
    if not test_sets:
        wanted = ", ".join(entry.split for entry in task.glue)
        raise DataError(f"{task_folder.folder} has no {wanted} file of {task.name}; pass --file FILE")
    return test_sets


def _entry_of(task: NamedTask, file: Path) -> GlueFile:
    """The test set that a file holds, by the name of the file."""
    matching = [entry for entry in task.glue if loading.stem(file) in task.splits[entry.split]]
    if len(task.glue) > 1 and not matching:
        names = ", ".join(chain.from_iterable(task.splits[entry.split] for entry in task.glue))
        raise UsageError(f"{file}: {task.name} has several test sets; name the file after one of them: {names}")
    return (matching or task.glue)[0]


def _lines(task: NamedTask, entry: GlueFile, answers: Iterable[dict[str, Any]]) -> Iterator[str]:
    for index, answer in enumerate(answers):
        prediction = _number(entry, answer["value"]) if "value" in answer else _word(task, answer["label"])
        yield f"{index}\t{prediction}\n"


def _number(entry: GlueFile, value: float) -> str:
    low, high = entry.range or (value, value)
    return f"{min(max(value, low), high):.3f}"


def _word(task: NamedTask, label: str) -> str:
    """The server's word for a label. A delta that was trained on a plain file may have numbers as labels."""
    if label in task.labels:
        number = task.labels.index(label)
    elif label.isdecimal() and int(label) < len(task.labels):
        number = int(label)
    else:
        raise DataError(f'the delta answers "{label}", which is not a label of {task.name}: {", ".join(task.labels)}')
    return (task.answers or task.labels)[number]
