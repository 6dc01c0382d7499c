"""Loading of data sets: the files of a folder, their kind and columns, and the splits training needs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError
from .columns import Sample, is_missing
from .examples import Columns as Columns
from .examples import Dataset as Dataset
from .examples import Examples as Examples
from .examples import Files
from .examples import Kind as Kind
from .formats import ENDINGS, existing, format_of
from .formats import rows as rows
from .readers import all_readers, reader_of
from .readers.multilabel import LabelSets
from .readers.texts import Classes, class_name, infer_kind
from .source import DataFile, Records, RowSource, StrPath, extension, plain_name, source_of
from .splits import split, subset

# The usual file names of each split; the first one is the name of the split.
ROLES = {
    "train": ("train", "train_sample"),
    "dev": ("dev", "validation", "valid", "val", "dev_matched", "validation_matched", "heldout", "heldout_sample"),
    "test": ("test",),
}


# ---------------------------------------------------------------- one file


def stream_texts(
    source: StrPath | RowSource | Sample, columns: Columns, kind: Kind = "classification"
) -> Iterator[tuple[int, Any, str | None]]:
    """Line, text and second text of every record, empty texts included, so that predictions match the rows."""
    sample = Sample.of(source)
    find_columns_of(kind, sample, text=columns.text, text_pair=columns.text_pair)
    return reader_of(kind).stream(sample.path, columns)


def stream_rows(source: RowSource, columns: Columns, kind: Kind) -> Iterator[tuple[int, Any, str | None]]:
    """The same as `stream_texts` for a source whose columns are known already."""
    return reader_of(kind).stream(source, columns)


def load_labelled(
    source: StrPath | RowSource | Sample, columns: Columns, kind: Kind, labels: Sequence[str] = ()
) -> tuple[Examples, tuple[str, ...]]:
    """The examples of a file whose columns, kind and labels are known, with notes."""
    sample = Sample.of(source)
    _require_label(sample, columns)
    if not _has_labels(sample, columns, kind, labels):
        problem = f'no row has a label in column "{columns.label}"'
        raise DataError(f"{sample.path}: {problem}; labels are needed here (bitfit predict works without them).")
    find_columns_of(kind, sample, text=columns.text, text_pair=columns.text_pair, label=columns.label)
    reader = reader_of(kind)
    table = reader.read(sample, columns)
    return reader.examples(table, labels, columns.numbered), tuple(table.notes)


def require_known_label(sample: Sample, trained: Columns, columns: Columns, labels: Sequence[str]) -> None:
    """Refuse a label column that was guessed, because the trained one is missing, and that holds none of the labels."""
    if columns.label is None or trained.label in (None, columns.label) or trained.separator or not labels:
        return
    pieces: set[str] = set()
    for cell in sample.column(columns.label):
        pieces.update(piece.strip(" '\"[]") for piece in re.split(r"[|;,]", class_name(cell)))
    if pieces & set(labels):
        return
    problem = f'no column "{trained.label}", as the training data had, and no other with its labels'
    raise DataError(f"{sample.path} has {problem}; pass --label, or use bitfit predict, which needs no labels.")


def _require_label(sample: Sample, columns: Columns) -> None:
    if columns.label is not None:
        return
    rest = [name for name in sample.names if name not in (columns.text, columns.text_pair)]
    if not rest:
        problem = "no column but the text, so it has no labels"
        raise DataError(f"{sample.path} has {problem}; labels are needed here (bitfit predict works without them).")
    names = ", ".join(sample.names)
    raise DataError(f"{sample.path}: cannot tell which column is the label; pass --label with one of: {names}.")


# ---------------------------------------------------------------- the data set


@dataclass(frozen=True, eq=False)
class Published:
    """The labelled files of a data set. The training file has been read; the others are read once, when needed."""

    files: Files
    kind: Kind
    labels: tuple[str, ...]
    columns: Columns
    train: Examples
    notes: tuple[str, ...]  # how the training file was read
    train_notes: tuple[str, ...]  # skipped rows and the like

    @cached_property
    def dev(self) -> tuple[Examples | None, tuple[str, ...]]:
        """The examples of the dev file, with notes."""
        if self.files.dev is None:
            return None, ()
        return load_labelled(self.files.dev, self.columns, self.kind, self.labels)

    @cached_property
    def test(self) -> tuple[Examples | None, tuple[str, ...]]:
        """The examples of the test file if it has labels, with notes."""
        return self._if_labelled(self.files.test)

    @cached_property
    def dev_as_test(self) -> tuple[Examples | None, tuple[str, ...]]:
        """The examples of the dev file if it has labels, with notes."""
        return self._if_labelled(self.files.dev)

    @cached_property
    def more(self) -> dict[str, tuple[Examples | None, tuple[str, ...]]]:
        """The further files to score, by name."""
        return {name: self._if_labelled(file) for name, file in self.files.more.items()}

    def _if_labelled(self, path: RowSource | None) -> tuple[Examples | None, tuple[str, ...]]:
        """The examples of a file with notes; no examples if there is no file, or if it has no labels."""
        if path is None:
            return None, ()
        sample = Sample.of(path)
        if not _has_labels(sample, self.columns, self.kind, self.labels):
            return None, (f"{path.name} has no labels and is ignored.",)
        return load_labelled(sample, self.columns, self.kind, self.labels)

    def dataset(self, train_size: int | None = None, seed: int = 0, holdout: float | None = None) -> Dataset:
        """The data set, with `train_size` training rows drawn, and dev split off the training rows if there is no file.

        `holdout` is the share of the training rows to hold out as dev; the dev file is then the test.
        """
        if holdout is None:
            train, dev, split_notes = self._train_and_dev(seed)
            drawn, draw_notes = _draw(train, self.kind, self.labels, train_size, seed)
            train = drawn
            split_notes = (*split_notes, *draw_notes)
            test, test_notes = self.test
        else:
            drawn, draw_notes = _draw(self.train, self.kind, self.labels, train_size, seed)
            train, dev, holdout_notes = _hold_out(drawn, self.files, self.kind, seed, holdout)
            split_notes = (*draw_notes, *holdout_notes)
            test, test_notes = self.test if self.files.dev is None else self.dev_as_test
        notes = [*self.notes, *split_notes, sizes_note(train, dev, test), *self.train_notes, *test_notes]
        more = {}
        for name, (examples, file_notes) in self.more.items():
            notes += file_notes
            if examples is not None:
                more[name] = examples
        notes += self._doubts(self.train if train_size is None else drawn)
        split_off = self.files.dev is None and holdout is None and train_size is None
        return Dataset(train, dev, test, self.kind, self.labels, self.columns, tuple(notes), more, split_off)

    def unsplit(self) -> Dataset:
        """The rows as in the files. Without a dev file, dev is empty and `held_out` is set."""
        dev, dev_notes = self.dev
        test, test_notes = self.test
        notes = (*self.notes, *self.train_notes, *dev_notes, *test_notes, *self._doubts(self.train))
        dev_or_empty = self.train.take([]) if dev is None else dev
        return Dataset(
            self.train, dev_or_empty, test, self.kind, self.labels, self.columns, notes, held_out=dev is None
        )

    def _doubts(self, train: Examples) -> list[str]:
        """Notes on labels that look wrong in these training rows, and on how the files were decoded."""
        notes = list(reader_of(self.kind).doubts(train, self.labels))
        for source in (self.files.train, self.files.dev, self.files.test):
            notes += source.notes if source is not None else []
        return notes

    def _train_and_dev(self, seed: int) -> tuple[Examples, Examples, tuple[str, ...]]:
        dev, notes = self.dev
        if dev is not None:
            return self.train, dev, notes
        train, split_off, note = _split_off(self.train, self.files.train, self.kind, seed)
        return train, split_off, (f"No dev file, so {note}",)


def read(
    files: Files,
    *,
    task: Kind | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    labels: Sequence[str] = (),
    separator: str | None = None,
    sample: Sample | None = None,
) -> Published:
    """Read the training file of a data set.

    `task` is the kind of task; without it, the kind is inferred from the file's format, columns and labels. `labels`
    are those of a named task, whose files may hold numbers instead. `separator` separates several labels of a row.
    `sample` holds the first rows of the training file, if they were read before.
    """
    sample = sample or Sample.of(files.train)
    kind = task or (LabelSets.kind if separator else suggest_kind(sample, label))
    if separator and kind != LabelSets.kind:
        raise UsageError(f"--separator {separator}: {kind} has one label per row; remove --separator or --task {kind}")
    columns = find_columns_of(kind, sample, text=text, text_pair=text_pair, label=label)
    columns = replace(columns, numbered=bool(labels), separator=separator)
    _require_label(sample, columns)
    table = reader_of(kind or Classes.kind).read(sample, columns)
    reasons: list[str] = []
    if kind is None:
        kind, reasons = infer_kind(table)
    reader = reader_of(kind)
    names = tuple(labels) or reader.label_names(table)
    examples = reader.examples(table, names, columns.numbered)
    used = columns_note(columns)
    notes = (used[0].upper() + used[1:], *reasons)
    return Published(files, kind, names, columns, examples, notes, tuple(table.notes))


def load(
    source: StrPath | RowSource | Files,
    *,
    dev: StrPath | RowSource | None = None,
    test: StrPath | RowSource | None = None,
    train_size: int | None = None,
    seed: int = 0,
    holdout: float | None = None,
    **options: Any,
) -> Dataset:
    """The data set of a labelled file, or of a folder with train, dev and test files.

    `options` are those of `read`; see `Published.dataset` for the sizes.
    """
    files, notes = (source, []) if isinstance(source, Files) else find_files(source)
    if dev is not None:
        files = replace(files, dev=source_of(dev))
    if test is not None:
        files = replace(files, test=source_of(test))
    dataset = read(files, **options).dataset(train_size, seed, holdout)
    return replace(dataset, notes=(*notes, *dataset.notes))


def kind_of_format(source: StrPath | RowSource) -> Kind | None:
    """The kind of task that alone uses the format of a file; None if several kinds use it."""
    file_format = format_of(source_of(source))
    return next((reader.kind for reader in all_readers() if file_format in reader.formats), None)


def suggest_kind(source: StrPath | RowSource | Sample, label: str | None = None) -> Kind | None:
    """The kind of task, inferred from a file's format or columns; None: one label per text, see `infer_kind`."""
    sample = Sample.of(source)
    kind = kind_of_format(sample.path)
    if kind is not None:
        return kind
    # In reverse order, since the readers that are registered later are the more specific ones.
    for reader in reversed(list(all_readers())):
        if reader.looks_like(sample, label):
            return reader.kind
    return None


