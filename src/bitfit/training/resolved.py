"""Trials with their selections resolved on the base: resolved once, then grouped into passes and trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from ..arrays import Tensors
from ..bank.bank import Bank
from ..bank.lanes import Lane, lane_to_train
from ..bank.sparse import SCATTERED
from ..delta.delta import INDEX, VALUE
from ..model.base import Base
from ..model.grafts import GRAFTS
from ..model.resolution import Resolution, resolve, resolve_pool
from ..model.selection import Selection
from ..model.task_model import Model
from .job import Job
from .plan import BATCH, EPOCHS, SEED, Plan, Trial, default_rates, follows_recipe, recipe_epochs, recipe_rates, several

LANES = 16  # most trials of a pass, without --lanes
# What a trial takes from the plan as it is; some of these values are replaced in resolve_plan.
_SHARED = ({f.name for f in fields(Trial)} & {f.name for f in fields(Plan)}) - {"lr", "batch", "seed"}


@dataclass(frozen=True, eq=False)
class Resolved:
    """A trial, and what its select, inject and init texts name on the base."""

    trial: Trial
    resolution: Resolution


def resolve_plan(plan: Plan, job: Job, train_size: int | None) -> list[Resolved]:
    """The trials of a plan's grid in the order batch, rate, seed, for one of its train sizes."""
    base = job.base
    pool = resolve_pool(base, job.task.pool(plan.pool))
    seeds = several(SEED if plan.seed is None else plan.seed)
    by_seed = {}
    for seed in seeds:
        by_seed[seed] = resolve(base, plan.select, inject=plan.inject, init=plan.init, pool=pool, seed=seed)
    rates, epochs = _rates_and_epochs(plan, job, by_seed[seeds[0]])
    shared = {name: getattr(plan, name) for name in _SHARED}
    shared["epochs"] = epochs
    shared["train_size"] = train_size
    shared["pool"] = pool
    shared["metric"] = job.task.metric
    shared["max_length"] = job.encoder.max_length
    shared["stride"] = job.encoder.stride
    trials = []
    for batch in several(plan.batch or BATCH):
        for rate in rates:
            for seed in seeds:
                trial = Trial(lr=float(rate), batch=batch, seed=seed, **shared)
                trials.append(Resolved(trial, by_seed[seed]))
    return trials


def _rates_and_epochs(plan: Plan, job: Job, resolution: Resolution) -> tuple[tuple[float, ...], int]:
    """The plan's rates and epochs; where it sets none, the defaults for the selection or those of the recipe."""
    rates = several(plan.lr) if plan.lr is not None else default_rates(resolution.selection, job.base.width)
    if not follows_recipe(plan):
        return rates, plan.epochs or EPOCHS
    rows = len(job.dataset.train)
    if job.dataset.held_out:
        rows += len(job.dataset.dev)  # the recipe trains on them too, in the end
    return recipe_rates(rates, rows), recipe_epochs(rows)


def resolve_trials(base: Base, trials: Iterable[Trial]) -> list[Resolved]:
    """The trials resolved; those that differ in rate or batch alone share one resolution."""
    known: dict[tuple[object, ...], Resolution] = {}
    resolved = []
    for trial in trials:
        key = trial.select, trial.inject, trial.init, trial.pool, trial.seed
        if key not in known:
            known[key] = resolve(
                base, trial.select, inject=trial.inject, init=trial.init, pool=trial.pool, seed=trial.seed
            )
        resolved.append(Resolved(trial, known[key]))
    return resolved


def start_lane(job: Job, model: Model, trial: Trial, resolution: Resolution) -> Lane:
    """The lane of a trial before training."""
    selection = resolution.selection
    if not trial.weight_decay:
        selection = reachable(job, selection)
    return lane_to_train(model, selection, trial.head, resolution.starts, trial.seed)


def reachable(job: Job, selection: Selection) -> Selection:
    """The selection without the rows of the word embedding that no training text has.

    Their gradient is always zero, so without weight decay they keep their values. Special tokens stay: a model may add
    some by itself.
    """
    name = job.base.word_embedding
    if name is None or selection.entries.get(name, ()) is not None:  # only if all of it is selected
        return selection
    rows, width = selection.shapes[name]
    special = [token for token in job.base.tokenizer.all_special_ids if token < rows]
    tokens = np.union1d(job.train.rows.ids, special).astype(np.int64)
    entries = tokens[:, None] * width + np.arange(width)
    return replace(selection, entries={**selection.entries, name: entries.ravel()})


def delta_tensors(bank: Bank, k: int, selection: Selection) -> Tensors:
    """Lane k's tensors as in a delta. What is selected as a whole is stored as a whole, words without a text too."""
    tensors = bank.tensors(k)
    for name, index in selection.entries.items():
        if index is None and name + INDEX in tensors:
            whole = bank.model.base.values(name).astype(np.float32, copy=True)
            whole.reshape(-1)[tensors.pop(name + INDEX)] = tensors.pop(name + VALUE)
            tensors[name] = whole
    return tensors


def passes(trials: Iterable[Resolved], lanes: int | None = None) -> list[list[Resolved]]:
    """Group consecutive trials that can train together into passes of at most `lanes` trials.

    The result depends on the trials alone, so that a resumed run groups them as before.

    A trial that trains more than SCATTERED of the matrices gets a pass of its own. Trials with different grafts share
    a pass, but not with a graft that would take the others off the packed path.
    """
    groups: list[list[Resolved]] = []
    last: tuple[object, ...] | None = None
    for resolved in trials:
        shared = _shared_in_a_pass(resolved)
        most = 1 if _trains_alone(resolved) else lanes or LANES
        if groups and shared == last and len(groups[-1]) < most:
            groups[-1].append(resolved)
        else:
            groups.append([resolved])
        last = shared
    return groups


def _shared_in_a_pass(resolved: Resolved) -> tuple[object, ...]:
    """What all trials of a pass have in common."""
    trial, resolution = resolved.trial, resolved.resolution
    return (
        trial.batch,
        trial.epochs,
        trial.dropout,
        trial.pool,
        trial.autofreeze,
        "" if _is_packed(resolution) else trial.inject,
        # The frozen layers of a pass are those below what any of its lanes trains, and dropout is off in them. So with
        # different depths a lane would differ from its separate run.
        resolution.depth,
        _trains_alone(resolved),
        resolution.selection.learned is not None,  # gates are trained before the pass
    )


def _trains_alone(resolved: Resolved) -> bool:
    return resolved.resolution.selection.matrix_share > SCATTERED


def _is_packed(resolution: Resolution) -> bool:
    """Whether the packed path takes all grafts of a trial, if it takes the base; true for a trial without grafts."""
    for site in resolution.anatomy.sites:
        if site.graft is None:
            continue
        some_entries = resolution.selection.entries.get(site.name) is not None
        if some_entries or not GRAFTS[site.graft].packed:
            return False
    return True
