"""Forecast of a study's cost: floating-point operations, seconds and memory. Only `speed` needs torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ..model.anatomy import Anatomy, anatomy
from ..model.architectures import architecture
from ..model.language import asks_for_nothing, parse_init, select
from ..model.selection import Selection
from ..training.plan import MASK
from .grid import Settings, rounds, tasks_and_sizes
from .spec import Method, Study

if TYPE_CHECKING:
    from ..training.job import Job
    from ..training.resolved import Resolved
    from .store import Results

CORE = 25e9  # operations a second of one core: stored trials of freeze-reinit on MiniLM, core on bert-tiny (LOG.md)
GPU = 1e13  # operations a second that a GPU of today sustains, for a rough idea; not measured
SMALL = Settings(train_size=500, dev_size=500, epochs=15, evals_per_epoch=1, seeds=2, lr="auto")
SMALL_BASE = "bert-tiny"  # the smallest base of results/evidence.sh, a folder in $BITFIT_MODELS
SPEED_FILES = 200  # results that the measured speed is taken from, at most
GATE_NUMBERS = 14  # per entry with a gate: value, start, difference, logit, gate, gradients, moments, temporaries
GATE_WORK = 800.0  # per entry with a gate and step, in operations of a matrix product that take as long
KERNEL_BYTES = 0.6e6  # of one of oneDNN's kernels (bank/blocked.py)
PRODUCTS = 0.5  # share of the speed of a matrix product that a training step reaches

# Rows for training and evaluation, and mean tokens of a row, of the full data sets.
DATA = {
    "cola": (8551, 1043, 11), "sst2": (67349, 872, 13), "mrpc": (3668, 408, 53), "stsb": (5749, 1500, 31),
    "qqp": (363846, 40430, 30), "mnli": (392702, 19647, 39), "qnli": (104743, 5463, 50),
    "rte": (2490, 277, 64), "imdb": (25000, 25000, 230), "squad": (87599, 10570, 170), "ptb-pos": (39832, 1700, 30),
    "trec": (5452, 500, 12), "rotten-tomatoes": (8530, 1066, 27), "ud-pos": (12544, 2001, 22),
}  # fmt: skip
# Parameters of the layers, which decide the work per token.
LAYER_PARAMETERS = {
    "bert-base-cased": 85e6, "bert-base-uncased": 85e6, "bert-large-cased": 302e6, "roberta-base": 85e6,
    "bert-tiny": 0.4e6, "bert-mini": 3.2e6, "bert-small": 12.6e6, "bert-medium": 25.2e6, "all-MiniLM-L6-v2": 10.6e6,
}  # fmt: skip


# The shape of BERT-base, on which selections are resolved for estimates: per layer, then outside the layers.
_WIDTH, _INNER, _VOCABULARY, _DEPTH = 768, 3072, 30522, 12
_IN_LAYER = {
    "attention.self.query": (_WIDTH, _WIDTH), "attention.self.key": (_WIDTH, _WIDTH),
    "attention.self.value": (_WIDTH, _WIDTH), "attention.output.dense": (_WIDTH, _WIDTH),
    "attention.output.LayerNorm": (_WIDTH,), "intermediate.dense": (_INNER, _WIDTH),
    "output.dense": (_WIDTH, _INNER), "output.LayerNorm": (_WIDTH,),
}  # fmt: skip
_OUTSIDE = {
    "embeddings.word_embeddings.weight": (_VOCABULARY, _WIDTH), "embeddings.position_embeddings.weight": (512, _WIDTH),
    "embeddings.token_type_embeddings.weight": (2, _WIDTH), "embeddings.LayerNorm.weight": (_WIDTH,),
    "embeddings.LayerNorm.bias": (_WIDTH,), "pooler.dense.weight": (_WIDTH, _WIDTH), "pooler.dense.bias": (_WIDTH,),
}  # fmt: skip


@cache
def _bert_base() -> Anatomy:
    shapes: dict[str, tuple[int, ...]] = dict(_OUTSIDE)
    for layer in range(_DEPTH):
        for module, shape in _IN_LAYER.items():
            shapes[f"encoder.layer.{layer}.{module}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{module}.bias"] = shape[:1]
    return anatomy("bert", shapes)


@dataclass(frozen=True)
class Effort:
    """What decides the cost of a step: the share of the layers that is frozen, and whether matrices train."""

    frozen: float
    matrices: bool

    @classmethod
    def of(cls, selection: Selection, depth: int, layers: int) -> Effort:
        """The effort of a selection above `depth` frozen layers."""
        return cls(depth / max(1, layers), selection.matrix_share > MASK)


@cache
def _effort(text: str, init: str) -> Effort:
    """The effort of a method on BERT-base."""
    sites = _bert_base()
    selection = select(sites, text)
    changed = set(selection.entries)
    for step in parse_init(init):
        if step.kind != "keep":
            changed.update(select(sites, step.selection).entries)
    return Effort.of(selection, sites.layers_below(changed), sites.layers)


def work(effort: Effort, parameters: float, tokens: float, dev_tokens: float, epochs: int, evaluations: int) -> float:
    """Floating-point operations of one trial on a base whose layers have so many `parameters`.

    Per parameter and token these are 2 in the forward pass, 2 for the gradient of the inputs and 2 for that of the
    weights. Frozen layers run once for all epochs.
    """
    frozen = parameters * effort.frozen
    active = parameters - frozen
    per_token = 6 if effort.matrices else 4
    training = per_token * tokens * epochs
    evaluating = 2 * dev_tokens * epochs * evaluations
    return 2 * frozen * (tokens + dev_tokens) + active * (training + evaluating)


@dataclass(frozen=True)
class Cost:
    """The trials of a study and their floating-point operations."""

    trials: int
    operations: float


def published_cost(study: Study) -> Cost:
    """The cost of a study as the paper did it, estimated from sizes."""
    return _cost(study, Settings(), study.protocol.bases)


def small_settings(study: Study) -> Settings:
    """Few rows and seeds, and no more epochs than the paper has."""
    return replace(SMALL, epochs=min(SMALL.epochs or 1, study.protocol.epochs))


def small_cost(study: Study) -> Cost:
    """The cost of a study with few rows on a small base, estimated from sizes."""
    return _cost(study, small_settings(study), (SMALL_BASE,))


def small_command(study: Study) -> list[str]:
    """The command that runs a study with few rows on a small base."""
    return ["bitfit", "study", "run", study.name, "--base", SMALL_BASE, *small_settings(study).words()]


def _cost(study: Study, settings: Settings, bases: Sequence[str]) -> Cost:
    frame = settings.frame(study.protocol)
    trials, operations = 0, 0.0
    for task, size in tasks_and_sizes(study, settings):
        train, dev, tokens = DATA.get(task, (5000, 1000, 40))
        train = min(size or train, train)
        dev = min(settings.dev_size or dev, dev)
        for method in study.methods:
            effort = _effort(method.select, method.init)
            count = _trials(study, settings, method, task)
            for base in bases:
                parameters = LAYER_PARAMETERS.get(base.rpartition("/")[2], 85e6)
                operations_each = work(
                    effort, parameters, train * tokens, dev * tokens, frame["epochs"], frame["evals_per_epoch"]
                )
                trials += count
                operations += count * operations_each
    return Cost(trials, operations)


def _trials(study: Study, settings: Settings, method: Method, task: str) -> int:
    """The trials of a method on a task: every rate and batch size, on all seeds or on the first one."""
    tried = len(method.rates_by_task.get(task, method.rates)) * len(settings.batch or study.protocol.batch)
    seeds = rounds(study, settings, task)
    return tried * seeds if (settings.search or study.protocol.search) == "all" else tried + seeds - 1


def trial_work(job: Job, resolved: Resolved) -> float:
    """Floating-point operations of a trial on its data, those of its gates included."""
    return training_work(job, resolved) + gate_work(job, resolved)


def training_work(job: Job, resolved: Resolved) -> float:
    """Floating-point operations of a trial's training and evaluations."""
    trial, resolution = resolved.trial, resolved.resolution
    effort = Effort.of(resolution.selection, resolution.depth, job.base.anatomy.layers)
    tokens, dev_tokens = len(job.train.rows.ids), len(job.dev.rows.ids)
    return work(effort, _layer_parameters(job), tokens, dev_tokens, trial.epochs, trial.evals_per_epoch)


