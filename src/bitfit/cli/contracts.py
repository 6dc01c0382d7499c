"""What the commands print with --json. Keys may be added, but never change their meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

# What `inspect --json` prints of a delta's metadata.
INSPECTED = (
    "base", "fingerprint", "dtype", "select", "inject", "head", "task", "labels", "metrics", "pool", "init", "columns",
    "max_length", "trial", "trained", "total", "versions",
)  # fmt: skip


def show_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value, ensure_ascii=False))


def training(run: Any, target: Path, seconds: float) -> dict[str, Any]:
    """The JSON of `bitfit train`."""
    best = run.best
    meta, trial = best.delta.meta, best.trial
    values = {split: _values(scores) for split, scores in best.scores.items()}
    return {
        "delta": str(target),
        **{key: getattr(meta, key) for key in ("base", "task", "name", "select", "head")},
        **{key: getattr(trial, key) for key in ("lr", "batch", "seed", "epochs", "train_size", "protocol")},
        "head_only": run.story is not None and run.story.candidates[0].chosen,
        "trained": meta.trained,
        "total": meta.total,
        "metric": meta.metric,
        "dev": values["dev"],
        "test": values.get("test"),
        "more": {split: values[split] for split in values if split not in ("dev", "test", "train")},
        "intervals": {split: _intervals(scores) for split, scores in best.scores.items()},
        "train": values.get("train"),
        "gap": best.gap or None,
        "majority": run.majority,
        "baseline": run.baseline_name,
        "trials": [_trial(outcome) for outcome in run.trials],
        "seconds": seconds,
        "threads": meta.threads,
        "recipe": meta.recipe,
        "story": None if run.story is None else _story(run.story),
        "notes": list(run.notes),
    }


def _story(story: Any) -> dict[str, Any]:
    """What the default recipe tried, and its results."""
    table = asdict(story)
    if story.curve is not None:
        table["curve"]["helps"] = story.curve.helps
    return table


def _values(scores: Mapping[str, Any]) -> dict[str, float]:
    return {metric: score.value for metric, score in scores.items()}


def _intervals(scores: Mapping[str, Any]) -> dict[str, list[float]]:
    return {metric: [score.low, score.high] for metric, score in scores.items()}


def _trial(outcome: Any) -> dict[str, Any]:
    trial = outcome.trial
    settings = {"lr": trial.lr, "batch": trial.batch, "seed": trial.seed}
    return {**settings, "dev": outcome.dev, "status": outcome.status}


BY_CLASS = ("precision", "recall", "f1", "support")


def evaluation(result: Any) -> dict[str, Any]:
    """The JSON of `bitfit evaluate`."""
    return {
        "rows": result.rows,
        "metrics": _values(result.scores),
        "interval": _intervals(result.scores),
        "positive": result.task.positive,
        "by_class": {row.label: _class_scores(row) for row in result.by_class},
        "confusion": result.confusion,
        "wrong": len(result.errors),
    }


def _class_scores(row: Any) -> dict[str, Any]:
    return {key: getattr(row, key) for key in BY_CLASS}


def inspection(delta: Any, size: int) -> dict[str, Any]:
    """The JSON of `bitfit inspect`."""
    table = delta.meta.table()
    shown = {key: table[key] for key in INSPECTED}
    return {**shown, "long": delta.meta.long, "bytes": size, "change": delta.change}
