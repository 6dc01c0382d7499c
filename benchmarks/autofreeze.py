"""AutoFreeze with BitFit against BitFit: training time and dev score.

python benchmarks/autofreeze.py --data DIR [--tasks mrpc,rte,sst2] [--seeds 0,1,2] [--settled 2,3]

Each seed trains all sides in turn. Time is that of the process on one thread, so that other work on the machine counts
little. Scores are those of the best checkpoint and of the last one on dev, and of the best one on test where there
are labelled test rows. The best of 20 dev scores is optimistic, and more so for a model that never stops changing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import bitfit
from bitfit.model.base import Base
from bitfit.training import autofreeze


@dataclass
class Side:
    """The runs of BitFit, or of AutoFreeze with one threshold, on a task."""

    settled: float | None  # None: nothing is frozen
    seconds: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)

    def run(self, base: Base, task: str, seed: int, args: argparse.Namespace) -> None:
        """Train once."""
        if self.settled is not None:
            autofreeze.SETTLED = self.settled
        began = time.process_time()
        run = bitfit.train(
            task, base, data=args.data, train_size=args.rows, epochs=args.epochs, lr=args.lr, seed=seed, threads=1,
            autofreeze=self.settled is not None,
        )  # fmt: skip
        self.seconds.append(time.process_time() - began)
        history = run.best.history
        self.best.append(100 * max(evaluation.dev_score for evaluation in history.evaluations))
        self.last.append(100 * history.evaluations[-1].dev_score)
        if "test" in run.best.scores:
            self.test.append(100 * run.best.scores["test"][run.best.trial.metric].value)
        self.frozen.append(" ".join(f"{f.step}:{f.frozen_layers}" for f in history.freezings))

    def told(self, against: Side) -> str:
        """The row of the table."""
        name = "BitFit" if self.settled is None else f"AutoFreeze {self.settled:g}"
        ratio = sum(self.seconds) / sum(against.seconds)
        test = _mean(self.test) if self.test else ""
        scores = f"{_mean(self.best)} | {_mean(self.last)} | {test}"
        return f"| {name} | {statistics.mean(self.seconds):.1f} | {ratio:.2f} | {scores} | {'; '.join(self.frozen)} |"


def _mean(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {deviation:.1f}"


def main() -> None:
    """Print a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--base")
    parser.add_argument("--tasks", default="mrpc,rte,sst2")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--settled", default=str(autofreeze.SETTLED))
    args = parser.parse_args()
    base = bitfit.load_base(args.base)
    for task in args.tasks.split(","):
        sides = [Side(None), *(Side(float(threshold)) for threshold in args.settled.split(","))]
        for seed in args.seeds.split(","):
            for side in sides:
                side.run(base, task, int(seed), args)
        print(f"\n{task}, {args.rows:,} rows, {args.epochs} epochs, rate {args.lr:g}, seeds {args.seeds}\n")
        print(
            "| | CPU s | of BitFit | best dev | last dev | test | step:frozen layers |\n|---|---|---|---|---|---|---|"
        )
        for side in sides:
            print(side.told(sides[0]), flush=True)


if __name__ == "__main__":
    main()
