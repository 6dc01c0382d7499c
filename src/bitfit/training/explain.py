"""What a run says of itself: how well each class is told, what more rows would bring, which labels look wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Array
from ..data.examples import Examples
from ..tasks import Task
from ..tasks.metrics import Score
from .calibration import Held, temperature
from .convex import Solution, States, solve
from .job import Job, Part

PAIRS = 5  # of confused classes that are shown
DRAWS = 4  # of half of the rows, for the learning curve
SURE = 0.6  # the probability of another class from which a label looks wrong
DOUBTED = 0.2  # the probability of its own class up to which a label looks wrong


@dataclass(frozen=True)
class Candidate:
    """A way to answer that was tried, and how it did on rows that it had not seen."""

    name: str
    lr: float | None  # None: the head alone, solved on the frozen base
    loss: float  # at the best temperature
    score: float
    chosen: bool = False


@dataclass(frozen=True)
class ClassScore:
    """How well one class is told from the others."""

    label: str
    rows: int
    precision: float
    recall: float


@dataclass(frozen=True)
class Confusion:
    """How often rows of one class are taken for another."""

    label: str
    taken_for: str
    rows: int


@dataclass(frozen=True)
class Curve:
    """The score of the head alone with half of the rows and with all of them, and how much halves differ."""

    rows: int
    half: float
    spread: float
    all: float

    @property
    def helps(self) -> bool:
        """Whether the second half of the rows helped by more than chance does."""
        error = self.spread / math.sqrt(DRAWS)
        return self.all - self.half > 2 * error


@dataclass(frozen=True)
class Suspect:
    """A row whose label looks wrong."""

    line: int
    text: str
    label: str
    suggested: str
    probability: float  # of the suggested label
    own: float  # of the label it has


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error on rows that were not trained on, before and after the temperature."""

    temperature: float
    before: float
    after: float


@dataclass(frozen=True)
class Story:
    """What was tried, what was chosen and why, and what to expect."""

    how: str  # how rows were held out
    candidates: tuple[Candidate, ...]
    metric: str
    expected: Score
    rows: int  # that the delta was trained on
    averaged: int  # trainings whose values were averaged
    calibration: Calibration | None = None
    threshold: float = 0.0  # added to the second of two classes
    classes: tuple[ClassScore, ...] = ()
    confusions: tuple[Confusion, ...] = ()
    curve: Curve | None = None
    suspects: tuple[Suspect, ...] = field(default=(), repr=False)


def class_scores(task: Task, predictions: object, examples: Examples) -> tuple[ClassScore, ...]:
    """Precision and recall of every class that occurs."""
    found = task.gold_and_predicted(predictions, examples)
    if found is None:
        return ()
    gold, predicted = found
    scores = []
    for number, label in enumerate(task.labels):
        true, said = gold == number, predicted == number
        hits = int((true & said).sum())
        if true.any():
            precision = hits / int(said.sum()) if said.any() else 0.0
            scores.append(ClassScore(label, int(true.sum()), precision, hits / int(true.sum())))
    return tuple(scores)


def confusions(task: Task, predictions: object, examples: Examples) -> tuple[Confusion, ...]:
    """The most frequent mistakes."""
    found = task.gold_and_predicted(predictions, examples)
    if found is None:
        return ()
    gold, predicted = found
    wrong = gold != predicted
    pairs, counts = np.unique(np.stack([gold[wrong], predicted[wrong]], 1), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:PAIRS]
    labels = task.labels
    return tuple(Confusion(labels[pairs[i, 0]], labels[pairs[i, 1]], int(counts[i])) for i in order)


def learning_curve(
    job: Job,
    states: States,
    splits: Sequence[tuple[Array, Array]],
    solution: Solution,
    score: Callable[[Array], float],
) -> Curve:
    """The score of the head alone on held-out rows, solved on half of the other rows and on all of them."""
    scores = []
    for draw in range(DRAWS):
        predicted = np.zeros_like(solution.predicted)
        for seen, unseen in splits:
            job.stop.check()
            half = np.random.default_rng(draw).permutation(seen)[: max(1, len(seen) // 2)]
            head = solve(job.task, states.take(np.sort(half)), solution.strength)
            predicted[states.places(unseen)] = head(states.take(unseen)).numpy()
        scores.append(score(predicted))
    rows = len(splits[0][0])
    return Curve(rows, float(np.mean(scores)), float(np.std(scores, ddof=1)), score(solution.predicted))


def suspects(task: Task, held: Held, part: Part, numbers: Array) -> tuple[Suspect, ...]:
    """Examples whose label the head alone, which has not seen them, takes for another; the surest first.

    `held` is what it says of the examples of a part that `numbers` names.
    """
    examples = part.examples.take(numbers.tolist())
    if held.by_token or task.gold_and_predicted(held.outputs, examples) is None:
        return ()
    warm = np.float32(temperature(task, held))
    found = []
    for number, answer in enumerate(task.answers(held.outputs / warm, part.encoded.take(numbers), examples)):
        label = task.labels[examples.labels[number]]
        own = answer["scores"][label]
        if answer["label"] != label and answer["score"] >= SURE and own <= DOUBTED:
            text = examples.texts[number] + (f" | {examples.pairs[number]}" if examples.pairs else "")
            line = examples.lines[number] if examples.lines else number
            found.append(Suspect(line, text, label, answer["label"], answer["score"], own))
    return tuple(sorted(found, key=lambda suspect: suspect.own))
