"""Records -> data sets: texts, labels of every kind, and the files of a folder."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from ..errors import DataError, suggest
from .columns import LABELS, MANY_CLASSES, Sample, bare, find_columns, is_missing, number
from .examples import Columns as Columns
from .examples import Dataset as Dataset
from .examples import Examples as Examples
from .examples import Files, Table, skipped
from .examples import Kind as Kind
from .formats import READERS, Row, StrPath, existing, extension, fault, plain_name
from .formats import rows as rows
from .readers import answering, multilabel, tagging
from .splits import conflicts, split, subset

FEW_FLOATS = 20

# What a folder may call its files: the first name is the role itself.
ROLES = {
    "train": ("train", "train_sample"),
    "dev": ("dev", "validation", "valid", "val", "dev_matched", "validation_matched", "heldout", "heldout_sample"),
    "test": ("test",),
}


class _Labels(Protocol):
    """A module that knows what labels a kind of task has."""

    def names(self, table: Table) -> tuple[str, ...]: ...
    def examples(self, table: Table, labels: Sequence[str]) -> Examples: ...


class _Reader(Protocol):
    """A module that knows how the records of a kind of task are written."""

    def find_columns(
        self, sample: Sample, *, text: str | None, text_pair: str | None, label: str | None
    ) -> Columns: ...
    def read(self, path: Path, columns: Columns) -> Table: ...
    def stream(self, path: StrPath, columns: Columns) -> Iterator[tuple[int, Any, str | None]]: ...


# The kinds of task whose records are no plain texts with one label.
_READERS: dict[Kind | None, _Reader] = {"tagging": tagging, "answering": answering}
_OF_FORMAT: dict[str, Kind] = {".conllu": "tagging", ".json": "answering"}
_LABELS: dict[Kind, _Labels] = {"tagging": tagging, "answering": answering, "multilabel": multilabel}


# ---------------------------------------------------------------- rows -> texts and raw labels


def stream_texts(
    source: StrPath | Sample, columns: Columns, kind: Kind = "classification"
) -> Iterator[tuple[int, Any, str | None]]:
    """Line, text and pair of every record, empty texts included, so that answers match the file row by row."""
    sample = Sample.of(source)
    find_columns_of(kind, sample, text=columns.text, text_pair=columns.text_pair)
    if kind in _READERS:
        return _READERS[kind].stream(sample.path, columns)
    return ((line, *_texts(sample.path, line, values, columns)) for line, values in rows(sample.path))


def _texts(path: Path, line: int, values: dict[str, object], columns: Columns) -> tuple[str, str | None]:
    text = _text(path, line, columns.text, values.get(columns.text))
    if columns.text_pair is None:
        return text, None
    return text, _text(path, line, columns.text_pair, values.get(columns.text_pair))


def _text(path: Path, line: int, name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict | bytes):
        raise fault(path, line, f'column "{name}" holds a {type(value).__name__}, not a text.')
    return "" if value is None else str(value)


def _read(sample: Sample, columns: Columns, kind: Kind | None = None) -> Table:
    path = sample.path
    if kind in _READERS:
        return _READERS[kind].read(path, columns)
    several = _label_columns(sample, columns.label) if kind == "multilabel" else ()
    kept: list[tuple[int, str, str | None, object]] = []
    empty, unlabelled = [], []
    for line, values in rows(path):
        text, pair = _texts(path, line, values, columns)
        label = multilabel.chosen_columns(path, line, values, several) if several else values.get(columns.label or "")
        if not text.strip() or (pair is not None and not pair.strip()):
            empty.append(line)
        elif label is None or (kind != "multilabel" and is_missing(label)):
            unlabelled.append(line)
        else:
            read = multilabel.label_set if kind == "multilabel" else _scalar
            kept.append((line, text, pair, read(path, line, label)))
    notes = [*skipped(path, "an empty text", empty), *skipped(path, "no label", unlabelled)]
    if not kept:
        raise DataError(f"{path} has no usable row. {' '.join(notes)}")
    lines, texts, pairs, labels = (list(column) for column in zip(*kept, strict=True))
    return Table(path, texts, pairs if columns.text_pair else None, labels, lines, notes)


def _scalar(path: Path, line: int, label: object) -> object:
    if isinstance(label, list | tuple | dict | bytes):
        raise fault(
            path, line, f"a {type(label).__name__} is not a label; one word or number per row (or --task multilabel)."
        )
    return label


# ---------------------------------------------------------------- raw labels -> kind and labels


def _is_float(value: object) -> bool:
    """Whether it is written as a float: by its type, or with a decimal point or an exponent."""
    if isinstance(value, str):
        return number(value) is not None and any(sign in value for sign in ".eE")
    return isinstance(value, float | Decimal)


def _class_name(value: object) -> str:
    """The name of a class; 1, "1", 1.0 and "1.0" are the same, because pandas turns the first into the last."""
    name = str(value).strip()
    if isinstance(value, bool):
        return name.lower()
    whole = re.fullmatch(r"(-?\d+)\.0*", name)
    return whole[1] if whole else name


def _infer_kind(table: Table) -> tuple[Kind, list[str]]:
    """Float labels mean regression, unless they are a few whole numbers."""
    numbers = [number(label) for label in table.labels]
    _refuse_decimal_commas(table)
    if not any(map(_is_float, table.labels)) or not _all_numbers(table, numbers):
        return "classification", []
    values = {_finite(table.path, *item) for item in zip(table.lines, table.labels, strict=True)}
    if len(values) <= FEW_FLOATS and all(value.is_integer() for value in values):
        return "classification", ["The float labels are all whole numbers, so they are taken as classes."]
    if len(values) == 1:
        raise DataError(f"{table.path}: every label is {values.pop()}; there is nothing to learn.")
    return "regression", [f"Float labels, so this is a regression, from {min(values):g} to {max(values):g}."]


def _refuse_decimal_commas(table: Table) -> None:
    texts = [label.strip() for label in table.labels if isinstance(label, str)]
    if len(texts) == len(table.labels) and all(re.fullmatch(r"-?\d+(,\d+)?", text) for text in texts):
        for line, text in zip(table.lines, texts, strict=True):
            if "," in text:
                raise fault(table.path, line, f'label "{text}" has a decimal comma; write {text.replace(",", ".")}.')


def _all_numbers(table: Table, numbers: list[float | None]) -> bool:
    if None not in numbers:
        return True
    if len(set(numbers)) > MANY_CLASSES and 2 * sum(map(_is_float, table.labels)) > len(numbers):
        _finite(table.path, table.lines[numbers.index(None)], table.labels[numbers.index(None)])
    return False


def _finite(path: Path, line: int, label: object) -> float:
    value = number(label)
    if value is None or not math.isfinite(value):
        raise fault(path, line, f'label "{label}" is not a finite number as the other labels are.')
    return value


def _label_names(table: Table, kind: Kind) -> tuple[str, ...]:
    if kind in _LABELS:
        return _LABELS[kind].names(table)
    return _class_names(table) if kind == "classification" else ()


def _class_names(table: Table) -> tuple[str, ...]:
    names = {_class_name(label) for label in table.labels}
    if len(names) == 1:
        raise DataError(f'{table.path}: every label is "{names.pop()}"; at least two classes are needed.')
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _examples(table: Table, kind: Kind, labels: Sequence[str], numbered: bool = False) -> Examples:
    if kind in _LABELS:
        return _LABELS[kind].examples(table, labels)
    raw = zip(table.lines, table.labels, strict=True)
    if kind == "regression":
        return Examples(table.texts, table.pairs, [_finite(table.path, *item) for item in raw], table.lines)
    # The files of a named task give its labels by name or by number.
    index = {str(i): i for i in range(len(labels)) if numbered} | {name: i for i, name in enumerate(labels)}
    ids = [index.get(_class_name(label), -1) for _, label in raw]
    if -1 in ids:
        place = ids.index(-1)
        name = _class_name(table.labels[place])
        where = "no label of the task" if numbered else "not in the training data"
        what = f'label "{name}" is {where}.{suggest(name, labels)}'
        raise fault(table.path, table.lines[place], what)
    return Examples(table.texts, table.pairs, ids, table.lines)


def load_labelled(
    source: StrPath | Sample, columns: Columns, kind: Kind, labels: Sequence[str] = ()
) -> tuple[Examples, tuple[str, ...]]:
    """The examples of a file whose columns, kind and labels are known, with notes."""
    sample = Sample.of(source)
    _require_label(sample, columns)
    find_columns_of(kind, sample, text=columns.text, text_pair=columns.text_pair, label=columns.label)
    table = _read(sample, columns, kind)
    return _examples(table, kind, labels, columns.numbered), tuple(table.notes)


def _require_label(sample: Sample, columns: Columns) -> None:
    if columns.label is None:
        names = ", ".join(sample.names)
        raise DataError(f"{sample.path}: cannot tell which column is the label; pass --label with one of: {names}.")


# ---------------------------------------------------------------- the whole data set


def load(
    path: StrPath | Files,
    *,
    task: Kind | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    labels: Sequence[str] = (),
    dev: StrPath | None = None,
    test: StrPath | None = None,
    train_size: int | None = None,
    seed: int = 0,
    holdout: float | None = None,
    sample: Sample | None = None,
) -> Dataset:
    """A labelled file, or a folder with train, dev and test files, as what training needs.

    `task` is the kind of task; without it the file's format, columns and labels tell. `labels` are those of a named
    task, which files may also give by number. `holdout` is the share of the training rows to hold out as dev; the dev
    file is then the test. `sample` holds the first rows of the training file, if they were read before.
    """
    files, notes = (path, list[str]()) if isinstance(path, Files) else find_files(path)
    files = replace(files, dev=Path(dev) if dev else files.dev, test=Path(test) if test else files.test)
    sample = Sample.of(sample or files.train)
    kind = task or suggest_kind(sample, label)
    columns = find_columns_of(kind, sample, text=text, text_pair=text_pair, label=label)
    columns = replace(columns, numbered=bool(labels))
    _require_label(sample, columns)
    table = _read(sample, columns, kind)
    kind, reasons = (kind, []) if kind else _infer_kind(table)
    labels = tuple(labels) or _label_names(table, kind)
    whole = _examples(table, kind, labels, columns.numbered)
    if holdout is None:
        train, held_out, how = _train_and_dev(whole, files, columns, kind, labels, seed)
        train, cut = _cut(train, kind, labels, train_size, seed)
        how = (*how, *cut)
    else:
        taken, cut = _cut(whole, kind, labels, train_size, seed)
        train, held_out, said = _hold_out(taken, files, kind, seed, holdout)
        files, how = replace(files, test=files.dev or files.test), (*cut, *said)
    tested, remarks = _tested(files.test, columns, kind, labels)
    more = {name: _tested(file, columns, kind, labels) for name, file in files.more.items()}
    notes += [
        _taken(columns),
        *reasons,
        *how,
        _sizes(train, held_out, tested),
        *table.notes,
        *remarks,
        *chain.from_iterable(said for _, said in more.values()),
        *(() if kind in _LABELS else _doubts(whole, labels)),
    ]
    further = {name: examples for name, (examples, _) in more.items() if examples is not None}
    return Dataset(train, held_out, tested, kind, labels, columns, tuple(notes), further)


def kind_of_format(path: StrPath) -> Kind | None:
    """The kind of task that is the only use of a file's format."""
    return _OF_FORMAT.get(extension(existing(Path(path))))


