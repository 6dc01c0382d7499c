"""The metadata of a delta: its base, its task, how it was trained and its scores.

In the file it is one JSON table. This module alone reads and writes that table; everything else uses attributes.

Format 1: a key that this version does not know is ignored, and a key that was added later has a default here, which
is what versions without the key did. So older and newer files of the same format load. A change that an older reader
would get wrong needs another format: format 2 is format 1 with a `long` that is not "head".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..data.examples import Columns
from ..data.readers import READERS
from ..errors import DeltaError, UsageError
from ..model.anatomy import PAIR
from ..model.dtypes import DTYPES, FULL
from ..model.grafts import NONE, injects
from ..values import read_known

FORMAT = 1
WINDOWS_FORMAT = 2  # of deltas whose `long` is not "head"; earlier versions would cut their texts
LONG = ("head", "head+tail", "windows")  # what is read of a text that is too long
HEAD_OF_TEXT = LONG[0]
POOLS = ("cls", "mean", PAIR, "tokens")  # what the head reads
MAX_LAYERS = 1000
HUB_NAMES = {"all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2"}  # hub ids of bases that packages contain
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
LARGEST = 1e300  # limit of the numbers that are printed or drawn
ERRORS = ("mae", "rmse")  # metrics in the unit of the labels, lower is better; all others are fractions of 1


def shown_score(metric: str, value: float) -> str:
    """A metric's value to read: a fraction as a percentage, an error in the unit of the labels."""
    if metric not in ERRORS:
        return f"{100 * value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


@dataclass(frozen=True)
class Score:
    """A metric's value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training, with everything that decides its outcome except the data and the base.

    A field that is added needs a default: what versions without it did.
    """

    select: str
    inject: str = NONE
    head: str
    init: str
    pool: str
    lr: float
    batch: int
    seed: int
    epochs: int
    evals_per_epoch: int
    schedule: str
    weight_decay: float
    clip: float
    max_length: int
    stride: int = 0
    train_size: int | None
    data_seed: int = 0
    protocol: str = "published"
    metric: str
    prefix_dropout: bool = True
    dropout: str = "on"
    autofreeze: bool = False
    class_weights: str = "none"


ADDED = {"autofreeze": False, "class_weights": "none"}
"""Fields of a trial that are written only if they differ from these values, so that finished trials keep their keys."""


