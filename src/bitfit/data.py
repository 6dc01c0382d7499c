"""Records -> data sets: the only module that knows column names, label kinds and how a split is made."""

from __future__ import annotations

import heapq
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

from . import labelsets, questions, sentences
from .errors import DataError, suggest
from .examples import Columns as Columns
from .examples import Dataset as Dataset
from .examples import Examples as Examples
from .examples import Files, Table, skipped
from .examples import Kind as Kind
from .formats import READERS, Row, StrPath, existing, extension, fault, plain_name
from .formats import rows as rows

DEV_SHARE, DEV_MOST = 0.1, 2000
MANY_CLASSES, FEW_FLOATS = 50, 20
SAMPLE_ROWS = 500

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("texta", "textb"),
    ("sentencea", "sentenceb"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
    ("question", "passage"),
)
# In order of preference, compared without case, spaces and underscores.
TEXTS = (
    "text sentence review reviewtext content body comment commenttext tweet message document description abstract "
    "utterance phrase question query prompt input headline title subject"
)
LABELS = (
    "label labels target class category sentiment y gold goldlabel score rating stars star intent emotion topic "
    "polarity similarity labelname labeltext labelid"
)
# "" is the index column that pandas writes; "unnamed0" is the same column after one more round trip.
IDS = {"", "id", "ids", "idx", "index", "guid", "uuid", "uid", "rowid", "pairid", "unnamed0"}
# What a folder may call its files: the first name is the role itself.
ROLES = {
    "train": ("train", "train_sample"),
    "dev": ("dev", "validation", "valid", "val", "dev_matched", "validation_matched", "heldout", "heldout_sample"),
    "test": ("test",),
}


# The kinds of task whose records are no plain texts with one label.
_READERS: dict[Kind, Any] = {"tagging": sentences, "answering": questions}
_OF_FORMAT: dict[str, Kind] = {".conllu": "tagging", ".json": "answering"}
_LABELS: dict[Kind, Any] = {**_READERS, "multilabel": labelsets}


# ---------------------------------------------------------------- rows -> columns