def suggest_kind(source: StrPath | Sample, label: str | None = None) -> Kind | None:
    """The kind of task that a file's format or columns tell; None: one label per text, and the labels tell which."""
    sample = Sample.of(source)
    kind = kind_of_format(sample.path)
    if kind is not None:
        return kind
    if answering.looks_answered(sample.rows):
        return "answering"
    if tagging.looks_tagged(sample.rows):
        return "tagging"
    if label is not None and len(_label_columns(sample, label)) > 1:
        return "multilabel"
    names = [label] if label else [name for name in sample.rows[0].values if bare(name) in LABELS.split()]
    lists = names and any(isinstance(value, list) for value in sample.column(names[0]))
    return "multilabel" if lists else None


def _label_columns(sample: Sample, label: str | None) -> tuple[str, ...]:
    """The columns that --label a,b,c names; none if it is a single column's name."""
    if label is None or label in sample.names or "," not in label:
        return ()
    several = tuple(part.strip() for part in label.split(","))
    for name in several:
        if name not in sample.names:
            raise DataError(f'{sample.path} has no column "{name}".{suggest(name, sample.names)}')
    return several


def has_column(sample: Sample, name: str) -> bool:
    """Whether a file has a column of this name, or all columns that a,b,c names."""
    return name in sample.names or all(part.strip() in sample.names for part in name.split(","))


