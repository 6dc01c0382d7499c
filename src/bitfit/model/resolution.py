"""Resolution of a trial's texts on one base: sites, selection, start values and frozen layers.

They are resolved here and nowhere else: a random sample depends on the sites it is drawn from, so resolving it again
on other sites would give another sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .anatomy import PAIR, Anatomy
from .base import Base
from .grafts import NONE, injects
from .language import parse_init, select
from .selection import Selection


@dataclass(frozen=True, eq=False)
class Start:
    """Entries that do not start from the base's values."""

    kind: str  # zero, or reinit (a fresh draw)
    selection: Selection


@dataclass(frozen=True, eq=False)
class Resolution:
    """Sites, selection, start values and frozen layers of a trial."""

    pool: str  # what the head reads: cls, mean, pair or tokens
    anatomy: Anatomy  # the sites that can be selected
    selection: Selection
    starts: tuple[Start, ...]
    depth: int  # layers below everything that differs from the base; they can be computed once


def resolve(
    base: Base, select_text: str, *, inject: str = NONE, init: str = "keep", pool: str = "auto", seed: int = 0
) -> Resolution:
    """Resolve a selection and start values on a base whose head reads `pool`."""
    pool = resolve_pool(base, pool)
    sites = selectable(base, pool, inject)
    selection = select(sites, select_text, seed)
    starts = resolve_starts(sites, init, seed)
    changed = set(selection.entries if selection.learned is None else selection.learned.operand.entries)
    for start in starts:
        changed.update(start.selection.entries)
    return Resolution(pool, sites, selection, starts, sites.layers_below(changed))


def resolve_starts(sites: Anatomy, init: str, seed: int) -> tuple[Start, ...]:
    """The start values that a text names, in order; `keep` names none."""
    steps = [step for step in parse_init(init) if step.kind != "keep"]
    return tuple(Start(step.kind, select(sites, step.selection, seed)) for step in steps)


def resolve_pool(base: Base, pool: str) -> str:
    """The pooling that `auto` means for this base; an architecture without a classification head is mean-pooled."""
    if pool in ("tokens", PAIR):
        return pool
    if not base.has_own_head:
        return "mean"
    return base.pooling if pool == "auto" else pool


def selectable(base: Base, pool: str, inject: str = NONE) -> Anatomy:
    """The sites that can be selected: all but those of a pooler that is never called."""
    sites = base.grown(inject) if injects(inject) else base.anatomy
    if pool == "cls":
        return sites
    used = tuple(site for site in sites.sites if site.part != "pooler")
    return replace(sites, sites=used)