def find_columns(
    path: StrPath, *, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Columns:
    """What was asked for, completed by well-known names and then by looking; label is None if nothing tells it.

    A text given without a pair means a single text, whatever else the file holds.
    """
    sample = [row.values for row in islice(rows(path), SAMPLE_ROWS)]
    names = list(dict.fromkeys(chain(*sample)))
    given = [name for name in (text, text_pair, label) if name is not None]
    _check_given(path, given, names)
    free = {n: [values.get(n) for values in sample] for n in names if n not in given and _bare(n) not in IDS}
    if text is None:
        text, text_pair = _find_text(path, free, text_pair, names)
    rest = {n: values for n, values in free.items() if n not in (text, text_pair)}
    return Columns(text, text_pair, label if label is not None else _find_label(path, rest))


def _check_given(path: StrPath, given: list[str], names: list[str]) -> None:
    for name in given:
        if name not in names:
            raise DataError(f'{path} has no column "{name}".{suggest(name, names)}')
        if given.count(name) > 1:
            raise DataError(f'Column "{name}" of {path} cannot be two of text, text pair and label at once.')


def _bare(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _find_text(
    path: StrPath, free: dict[str, list[object]], pair: str | None, names: list[str]
) -> tuple[str, str | None]:
    known = {_bare(name): name for name in reversed(free)}
    for one, other in PAIRS:
        if one in known and pair is None and other in known:
            return known[one], known[other]
        if one in known and pair is not None and _bare(pair) == other:
            return known[one], pair
    named = [known[name] for name in TEXTS.split() if name in known]
    wordy = [name for name in free if _bare(name) not in LABELS.split() and _is_wordy(free[name])]
    if not named and not wordy:
        raise DataError(f"{path}: no column looks like text; pass --text with one of: {', '.join(names)}.")
    return (named or [max(wordy, key=lambda name: _text_likeness(free[name]))])[0], pair


def _is_wordy(values: list[object]) -> bool:
    words = [v for v in values if isinstance(v, str) and v.strip() and _number(v) is None]
    return 2 * len(words) > len(values)


def _text_likeness(values: list[object]) -> tuple[bool, float]:
    return not _is_class_like(values), sum(len(str(v)) for v in values) / len(values)


def _find_label(path: StrPath, rest: dict[str, list[object]]) -> str | None:
    known = {_bare(name): name for name in reversed(rest)}
    named = [known[name] for name in LABELS.split() if name in known]
    if named:
        return named[0]
    found = _only_candidate(rest)
    if found is not None and found in _distinct(rest[found]):
        raise DataError(f'{path}: the first line seems to be data ("{found}" is also a value); add a header line.')
    return found


def _only_candidate(rest: dict[str, list[object]]) -> str | None:
    """The one column that could be a label; two are no decision, since a wrong one would train without complaint."""
    classes = [name for name, values in rest.items() if _is_class_like(values)]
    varied = [name for name in classes if len(_distinct(rest[name])) > 1]
    numeric = [name for name, values in rest.items() if _is_numeric(values)]
    strongest = varied or numeric or classes
    return strongest[0] if len(strongest) == 1 else None


def _is_numeric(values: list[object]) -> bool:
    distinct = _distinct(values)
    return bool(distinct) and all(_number(value) is not None for value in distinct)


def _distinct(values: list[object]) -> set[str]:
    return {str(v) for v in values if not _is_missing(v)}


def _is_class_like(values: list[object]) -> bool:
    scalar = all(v is None or isinstance(v, str | int | float) for v in values)
    distinct = _distinct(values) if scalar else set()
    few = 0 < len(distinct) <= max(2, min(MANY_CLASSES, len(values) // 2))
    return few and max(map(len, distinct)) <= 40


# ---------------------------------------------------------------- rows -> texts and raw labels


def stream_texts(
    path: StrPath, columns: Columns, kind: Kind = "classification"
) -> Iterator[tuple[int, Any, str | None]]:
    """Line, text and pair of every record, empty texts included, so that answers match the file row by row."""
    find_columns_of(kind, path, text=columns.text, text_pair=columns.text_pair)
    if kind in _READERS:
        return _READERS[kind].stream(path, columns)  # type: ignore[no-any-return]
    return ((line, *_texts(Path(path), line, values, columns)) for line, values in rows(path))


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


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _read(path: Path, columns: Columns, kind: Kind | None = None) -> Table:
    if kind in _READERS:
        return _READERS[kind].read(path, columns)  # type: ignore[no-any-return]
    several = _label_columns(path, columns.label) if kind == "multilabel" else ()
    kept: list[tuple[int, str, str | None, object]] = []
    empty, unlabelled = [], []
    for line, values in rows(path):
        text, pair = _texts(path, line, values, columns)
        label = labelsets.chosen_columns(path, line, values, several) if several else values.get(columns.label or "")
        if not text.strip() or (pair is not None and not pair.strip()):
            empty.append(line)
        elif label is None or (kind != "multilabel" and _is_missing(label)):
            unlabelled.append(line)
        else:
            read = labelsets.label_set if kind == "multilabel" else _scalar
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


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except (ValueError, OverflowError):
        return None


def _is_float(value: object) -> bool:
    """Whether it is written as a float: by its type, or with a decimal point or an exponent."""
    if isinstance(value, str):
        return _number(value) is not None and any(sign in value for sign in ".eE")
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
    numbers = [_number(label) for label in table.labels]
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
    value = _number(label)
    if value is None or not math.isfinite(value):
        raise fault(path, line, f'label "{label}" is not a finite number as the other labels are.')
    return value


def _label_names(table: Table, kind: Kind) -> tuple[str, ...]:
    if kind in _LABELS:
        return _LABELS[kind].names(table)  # type: ignore[no-any-return]
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
        return _LABELS[kind].examples(table, labels)  # type: ignore[no-any-return]
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
    path: StrPath, columns: Columns, kind: Kind, labels: Sequence[str] = ()
) -> tuple[Examples, tuple[str, ...]]:
    """The examples of a file whose columns, kind and labels are known, with notes."""
    _require_label(path, columns)
    find_columns_of(kind, path, text=columns.text, text_pair=columns.text_pair, label=columns.label)
    table = _read(Path(path), columns, kind)
    return _examples(table, kind, labels, columns.numbered), tuple(table.notes)


def _require_label(path: StrPath, columns: Columns) -> None:
    if columns.label is None:
        names = ", ".join(column_names(path))
        raise DataError(f"{path}: cannot tell which column is the label; pass --label with one of: {names}.")


def column_names(path: StrPath) -> list[str]:
    """The columns of a file's first rows, in order."""
    return list(dict.fromkeys(chain(*(row.values for row in islice(rows(path), SAMPLE_ROWS)))))


# ---------------------------------------------------------------- splits and subsets


def _strata(examples: Examples, kind: Kind) -> list[int]:
    return [int(label) for label in examples.labels] if kind == "classification" else [0] * len(examples)


def _duplicates(examples: Examples, by_pair: bool = False) -> list[list[int]]:
    """Indices grouped by equal text and pair (or by equal pair alone), in order of first appearance."""
    pairs = examples.pairs or examples.texts
    groups: dict[tuple[Any, str], list[int]] = {}
    for i, key in enumerate(zip(pairs if by_pair else examples.texts, pairs, strict=True)):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _agrees(examples: Examples, group: list[int]) -> bool:
    return len(group) == 1 or len({examples.labels[i] for i in group}) == 1


def split(examples: Examples, kind: Kind, seed: int, share: float | None = None) -> tuple[list[int], list[int]]:
    """Indices of train and dev: this share (10%, at most about 2,000) of every class, equal texts on one side.

    A text with conflicting labels stays in train, so that every class keeps an example there and dev is clean.
    Questions on one context stay together.
    """
    strata = _strata(examples, kind)
    groups: defaultdict[int, list[list[int]]] = defaultdict(list)
    for group in _duplicates(examples, kind == "answering"):
        if kind == "answering" or _agrees(examples, group):
            groups[strata[group[0]]].append(group)
    share = share or min(DEV_SHARE, DEV_MOST / max(1, len(examples)))
    rng = random.Random(f"split {seed}")
    sizes = sorted(Counter(strata).items())
    dev = set(chain.from_iterable(_dev_part(groups[stratum], size, share, rng) for stratum, size in sizes))
    return [i for i in range(len(examples)) if i not in dev], sorted(dev)


def _dev_part(groups: list[list[int]], size: int, share: float, rng: random.Random) -> list[int]:
    rng.shuffle(groups)
    wanted = max(1, round(share * size)) if size > 1 else 0
    chosen: list[int] = []
    for group in groups:
        if len(chosen) + len(group) <= wanted:
            chosen += group
    smallest = min(groups, key=len, default=[])
    return smallest if wanted and not chosen and len(smallest) < size else chosen


def subset(examples: Examples, kind: Kind, size: int, seed: int) -> list[int]:
    """Indices of exactly so many examples, each class with its share; a smaller subset lies within a larger one."""
    if not 1 <= size <= len(examples):
        raise DataError(f"Train size {size:,} is not between 1 and the {len(examples):,} training rows there are.")
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, stratum in enumerate(_strata(examples, kind)):
        members[stratum].append(i)
    pools = [members[stratum] for stratum in sorted(members)]
    rng = random.Random(f"subset {seed}")
    for pool in pools:
        rng.shuffle(pool)
    return sorted(pools[k].pop() for k in islice(_interleaved([len(pool) for pool in pools]), size))


def _interleaved(sizes: list[int]) -> Iterator[int]:
    """Class after class so that every prefix holds each class's share rounded down or up.

    The j-th member of a class must appear in the slots where its class's share passes from j to j + 1;
    taking the earliest deadline first always meets all of them (unit jobs with release times).
    """
    total = sum(sizes)
    jobs = ((j * total // size, -(-(j + 1) * total // size), k) for k, size in enumerate(sizes) for j in range(size))
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[int, int]] = []
    for slot in range(total):
        while waiting and waiting[-1][0] <= slot:
            heapq.heappush(ready, waiting.pop()[1:])
        yield heapq.heappop(ready)[1]


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
) -> Dataset:
    """A labelled file, or a folder with train, dev and test files, as what training needs.

    `task` is the kind of task; without it the file's format, columns and labels tell. `labels` are those of a named
    task, which files may also give by number. `holdout` is the share of the training rows to hold out as dev; the dev
    file is then the test.
    """
    files, notes = (path, list[str]()) if isinstance(path, Files) else find_files(path)
    files = replace(files, dev=Path(dev) if dev else files.dev, test=Path(test) if test else files.test)
    kind = task or suggest_kind(files.train, label)
    columns = find_columns_of(kind, files.train, text=text, text_pair=text_pair, label=label)
    columns = replace(columns, numbered=bool(labels))
    _require_label(files.train, columns)
    table = _read(files.train, columns, kind)
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


def suggest_kind(path: StrPath, label: str | None = None) -> Kind | None:
    """The kind of task that a file's format or columns tell; None: one label per text, and the labels tell which."""
    kind = kind_of_format(path)
    if kind is not None:
        return kind
    sample = list(islice(rows(path), SAMPLE_ROWS))
    if questions.looks_answered(sample):
        return "answering"
    if sentences.looks_tagged(sample):
        return "tagging"
    if label is not None and len(_label_columns(Path(path), label)) > 1:
        return "multilabel"
    names = [label] if label else [name for name in sample[0].values if _bare(name) in LABELS.split()]
    lists = names and any(isinstance(row.values.get(names[0]), list) for row in sample)
    return "multilabel" if lists else None


def _label_columns(path: Path, label: str | None) -> tuple[str, ...]:
    """The columns that --label a,b,c names; none if it is a single column's name."""
    held = dict.fromkeys(chain(*(row.values for row in islice(rows(path), SAMPLE_ROWS))))
    if label is None or label in held or "," not in label:
        return ()
    several = tuple(part.strip() for part in label.split(","))
    for name in several:
        if name not in held:
            raise DataError(f'{path} has no column "{name}".{suggest(name, held)}')
    return several


def find_columns_of(
    kind: Kind | None,
    path: StrPath,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """`find_columns` for any kind of task."""
    if kind in _READERS:
        return _READERS[kind].find_columns(path, text=text, text_pair=text_pair, label=label)  # type: ignore[no-any-return]
    several = _label_columns(Path(path), label) if kind == "multilabel" else ()
    found = find_columns(path, text=text, text_pair=text_pair, label=several[0] if several else label)
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
    names = (_label_columns(path, columns.label) if kind == "multilabel" else ()) or (columns.label or "",)
    if all(_is_unlabelled(row, name, labels) for row in rows(path) for name in names):
        return None, (f"{path.name} has no labels and is ignored.",)
    return load_labelled(path, columns, kind, labels)


def _is_unlabelled(row: Row, label: str, labels: tuple[str, ...]) -> bool:
    """Whether the label is missing, or the -1 by which public test sets hide theirs."""
    value = row.values.get(label)
    return _is_missing(value) or ("-1" not in labels and _class_name(value) == "-1")


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
    conflicts = sum(not _agrees(examples, group) for group in _duplicates(examples))
    if conflicts:
        notes.append(f"{conflicts:,} repeated {'texts have' if conflicts > 1 else 'text has'} conflicting labels.")
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
