"""What the quality benchmark compares: data as a user has it, the methods, and how an answer is scored.

Only the public functions of bitfit are used for bitfit's rows; the linear baselines use transformers and scikit-learn
alone, so that they cannot share a mistake with the code they judge.
"""

from __future__ import annotations

import gzip
import json
import random
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import bitfit

Array = NDArray[Any]
Record = dict[str, Any]

TEST_ROWS = 1000
LENGTH = 128
STRENGTHS = np.logspace(-4, 4, 13)


@dataclass(frozen=True)
class Source:
    """Where a task's rows are and what they are called there."""

    folder: str
    train: str
    test: str
    text: str
    label: str
    pair: str | None = None
    kind: str = "classification"
    metric: str = "accuracy"


TASKS = {
    "sst2": Source("sst2", "train", "dev", "sentence", "label"),
    "rotten_tomatoes": Source("rotten_tomatoes", "train", "test", "text", "label"),
    "trec": Source("trec", "train", "test", "text", "label"),
    "imdb": Source("imdb", "train", "test", "text", "label"),
    "mrpc": Source("mrpc", "train", "test", "sentence1", "label", "sentence2"),
    "rte": Source("rte", "train", "dev", "sentence1", "label", "sentence2"),
    "qnli": Source("qnli", "train_sample", "dev", "question", "label", "sentence"),
    "qqp": Source("qqp", "train_sample", "heldout_sample", "question1", "label", "question2"),
    "mnli": Source("mnli", "train_sample", "dev_matched", "premise", "label", "hypothesis"),
    "stsb": Source("stsb", "train", "test", "sentence1", "label", "sentence2", "regression", "spearman"),
    "ud_ewt": Source("ud_ewt", "train", "test", "tokens", "upos", None, "tagging"),
}


