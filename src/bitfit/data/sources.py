"""Finding data: a path, or a named task in a local folder, in the cache, or on the hub, in this order."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError, suggest
from . import loading, named
from .columns import Sample
from .examples import Dataset, Files, Kind
from .loading import Published
from .named import NamedTask
from .readers import READERS
from .readers.reader import first_known
from .source import DataFile, RowSource, StrPath

HOLDOUT_SHARE = 0.2


@dataclass(frozen=True)
class TaskFolder:
    """A folder that holds a named task, with the file of every split in it."""

    folder: Path
    files: Mapping[str, Path]

    def notes(self, task: NamedTask) -> list[str]:
        """A note on the folder, and one on every file that has only some rows of the published split."""
        notes = [f"{task.name} is read from {self.folder}."]
        for split, file in self.files.items():
            if loading.stem(file) in task.partial:
                notes.append(f"{file.name} is taken as {split}; it has only some rows of the published split.")
        return notes


# ---------------------------------------------------------------- names


def named_task(name: str) -> NamedTask:
    """The task of this name, or the one task of a TOML file."""
    if name.endswith(".toml"):
        return named.only_task(Path(name))
    task = named.find(name)
    if task is None:
        raise UsageError(f'no task "{name}".{suggest(name, [*named.known(), *READERS])}')
    return task


def kind_or_task(name: str | None) -> tuple[Kind | None, NamedTask | None]:
    """The value of --task as a kind or as a named task; the other is None."""
    if name is None or name in READERS:
        return name, None
    return None, named_task(name)


def path_or_task(source: StrPath) -> tuple[Path | None, NamedTask | None, list[str]]:
    """A path or a named task, with notes. An existing path takes precedence over a task of the same name."""
    path = Path(source)
    text = os.fspath(source)
    task = named.find(text) if path.name == text else None
    if path.exists() and task is not None:
        hint = f"--task {task.name} reads it as that task"
        return path, None, [f"{text} is read as a path, not as the named task; {hint}."]
    if path.exists():
        return path, None, []
    if task is not None:
        return None, task, []
    if path.parent == Path() and not path.suffix:
        known = suggest(text, named.known())
        raise DataError(f"{text} is neither an existing file nor a named task.{known}")
    return path, None, []


@dataclass(frozen=True, eq=False)
class Source:
    """A path or a named task whose training file has been read."""

    published: Published
    follows: NamedTask | None  # the named task whose columns, labels and metric it follows, if any
    notes: tuple[str, ...]

    def dataset(self, protocol: str = "published", train_size: int | None = None, seed: int = 0) -> Dataset:
        """The data set under a protocol: the published splits, or dev held out of the training rows."""
        share = HOLDOUT_SHARE if protocol == "holdout" else None
        dataset = self.published.dataset(train_size, seed, share)
        return replace(dataset, notes=(*self.notes, *dataset.notes))


def read(
    source: StrPath | Files,
    *,
    folder: StrPath | None = None,
    encoding: str | None = None,
    task: str | None = None,
    separator: str | None = None,
    **columns: str | None,
) -> Source:
    """Find and read the training file of a path or a named task. `Files` were found before, or are data in memory."""
    kind, requested_task = kind_or_task(task)
    files, source_task, notes = _find_files(source, folder, encoding)
    if source_task:
        other_task = requested_task is not None and requested_task is not source_task
        other_kind = kind is not None and kind != source_task.kind
        if other_task or other_kind:
            raise UsageError(f"--task {task}: {source_task.name} is a named task already; remove --task")
    follows = requested_task or source_task
    sample = Sample.of(files.train)
    names = _columns(follows, sample, columns) if follows else columns
    published = loading.read(
        files,
        task=follows.kind if follows else kind,
        labels=follows.labels if follows else (),
        text=names.get("text"),
        text_pair=names.get("text_pair"),
        label=names.get("label"),
        separator=separator,
        sample=sample,
    )
    return Source(published, follows, tuple(notes))


def _find_files(
    source: StrPath | Files, folder: StrPath | None, encoding: str | None
) -> tuple[Files, NamedTask | None, list[str]]:
    """The files of a source, the named task that the source is, if any, and notes."""
    if isinstance(source, Files):
        return source, None, []
    path, task, notes = path_or_task(source)
    if task is not None:
        task_folder = find(task, folder)
        return _files(task, task_folder), task, task_folder.notes(task)
    assert path is not None
    files, renamed = loading.find_files(path, encoding)
    return files, None, notes + renamed


def load(
    source: StrPath | Files,
    *,
    protocol: str = "published",
    train_size: int | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Dataset, NamedTask | None]:
    """The data set of a path or a named task, and the task it follows, if any; `options` are those of `read`."""
    data = read(source, **options)
    return data.dataset(protocol, train_size, seed), data.follows


def _files(task: NamedTask, task_folder: TaskFolder) -> Files:
    if "train" not in task_folder.files:
        names = ", ".join(task.splits["train"])
        raise DataError(f"{task_folder.folder} has no train file of {task.name} ({names}, with a known extension)")
    files = {split: DataFile(path) for split, path in task_folder.files.items()}
    more = {split: file for split, file in files.items() if split not in loading.ROLES}
    return Files(files["train"], files.get("dev"), files.get("test"), more)


def _columns(task: NamedTask, sample: Sample, requested: Mapping[str, str | None]) -> dict[str, str | None]:
    """The file's column for every role of the task; a column that the user names takes precedence."""
    columns: dict[str, str | None] = {}
    for role, names in task.columns.items():
        name = requested.get(role) or first_known(names, sample.names)
        if name is None:
            option = f"--{role.replace('_', '-')}"
            raise DataError(
                f"{sample.path} has no column for the {role.replace('_', ' ')} of {task.name} ({', '.join(names)}); "
                f"pass {option} with one of: {', '.join(sample.names)}"
            )
        columns[role] = name
    return columns


