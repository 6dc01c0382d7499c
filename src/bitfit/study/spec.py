"""Study files: what to train, the papers' protocol and published numbers, and the claims a study decides.

This module reads and checks TOML files. It imports no torch, so that listing studies stays fast.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from .. import values
from ..errors import BitfitError, StudyError, suggest
from ..model.anatomy import HEADS
from ..model.grafts import NONE
from ..model.language import check, check_inject, parse_init
from ..training.plan import DROPOUTS
from . import SEARCHES

FOLDER = Path(__file__).parent / "papers"
CLAIMS = Path(__file__).parent / "claims.toml"
SPLITS = ("dev", "holdout", "test")
SIZES = ("all", "smallest", "largest", "scarce")
LAYOUTS = ("tasks", "rates", "sizes", "space", "best", "metrics", "test", "numbers")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Number:
    """A published number, with its standard deviation where the paper gives one."""

    value: float
    deviation: float | None = None


@dataclass(frozen=True)
class Protocol:
    """How the paper trained and scored; `unstated` names the settings that are our choice."""

    model: str
    bases: tuple[str, ...]
    cased: str = "not stated"
    optimiser: str = "AdamW"
    batch: tuple[int, ...] = (8,)
    epochs: int = 20
    evals_per_epoch: int = 2
    rounds: int = 1
    rounds_by_task: Mapping[str, int] = field(default_factory=dict)
    split: str = "dev"
    test_part: Mapping[str, str] = field(default_factory=dict)  # task -> the part of its data that is the test set
    search: str = "first-seed"
    schedule: Literal["constant", "linear"] = "constant"
    weight_decay: float = 0.0
    clip: float = 1.0
    max_length: int = 128
    unstated: tuple[str, ...] = ()
    not_stated: tuple[str, ...] = ()  # what else the text leaves open, in sentences

    def __post_init__(self) -> None:
        _one_of("split", self.split, SPLITS)
        _one_of("search", self.search, SEARCHES)
        for name in ("batch", "rounds_by_task"):
            _positive(name, getattr(self, name))
        for name in ("epochs", "evals_per_epoch", "rounds", "max_length"):
            _positive(name, {name: getattr(self, name)})
        for name in self.unstated:
            _one_of("unstated", name, self.__dataclass_fields__)


@dataclass(frozen=True)
class Method:
    """One way to train: a row of the papers' tables."""

    name: str
    select: str
    rates: tuple[float, ...]
    rates_by_task: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    inject: str = NONE  # parameters that are added to the base
    epochs_times: int = 1  # times the protocol's epochs, where little trains and the encoder runs once
    fixed: bool = False  # the study is about these rates: they are never replaced or widened
    head: str = "full"
    init: str = "keep"
    dropout: str = "on"
    autofreeze: bool = False  # settled layers are frozen while it trains
    family: str = ""  # the method's name in other studies, for its colour; its own name if empty
    note: str = ""  # where its rates come from, if not from the paper

    def __post_init__(self) -> None:
        _parsed("select", self.select, check)
        _parsed("init", self.init, parse_init)
        _parsed("inject", self.inject, check_inject)
        _positive("epochs_times", (self.epochs_times,))
        _one_of("head", self.head, HEADS)
        _one_of("dropout", self.dropout, DROPOUTS)

    @property
    def kind(self) -> str:
        """The name that methods of one kind share over studies."""
        return self.family or self.name


@dataclass(frozen=True)
class Row:
    """A row of a published table: the paper's label, and the method of ours it stands beside."""

    label: str
    values: tuple[float | tuple[float, float] | str, ...] = ()  # a number, number and deviation, or "" if not given
    method: str = ""  # empty: published only
    numbers_of: str = ""  # the method that the numbers are of, where we cannot score what they were scored on
    base: str = ""
    rate: float | None = None
    share: str = ""
    texts: tuple[str, ...] = ()  # cells that are no numbers

    def __post_init__(self) -> None:
        for value in self.values:
            if isinstance(value, str) and value:
                raise ValueError(f'values: "{value}" must be a number, [number, deviation] or ""')

    @cached_property
    def numbers(self) -> tuple[Number | None, ...]:
        """The published numbers; None where the text gives none."""
        return tuple(_number(value) for value in self.values)


