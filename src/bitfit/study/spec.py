"""A study as data: what to train, the papers' protocol and published numbers, and the claims it decides.

Reading and checking a TOML file is all this module does, so that listing studies needs no torch and no numpy.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..errors import BitfitError, StudyError, suggest
from ..model.anatomy import HEADS
from ..model.language import check, parse_init
from ..training.plan import DROPOUTS
from . import SEARCHES

FOLDER = Path(__file__).parent / "papers"
SPLITS = ("dev", "holdout", "test")
FIGURES = ("bars", "failed", "loss", "score", "sizes", "map", "change", "heat", "gap", "models", "spread")
LAYOUTS = ("tasks", "rates", "sizes", "space", "best", "metrics", "test", "numbers")
TESTS = (
    "greater",
    "equal",
    "not_worse",
    "small",
    "nothing",
    "still",
    "most",
    "unrelated",
    "shrinks",
    "smaller_base",
    "same",
)
QUANTITIES = ("score", "gap", "fall", "area", "epochs", "spread", "failed")

T = TypeVar("T")
Reader = Callable[[Any], Any]


# ---- readers: a value as TOML gives it -> as the study keeps it; ValueError says what it must be


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be a whole number of at least 1")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _one_of(known: tuple[str, ...]) -> Reader:
    def read(value: Any) -> str:
        if value not in known:
            raise ValueError(f'has no "{value}".{suggest(str(value), known)}')
        return str(value)

    return read


def _each(read: Reader) -> Reader:
    def several(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError("must be a list")
        return tuple(read(item) for item in value)

    return several


def _by_name(read: Reader) -> Reader:
    def table(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("must be a table")
        return {str(name): read(item) for name, item in value.items()}

    return table


def _size(value: Any) -> int | None:
    return None if value == "all" else _whole(value)


def _selection(value: Any) -> str:
    check(_text(value))
    return str(value)


def _start(value: Any) -> str:
    parse_init(_text(value))
    return str(value)


def _published(value: Any) -> Number | None:
    if value == "":
        return None
    if isinstance(value, list) and len(value) == 2:
        return Number(_number(value[0]), _number(value[1]))
    return Number(_number(value))


def _key(read: Reader, default: Any = MISSING) -> Any:
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"read": read})
    return field(default=default, metadata={"read": read})


def _table(kind: type) -> Any:
    return field(metadata={"table": kind})


def _many(kind: type, needed: bool = False) -> Any:
    return field(metadata={"tables": kind}) if needed else field(default=(), metadata={"tables": kind})


# ---- what a study consists of


@dataclass(frozen=True)
class Number:
    """A published number, with its standard deviation where the paper gives one."""

    value: float
    deviation: float | None = None


@dataclass(frozen=True)
class Protocol:
    """How the paper trained and scored."""

    model: str = _key(_text)
    bases: tuple[str, ...] = _key(_each(_text))
    cased: str = _key(_text, "not stated")
    optimiser: str = _key(_text, "AdamW")
    batch: tuple[int, ...] = _key(_each(_whole), (8,))
    epochs: int = _key(_whole, 20)
    evals_per_epoch: int = _key(_whole, 2)
    rounds: int = _key(_whole, 1)
    rounds_by_task: Mapping[str, int] = _key(_by_name(_whole), {})
    split: str = _key(_one_of(SPLITS), "dev")
    search: str = _key(_one_of(SEARCHES), "first-seed")
    schedule: str = _key(_one_of(("constant", "linear")), "constant")
    weight_decay: float = _key(_number, 0.0)
    clip: float = _key(_number, 1.0)
    max_length: int = _key(_whole, 128)
    not_stated: tuple[str, ...] = _key(_each(_text), ())  # what the text leaves open and we had to choose


@dataclass(frozen=True)
class Method:
    """One way to train: a row of the papers' tables."""

    name: str = _key(_text)
    select: str = _key(_selection)
    rates: tuple[float, ...] = _key(_each(_number))
    rates_by_task: Mapping[str, tuple[float, ...]] = _key(_by_name(_each(_number)), {})
    fixed: bool = _key(_flag, False)  # the rates are the point of the study: never replaced by those that suit a base
    head: str = _key(_one_of(HEADS), "full")
    init: str = _key(_start, "keep")
    dropout: str = _key(_one_of(DROPOUTS), "on")


@dataclass(frozen=True)
class Row:
    """A row of a published table: the paper's own label, and which of our methods it stands beside."""

    label: str = _key(_text)
    values: tuple[Number | None, ...] = _key(_each(_published), ())
    method: str = _key(_text, "")  # empty: published only
    base: str = _key(_text, "")
    rate: float | None = _key(_number, None)
    share: str = _key(_text, "")
    texts: tuple[str, ...] = _key(_each(_text), ())  # cells that are no numbers


@dataclass(frozen=True)
class Table:
    """A table in the paper's layout; `columns` are tasks, sizes or free names, by `layout`."""

    name: str = _key(_text)
    layout: str = _key(_one_of(LAYOUTS), "tasks")
    columns: tuple[str, ...] = _key(_each(_text), ())
    task: str = _key(_text, "")
    caption: str = _key(_text, "")
    average: bool = _key(_flag, False)
    metric: str = _key(_text, "")  # another than the task's
    rows: tuple[Row, ...] = _many(Row)


@dataclass(frozen=True)
class Figure:
    """A figure and what it is drawn from; without methods or tasks, from all."""

    name: str = _key(_text)
    kind: str = _key(_one_of(FIGURES))
    caption: str = _key(_text, "")
    methods: tuple[str, ...] = _key(_each(_text), ())
    tasks: tuple[str, ...] = _key(_each(_text), ())
    metric: str = _key(_text, "")  # another than the task's