def split_file(
    source: StrPath, split: str | None, folder: StrPath | None, encoding: str | None = None
) -> tuple[RowSource, NamedTask | None, list[str]]:
    """The file to evaluate on: a path, the test, dev or train file of a folder, or a split of a named task."""
    path, task, notes = path_or_task(source)
    if task is None:
        assert path is not None
        return _in_folder(path, split, notes, encoding)
    task_folder = find(task, folder)
    files = task_folder.files
    wanted = split or "dev"
    if split is None and "dev" not in files:
        wanted = "test"
    if wanted not in files:
        raise DataError(f"{task_folder.folder} has no {wanted} file of {task.name}; it has: {', '.join(files)}")
    return DataFile(files[wanted]), task, [f"{task.name}, {wanted}: {files[wanted]}."]


def _in_folder(
    path: Path, split: str | None, notes: list[str], encoding: str | None
) -> tuple[RowSource, None, list[str]]:
    if not path.is_dir():
        if split is not None:
            raise UsageError(f"--split {split}: {path} is a file; only folders and named tasks have splits")
        return DataFile(path, encoding), None, notes
    files, _ = loading.find_files(path, encoding)
    if split is None:
        return files.test or files.dev or files.train, None, notes
    chosen = {"train": files.train, "dev": files.dev, "test": files.test}.get(split)
    if chosen is None:
        raise DataError(f"{path} has no {split} file")
    return chosen, None, notes


# ---------------------------------------------------------------- local folders


def roots(folder: StrPath | None = None) -> list[Path]:
    """The folders to search: --data or $BITFIT_DATA, then the cache of data sets from the hub."""
    option = "--data" if folder else "$BITFIT_DATA"
    chosen = os.fspath(folder) if folder else os.environ.get("BITFIT_DATA", "")
    if chosen and not Path(chosen).is_dir():
        raise DataError(f"{option} {chosen}: no such folder")
    folders = [Path(chosen)] if chosen else []
    if cache().is_dir():
        folders.append(cache())
    return folders


def cache() -> Path:
    """The folder of data sets from the hub: $BITFIT_CACHE, or bitfit in the user's cache folder."""
    configured = os.environ.get("BITFIT_CACHE")
    if configured:
        return Path(configured)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "bitfit"


