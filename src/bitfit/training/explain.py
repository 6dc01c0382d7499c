"""What a run reports: scores by class, whether more rows would help, which labels look wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array
from ..tasks.metrics import ClassScore, Score
from .calibration import HeldOut
from .convex import Split, States, held_examples, held_out_outputs, solve
from .job import Job

PAIRS = 5  # pairs of confused classes that are listed
SHOWN = 3  # of these pairs, how many the sentences name
DRAWS = 4  # random halves of the rows, for the learning curve
# A label looks wrong if another class has at least the probability SURE, and the label at most DOUBTED.
SURE = 0.6
DOUBTED = 0.2


@dataclass(frozen=True)
class Candidate:
    """A model that was tried, and how it did on rows that it had not seen."""

    name: str
    lr: float | None  # None: the head alone, solved on the frozen base
    loss: float  # at the best temperature
    score: float
    chosen: bool = False
    reading: str = ""  # how the texts of a pair are read, if two ways were tried


@dataclass(frozen=True)
class Confusion:
    """How often rows of one class are taken for another."""

    label: str
    taken_for: str
    rows: int


@dataclass(frozen=True)
class Curve:
    """The score of the head alone with half of the rows and with all of them."""

    rows: int
    half: float  # the mean over random halves
    spread: float  # the standard deviation over these halves
    full: float

    @property
    def helps(self) -> bool:
        """Whether all rows are better than half of them by more than two standard errors of the difference.

        The score of all rows is one draw, too. Without its error, one in six files without anything to learn would
        seem to gain by more rows.
        """
        error = self.spread * math.sqrt(1 + 1 / DRAWS)
        return self.full - self.half > 2 * error > 0  # halves that are all alike say nothing of the error


@dataclass(frozen=True)
class Suspect:
    """A row whose label looks wrong."""

    line: Any  # of the file; of data in memory the frame's index, or the position
    text: str
    label: str
    predicted: str
    probability: float  # of the predicted label
    label_probability: float  # of the label it has
    text_pair: str | None = None
    split: str = "train"  # the side that it is on: train or dev; with a dev file, the file of its line


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error on rows that were not trained on, before and after temperature and threshold."""

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
    diverged: tuple[float, ...] = ()  # learning rates with which training diverged
    unknown: int = 0  # held-out rows with a class that the rows trained on lack
    calibration: Calibration | None = None
    threshold: float = 0.0  # added to the second of two classes
    classes: tuple[ClassScore, ...] = ()
    confusions: tuple[Confusion, ...] = ()
    curve: Curve | None = None
    suspects: tuple[Suspect, ...] = field(default=(), repr=False)


def confusions(held: HeldOut) -> tuple[Confusion, ...]:
    """The most frequent mistakes; none where there are no classes."""
    table = held.task.confusion(held.predictions, held.part.examples)
    if table is None:
        return ()
    wrong = table.copy()
    np.fill_diagonal(wrong, 0)
    pairs = []
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]:
        true, predicted = np.unravel_index(cell, wrong.shape)
        if wrong[true, predicted]:
            labels = held.task.labels
            pairs.append(Confusion(labels[true], labels[predicted], int(wrong[true, predicted])))
    return tuple(pairs)


def calibration(held: HeldOut) -> Calibration | None:
    """The calibration error before and after temperature and threshold; None where answers are not probabilities."""
    before = held.calibration_error()
    after = held.delivered.calibration_error()
    if before is None or after is None:
        return None
    return Calibration(held.temperature, before, after)


