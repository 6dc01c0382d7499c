"""What a classifier answers, for a page: new texts, confusions, and whether its probabilities mean what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import drawing
from .page import Cell, Grid
from .report import Section

MISTAKES = 8  # that are shown
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Bin:
    """Answers of like probability: how many, their mean probability and the share that is right."""

    rows: int
    confidence: float
    accuracy: float


def answers(texts: Sequence[str], given: Sequence[Answer]) -> Section:
    """The answers to some texts that nobody labelled."""
    rows = [[text, answer["label"], f"{answer['score']:.2f}"] for text, answer in zip(texts, given, strict=True)]
    grid = Grid("New sentences", ["text", "answer", "probability"], rows, texts=(0, 1))
    return Section("Answers", "What the delta says of sentences that are in no file.", [grid])


def confusions(labels: Sequence[str], table: Sequence[Sequence[int]], wrong: Sequence[Mapping[str, Any]]) -> Section:
    """How often each class is taken for each, and the mistakes with the largest probability."""
    counts = []
    for label, row in zip(labels, table, strict=True):
        counts.append([label, *map("{:,}".format, row)])
    confused = Grid("True class by answer", ["true class", *labels], counts)
    surest = sorted(wrong, key=lambda row: row["score"], reverse=True)[:MISTAKES]
    rows = [[row["text"], Cell(row["predicted"], f"true: {row['label']}"), f"{row['score']:.2f}"] for row in surest]
    mistakes = Grid("The surest mistakes", ["text", "answer", "probability"], rows, texts=(0, 1))
    total = sum(map(sum, table))
    text = f"{len(wrong):,} of {total:,} test rows are answered wrongly."
    return Section("Confusions", text, [confused, mistakes])


def calibration(bins: Sequence[Bin]) -> Section:
    """Whether answers of a probability are right as often as it says."""
    full = [group for group in bins if group.rows]
    total = sum(group.rows for group in full)
    error = sum(group.rows * abs(group.confidence - group.accuracy) for group in full) / total
    rows = [[f"{group.confidence:.2f}", f"{group.accuracy:.2f}", f"{group.rows:,}"] for group in full]
    grid = Grid("Answers by probability", ["mean probability", "share that is right", "rows"], rows, texts=())
    text = (
        f"The expected calibration error on test rows is {error:.3f}: the mean distance between the probability of "
        "answers and the share of them that is right."
    )
    return Section("Calibration", text, [grid], [_reliability(full)])


def _reliability(bins: Sequence[Bin]) -> drawing.Panel:
    with drawing.style():
        figure, axes = drawing.axes(2.6)
        low = min(min(group.confidence, group.accuracy) for group in bins)
        low = min(0.5, low - 0.05)
        axes.plot([low, 1], [low, 1], color=drawing.SOFT, linewidth=0.8, linestyle="--")
        most = max(group.rows for group in bins)
        axes.scatter(
            [group.confidence for group in bins],
            [group.accuracy for group in bins],
            s=[15 + 90 * group.rows / most for group in bins],
            color=drawing.colour("BitFit"),
        )
        axes.set_xlim(low, 1.02)
        axes.set_ylim(low, 1.05)
        axes.set_xlabel("probability of the answer")
        axes.set_ylabel("share that is right")
    said = "; ".join(f"{group.confidence:.2f}: {group.accuracy:.2f} right" for group in bins)
    words = f"Share of right answers by their probability. {said}. A larger dot has more rows."
    return drawing.Panel("Probability and share of right answers", figure, words)
