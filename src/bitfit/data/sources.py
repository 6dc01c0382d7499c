"""Where data comes from: a path, or a named task in a local folder, in the cache, or on the hub; in this order."""

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
from .source import DataFile, RowSource, StrPath

HOLDOUT_SHARE = 0.2


@dataclass(frozen=True)
class Place:
    """A folder that holds a task, with the file of every split found in it."""

    folder: Path
    files: Mapping[str, Path]

    def notes(self, task: NamedTask) -> list[str]:
        """One sentence for the folder and one for every file that is not the published split."""
        taken = [f"{task.name} is read from {self.folder}."]
        for split, file in self.files.items():
            if loading.stem(file) in task.partial:
                taken.append(f"{file.name} is taken as {split}; it is only a part of the published split.")
        return taken


# ---------------------------------------------------------------- what a name means


def named_task(name: str) -> NamedTask:
    """The task of this name, or the one task of a TOML file."""
    if name.endswith(".toml"):
        return named.only_task(Path(name))
    task = named.find(name)
    if task is None:
        raise UsageError(f'no task "{name}".{suggest(name, [*named.known(), *READERS])}')
    return task


def kind_or_task(name: str | None) -> tuple[Kind | None, NamedTask | None]:
    """What --task means: a kind, or a named task."""
    if name is None or name in READERS:
        return name, None
    return None, named_task(name)


def path_or_task(source: StrPath) -> tuple[Path | None, NamedTask | None, list[str]]:
    """A path that exists wins over a task of the same name, and that is said."""
    path, text = Path(source), os.fspath(source)
    task = named.find(text) if path.name == text else None
    if path.exists():
        other = f"; --task {task.name} reads it as that task" if task else ""
        return path, None, [f"{text} is taken as the path here, not as the named task{other}."] if task else []
    if task is not None:
        return None, task, []
    if path.parent == Path() and not path.suffix:
        known = suggest(text, named.known())
        raise DataError(f"{text} does not exist here, and no named task is called so.{known}")
    return path, None, []


@dataclass(frozen=True, eq=False)
class Source:
    """A path or a named task, its training file read."""

    published: Published
    follows: NamedTask | None  # the named task whose columns, labels and metric it follows, if any
    notes: tuple[str, ...]

    def dataset(self, protocol: str = "published", train_size: int | None = None, seed: int = 0) -> Dataset:
        """The data set under a protocol."""
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
    kind, asked = kind_or_task(task)
    files, meant, notes = _found(source, folder, encoding)
    if meant and ((asked or meant) is not meant or (kind or meant.kind) != meant.kind):
        raise UsageError(f"--task {task}: {meant.name} is a task of its own; remove --task")
    follows = asked or meant
    sample = Sample.of(files.train)
    found = _columns(follows, sample, columns) if follows else columns
    published = loading.read(
        files,
        task=follows.kind if follows else kind,
        labels=follows.labels if follows else (),
        text=found.get("text"),
        text_pair=found.get("text_pair"),
        label=found.get("label"),
        separator=separator,
        sample=sample,
    )
    return Source(published, follows, tuple(notes))


def _found(
    source: StrPath | Files, folder: StrPath | None, encoding: str | None
) -> tuple[Files, NamedTask | None, list[str]]:
    if isinstance(source, Files):
        return source, None, []
    path, task, notes = path_or_task(source)
    if task is not None:
        place = find(task, folder)
        return _files(task, place), task, place.notes(task)
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
    found = read(source, **options)
    return found.dataset(protocol, train_size, seed), found.follows


def _files(task: NamedTask, place: Place) -> Files:
    if "train" not in place.files:
        names = ", ".join(task.splits["train"])
        raise DataError(f"{place.folder} has no train file of {task.name} ({names}, with a known extension)")
    files = {split: DataFile(path) for split, path in place.files.items()}
    more = {split: file for split, file in files.items() if split not in loading.ROLES}
    return Files(files["train"], files.get("dev"), files.get("test"), more)


def _columns(task: NamedTask, sample: Sample, given: Mapping[str, str | None]) -> dict[str, str | None]:
    """The task's columns as this file calls them; what the user names wins."""
    there = sample.names
    found: dict[str, str | None] = {}
    for role, names in task.columns.items():
        name = given.get(role) or next((name for name in names if name in there), None)
        if name is None:
            option = f"--{role.replace('_', '-')}"
            raise DataError(
                f"{sample.path} has no column for the {role.replace('_', ' ')} of {task.name} ({', '.join(names)}); "
                f"pass {option} with one of: {', '.join(there)}"
            )
        found[role] = name
    return found


def split_file(
    source: StrPath, split: str | None, folder: StrPath | None, encoding: str | None = None
) -> tuple[RowSource, NamedTask | None, list[str]]:
    """The file to evaluate on: a path, the test, dev or train file of a folder, or a split of a named task."""
    path, task, notes = path_or_task(source)
    if task is None:
        assert path is not None
        return _in_folder(path, split, notes, encoding)
    place = find(task, folder)
    wanted = split or "dev"
    if split is None and "dev" not in place.files:
        wanted = "test"
    if wanted not in place.files:
        raise DataError(f"{place.folder} has no {wanted} file of {task.name}; it has: {', '.join(place.files)}")
    return DataFile(place.files[wanted]), task, [f"{task.name}, {wanted}: {place.files[wanted]}."]


