"""A kind of task for bitfit: `--task count` predicts how many (0, 1, 2, ...) by Poisson regression."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch.nn import functional

from bitfit.data.formats import fault
from bitfit.data.readers.texts import Numbers
from bitfit.tasks.task import Task
from bitfit.tasks.texts import Regression

LARGEST = 20.0  # of the logarithm of a count


class Counts(Numbers):
    """Reads a text, or two, and a whole number from 0."""

    kind: ClassVar[str] = "count"

    def examples(self, table, labels, numbered=False):
        """The texts with their counts; an error names the line of a label that is none."""
        examples = super().examples(table, labels, numbered)
        for line, value in zip(table.lines, examples.labels, strict=True):
            if value < 0 or value != int(value):
                raise fault(table.path, line, f"{value:g} is not a count.")
        return examples


@dataclass(frozen=True)
class Count(Regression):
    """How many. The head gives the logarithm of the expected count."""

    kind: ClassVar[str] = Counts.kind
    reader: ClassVar[type[Counts]] = Counts
    card: ClassVar[str] = "How many, for {texts}."

    def fitted(self, examples) -> Task:
        """The same task: counts are not standardised."""
        return self

    def loss(self, logits, targets, rows):
        """Of a Poisson distribution."""
        return functional.poisson_nll_loss(logits.squeeze(-1), targets)

    def predictions(self, logits, encoded, examples):
        """The expected counts."""
        return np.exp(np.minimum(logits[:, 0].astype(np.float64), LARGEST))
