"""Estimators that train a delta in `fit` and answer with it: scikit-learn's interface to training and prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from ..arrays import Array
from ..data.examples import Columns, Dataset, Examples
from ..data.splits import split
from ..delta.delta import Delta
from ..model.base import load_base, locate
from ..prediction.host import Host, Resident
from ..tasks import Task
from ..tasks.tagging import Tagging
from ..tasks.texts import softmax
from ..training.plan import Plan
from ..training.run import train
from .inputs import Inputs, sentences_of, tags_of, texts_of

BASES = 2  # loaded bases that a process caches
PAIR_COLUMNS = ("text", "text_pair")
_loading = Lock()


def host_of(base: str | os.PathLike[str] | None) -> Host:
    """The host of a base, which is loaded once in a process, however many estimators name it."""
    if base is not None and not isinstance(base, str | os.PathLike):
        raise TypeError(f"base={base!r}: pass a folder or a hub id, so that clones and pickles contain no weights")
    source, _ = locate(base)
    with _loading:
        return _load_host(source)


@lru_cache(maxsize=BASES)
def _load_host(source: str) -> Host:
    return Host(load_base(source))


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What the estimators share: their parameters, the training, and the delta as a file."""

    _kind: ClassVar[str]

    def __init__(
        self,
        base: str | os.PathLike[str] | None = None,
        *,
        select: str = "bias",
        inject: str = "none",
        head: str = "full",
        init: str = "keep",
        pool: str = "auto",
        lr: Sequence[float] | float | None = None,
        batch: Sequence[int] | int | None = None,
        epochs: int | None = None,
        seed: Sequence[int] | int | None = None,
        recipe: str = "default",
        evals_per_epoch: int | None = None,
        schedule: str = "linear",
        weight_decay: float = 0.0,
        clip: float = 1.0,
        max_length: int | None = None,
        long: str = "head",
        stride: int | None = None,
        metric: str | None = None,
        class_weights: str = "none",
        dropout: str = "on",
        data_seed: int = 0,
        lanes: int | None = None,
        threads: int | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.base = base
        self.select = select
        self.inject = inject
        self.head = head
        self.init = init
        self.pool = pool
        self.lr = lr
        self.batch = batch
        self.epochs = epochs
        self.seed = seed
        self.recipe = recipe
        self.evals_per_epoch = evals_per_epoch
        self.schedule = schedule
        self.weight_decay = weight_decay
        self.clip = clip
        self.max_length = max_length
        self.long = long
        self.stride = stride
        self.metric = metric
        self.class_weights = class_weights
        self.dropout = dropout
        self.data_seed = data_seed
        self.lanes = lanes
        self.threads = threads
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False  # of numbers, which is what scikit-learn means
        tags.target_tags.required = True
        return tags

    def save(self, path: str | Path) -> int:
        """Write the trained delta to a file; returns its size in bytes."""
        check_is_fitted(self)
        return self.delta_.save(path)

    @classmethod
    def _loaded(cls, path: str | Path, base: str | os.PathLike[str] | None) -> Self:
        """A fitted estimator from the file of a delta."""
        delta = Delta.load(path)
        if delta.meta.task != cls._kind:
            raise ValueError(f"{path} is a delta for {delta.meta.task}, but {cls.__name__} is for {cls._kind}")
        estimator = cls(base)
        estimator.delta_ = delta
        return estimator

    def _train(self, examples: Examples, labels: tuple[str, ...], columns: Columns) -> None:
        """Train on the examples; some of them are held out, to choose settings by."""
        parameters = self.get_params(deep=False)
        plan = Plan(**{entry.name: parameters[entry.name] for entry in fields(Plan) if entry.name in parameters})
        rest, held = split(examples, self._kind, self.data_seed)
        if not held:
            what = f"n_samples={len(examples)} with too few different texts"
            raise ValueError(f"{what} to hold some out; every class needs at least two different texts")
        dataset = Dataset(
            train=examples.take(rest),
            dev=examples.take(held),
            test=None,
            kind=self._kind,
            labels=labels,
            columns=columns,
            notes=(),
            held_out=True,
        )
        say = print if self.verbose else None
        run = train(dataset, host_of(self.base).base, plan=plan, say=say, quiet=not self.verbose)
        assert run.best.delta is not None
        self.delta_ = run.best.delta

    def _resident(self) -> tuple[Host, Resident]:
        """The trained delta, ready to answer."""
        check_is_fitted(self)
        host = host_of(self.delta_.meta.base if self.base is None else self.base)
        self.delta_.check(host.base)
        # Not folded, as in `bitfit.predict`, so that the answers are exactly those of the training.
        return host, host.admit(self.delta_, fold=False)


class _TextEstimator(_Estimator):
    """An estimator whose rows are a text or a pair of texts."""

    def _fit_texts(self, X: object, labels: list[Any], names: tuple[str, ...]) -> None:
        inputs = self._inputs(X, fitting=True)
        check_consistent_length(inputs.texts, labels)
        text, pair = PAIR_COLUMNS if inputs.columns is None else (*inputs.columns, None)[:2]
        columns = Columns(text or "text", pair if inputs.width == 2 else None, "label")
        self._train(Examples(inputs.texts, inputs.pairs, labels, list(range(len(labels)))), names, columns)

    def _inputs(self, X: object, fitting: bool = False) -> Inputs:
        """The texts or pairs. With `fitting`, their number of columns and the names are stored for `predict`."""
        inputs = texts_of(X)
        if not fitting:
            self._check_width(inputs.width)
            return inputs
        self.n_features_in_ = inputs.width
        if inputs.columns is not None:
            self.feature_names_in_ = np.array(inputs.columns, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return inputs

    def _check_width(self, width: int) -> None:
        if width != self.n_features_in_:
            what = f"X has {width} features, but {type(self).__name__} is expecting {self.n_features_in_}"
            raise ValueError(f"{what} features as input: single texts or pairs, as in fit")

    def _outputs(self, X: object) -> tuple[Task, Array]:
        """The task, and the outputs of the head for each row."""
        check_is_fitted(self)
        inputs = self._inputs(X)
        host, resident = self._resident()
        texts: list[Any] = inputs.texts
        if inputs.pairs is not None:
            texts = list(zip(inputs.texts, inputs.pairs, strict=True))
        reading = host.encode(resident, texts)
        return resident.task, host.compute({resident: reading.rows})[resident]


class BitFitClassifier(ClassifierMixin, _TextEstimator):  # type: ignore[misc]
    """A classifier of texts or pairs of texts that trains the bias terms of a frozen transformer.

    The parameters are those of `bitfit.train`. By default, the recipe tries the head only and several learning rates on
    held-out rows and trains the best on all rows. `base` is a folder or a hub id; a process loads it once,
    and neither clones nor pickles contain it. `fit` and `predict` take a list, array or Series of texts, a frame of
    one column, or pairs as tuples or as a frame of two columns.

    After `fit`: `classes_`, `delta_` (a bitfit.Delta), `n_features_in_` (1, or 2 for pairs), and `feature_names_in_`
    for frames.

    scikit-learn's estimator checks use numbers. The estimator's tags say that it takes texts, so few checks run. On a
    subclass that writes numbers as words, all of them pass except check_methods_subset_invariance: outputs are sums of
    float32 numbers, whose 6th digit depends on the batch, and the check compares 7. (The subclass has the tag
    `poor_score`, because a language model does not learn from numbers that are written as words.)
    """

    _kind = "classification"

    def fit(self, X: object, y: object) -> Self:
        """Train on texts and their classes."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        labels = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=None, input_name="y")
        check_classification_targets(labels)
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"Classifier can't train when only one class is present: {classes[0]!r}")
        names = tuple(str(label) for label in classes)
        if len(set(names)) < len(names):
            raise ValueError("two classes have the same name as text; rename one of them")
        self._fit_texts(X, numbers.tolist(), names)
        self.classes_ = classes
        return self

    def predict_proba(self, X: object) -> Array:
        """The probability of each class, in the order of `classes_`."""
        _, outputs = self._outputs(X)
        return softmax(outputs.astype(np.float64))

    def predict(self, X: object) -> Array:
        """The likeliest class of each text."""
        _, outputs = self._outputs(X)
        predicted: Array = self.classes_[outputs.argmax(-1)]
        return predicted

    @classmethod
    def load(
        cls, path: str | Path, base: str | os.PathLike[str] | None = None, classes: Sequence[Any] | None = None
    ) -> Self:
        """A fitted classifier of a delta's file; `base` is needed only if the delta's base was a folder.

        `classes` are the values that stand for the delta's labels, in their order; without it the labels, as texts.
        """
        estimator = cls._loaded(path, base)
        labels = estimator.delta_.labels
        estimator.classes_ = np.array(labels if classes is None else classes)
        if len(estimator.classes_) != len(labels):
            raise ValueError(f"{len(estimator.classes_)} classes for the {len(labels)} labels of {path}")
        estimator.n_features_in_ = 2 if estimator.delta_.meta.pairs else 1
        return estimator


class BitFitRegressor(RegressorMixin, _TextEstimator):  # type: ignore[misc]
    """A number for a text or a pair of texts, as BitFitClassifier gives a class.

    After `fit`: `delta_`, `n_features_in_`, and `feature_names_in_` for frames.
    """

    _kind = "regression"

    def fit(self, X: object, y: object) -> Self:
        """Train on texts and their numbers."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        labels = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=np.float64, input_name="y")
        self._fit_texts(X, labels.tolist(), ())
        return self

    def predict(self, X: object) -> Array:
        """The number of each text, on the scale of the labels."""
        task, outputs = self._outputs(X)
        values: Array = outputs[:, 0].astype(np.float64) * task.spread + task.center
        return values

    @classmethod
    def load(cls, path: str | Path, base: str | os.PathLike[str] | None = None) -> Self:
        """A fitted regressor of a delta's file; `base` is needed only if the delta's base was a folder."""
        estimator = cls._loaded(path, base)
        estimator.n_features_in_ = 2 if estimator.delta_.meta.pairs else 1
        return estimator


class BitFitTagger(_Estimator):
    """A tag for every word of a sentence: X is a list of lists of words, y a list of lists of tags.

    The parameters are those of BitFitClassifier. `score` is the F1 of entities where the tags mark some (B-PER,
    I-PER), else the share of the words whose tag is right. After `fit`: `classes_` (the tags) and `delta_`.
    scikit-learn has no checks for sequences, so of its estimator checks only those run that fit nothing.
    """

    _kind = "tagging"

    def fit(self, X: object, y: object) -> Self:
        """Train on sentences and the tags of their words."""
        sentences = sentences_of(X)
        tags = tags_of(y, sentences)
        names = tuple(sorted({tag for row in tags for tag in row}))
        if len(names) < 2:
            raise ValueError("there are fewer than two different tags")
        labels = _tag_numbers(tags, names)
        not_empty = [number for number, words in enumerate(sentences) if words]
        examples = Examples(sentences, None, labels, list(range(len(labels)))).take(not_empty)
        self._train(examples, names, Columns("tokens", None, "tags"))
        self.classes_ = np.array(names)
        return self

    def predict_proba(self, X: object) -> list[Array]:
        """For each sentence the probability of each tag for each word, in the order of `classes_`."""
        host, resident = self._resident()
        sentences: list[Any] = sentences_of(X)
        reading = host.encode(resident, sentences)
        outputs = host.compute({resident: reading.rows})[resident]
        task = resident.task
        assert isinstance(task, Tagging)
        rows = task.by_word(outputs.astype(np.float64), reading.encoded, reading.examples)
        return [softmax(row) if len(row) else row for row in rows]

    def predict(self, X: object) -> list[list[str]]:
        """The tags of each sentence."""
        return [self.classes_[row.argmax(-1)].tolist() for row in self.predict_proba(X)]

    def score(self, X: object, y: object) -> float:
        """The F1 of entities, or the share of right tags where the tags mark none."""
        probabilities = self.predict_proba(X)
        sentences = sentences_of(X)
        tags = tags_of(y, sentences)
        task = Task.of_delta(self.delta_)
        # A tag that was not trained on is never predicted, and counts as one that was missed.
        new = sorted({tag for row in tags for tag in row} - set(task.labels))
        task = replace(task, labels=(*task.labels, *new))
        labels = _tag_numbers(tags, task.labels)
        return task.score([row.argmax(-1) for row in probabilities], Examples(sentences, None, labels))

    @classmethod
    def load(cls, path: str | Path, base: str | os.PathLike[str] | None = None) -> Self:
        """A fitted tagger of a delta's file; `base` is needed only if the delta's base was a folder."""
        estimator = cls._loaded(path, base)
        estimator.classes_ = np.array(estimator.delta_.labels)
        return estimator


def _tag_numbers(tags: Sequence[Sequence[str]], names: Sequence[str]) -> list[tuple[int, ...]]:
    """The number of each word's tag among the names."""
    numbers = {tag: number for number, tag in enumerate(names)}
    return [tuple(map(numbers.__getitem__, row)) for row in tags]