def _in_folder(
    path: Path, split: str | None, notes: list[str], encoding: str | None
) -> tuple[RowSource, None, list[str]]:
    if not path.is_dir():
        if split is not None:
            raise UsageError(f"--split {split}: {path} is a file; a split is of a folder or a named task")
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
    """The folders to look in: --data or $BITFIT_DATA, then what was fetched from the hub before."""
    chosen = os.fspath(folder) if folder else os.environ.get("BITFIT_DATA", "")
    if chosen and not Path(chosen).is_dir():
        raise DataError(f"{'--data' if folder else '$BITFIT_DATA'} {chosen}: no such folder")
    return [*([Path(chosen)] if chosen else []), *([cache()] if cache().is_dir() else [])]


def cache() -> Path:
    """Where data sets of the hub are kept: $BITFIT_CACHE, or bitfit in the user's cache folder."""
    own = os.environ.get("BITFIT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitfit"


def local(task: NamedTask, folder: StrPath | None = None) -> Place | None:
    """The first folder that holds a file of the task; this never touches the network."""
    for root in roots(folder):
        own = sorted(child for child in root.iterdir() if child.is_dir() and task.calls(child.name))
        for child in own:
            files = _splits_in(child, task)
            if files:
                return Place(child, files)
    return None


def _splits_in(folder: Path, task: NamedTask) -> dict[str, Path]:
    there = loading.by_stem(folder)
    found = {}
    for split, names in task.splits.items():
        file = loading.one_of(there, [name.lower() for name in names])
        if file is not None:
            found[split] = file
    return found


def find(task: NamedTask, folder: StrPath | None = None) -> Place:
    """Where a task's data is: in a local folder, or fetched from the hub into the cache."""
    place = local(task, folder)
    if place is None:
        _fetch(task, cache())
        place = local(task, folder)
    if place is None:
        raise _nowhere(task, f"what is kept of it in {cache()} is no use; delete it")
    return place


def listing(folder: StrPath | None = None) -> list[dict[str, Any]]:
    """Every named task with where its data was found, as `bitfit tasks --json` prints it."""
    return [_entry(task, local(task, folder)) for task in named.known().values()]


def _entry(task: NamedTask, place: Place | None) -> dict[str, Any]:
    files = place.files if place else {}
    return {
        **{key: getattr(task, key) for key in ("name", "about", "kind", "metric", "labels", "average", "max_length")},
        "hub": task.hub.names() if task.hub else {},
        "folder": str(place.folder) if place else None,
        "splits": {split: file.name for split, file in files.items()},
        "partial": [split for split, file in files.items() if loading.stem(file) in task.partial],
    }


# ---------------------------------------------------------------- the hub


def _fetch(task: NamedTask, target: Path) -> None:
    """Copy the task's splits from the hub into a folder of the cache, all or nothing."""
    known = set(chain.from_iterable(task.splits.values()))
    splits = {split: rows for split, rows in _from_hub(task).items() if split in known}
    if not splits:
        raise _nowhere(task, "the hub has no split that is known")
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
        raise _nowhere(task, "it is not on the hub")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise _nowhere(task, "HF_HUB_OFFLINE is set")
    try:
        import datasets
    except ImportError as error:
        raise _nowhere(task, 'datasets is not installed: pip install "bitfit[hub]"') from error
    source, config = task.hub.id, task.hub.config
    settings = {} if task.hub.revision is None else {"revision": task.hub.revision}
    try:
        if not Path(source).exists():
            # One short question instead of minutes of retries when there is no network.
            from huggingface_hub import HfApi

            HfApi().dataset_info(source, timeout=5)
        found: Mapping[str, Any] = datasets.load_dataset(source, config, **settings)
    except Exception as error:
        raise _nowhere(task, (str(error).strip().splitlines() or [type(error).__name__])[0][:200]) from error
    return found


def _nowhere(task: NamedTask, reason: str) -> DataError:
    here = f"put it at DIR/{task.name}/train.jsonl and dev.jsonl and pass --data DIR or set BITFIT_DATA=DIR"
    hub = f" ({task.hub.id})" if task.hub else ""
    return DataError(f"no data of {task.name}: {here}, or from the hub{hub}: {reason}")


def _plain_rows(split: Any) -> Iterator[dict[str, Any]]:
    """Rows as files hold them: numbers of tags become their names, since a sentence's tags are no places in labels."""
    names = {
        column: feature.feature.names
        for column, feature in getattr(split, "features", {}).items()
        if hasattr(getattr(feature, "feature", None), "names")
    }
    for row in split:
        plain = dict(row)
        for column, known in names.items():
            plain[column] = [known[number] for number in row[column]]
        yield plain