def learning_curve(job: Job, states: States, splits: Sequence[Split], strength: float, predicted: Array) -> Curve:
    """The score of the head alone on held-out examples, solved on half of the other ones and on all of them.

    `predicted` are the outputs of the heads that are solved on all examples that a split trains on.
    """
    examples = held_examples(splits)
    full = HeldOut(job.task, states.part, predicted).take(examples).score
    scores = []
    for draw in range(DRAWS):
        heads = []
        for split in splits:
            job.stop.check()
            half = np.random.default_rng(draw).permutation(split.train)[: max(1, len(split.train) // 2)]
            heads.append(solve(job.task, states.take(np.sort(half)), strength))
        halved = HeldOut(job.task, states.part, held_out_outputs(states, splits, heads))
        scores.append(halved.take(examples).score)
    rows = len(splits[0].train)
    return Curve(rows, float(np.mean(scores)), float(np.std(scores, ddof=1)), full)


def suspects(held: HeldOut, in_dev: Array) -> tuple[Suspect, ...]:
    """Examples whose label looks wrong to a model that was not trained on them; the least probable label first.

    Of a class that the model does not know no label looks wrong. `in_dev`: whether an example is one of dev.
    """
    task, part = held.task, held.part
    examples = part.examples
    if part.by_token or task.confusion(held.predictions, examples) is None:
        return ()
    outputs = held.outputs / np.float32(held.temperature)
    doubtful = []
    for number, answer in enumerate(task.answers(outputs, part.encoded, examples)):
        if held.known is not None and not held.known[number]:
            continue
        label = task.labels[examples.labels[number]]
        probability = answer["scores"][label]
        if answer["label"] != label and answer["score"] >= SURE and probability <= DOUBTED:
            pair = examples.pairs[number] if examples.pairs else None
            line = examples.lines[number] if examples.lines else number
            text = examples.texts[number]
            split = "dev" if in_dev[number] else "train"
            doubtful.append(Suspect(line, text, label, answer["label"], answer["score"], probability, pair, split))
    return tuple(sorted(doubtful, key=lambda suspect: suspect.label_probability))


def sentences(story: Story) -> list[str]:
    """The story in a few sentences."""
    tried = "; ".join(f"{_name(candidate)}: {100 * candidate.score:.1f}" for candidate in story.candidates)
    lines = [f"Tried with {story.how} ({story.metric}): {tried}."]
    if story.diverged:
        rates = ", ".join(f"{rate:g}" for rate in story.diverged)
        lines.append(f"Training diverged, because the loss was not a number: learning rate {rates}.")
    lines.append(_choice_sentence(story))
    again = f" {story.averaged} times and averaged" if story.averaged > 1 else ""
    expected = f"Expected on new data: {story.metric} {_with_interval(story.expected)}."
    lines.append(f"The delta is trained on {story.rows:,} rows{again}. {expected}")
    if story.unknown:
        lines.append(_unknown_sentence(story.unknown))
    if story.calibration is not None:
        lines.append(_calibration_sentence(story.calibration))
    if story.threshold:
        label = story.classes[1].label
        lines.append(f'A class is rare, so {story.threshold:+.2f} is added to the output of "{label}".')
    if story.confusions:
        pairs = [f"{pair.label} taken for {pair.taken_for} ({pair.rows})" for pair in story.confusions[:SHOWN]]
        lines.append(f"Most confused: {', '.join(pairs)}.")
    if story.curve is not None:
        lines.append(_curve_sentence(story.curve))
    if story.suspects:
        looks = "1 label looks" if len(story.suspects) == 1 else f"{len(story.suspects):,} labels look"
        lines.append(f"{looks} wrong.")
    return lines


def _choice_sentence(story: Story) -> str:
    if story.diverged and all(candidate.lr is None for candidate in story.candidates):
        return "The head alone is delivered, because no training was left."
    chosen = next(candidate for candidate in story.candidates if candidate.chosen)
    sentence = f"Chosen by the loss on these rows: {_name(chosen)}."
    alike = [candidate for candidate in story.candidates if candidate.reading == chosen.reading]
    if chosen.lr is not None and alike[0].loss < chosen.loss:
        sentence += " The loss of the head only is smaller, but not by enough to be sure."
    return sentence


def _unknown_sentence(count: int) -> str:
    rows = "1 row" if count == 1 else f"{count:,} rows"
    why = "no other row of the class, or none outside of the fold"
    return f"{rows} could not be predicted: {why}. The expected score counts them, temperature and choice do not."


def _name(candidate: Candidate) -> str:
    if candidate.lr is not None:
        return candidate.name
    return f"head only, texts {candidate.reading}" if candidate.reading else "head only"


def _with_interval(score: Score) -> str:
    return f"{100 * score.value:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"


def _calibration_sentence(calibration: Calibration) -> str:
    errors = f"calibration error {calibration.before:.3f} before and {calibration.after:.3f} after"
    return f"Probabilities: temperature {calibration.temperature:.2f}, {errors}."


def _curve_sentence(curve: Curve) -> str:
    half = f"{100 * curve.half:.1f} with half of the rows (± {100 * curve.spread:.1f})"
    if curve.helps:
        verdict = "more rows are likely to help"
    elif curve.full > curve.half:
        verdict = "more rows may help, but the gain may be chance"
    else:
        verdict = "more rows may help little"
    return f"Head only: {half}, {100 * curve.full:.1f} with all: {verdict}."