def has_column(sample: Sample, name: str) -> bool:
    """Whether a file has a column of this name, or all columns of a comma-separated list."""
    if name in sample.names:
        return True
    return all(column.strip() in sample.names for column in name.split(","))


def find_columns_of(
    kind: Kind | None,
    source: StrPath | RowSource | Sample,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """The columns of a file for a kind of task; None: one label per text."""
    reader = reader_of(kind or Classes.kind)
    return reader.find_columns(Sample.of(source), text=text, text_pair=text_pair, label=label)


def find_files(source: StrPath | RowSource, encoding: str | None = None) -> tuple[Files, list[str]]:
    """The files of a data set by their names, with a note for every name that is not exactly train, dev or test."""
    if isinstance(source, Records | DataFile):
        return Files(source), []
    path = Path(source)
    if not path.is_dir():
        return Files(DataFile(existing(path), encoding)), []
    files = by_stem(path)
    by_role: dict[str, DataFile] = {}
    notes = []
    for role, names in ROLES.items():
        file = one_of(files, names) or _only_named(files, role)
        if file is None:
            continue
        by_role[role] = DataFile(file, encoding)
        if stem(file) != role:
            notes.append(f"{file.name} is taken as {role}.")
    if "train" not in by_role:
        content = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise DataError(f"{path} has no train file ({', '.join(ENDINGS)}, each also with .gz); it holds: {content}.")
    return Files(by_role["train"], by_role.get("dev"), by_role.get("test")), notes


def _only_named(files: Mapping[str, list[Path]], role: str) -> Path | None:
    """The only file whose name contains the role, as in en_ewt-ud-dev or dev-v1.1; None if there are several."""
    matches: list[Path] = []
    for name, same_stem in files.items():
        if role in re.split(r"[-_.]", name):
            matches += same_stem
    return matches[0] if len(matches) == 1 else None


def stem(file: Path) -> str:
    """A file's name in lower case without extensions."""
    return plain_name(file).stem


def by_stem(folder: Path) -> dict[str, list[Path]]:
    """The readable files of a folder, by stem."""
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.iterdir()):
        if extension(file) in ENDINGS:
            files[stem(file)].append(file)
    return files


