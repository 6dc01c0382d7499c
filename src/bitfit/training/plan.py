"""What to train: a plan holds the options of a user, which make a grid of trials.

The command line is made from Plan's fields, so importing this module must stay cheap: no torch, no numpy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from ..data.readers import BUILT_IN
from ..delta.meta import HEAD_OF_TEXT, LONG
from ..delta.meta import Trial as Trial
from ..errors import UsageError, suggest
from ..model.anatomy import HEADS, PAIR
from ..model.dtypes import DTYPES, FULL

if TYPE_CHECKING:
    from ..model.selection import Selection

DROPOUTS = ("on", "off", "first-tenth")
RECIPES = ("default", "plain")
CLASS_WEIGHTS = ("none", "balanced")
DEVICES = ("auto", "cpu", "cuda", "mps")
BATCH, SEED, EPOCHS = 8, 0, 5  # the defaults of the options
FEW = 500  # rows up to which the default recipe holds out every row once, and takes more epochs
MOST_EPOCHS = 20  # of the default recipe
EXTRA_EPOCHS = 480  # for few rows: this number divided by the rows is added to EPOCHS
PROTOCOLS = ("published", "holdout")
EVALS_PER_EPOCH = {"published": 2, "holdout": 10}
NARROW = 512  # up to this width the larger rates won on real tasks (LOG.md)
EVALUATIONS_TO_FREEZE = 3  # AutoFreeze measures a move at the second at the earliest, and saves time after it
MASK = 0.05  # up to this share of the matrices a selection gets the rates of a sparse mask, above it those of "all"


@dataclass(frozen=True)
class Option:
    """How the command line gives a field of Plan."""

    help: str
    read: Callable[[str], Any]
    choices: Sequence[str]

    @classmethod
    def of(cls, entry: Field[Any]) -> Option:
        """The option of a field."""
        option: Option = entry.metadata[_OPTION]
        return option


_OPTION = "option"


def _option(default: Any, text: str, read: Callable[[str], Any] = str, choices: Sequence[str] = ()) -> Any:
    return field(default=default, metadata={_OPTION: Option(text, read, choices)})


def numbers(text: str) -> list[float]:
    """Numbers, comma-separated."""
    return [float(item) for item in text.split(",")]


def wholes(text: str) -> list[int]:
    """Whole numbers, comma-separated."""
    return [int(item) for item in text.split(",")]


@dataclass(frozen=True)
class Plan:
    """What a user asks of `train`: several rates, batch sizes or seeds make a grid of trials."""

    select: str = _option("bias", "what trains: bias, b_q + b_m2, bias@last4, random(all, 0.1%), all, none, ...")
    inject: str = _option(
        "none", "what is added: biases where a layer has none (bias), lora(W_q + W_v, 8), adapter(64)"
    )
    head: str = _option("full", "which parameters of the head train", choices=HEADS)
    init: str = _option("keep", "start values: keep, zero(SELECTION) or reinit(SELECTION)")
    pool: str = _option(
        "auto",
        "what the head reads (auto: as the base declares); pair: the two texts of a row, each encoded by itself",
        choices=("auto", "cls", "mean", PAIR),
    )
    lr: Sequence[float] | float | None = _option(
        None, "learning rates, comma-separated (chosen by SELECT and the base)", numbers
    )
    batch: Sequence[int] | int | None = _option(None, "batch sizes, comma-separated (8)", wholes)
    seed: Sequence[int] | int | None = _option(None, "seeds, comma-separated (0)", wholes)
    epochs: int | None = _option(
        None, "passes over the training rows (5; the default recipe takes more for few rows)", int
    )
    recipe: str = _option(
        "default",
        "plain: from a random head, the best rate on dev is kept; implied by --lr, --epochs, --batch, --autofreeze, "
        "several seeds, diff_pruning",
        choices=RECIPES,
    )
    evals_per_epoch: int | None = _option(
        None, "evaluations per epoch, of which the plain recipe keeps the best (2; 10 with --protocol holdout)", int
    )
    schedule: str = _option("linear", "linear: warm-up, then down to 0", choices=("constant", "linear"))
    weight_decay: float = _option(0.0, "weight decay of the trained entries", float)
    clip: float = _option(1.0, "largest gradient norm; 0: none", float)
    max_length: int | None = _option(None, "tokens per text (128; 384 with a question)", int)
    stride: int | None = _option(
        None, "tokens shared by two windows of a sentence or context (a third of --max-length) or of a text (0)", int
    )
    long: str = _option(
        HEAD_OF_TEXT,
        "how a text above --max-length is read: its first tokens, its first and last ones, or all of it in windows",
        choices=LONG,
    )
    train_size: Sequence[int] | int | None = _option(
        None, "train on this many rows, classes keep their shares; several, comma-separated, train a delta each", wholes
    )
    data_seed: int = _option(0, "seed of the rows drawn by --train-size and of a dev split", int)
    protocol: str = _option(
        "published", "holdout: a fifth of train picks the checkpoint, and dev is the test", choices=PROTOCOLS
    )
    data: str | None = _option(None, "folder with the data of named tasks: DIR/TASK/SPLIT.jsonl[.gz] ($BITFIT_DATA)")
    encoding: str | None = _option(None, "encoding of the files: utf-8, cp1252, utf-16, ... (recognised)")
    metric: str | None = _option(
        None, "main metric; the plain recipe picks checkpoint and trial by it (accuracy; spearman for numbers)"
    )
    positive: str | None = _option(None, "the positive class of two, for precision, recall and F1 (the rarer)")
    class_weights: str = _option(
        "none", "balanced: each class counts alike in the loss, however few its rows", choices=CLASS_WEIGHTS
    )
    prefix_dropout: bool = _option(False, "apply dropout also below the lowest trained layer; slower", bool)
    dropout: str = _option("on", "first-tenth: only in the first tenth of each epoch", choices=DROPOUTS)
    autofreeze: bool = _option(False, "freeze layers whose values have settled, from the lowest up; faster", bool)
    gap: bool = _option(False, "score the training rows too, for the generalisation gap", bool)
    task: str | None = _option(None, f"a named task, or a kind: {', '.join(BUILT_IN)} (recognised)")
    text: str | None = _option(None, "text column (recognised)")
    text_pair: str | None = _option(None, "second text column; a question's context")
    label: str | None = _option(None, "label column; several 0/1 columns, comma-separated, are a multilabel task")
    separator: str | None = _option(None, "separator of several labels in a row (| or ;); implies multilabel")
    lanes: int | None = _option(None, "most trials in one pass through the base", int)
    threads: int | None = _option(None, "CPU threads; results are equal to the bit for an equal number", int)
    device: str = _option("auto", "where to compute", choices=DEVICES)
    dtype: str = _option(FULL, "type in which the frozen base is stored; what trains is float32", choices=DTYPES)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_texts()
        if self.evals_per_epoch is None:
            object.__setattr__(self, "evals_per_epoch", EVALS_PER_EPOCH[self.protocol])
        self._convert(operator.index, "seed", "epochs", "evals_per_epoch", "batch", "max_length", "train_size")
        self._convert(operator.index, "stride", "data_seed", "lanes", "threads")
        self._convert(float, "lr", "weight_decay", "clip")
        if self.train_size is not None and len(several(self.train_size)) == 1:
            object.__setattr__(self, "train_size", several(self.train_size)[0])
        self._check_ranges()
        if self.autofreeze:
            self._check_autofreeze()

    def _check_choices(self) -> None:
        for entry in fields(self):
            allowed = Option.of(entry).choices
            value = getattr(self, entry.name)
            if allowed and value not in allowed:
                name = entry.name.replace("_", "-")
                raise UsageError(f'--{name}: no "{value}".{suggest(str(value), allowed)}')

    def _check_texts(self) -> None:
        from ..data.decoding import check_encoding
        from ..data.sources import kind_or_task
        from ..model.language import check, check_inject, parse_init

        for name in ("select", "inject", "init"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} takes a text in the selection language, such as 'bias - b_q'")
        kind_or_task(self.task)
        check_encoding(self.encoding)
        check(self.select)
        check_inject(self.inject)
        parse_init(self.init)

    def _check_ranges(self) -> None:
        for name in ("epochs", "evals_per_epoch", "batch", "train_size", "lanes", "threads"):
            self._require(name, lambda n: n >= 1, "a whole number of at least 1")
        self._require("lr", lambda n: 0 < n < math.inf, "a number above 0")
        for name in ("seed", "data_seed"):
            self._require(name, lambda n: 0 <= n < 1 << 32, "a whole number from 0")
        self._require("weight_decay", lambda n: 0 <= n < math.inf, "a number of at least 0")
        self._require("clip", lambda n: 0 <= n < math.inf, "a number of at least 0")

    def _check_autofreeze(self) -> None:
        from ..model.language import asks_for_nothing

        if self.prefix_dropout:
            raise UsageError("--autofreeze keeps the states of frozen layers, which --prefix-dropout would change")
        if asks_for_nothing(self.select):
            raise UsageError(f"--autofreeze: --select {self.select} trains no layer that could be frozen")
        evaluations = (self.epochs or EPOCHS) * (self.evals_per_epoch or 1)
        if evaluations < EVALUATIONS_TO_FREEZE:
            raise UsageError(
                f"--autofreeze judges layers at evaluations and needs {EVALUATIONS_TO_FREEZE}, here are {evaluations}; "
                "raise --epochs or --evals-per-epoch"
            )

    def _convert(self, kind: Callable[[Any], Any], *names: str) -> None:
        """Turn the numbers of these fields, such as NumPy's, into Python numbers; several become a list."""
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            try:
                object.__setattr__(self, name, _numbers_of(value, kind))
            except (TypeError, ValueError):
                what = "a number" if kind is float else "a whole number"
                raise UsageError(f"--{name.replace('_', '-')} {value!r}: must be {what}, or several") from None

    def _require(self, name: str, good: Callable[[Any], bool], what: str) -> None:
        value = getattr(self, name)
        if value is not None and not (several(value) and all(good(item) for item in several(value))):
            shown = ",".join(f"{item:g}" for item in several(value))
            raise UsageError(f"--{name.replace('_', '-')} {shown}: must be {what}")


