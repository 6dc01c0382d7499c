"""Trials with what their texts mean on the base: resolved once, then grouped into passes and trained as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..bank.sparse import SCATTERED
from ..model.base import Base
from ..model.resolution import Resolution, resolve, resolve_pool
from .job import Job
from .plan import BATCH, EPOCHS, SEED, Plan, Trial, default_rates, follows_recipe, recipe_epochs, recipe_rates, several

LANES = 16  # trials of a pass at most, when nobody says


@dataclass(frozen=True, eq=False)
class Resolved:
    """A trial, and what its texts mean on the base."""

    trial: Trial
    resolution: Resolution


def resolve_plan(plan: Plan, job: Job, train_size: int | None) -> list[Resolved]:
    """The grid of a plan, in the order batch, rate, seed; `train_size` is one of the plan's."""
    base = job.base
    pool = resolve_pool(base, job.task.pool(plan.pool))
    seeds = several(SEED if plan.seed is None else plan.seed)
    by_seed = {
        seed: resolve(base, plan.select, inject=plan.inject, init=plan.init, pool=pool, seed=seed) for seed in seeds
    }
    rates = plan.lr if plan.lr is not None else default_rates(by_seed[seeds[0]].selection, base.width)
    shared = {name: getattr(plan, name) for name in _SHARED}
    shared["epochs"] = plan.epochs or EPOCHS
    if follows_recipe(plan):
        rows = len(job.dataset.train) + (len(job.dataset.dev) if job.dataset.held_out else 0)
        rates = recipe_rates(several(rates), rows)
        shared["epochs"] = recipe_epochs(rows)
    shared["train_size"] = train_size
    shared["pool"] = pool
    shared["metric"] = job.task.metric
    shared["max_length"] = job.encoder.max_length
    shared["stride"] = job.encoder.stride if job.task.by_token else 0
    trials = []
    for batch in several(plan.batch or BATCH):
        for rate in several(rates):
            for seed in seeds:
                trial = Trial(lr=float(rate), batch=batch, seed=seed, **shared)
                trials.append(Resolved(trial, by_seed[seed]))
    return trials


_SHARED = ({f.name for f in fields(Trial)} & {f.name for f in fields(Plan)}) - {"lr", "batch", "seed"}


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


def passes(trials: Iterable[Resolved], lanes: int | None = None) -> list[list[Resolved]]:
    """Group trials into passes of at most `lanes`. The result depends on the trials alone, so a resumed run agrees.

    A trial that trains more than SCATTERED of the matrices gets a pass of its own.
    """
    groups: list[list[Resolved]] = []
    last: tuple[object, ...] | None = None
    for resolved in trials:
        trial, what = resolved.trial, resolved.resolution
        # The layers that are frozen in a pass are those below all of its lanes. With lanes of unlike depth a lane
        # would differ from its separate run: dropout is off in frozen layers.
        like = (trial.batch, trial.dropout, trial.pool, trial.inject, what.depth)
        room = 1 if what.selection.matrix_share > SCATTERED else lanes or LANES
        if groups and like == last and len(groups[-1]) < room:
            groups[-1].append(resolved)
        else:
            groups.append([resolved])
        last = like
    return groups