def trial_table(trial: Trial) -> dict[str, Any]:
    """A trial as files and keys hold it."""
    table = asdict(trial)
    for name, default in ADDED.items():
        if table[name] == default:
            del table[name]
    return table


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Trial):
    """The trial that made a delta, and its outcome."""

    best_step: int = 0  # of the checkpoint that the delta holds
    train_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The metadata of a delta. It holds no time, no path and no host name."""

    format: int = FORMAT
    base: str
    hub: bool  # whether the base's name is one of the hub
    fingerprint: str
    dtype: str = FULL  # in which the base was stored when the delta was trained
    select: str
    inject: str = NONE  # the parameters that the delta adds to the base, as in --inject
    head: str
    init: str
    pool: str
    task: str  # the kind of task
    name: str | None = None  # of a named task
    labels: tuple[str, ...]  # the names of the classes; none for regression and answering
    center: float  # a regression's head answers (label - center) / spread
    spread: float
    positive: str | None = None  # of two classes the positive one; None: the last
    columns: Columns
    max_length: int
    stride: int = 0
    long: str = HEAD_OF_TEXT  # what is read of a text above max_length: head, head+tail or windows
    metric: str
    metrics: Mapping[str, Mapping[str, Score]]  # split -> metric -> score; empty: never scored
    trial: TrialRecord | None = None  # None: the delta was not made by a training
    trained: int
    total: int
    change: Mapping[str, tuple[float | None, ...]]  # term -> mean absolute change of each layer
    versions: Mapping[str, str]
    threads: int = 0  # of the training, 0 if unknown
    folded: bool = False
    recipe: str = "plain"  # how the training was set up
    calibration_errors: tuple[float, float] | None = None  # on held-out rows, without and with the temperature
    open_gates: float | None = None  # Diff-Pruning: the share of open gates before the largest differences were chosen
    sha256: str = ""  # of the file it was read from

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise ValueError(f"pool: must be one of {', '.join(POOLS)}")
        if self.pool == PAIR and not self.pairs:
            raise ValueError("pool: pair is for pairs of texts, and the delta reads single texts")
        if self.long not in LONG:
            raise ValueError(f"long: must be one of {', '.join(LONG)}")
        if self.long != HEAD_OF_TEXT and (self.pairs or self.pool == "tokens"):
            raise ValueError("long: must be head for pairs of texts and for tasks that read every token")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}")
        if not 1 <= self.max_length < 1 << 20:
            raise ValueError("max_length: must be at least 1 and less than 1,048,576 tokens")
        if not 0 <= self.stride <= self.max_length // 2:
            raise ValueError(f"stride: must be between 0 and half of max_length {self.max_length}")
        if not 0 <= self.trained <= self.total < 1 << 63 or self.total == 0:
            raise ValueError("trained: must be at least 0 and at most total")
        self._check_texts()
        self._check_labels()
        self._check_scores()
        self._check_change()
        if self.open_gates is not None and not 0 <= self.open_gates <= 1:
            raise ValueError("open_gates: must be a share from 0 to 1")

    def _check_texts(self) -> None:
        columns = self.columns
        names = (self.base, self.name, self.task, self.metric, columns.text, columns.text_pair, columns.label)
        settings = (self.select, self.inject, self.head, self.init)
        texts = (*names, *settings, *self.labels, *self.change)
        try:
            "".join(text or "" for text in texts).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text is not valid Unicode") from error

    def _check_labels(self) -> None:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels: a label occurs twice")
        if not self.labels and self.task in READERS and READERS[self.task].labelled:
            raise ValueError(f"labels: must not be empty for a {self.task} task")

    def _check_scores(self) -> None:
        if self.metrics and self.metric not in self.metrics.get("dev", ()):
            raise ValueError(f"metrics: the dev score by {self.metric[:40]} is missing")
        for scores in self.metrics.values():
            for score in scores.values():
                _require_numbers("metrics", (score.value, score.low, score.high))

    def _check_change(self) -> None:
        for row in self.change.values():
            if len(row) > MAX_LAYERS:
                raise ValueError(f"change: a term has more than {MAX_LAYERS:,} layers")
            _require_numbers("change", row)

    @property
    def score(self) -> Score | None:
        """The dev score by the metric that picked the checkpoint; None if the delta was never scored."""
        return self.metrics["dev"][self.metric] if self.metrics else None

    @property
    def hub_base(self) -> str | None:
        """The base's hub id; None if the base was a folder."""
        return self.base if self.hub and HUB_ID.fullmatch(self.base) else HUB_NAMES.get(self.base)

    @property
    def injects(self) -> bool:
        """Whether the delta adds parameters to the base."""
        return injects(self.inject)

    @property
    def pairs(self) -> bool:
        """Whether an input is two texts."""
        return self.columns.text_pair is not None

    def table(self) -> dict[str, Any]:
        """The metadata as the file holds it."""
        table = asdict(self)
        del table["columns"]["numbered"]  # a setting of the reader, not of the data
        if self.columns.separator is None:
            del table["columns"]["separator"]  # so that files are the same as before there was one
        if self.open_gates is None:
            del table["open_gates"]
        table["trial"] = {} if self.trial is None else trial_table(self.trial)
        if self.long == HEAD_OF_TEXT:
            del table["long"]
        table["format"] = FORMAT if self.long == HEAD_OF_TEXT else WINDOWS_FORMAT
        return table


def read_meta(table: Mapping[str, Any], where: str) -> Meta:
    """The metadata in a file's table; DeltaError with the file and the key if it is not of the format."""
    known = (FORMAT, WINDOWS_FORMAT)
    if table.get("format") not in known or isinstance(table["format"], bool):
        actual = f"delta format {_short(table.get('format'))}"
        raise DeltaError(f"{where}: {actual}; this version of bitfit reads formats {FORMAT} and {WINDOWS_FORMAT}")
    if table.get("trial") == {}:
        table = {**table, "trial": None}
    try:
        return read_known(Meta, table, f"{where}: metadata", DeltaError)
    except UsageError as error:  # of a package that adds the kind of task and cannot be loaded
        raise DeltaError(f"{where}: {error}") from error


def _short(value: object) -> str:
    return repr(value)[:40]


def _require_numbers(key: str, values: Iterable[float | None]) -> None:
    for value in values:
        if value is not None and not abs(value) <= LARGEST:
            raise ValueError(f"{key}: a number is too large, or not a number")