@dataclass(frozen=True)
class Table:
    """A table in the paper's layout; `columns` are tasks, sizes or free names, by `layout`."""

    name: str
    layout: str = "tasks"
    columns: tuple[str, ...] = ()
    task: str = ""
    caption: str = ""
    average: bool = False
    metric: str = ""  # another than the task's
    rows: tuple[Row, ...] = ()
    wins: tuple[str, str] | None = None  # a method and the label of a published row it is counted against

    def __post_init__(self) -> None:
        _one_of("layout", self.layout, LAYOUTS)


@dataclass(frozen=True)
class Figure:
    """A figure and the methods and tasks it shows; without methods or tasks, all of them."""

    name: str
    kind: str
    caption: str = ""
    methods: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    metric: str = ""  # another than the task's
    terms: tuple[str, ...] = ()  # terms that a map shows although they did not move
    reference: str = ""  # the method that others are compared with
    rate: float | None = None  # the rate that is drawn, where it is not the chosen one


@dataclass(frozen=True)
class Part:
    """One comparison of a claim."""

    test: str
    a: str = ""
    b: str = ""
    quantity: str = "score"
    tasks: tuple[str, ...] = ()
    not_tasks: tuple[str, ...] = ()  # tasks that, with all their rows, the claim is not about
    sizes: str = "all"
    least_rows: int = 0  # training rows below which a place is not what the claim is about
    margin: float = 1.0  # the smallest difference that matters
    by: float = 0.0  # for `greater`: by more than this
    terms: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()  # for `same_difference`: the two methods whose difference a - b is compared with
    base: str = ""  # the only base the claim is about, by the name of its folder

    def __post_init__(self) -> None:
        _one_of("sizes", self.sizes, SIZES)


@dataclass(frozen=True)
class Claim:
    """What a paper says and where, and the comparisons that decide it; a claim holds when all its parts do."""

    id: str
    text: str = ""
    paper: str = ""
    where: str = ""
    parts: tuple[Part, ...] = ()
    untested: str = ""  # why it cannot be decided here; its parts are compared all the same


@dataclass(frozen=True)
class View:
    """A task that is scored by the trials of another task, on another part of its data."""

    of: str
    part: str


@dataclass(frozen=True)
class Study:
    """One result of the papers, ready to be run."""

    name: str
    title: str
    paper: str
    covers: tuple[str, ...]
    tasks: tuple[str, ...]
    protocol: Protocol
    methods: tuple[Method, ...]
    about: str = ""
    sizes: tuple[int | str, ...] = ("all",)
    sizes_by_task: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    views: Mapping[str, View] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        for sizes in (self.sizes, *self.sizes_by_task.values()):
            for size in sizes:
                if size != "all" and (isinstance(size, str) or size < 1):
                    raise ValueError(f'sizes: {size!r} must be a whole number of at least 1 or "all"')

    def method(self, name: str) -> Method:
        """The method of this name."""
        return self._methods[name]

    @cached_property
    def _methods(self) -> dict[str, Method]:
        return {method.name: method for method in self.methods}

    def prints(self, method: str) -> bool:
        """Whether the paper prints numbers of a method."""
        rows = chain.from_iterable(table.rows for table in self.tables)
        return any(row.method == method and row.values for row in rows)

    @property
    def of_a_paper(self) -> bool:
        """Whether it repeats something of a paper; else its protocol is ours."""
        return bool(self.covers)

    @cached_property
    def trained_tasks(self) -> tuple[str, ...]:
        """Tasks with trials of their own: all but the views of another task."""
        return tuple(task for task in self.tasks if task not in self.views)

    def rounds(self, task: str) -> int:
        """How many seeds the paper gave a task."""
        return self.protocol.rounds_by_task.get(task, self.protocol.rounds)

    def task_sizes(self, task: str) -> tuple[int | None, ...]:
        """Training sizes of a task; None is all of its rows."""
        sizes = self.sizes_by_task.get(task, self.sizes)
        return tuple(None if isinstance(size, str) else size for size in sizes)


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
    study = values.read(Study, _toml(path), path.name, StudyError)
    _check(study, path.name)
    known = known_claims()
    claims = tuple(_completed(claim, known, path.name) for claim in study.claims)
    return replace(study, claims=claims)