@dataclass(frozen=True)
class Cell:
    """One training file and its test file: a task, a number of rows and a draw of them."""

    task: str
    size: int
    draw: int

    @property
    def source(self) -> Source:
        """Where its rows come from."""
        return TASKS[self.task]

    def write(self, data: Path, folder: Path) -> None:
        """Put the drawn rows into train.jsonl and the test rows into test.jsonl."""
        train, test = read(data, self.source)
        chosen = draw(train, self.size, self.draw, self.source.kind)
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in (("train", chosen), ("test", test)):
            lines = (json.dumps(record) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def read(data: Path, source: Source) -> tuple[list[Record], list[Record]]:
    """All training records and up to TEST_ROWS test records under the names that bitfit finds by itself."""
    sides = []
    for split in (source.train, source.test):
        with gzip.open(data / source.folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            sides.append([record_of(json.loads(line), source) for line in file])
    train, test = sides
    random.Random(0).shuffle(test)
    return train, test[:TEST_ROWS]


def record_of(row: Record, source: Source) -> Record:
    """A row with the column names of this benchmark."""
    if source.kind == "tagging":
        return {"tokens": row[source.text], "tags": row[source.label]}
    pair = {} if source.pair is None else {"text_pair": row[source.pair]}
    return {"text": row[source.text], **pair, "label": row[source.label]}


def draw(records: list[Record], size: int, seed: int, kind: str) -> list[Record]:
    """A seeded draw of so many records in random order; every class has one at least."""
    rng = random.Random(f"draw {seed}")
    order = list(range(len(records)))
    rng.shuffle(order)
    if kind != "classification":
        return [records[i] for i in order[:size]]
    firsts: dict[Any, int] = {}
    for i in order:
        firsts.setdefault(records[i]["label"], i)
    needed = set(firsts.values())
    others = [i for i in order if i not in needed]
    chosen = [*needed, *others[: size - len(needed)]]
    rng.shuffle(chosen)
    return [records[i] for i in chosen]


def load(folder: Path, name: str) -> list[Record]:
    """The records of a file that `Cell.write` wrote."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- scores


def judge(source: Source, answers: Sequence[Any], test: Sequence[Record]) -> dict[str, Any]:
    """The score with its interval, and for classes the log loss and the expected calibration error.

    An answer is a number, a list of tags, or the probability of each label.
    """
    if source.kind == "tagging":
        return _judge_tags(answers, test)
    golds = [record["label"] for record in test]
    if source.kind == "regression":
        return _with_interval(source.metric, answers, golds)
    names = sorted({*map(str, golds), *answers[0]})
    table = np.array([[row.get(name, 0.0) for name in names] for row in answers])
    true = np.array([names.index(str(gold)) for gold in golds])
    scored = _with_interval(source.metric, table.argmax(1), true)
    chosen = np.clip(table[np.arange(len(true)), true], 1e-12, 1.0)
    scored["log_loss"] = float(-np.log(chosen).mean())
    scored["calibration_error"] = calibration_error(table, true)
    return scored


def _with_interval(metric: str, predictions: Any, golds: Any) -> dict[str, Any]:
    """Accuracy or Spearman's correlation with the 95% interval of a bootstrap over the test rows."""
    predicted, true = np.asarray(predictions), np.asarray(golds)
    score = _spearman if metric == "spearman" else _accuracy
    draws = np.random.default_rng(0).integers(len(true), size=(500, len(true)))
    low, high = np.quantile([score(predicted[rows], true[rows]) for rows in draws], [0.025, 0.975])
    return {"metric": metric, "score": score(predicted, true), "low": float(low), "high": float(high)}


def _accuracy(predicted: Array, true: Array) -> float:
    return float((predicted == true).mean())


def _spearman(predicted: Array, true: Array) -> float:
    ranks = [rankdata(side) for side in (predicted, true)]
    return float(np.corrcoef(*ranks)[0, 1]) if min(rank.std() for rank in ranks) > 0 else 0.0


def _judge_tags(answers: Sequence[Sequence[str]], test: Sequence[Record]) -> dict[str, Any]:
    right, words = [], []
    for tags, record in zip(answers, test, strict=True):
        right.append(sum(a == b for a, b in zip(tags, record["tags"], strict=True)))
        words.append(len(record["tags"]))
    hits, counts = np.array(right), np.array(words)
    draws = np.random.default_rng(0).integers(len(hits), size=(1000, len(hits)))
    low, high = np.quantile(hits[draws].sum(1) / counts[draws].sum(1), [0.025, 0.975])
    return {"metric": "accuracy", "score": float(hits.sum() / counts.sum()), "low": float(low), "high": float(high)}


def calibration_error(table: Array, true: Array, bins: int = 15) -> float:
    """Expected calibration error: the mean distance of confidence and accuracy over bins of equal width."""
    confidence, right = table.max(1), table.argmax(1) == true
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    total = 0.0
    for number in range(bins):
        inside = place == number
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return float(total)


# ---- linear models on frozen embeddings


class Embedder:
    """The base's states, by transformers alone; those of test rows are computed once for all cells."""

    def __init__(self, base: Any) -> None:
        self.tokenizer, self.encoder = base.tokenizer, base.encoder
        self.known: dict[Any, Array] = {}

    def texts(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Array:
        """One mean state per text, or per pair read as one sequence."""
        inputs = list(zip(texts, pairs, strict=True)) if pairs is not None else list(texts)
        new = sorted(set(inputs) - self.known.keys())
        if new:
            firsts, seconds = ([one for one, _ in new], [two for _, two in new]) if pairs is not None else (new, None)
            self.known |= zip(new, self._means(firsts, seconds), strict=True)
        return np.stack([self.known[each] for each in inputs])

    def _means(self, texts: Sequence[str], pairs: Sequence[str] | None) -> Array:
        found = np.zeros((len(texts), self.encoder.config.hidden_size), np.float32)
        for chosen in _by_length(texts, pairs):
            batch = [[texts[i] for i in chosen]] + ([] if pairs is None else [[pairs[i] for i in chosen]])
            states, mask = self._states(*batch)
            weight = mask.unsqueeze(-1)
            found[chosen] = ((states * weight).sum(1) / weight.sum(1)).numpy()
        return found

    def words(self, sentences: Sequence[Sequence[str]]) -> list[Array]:
        """The state of each word's first piece, sentence by sentence; words beyond the length get zeros."""
        for words in sentences:
            if tuple(words) in self.known:
                continue
            encoding = self.tokenizer(
                list(words), is_split_into_words=True, truncation=True, max_length=256, return_tensors="pt"
            )
            with torch.inference_mode():
                states = self.encoder(**encoding).last_hidden_state[0].numpy()
            table = np.zeros((len(words), states.shape[1]), np.float32)
            seen: set[int] = set()
            for place, word in enumerate(encoding.word_ids()):
                if word is not None and word not in seen:
                    seen.add(word)
                    table[word] = states[place]
            self.known[tuple(words)] = table
        return [self.known[tuple(words)] for words in sentences]

    def _states(self, *texts: list[str]) -> tuple[Any, Any]:
        encoding = self.tokenizer(*texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        with torch.inference_mode():
            return self.encoder(**encoding).last_hidden_state, encoding["attention_mask"].float()


def _by_length(texts: Sequence[str], pairs: Sequence[str] | None) -> Iterator[list[int]]:
    lengths = [len(text) + len(pairs[i] if pairs else "") for i, text in enumerate(texts)]
    order = sorted(range(len(texts)), key=lambda i: lengths[i])
    for start in range(0, len(order), 32):
        yield order[start : start + 32]


EMBEDDERS: dict[int, Embedder] = {}


def linear(source: Source, folder: Path, base: Any, relation: bool = False) -> dict[str, Any]:
    """Logistic or ridge regression, its regularisation by cross-validation.

    A pair is read as one sequence, or with `relation` as [u, v, |u - v|, u * v] of its two texts.
    """
    train, test = load(folder, "train"), load(folder, "test")
    embedder = EMBEDDERS.setdefault(id(base), Embedder(base))
    began = time.process_time()
    if source.kind == "tagging":
        return _linear_tags(embedder, train, test, began)
    table = _features(embedder, train, relation)
    labels = [record["label"] for record in train]
    if source.kind == "regression":
        model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 5, 15))).fit(table, labels)
    else:
        model = logistic(table, labels)
    seconds = time.process_time() - began
    tested = _features(embedder, test, relation)
    if source.kind == "regression":
        answers: list[Any] = model.predict(tested).tolist()
    else:
        names = [str(name) for name in model.classes_]
        answers = [dict(zip(names, row, strict=True)) for row in model.predict_proba(tested).tolist()]
    return {**judge(source, answers, test), "seconds": seconds}


def _features(embedder: Embedder, records: list[Record], relation: bool) -> Array:
    texts = [record["text"] for record in records]
    if "text_pair" not in records[0]:
        return embedder.texts(texts)
    pairs = [record["text_pair"] for record in records]
    if not relation:
        return embedder.texts(texts, pairs)
    u, v = embedder.texts(texts), embedder.texts(pairs)
    return np.concatenate([u, v, abs(u - v), u * v], 1)


def logistic(table: Array, labels: Sequence[Any]) -> Any:
    """Logistic regression on standardised features; C by the log loss of stratified folds."""
    _, counts = np.unique(labels, return_counts=True)
    folds = StratifiedKFold(int(min(5, max(2, counts.min()))), shuffle=True, random_state=0)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    grid = {"logisticregression__C": STRENGTHS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class with one row is missing in a fold
        scoring = "neg_log_loss" if counts.min() > 1 else "accuracy"
        return GridSearchCV(pipeline, grid, cv=folds, scoring=scoring).fit(table, labels)


def _linear_tags(embedder: Embedder, train: list[Record], test: list[Record], began: float) -> dict[str, Any]:
    table = np.concatenate(embedder.words([record["tokens"] for record in train]))
    tags = [tag for record in train for tag in record["tags"]]
    model = logistic(table, tags)
    seconds = time.process_time() - began
    words = embedder.words([record["tokens"] for record in test])
    answers = [model.predict(states).tolist() if len(states) else [] for states in words]
    return {**judge(TASKS["ud_ewt"], answers, test), "seconds": seconds}


# ---- bitfit


def trained(source: Source, folder: Path, base: Any, **options: Any) -> dict[str, Any]:
    """What `bitfit train FOLDER` with these options gives, and each trial's test score for the hindsight."""
    known = {entry.name for entry in fields(bitfit.Plan)}
    options = {name: value for name, value in options.items() if name in known}
    began = time.process_time()
    wall = time.monotonic()
    run = bitfit.train(folder / "train.jsonl", base, threads=torch.get_num_threads(), **options)
    spent = {"seconds": time.process_time() - began, "wall": time.monotonic() - wall}
    test = load(folder, "test")
    answers = _answers(source, run.best.delta, base, test)
    result = {**judge(source, answers, test), **spent}
    if getattr(run, "story", None) is not None:  # releases before the recipe have none
        from bitfit.training.recipe import VERSION

        result |= {"recipe": VERSION, "pool": run.best.trial.pool, "story": _summary(run.story)}
        if run.story.calibration is not None and not run.story.threshold:
            result["before"] = _uncalibrated(source, answers, test, run.story.calibration.temperature)
    result["trials"] = []
    for outcome in run.trials:
        if outcome.delta is None:
            continue
        own = outcome is run.best
        score = result["score"] if own else judge(source, _answers(source, outcome.delta, base, test), test)["score"]
        facts = {"lr": outcome.trial.lr, "pool": outcome.trial.pool, "dev": outcome.dev, "test": score, "chosen": own}
        result["trials"].append(facts)
    return result


def _summary(story: Any) -> dict[str, Any]:
    """What the run said of itself that its test score can be compared with."""
    chosen = next(candidate for candidate in story.candidates if candidate.chosen)
    frozen = story.candidates[0]
    summary = {"chosen": chosen.name, "expected": story.expected.value, "head_alone": frozen.score}
    summary["losses"] = {candidate.name: candidate.loss for candidate in story.candidates}
    if story.calibration is not None:
        summary |= {"temperature": story.calibration.temperature}
    return summary


def _uncalibrated(source: Source, answers: list[Any], test: list[Record], temperature: float) -> dict[str, Any]:
    """Log loss and calibration error of the same answers without the temperature; empty for words."""
    if source.kind != "classification":
        return {}
    names = list(answers[0])
    table = np.array([[row[name] for name in names] for row in answers])
    table = np.clip(table, 1e-12, 1.0) ** temperature
    table /= table.sum(1, keepdims=True)
    scored = judge(source, [dict(zip(names, row, strict=True)) for row in table.tolist()], test)
    return {"log_loss": scored["log_loss"], "calibration_error": scored["calibration_error"]}


def _answers(source: Source, delta: Any, base: Any, test: list[Record]) -> list[Any]:
    if source.kind == "tagging":
        texts: list[Any] = [tuple(record["tokens"]) for record in test]
    elif source.pair is not None:
        texts = [(record["text"], record["text_pair"]) for record in test]
    else:
        texts = [record["text"] for record in test]
    answers = list(bitfit.Predictor(delta, base).answers(texts))
    key = {"tagging": "tags", "regression": "value"}.get(source.kind, "scores")
    return [answer[key] for answer in answers]


def full(source: Source, folder: Path, base: Any) -> dict[str, Any]:
    """Full fine-tuning from a random head: three rates, as many epochs as the default recipe takes for these rows."""
    from bitfit.training.plan import recipe_epochs  # what an older release lacks

    epochs = recipe_epochs(len(load(folder, "train")))
    return trained(source, folder, base, recipe="plain", select="all", epochs=epochs)


OLD = "025b80b"  # before the recipe: random head, four rates, five epochs
OLD_DEFAULT = "old default"
Method = Callable[[Source, Path, Any], dict[str, Any]]


def _with(**options: Any) -> Method:
    def run(source: Source, folder: Path, base: Any) -> dict[str, Any]:
        return trained(source, folder, base, **options)

    return run


def _seeded(source: Source, folder: Path, base: Any, seed: int, recipe: str) -> dict[str, Any]:
    """A recipe at another seed. With the default one, a given `--seed` would turn folds and averages off."""
    if recipe != "default":
        return trained(source, folder, base, recipe=recipe, seed=seed)
    with mock.patch("bitfit.training.resolved.SEED", seed):
        return trained(source, folder, base)


def seeded(method: str, seed: int) -> Method:
    """A method of `SEEDED` at a seed. The sources of the commit OLD ignore the name of a recipe."""
    recipe = {"bitfit": "default", "bitfit plain": "plain", OLD_DEFAULT: "old"}[method]
    return partial(_seeded, seed=seed, recipe=recipe)


def _relation(source: Source, folder: Path, base: Any) -> dict[str, Any]:
    return linear(source, folder, base, relation=True)


METHODS: dict[str, Method] = {
    "linear": linear,
    "linear on u, v": _relation,
    "bitfit": _with(),
    "bitfit plain": _with(recipe="plain"),
    "full, three rates": full,
    "full, same recipe": _with(select="all"),
    "head alone": _with(select="none"),
    "lora": _with(select="injected", inject="lora(W_q + W_v, 8)"),
    OLD_DEFAULT: _with(),  # run with the sources of the commit OLD
}


def applies(method: str, task: str) -> bool:
    """Whether a method makes sense for a task: two texts are needed for their relation."""
    return method != "linear on u, v" or TASKS[task].pair is not None


def grouped(cells: Sequence[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Results by some of their fields, in order of appearance."""
    found: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        found[tuple(cell[key] for key in keys)].append(cell)
    return dict(found)