def one_of(files: Mapping[str, list[Path]], names: Sequence[str]) -> Path | None:
    """The file with the first of these stems that exists; None if none does. DataError if two have the same stem."""
    matches = next((files[name] for name in names if name in files), [])
    if len(matches) > 1:
        raise DataError(f"{matches[0]} and {matches[1].name} are the same split of the data; remove one of them.")
    return matches[0] if matches else None


def _split_off(
    examples: Examples, path: RowSource, kind: Kind, seed: int, share: float | None = None
) -> tuple[Examples, Examples, str]:
    """Split dev off the training examples: train, dev and the end of a sentence about it."""
    train, dev = split(examples, kind, seed, share)
    if not dev:
        raise DataError(f"{path} has too few different rows to split off a dev set; add rows or a dev file.")
    of_class = "of every class " if reader_of(kind).by_class else ""
    note = f"{len(dev) / len(examples):.0%} {of_class}is split off (seed {seed}), equal texts together."
    return examples.take(train), examples.take(dev), note


def _hold_out(
    examples: Examples, files: Files, kind: Kind, seed: int, share: float
) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Split dev off for the holdout protocol: train, dev and notes."""
    train, dev, note = _split_off(examples, files.train, kind, seed, share)
    test_file = files.dev or files.test
    test = "there is no file to test on" if test_file is None else f"{test_file.name} is the test"
    return train, dev, (f"To pick the best checkpoint {note}", f"By the holdout protocol {test}.")


def _has_labels(sample: Sample, columns: Columns, kind: Kind, labels: Sequence[str]) -> bool:
    """Whether any row has a label. Public test sets write -1 for a hidden label."""
    minus_one_is_hidden = "-1" not in labels
    names = reader_of(kind).label_columns(sample, columns.label)
    for row in chain(sample.rows, rows(sample.path)):
        for name in names:
            value = row.values.get(name)
            is_hidden = minus_one_is_hidden and class_name(value) == "-1"
            if not is_missing(value) and not is_hidden:
                return True
    return False


def _draw(
    train: Examples, kind: Kind, labels: tuple[str, ...], size: int | None, seed: int
) -> tuple[Examples, list[str]]:
    """Draw `size` training examples, with notes; all of them if it is None."""
    if size is None:
        return train, []
    drawn = train.take(subset(train, kind, size, seed))
    notes = [f"{size:,} of {len(train):,} training rows were drawn (seed {seed})."]
    missing = len(labels) - len(set(drawn.labels)) if reader_of(kind).by_class else 0
    if missing:
        notes.append(f"{missing} of {len(labels)} classes have no example among them.")
    return drawn, notes


def columns_note(columns: Columns) -> str:
    """Which columns are read, as the end of a sentence."""
    pair = f' with "{columns.text_pair}"' if columns.text_pair else ""
    return f'the text is column "{columns.text}"{pair}, the label is column "{columns.label}".'


def sizes_note(train: Examples, dev: Examples, test: Examples | None) -> str:
    """The number of rows of each split."""
    test_size = "no" if test is None else f"{len(test):,}"
    return f"There are {len(train):,} train, {len(dev):,} dev and {test_size} test rows."