@cache
def known_claims() -> dict[str, Claim]:
    """The papers' claims by id: text, paper and where it stands. Studies add the comparisons."""
    tables = _toml(CLAIMS)
    return {
        name: values.read(Claim, {"id": name, **table}, f"{CLAIMS.name}: {name}", StudyError)
        for name, table in tables.items()
    }


def _completed(claim: Claim, known: Mapping[str, Claim], where: str) -> Claim:
    """A claim of a study with the text and the paper of the known claim of its id."""
    published = known.get(claim.id, claim)
    if not (claim.text or published.text):
        raise StudyError(f'{where}: claim "{claim.id}" has no text and is not a known one.{suggest(claim.id, known)}')
    return replace(
        claim,
        text=claim.text or published.text,
        paper=claim.paper or published.paper,
        where=claim.where or published.where,
        untested=claim.untested or published.untested,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: not TOML ({error})") from error


# ---- checks


def _number(value: float | tuple[float, float] | str) -> Number | None:
    if isinstance(value, str):
        return None
    if isinstance(value, tuple):
        return Number(*value)
    return Number(value)


def _one_of(key: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f'{key}: no "{value}".{suggest(value, known)}')


def _positive(key: str, numbers: Mapping[str, int] | tuple[int, ...]) -> None:
    values = numbers.values() if isinstance(numbers, Mapping) else numbers
    for number in values:
        if number < 1:
            raise ValueError(f"{key} = {number}: must be a whole number of at least 1")


def _parsed(key: str, text: str, parse: Any) -> None:
    try:
        parse(text)
    except BitfitError as error:
        raise ValueError(f"{key} = {text!r}: {error}") from None


def _check(study: Study, where: str) -> None:
    """Check what concerns several keys: names must be those of the study, rows as long as their table."""
    _unique(where, "methods", [method.name for method in study.methods])
    _unique(where, "tasks", study.tasks)
    known = [method.name for method in study.methods]
    for name, view in study.views.items():
        _known(f"{where}: views", [name, view.of], study.tasks)
    for table in study.tables:
        for row in table.rows:
            at = f"{where}: {table.name}, row {row.label}"
            _known(at, [name for name in (row.method, row.numbers_of) if name], known)
            if row.values and len(row.values) != len(table.columns):
                raise StudyError(f"{at}: {len(row.values)} values for {len(table.columns)} columns")
    for figure in study.figures:
        _known(f"{where}: {figure.name}", figure.methods, known)
        _known(f"{where}: {figure.name}", figure.tasks, study.tasks)
    for claim in study.claims:
        for part in claim.parts:
            named = [name for name in (part.a, part.b, *part.pair) if name]
            _known(f"{where}: claim {claim.id}", named, known)
            _known(f"{where}: claim {claim.id}", [*part.tasks, *part.not_tasks], study.tasks)


def _unique(where: str, what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise StudyError(f'{where}: {what}: "{name}" occurs twice')
        seen.add(name)
    if not seen:
        raise StudyError(f"{where}: {what}: at least one is needed")


def _known(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise StudyError(f'{where}: no "{name}".{suggest(name, known)}')
