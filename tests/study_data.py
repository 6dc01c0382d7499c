"""Generated data for studies: every task a study may name, learnable, small."""

from __future__ import annotations

import json
import random
from pathlib import Path

from conftest import WORDS, reviews

PAIRS = ("rte", "mrpc", "qqp", "mnli", "mnli-mm", "qnli")


def write_tasks(folder: Path, tasks: tuple[str, ...], rows: int = 48) -> Path:
    """A data folder with train, dev and test files of each task."""
    for task in tasks:
        place = folder / task
        place.mkdir(parents=True, exist_ok=True)
        for seed, part in enumerate(("train", "dev", "test")):
            lines = _lines(task, rows if part == "train" else rows // 2, seed)
            (place / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _lines(task: str, rows: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(f"{task} {seed}")
    found: list[dict[str, object]] = []
    for text, label in reviews(rows, seed):
        if task == "stsb":
            pair = {"sentence1": text, "sentence2": " ".join(draw.choices(WORDS, k=4))}
            found.append({**pair, "label": round(draw.random() * 2 + (3 if label == "positive" else 0), 2)})
        elif task in PAIRS:
            found.append({"sentence1": text, "sentence2": " ".join(draw.choices(WORDS, k=4)), "label": int(label == "positive")})
        else:
            found.append({"text": text, "label": int(label == "positive")})
    return found