@dataclass(frozen=True)
class Part:
    """One comparison; a claim holds when all its parts do."""

    test: str = _key(_one_of(TESTS))
    a: str = _key(_text, "")
    b: str = _key(_text, "")
    quantity: str = _key(_one_of(QUANTITIES), "score")
    tasks: tuple[str, ...] = _key(_each(_text), ())
    except_: tuple[str, ...] = _key(_each(_text), ())  # tasks that, with all their rows, the claim is not about
    sizes: str = _key(_one_of(("all", "smallest", "largest", "scarce")), "all")
    margin: float = _key(_number, 1.0)  # points that matter
    by: float = _key(_number, 0.0)  # for `greater`: by more than this
    terms: tuple[str, ...] = _key(_each(_text), ())
    with_: tuple[str, ...] = _key(_each(_text), ())  # for `same`: the pair the difference a - b is compared with


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the comparisons that decide it."""

    id: str = _key(_text)
    text: str = _key(_text)
    parts: tuple[Part, ...] = _many(Part)


@dataclass(frozen=True)
class Study:
    """One result of the papers, ready to be run."""

    name: str = _key(_text)
    title: str = _key(_text)
    paper: str = _key(_text)
    covers: tuple[str, ...] = _key(_each(_text))
    tasks: tuple[str, ...] = _key(_each(_text))
    protocol: Protocol = _table(Protocol)  # noqa: RUF009 (it is a field)
    methods: tuple[Method, ...] = _many(Method, needed=True)
    about: str = _key(_text, "")
    sizes: tuple[int | None, ...] = _key(_each(_size), (None,))
    sizes_by_task: Mapping[str, tuple[int | None, ...]] = _key(_by_name(_each(_size)), {})
    contradictions: tuple[str, ...] = _key(_each(_text), ())
    tables: tuple[Table, ...] = _many(Table)
    figures: tuple[Figure, ...] = _many(Figure)
    claims: tuple[Claim, ...] = _many(Claim)

    def method(self, name: str) -> Method:
        """The method of this name."""
        return self._methods[name]

    @cached_property
    def _methods(self) -> dict[str, Method]:
        return {method.name: method for method in self.methods}

    def rounds(self, task: str) -> int:
        """How many seeds the paper gave a task."""
        return self.protocol.rounds_by_task.get(task, self.protocol.rounds)

    def task_sizes(self, task: str) -> tuple[int | None, ...]:
        """Training sizes of a task; None is all of its rows."""
        return self.sizes_by_task.get(task, self.sizes)


# ---- files


def names() -> list[str]:
    """The studies that come with bitfit."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Study:
    """A study that comes with bitfit, or a TOML file of the same form."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file() or "/" in name:
        path = Path(name)
        if path.suffix != ".toml":
            raise StudyError(f'no study "{name}", and no .toml file.{suggest(name, names())}')
    return read(path)


def read(path: Path) -> Study:
    """A study file, checked; an error names the file and the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: not TOML ({error})") from error
    study = _build(Study, table, path.name)
    _check(study, path.name)
    return study


def _build(kind: type[T], table: Any, where: str) -> T:
    if not isinstance(table, dict):
        raise StudyError(f"{where}: must be a table")
    known: dict[str, Any] = {entry.name.rstrip("_"): entry for entry in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise StudyError(f'{where}: no key "{key}".{suggest(key, known)}')
    values = {}
    for key, entry in known.items():
        if key in table:
            values[entry.name] = _value(entry.metadata, table[key], f"{where}: {key}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise StudyError(f'{where}: the key "{key}" is missing')
    return kind(**values)


def _value(metadata: Mapping[str, Any], value: Any, where: str) -> Any:
    if "table" in metadata:
        return _build(metadata["table"], value, where)
    if "tables" in metadata:
        if not isinstance(value, list):
            raise StudyError(f"{where}: must be a list of tables")
        return tuple(_build(metadata["tables"], item, f"{where}[{n}]") for n, item in enumerate(value, 1))
    try:
        return metadata["read"](value)
    except (ValueError, BitfitError) as error:
        raise StudyError(f"{where} = {value!r}: {error}") from None


def _check(study: Study, where: str) -> None:
    """What a single key cannot tell: names must be those of the study, rows as long as their table."""
    _unique(where, "methods", [method.name for method in study.methods])
    _unique(where, "tasks", study.tasks)
    known = [method.name for method in study.methods]
    for table in study.tables:
        for row in table.rows:
            _known(f"{where}: {table.name}, row {row.label}", [row.method] if row.method else [], known)
            if row.values and len(row.values) != len(table.columns):
                raise StudyError(f"{where}: {table.name}, row {row.label}: {len(row.values)} values for "
                                 f"{len(table.columns)} columns")  # fmt: skip
    for figure in study.figures:
        _known(f"{where}: {figure.name}", figure.methods, known)
        _known(f"{where}: {figure.name}", figure.tasks, study.tasks)
    for claim in study.claims:
        for part in claim.parts:
            named = [name for name in (part.a, part.b, *part.with_) if name and name != "best"]
            _known(f"{where}: claim {claim.id}", named, known)
            _known(f"{where}: claim {claim.id}", [*part.tasks, *part.except_], study.tasks)
            if part.test == "same" and len(part.with_) != 2:
                raise StudyError(f"{where}: claim {claim.id}: with = {list(part.with_)}: must be two methods")


def _unique(where: str, what: str, given: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in given:
        if name in seen:
            raise StudyError(f'{where}: {what}: "{name}" stands twice')
        seen.add(name)
    if not seen:
        raise StudyError(f"{where}: {what}: at least one is needed")


def _known(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise StudyError(f'{where}: no "{name}".{suggest(name, known)}')