def test_work(job: Job) -> float:
    """Floating-point operations that it takes to score the test rows once."""
    tokens = sum(len(part.rows.ids) for part in job.tests.values())
    return 2.0 * _layer_parameters(job) * tokens


def gate_work(job: Job, resolved: Resolved) -> float:
    """Floating-point operations that it takes to learn a trial's selection; 0 if it is not learned."""
    trial, resolution = resolved.trial, resolved.resolution
    learned = resolution.selection.learned
    if learned is None:
        return 0.0
    steps = trial.epochs * math.ceil(len(job.train) / trial.batch)
    gates = GATE_WORK * learned.operand.count * steps
    dense = Effort.of(learned.operand, resolution.depth, job.base.anatomy.layers)
    return gates + work(dense, _layer_parameters(job), len(job.train.rows.ids), 0, trial.epochs, 0)


def _layer_parameters(job: Job) -> int:
    """How many parameters the layers of the base have, which decide the work per token."""
    return sum(site.size for site in job.base.anatomy.sites if site.layer is not None)


def memory(job: Job, group: Sequence[Resolved]) -> float:
    """The approximate memory of a pass: base, copies of its matrices, five numbers per trained entry, activations.

    Only the packed path copies matrices, and has kernels of oneDNN for the copies. Gates are trained before, for one
    trial at a time.
    """
    from ..bank.blocked import KERNELS, MOST_BYTES

    base, rows = job.base, job.train.rows
    matrices = sum(math.prod(site.shape) for site in base.anatomy.sites if site.layer is not None)
    copies = 4.0 * 2 * matrices
    copied = architecture(base.config.model_type).packed is not None and copies <= MOST_BYTES
    copied_bytes = copies + KERNELS * KERNEL_BYTES if copied else 0.0  # a worker's CPU may need them
    trained = sum(resolved.resolution.selection.count for resolved in group)
    numbers = 5 * trained
    for resolved in group:
        learned = resolved.resolution.selection.learned
        if learned is not None:
            numbers = max(numbers, GATE_NUMBERS * learned.operand.count)
    tokens = len(group) * group[0].trial.batch * len(rows.ids) / max(1, len(rows))
    inner = int(getattr(base.config, "intermediate_size", 4 * base.width))
    activations = tokens * base.anatomy.layers * (12 * base.width + 3 * inner)
    return 4.0 * (base.anatomy.total + numbers + activations) + copied_bytes


def speed(results: Results) -> float:
    """The speed of training, in operations per second: of earlier trials, else estimated by a matrix product.

    Solved heads tell nothing: they do not train.
    """
    done = 0.0
    seconds = 0.0
    for path in sorted(results.trials.glob("*.json"))[:SPEED_FILES]:
        result = results.read(path.stem)
        if result is not None and not asks_for_nothing(result.trial["select"]):
            done += result.cost.get("work", 0.0)
            seconds += result.cost.get("seconds", 0.0)
    return done / seconds if seconds > 0 else PRODUCTS * _product_speed()


def _product_speed() -> float:
    import torch

    a, b = torch.randn(256, 384), torch.randn(384, 1536)
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * 256 * 384 * 1536 / best