def local(task: NamedTask, folder: StrPath | None = None) -> TaskFolder | None:
    """The first folder that holds a file of the task; this never touches the network."""
    for root in roots(folder):
        children = sorted(child for child in root.iterdir() if child.is_dir() and task.calls(child.name))
        for child in children:
            files = _splits_in(child, task)
            if files:
                return TaskFolder(child, files)
    return None


def _splits_in(folder: Path, task: NamedTask) -> dict[str, Path]:
    files = loading.by_stem(folder)
    by_split = {}
    for split, names in task.splits.items():
        file = loading.one_of(files, [name.lower() for name in names])
        if file is not None:
            by_split[split] = file
    return by_split


def find(task: NamedTask, folder: StrPath | None = None) -> TaskFolder:
    """The folder of a task's data: a local one, or the cache after fetching it from the hub."""
    task_folder = local(task, folder)
    if task_folder is None:
        _fetch(task, cache())
        task_folder = local(task, folder)
    if task_folder is None:
        raise _no_data(task, f"the cached copy in {cache()} is incomplete; delete it")
    return task_folder


def listing(folder: StrPath | None = None) -> list[dict[str, Any]]:
    """Every named task and the folder of its data, as `bitfit tasks --json` prints it."""
    return [_entry(task, local(task, folder)) for task in named.known().values()]


def _entry(task: NamedTask, task_folder: TaskFolder | None) -> dict[str, Any]:
    files = task_folder.files if task_folder else {}
    return {
        "name": task.name,
        "about": task.about,
        "kind": task.kind,
        "metric": task.metric,
        "labels": task.labels,
        "average": task.average,
        "max_length": task.max_length,
        "hub": task.hub.names() if task.hub else {},
        "folder": str(task_folder.folder) if task_folder else None,
        "splits": {split: file.name for split, file in files.items()},
        "partial": [split for split, file in files.items() if loading.stem(file) in task.partial],
    }


# ---------------------------------------------------------------- the hub


def _fetch(task: NamedTask, target: Path) -> None:
    """Copy the task's splits from the hub into a folder of the cache, atomically."""
    known = set(chain.from_iterable(task.splits.values()))
    splits = {split: rows for split, rows in _from_hub(task).items() if split in known}
    if not splits:
        raise _no_data(task, "none of its splits there is known")
    target.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target, prefix=f".{task.name}."))
    try:
        for split, rows in splits.items():
            with gzip.open(building / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in _plain_rows(rows))
        # The folder gets its name last, so its existence means that it is complete. Another process may be faster.
        with suppress(OSError):
            building.replace(target / task.name)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _from_hub(task: NamedTask) -> Mapping[str, Any]:
    if not task.hub:
        raise _no_data(task, "it is not on the hub")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise _no_data(task, "HF_HUB_OFFLINE is set")
    try:
        import datasets
    except ImportError as error:
        raise _no_data(task, 'datasets is not installed: pip install "bitfit[hub]"') from error
    source, config = task.hub.id, task.hub.config
    settings = {} if task.hub.revision is None else {"revision": task.hub.revision}
    try:
        if not Path(source).exists():
            # One short request, because load_dataset would retry for minutes without a network.
            from huggingface_hub import HfApi

            HfApi().dataset_info(source, timeout=5)
        splits: Mapping[str, Any] = datasets.load_dataset(source, config, **settings)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _no_data(task, lines[0][:200]) from error
    return splits


def _no_data(task: NamedTask, reason: str) -> DataError:
    locally = f"put it at DIR/{task.name}/train.jsonl and dev.jsonl and pass --data DIR or set BITFIT_DATA=DIR"
    hub = f" ({task.hub.id})" if task.hub else ""
    return DataError(f"no data of {task.name}: {locally}; it cannot be loaded from the hub{hub}: {reason}")


def _plain_rows(split: Any) -> Iterator[dict[str, Any]]:
    """The rows of a split. Lists of tag numbers become lists of tag names, as the reader of tagging expects."""
    tag_names: dict[str, list[str]] = {}
    for column, feature in getattr(split, "features", {}).items():
        item: Any = getattr(feature, "feature", None)  # of a list
        if hasattr(item, "names"):
            tag_names[column] = item.names
    for row in split:
        plain = dict(row)
        for column, names in tag_names.items():
            plain[column] = [names[number] for number in row[column]]
        yield plain
