"""Generated data for studies: every named task, learnable, small."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bitfit.data import named
from conftest import WORDS

GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")


def write_tasks(folder: Path, tasks: tuple[str, ...], rows: int = 48) -> Path:
    """A data folder with train, dev and test files of each task."""
    for name in tasks:
        task = named.find(name)
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        extra = ("dev_mismatched",) if name == "mnli" else ("dev_in_domain",) if name == "cola" else ()
        for part in ("train", "dev_matched" if name == "mnli" else "dev", "test", *extra):
            draw = random.Random(f"{name} {part}")
            lines = [_line(task, n, draw) for n in range(rows if part == "train" else rows // 2)]
            (place / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _line(task: Any, number: int, draw: random.Random) -> dict[str, Any]:
    """One row whose words tell its label."""
    good = number % 2
    words = [*draw.choices(WORDS[6:], k=draw.randint(2, 7)), draw.choice(GOOD if good else BAD)]
    draw.shuffle(words)
    columns = {role: names[0] for role, names in task.columns.items()}
    if task.kind == "tagging":
        tags = ["ADJ" if word in (*GOOD, *BAD) else "X" for word in words]
        return {columns["text"]: words, columns["label"]: tags}
    if task.kind == "answering":
        answer = next(word for word in words if word in (*GOOD, *BAD))
        context = " ".join(words)
        found = {"text": [answer], "answer_start": [context.index(answer)]}
        return {
            "id": str(number),
            columns["text"]: "is the film",
            columns["text_pair"]: context,
            columns["label"]: found,
        }
    row: dict[str, Any] = {columns["text"]: " ".join(words)}
    if "text_pair" in columns:
        row[columns["text_pair"]] = " ".join(draw.choices(WORDS, k=3))
    value: Any = good if len(task.labels) < 3 else number % len(task.labels)
    row[columns["label"]] = round(draw.random() * 2 + 3 * good, 2) if task.kind == "regression" else value
    return row