def _numbers_of(value: Any, kind: Callable[[Any], Any]) -> Any:
    if isinstance(value, str):
        raise ValueError("a text is not a number")  # float("1") would accept it
    if hasattr(value, "__len__"):
        return [kind(item) for item in value]
    return kind(value)


class SharedOptions(TypedDict, total=False):
    """The keyword arguments that `train` and `sweep` share: the fields of Plan without `train_size`.

    A test compares them with Plan.
    """

    select: str
    inject: str
    head: str
    init: str
    pool: str
    lr: Sequence[float] | float | None
    batch: Sequence[int] | int | None
    seed: Sequence[int] | int | None
    epochs: int | None
    recipe: str
    evals_per_epoch: int | None
    schedule: str
    weight_decay: float
    clip: float
    max_length: int | None
    stride: int | None
    long: str
    data_seed: int
    protocol: str
    data: str | None
    encoding: str | None
    metric: str | None
    positive: str | None
    class_weights: str
    prefix_dropout: bool
    dropout: str
    autofreeze: bool
    gap: bool
    task: str | None
    text: str | None
    text_pair: str | None
    label: str | None
    separator: str | None
    lanes: int | None
    threads: int | None
    device: str
    dtype: str


class PlanOptions(SharedOptions, total=False):
    """The keyword arguments of `bitfit.train`."""

    train_size: int | None