def find_columns_of(
    kind: Kind | None,
    source: StrPath | Sample,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """`find_columns` for any kind of task."""
    sample = Sample.of(source)
    if kind in _READERS:
        return _READERS[kind].find_columns(sample, text=text, text_pair=text_pair, label=label)
    several = _label_columns(sample, label) if kind == "multilabel" else ()
    found = find_columns(sample, text=text, text_pair=text_pair, label=several[0] if several else label)
    return replace(found, label=label) if several else found


def find_files(path: StrPath) -> tuple[Files, list[str]]:
    """The files of a data set by their names, with a note for every name that is not train, dev or test itself."""
    path = Path(path)
    if not path.is_dir():
        return Files(existing(path)), []
    files = by_stem(path)
    found = {role: one_of(files, names) or _only_named(files, role) for role, names in ROLES.items()}
    train = found["train"]
    if train is None:
        held = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise DataError(f"{path} has no train file ({', '.join(READERS)}, each also with .gz); it holds: {held}.")
    renamed = [(role, file) for role, file in found.items() if file and stem(file) != role]
    return Files(train, found["dev"], found["test"]), [f"{file.name} is taken as {role}." for role, file in renamed]


def _only_named(files: Mapping[str, list[Path]], role: str) -> Path | None:
    """The one file with the role as a part of its name, as in en_ewt-ud-dev or dev-v1.1."""
    found = [own for name, own in files.items() if role in re.split(r"[-_.]", name)]
    return found[0][0] if len(found) == 1 and len(found[0]) == 1 else None


def stem(file: Path) -> str:
    """A file's name in small letters without extensions."""
    return plain_name(file).stem


def by_stem(folder: Path) -> dict[str, list[Path]]:
    """The readable files of a folder, by stem."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.iterdir()):
        if extension(file) in READERS:
            found[stem(file)].append(file)
    return found


def one_of(files: Mapping[str, list[Path]], names: Sequence[str]) -> Path | None:
    """The file with the first of these stems that is there."""
    found = next((files[name] for name in names if name in files), [])
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1].name} stand for the same part of the data; remove one of them.")
    return found[0] if found else None


def _train_and_dev(
    whole: Examples, files: Files, columns: Columns, kind: Kind, labels: tuple[str, ...], seed: int
) -> tuple[Examples, Examples, tuple[str, ...]]:
    if files.dev is not None:
        return whole, *load_labelled(files.dev, columns, kind, labels)
    train, dev, how = _split_off(whole, files.train, kind, seed)
    return train, dev, (f"No dev file, so {how}",)


def _split_off(
    whole: Examples, path: Path, kind: Kind, seed: int, share: float | None = None
) -> tuple[Examples, Examples, str]:
    train, dev = split(whole, kind, seed, share)
    if not dev:
        raise DataError(f"{path} has too few different rows to split off a dev set; add rows or a dev file.")
    how = "of every class " if kind == "classification" else ""
    note = f"{len(dev) / len(whole):.0%} {how}is split off (seed {seed}), equal texts together."
    return whole.take(train), whole.take(dev), note


def _hold_out(
    taken: Examples, files: Files, kind: Kind, seed: int, share: float
) -> tuple[Examples, Examples, tuple[str, ...]]:
    train, dev, how = _split_off(taken, files.train, kind, seed, share)
    held = files.dev or files.test
    test = "there is no file to test on" if held is None else f"{held.name} is the test"
    return train, dev, (f"To pick the best checkpoint {how}", f"By the holdout protocol {test}.")


def _tested(
    path: Path | None, columns: Columns, kind: Kind, labels: tuple[str, ...]
) -> tuple[Examples | None, tuple[str, ...]]:
    if path is None:
        return None, ()
    sample = Sample.of(path)
    names = (_label_columns(sample, columns.label) if kind == "multilabel" else ()) or (columns.label or "",)
    if all(_is_unlabelled(row, name, labels) for row in chain(sample.rows, rows(path)) for name in names):
        return None, (f"{path.name} has no labels and is ignored.",)
    return load_labelled(sample, columns, kind, labels)


def _is_unlabelled(row: Row, label: str, labels: tuple[str, ...]) -> bool:
    """Whether the label is missing, or the -1 by which public test sets hide theirs."""
    value = row.values.get(label)
    return is_missing(value) or ("-1" not in labels and _class_name(value) == "-1")


def _cut(
    train: Examples, kind: Kind, labels: tuple[str, ...], size: int | None, seed: int
) -> tuple[Examples, list[str]]:
    if size is None:
        return train, []
    taken = train.take(subset(train, kind, size, seed))
    lost = len(labels) - len(set(taken.labels)) if kind == "classification" else 0
    notes = [f"{size:,} of {len(train):,} training rows were drawn (seed {seed})."]
    return taken, notes + ([f"{lost} of {len(labels)} classes have no example among them."] if lost else [])


def _taken(columns: Columns) -> str:
    pair = f' with "{columns.text_pair}"' if columns.text_pair else ""
    return f'The text is column "{columns.text}"{pair}, the label is column "{columns.label}".'


def _sizes(train: Examples, dev: Examples, test: Examples | None) -> str:
    tested = "no" if test is None else f"{len(test):,}"
    return f"There are {len(train):,} train, {len(dev):,} dev and {tested} test rows."


def _doubts(examples: Examples, labels: tuple[str, ...]) -> list[str]:
    notes = []
    if count := conflicts(examples):
        notes.append(f"{count:,} repeated {'texts have' if count > 1 else 'text has'} conflicting labels.")
    if len(labels) > MANY_CLASSES:
        notes.append(f"{len(labels):,} classes are many; if the labels are amounts, write them as floats (3.0, 4.5).")
    spelt = [names for names in _spellings(labels).values() if len(names) > 1]
    if spelt:
        notes.append(f"Different classes by their spelling alone: {_some([' and '.join(names) for names in spelt])}.")
    counts = Counter(examples.labels)
    single = [name for i, name in enumerate(labels) if counts[i] == 1]
    if single:
        notes.append(f"{len(single):,} of {len(labels):,} classes have one example, kept in train: {_some(single)}.")
    return notes


def _spellings(labels: tuple[str, ...]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in labels:
        groups.setdefault(name.casefold(), []).append(name)
    return groups


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