def follows_recipe(plan: Plan) -> bool:
    """Whether the default recipe sets up the training: the plan sets nothing that the recipe chooses or lacks."""
    from ..model.language import is_learned

    leaves_the_choice = plan.lr is None and plan.epochs is None and plan.batch is None
    one_seed = len(several(plan.seed)) == 1  # None, for the default, counts as one
    supported = plan.head == "full" and plan.protocol == "published" and not plan.autofreeze
    return plan.recipe == "default" and leaves_the_choice and one_seed and supported and not is_learned(plan.select)


def recipe_rates(rates: Sequence[float], rows: int) -> tuple[float, ...]:
    """The rates that the default recipe tries: not the smallest, and for few rows two.

    Training starts from a solved head, from which the rates hardly differ.
    """
    return (rates[1], rates[-1]) if rows <= FEW else tuple(rates[1:])


def recipe_epochs(rows: int) -> int:
    """The epochs of the default recipe: more for few rows."""
    if rows > FEW:
        return EPOCHS
    return min(MOST_EPOCHS, round(EPOCHS + EXTRA_EPOCHS / max(1, rows)))


def default_rates(selection: Selection, width: int) -> tuple[float, ...]:
    """Learning rates for a selection on a base of this width: the papers' grids, with larger rates for narrow bases."""
    if not selection:
        return (1e-3, 4e-3, 1e-2)
    if selection.matrix_share > MASK:
        return (2e-5, 5e-5, 1e-4) if width <= NARROW else (1e-5, 2e-5, 3e-5, 5e-5)
    if selection.matrix_share:
        return (5e-4, 1e-3, 2e-3, 5e-3)
    return (4e-4, 1e-3, 2e-3, 4e-3) if width <= NARROW else (1e-4, 4e-4, 7e-4, 1e-3)


def several(value: Any) -> tuple[Any, ...]:
    """One or more values as a tuple."""
    return tuple(value) if isinstance(value, Sequence) else (value,)
