"""The parameter audit: how many parameters of a base a selection trains, by the papers' terms and by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import SelectionError, UsageError, suggest
from .anatomy import HEADS, PARTS, Anatomy, anatomy, part_of
from .base import Base, empty_model, load_base, load_config, locate
from .grafts import NONE
from .injection import grow, target_of
from .language import asks_for_nothing, is_learned
from .language import select as select_sites
from .resolution import resolve
from .selection import Selection, count_by_term
from .strategies import WeightsNeeded
from .task_model import Model


@dataclass(frozen=True)
class Audit:
    """Counts of one selection on one base."""

    base: str
    text: str  # the selection as text
    anatomy: Anatomy
    selection: Selection
    trained: dict[str, int]  # by term
    head: dict[str, tuple[int, ...]]
    head_policy: str
    unused: int = 0  # entries of a pooler that is never called

    @property
    def terms(self) -> dict[str, int]:
        """Entries of each term the base offers."""
        sizes = dict.fromkeys(self.anatomy.terms, 0)
        for site in self.anatomy.sites:
            sizes[site.term] += site.size
        return sizes

    @property
    def head_total(self) -> int:
        """Entries of the head for two classes."""
        return sum(math.prod(shape) for shape in self.head.values())

    @property
    def head_trained(self) -> int:
        """Entries of the head that train under its policy."""
        if self.head_policy == "full":
            return self.head_total
        if self.head_policy == "frozen":
            return 0
        return sum(math.prod(shape) for name, shape in self.head.items() if name.endswith("bias"))

    @property
    def total(self) -> int:
        """Entries of the encoder and the head."""
        return self.anatomy.total + self.head_total

    @property
    def all_trained(self) -> int:
        """Entries that train, those of the head included."""
        return self.selection.count + self.head_trained

    @property
    def warnings(self) -> list[str]:
        """Notes on the selection, for the user."""
        notes = list(self.selection.notes)
        if self.selection.learned is not None:
            notes.append("Training determines the entries; until then the counts by term are those of an even sample.")
        if not self.selection and not asks_for_nothing(self.text):
            notes.append(f"The selection {self.text} is empty on this base: only the head would train.")
        if self.unused:
            notes.append(
                f"The base declares mean pooling: its pooler ({self.unused:,} parameters) is neither used nor trained."
            )
        if self.head_trained < self.head_total:
            frozen = self.head_total - self.head_trained
            notes.append(
                f"--head {self.head_policy} leaves {frozen:,} randomly initialised head parameters frozen at their "
                "random start; --head full trains them."
            )
        return notes

    def parts(self) -> dict[str, tuple[int, int]]:
        """Total and trained entries of encoder, embedding, pooler and head."""
        table = dict.fromkeys(PARTS, (0, 0))
        for term, size in self.terms.items():
            total, trained = table[part_of(term)]
            table[part_of(term)] = (total + size, trained + self.trained[term])
        return {**table, "head": (self.head_total, self.head_trained)}

    def json(self) -> dict[str, Any]:
        """What `bitfit count --json` prints."""
        return {
            "base": self.base,
            "total": self.total,
            "trained": self.all_trained,
            "percent": 100 * self.all_trained / self.total,
            "terms": {t: {"total": n, "trained": self.trained[t]} for t, n in self.terms.items()},
            "parts": {part: {"total": a, "trained": b} for part, (a, b) in self.parts().items()},
            "head": {"total": self.head_total, "trained": self.head_trained},
            "warnings": self.warnings,
        }

    def names(self) -> list[tuple[str, str]]:
        """(Term, parameter name) of every site, without repetition; the number of a layer is written as *."""
        rows: dict[tuple[str, str], None] = {}
        for site in self.anatomy.sites:
            name = site.name if site.layer is None else site.name.replace(f".{site.layer}.", ".*.", 1)
            if not site.whole:
                slices = [":"] * site.axis + [f"{site.start}:{site.stop}"]
                name += f"[{', '.join(slices)}]"
            rows[site.term, name] = None
        return list(rows)


def count(
    spec: str | Base | None, select: str = "bias", head: str = "full", seed: int = 0, inject: str = NONE
) -> Audit:
    """Count what a selection trains on a folder, a hub id or a config file, with a head for two classes.

    The weights of a hub id are fetched only if the selection depends on them.
    """
    if head not in HEADS:
        raise UsageError(f'--head: no "{head}".{suggest(head, HEADS)}')
    if spec is None or isinstance(spec, Base) or _has_weights(spec):
        base = spec if isinstance(spec, Base) else load_base(spec)
        resolved = resolve(base, select, inject=inject, seed=seed)
        model = Model(base, 2, resolved.pool, inject)
        return _audit(base.name, select, base.grown(inject), resolved.anatomy, resolved.selection, model.head, head)
    name, sites, head_shapes = _shapes(spec, inject)
    try:
        selection = select_sites(sites, select, seed)
    except WeightsNeeded:
        if Path(spec).is_file():
            raise
        return count(load_base(spec), select, head, seed, inject)
    return _audit(name, select, sites, sites, selection, head_shapes, head)


def _audit(
    name: str,
    text: str,
    sites: Anatomy,
    usable: Anatomy,
    selection: Selection,
    head: dict[str, tuple[int, ...]],
    policy: str,
) -> Audit:
    trained = dict.fromkeys(sites.terms, 0) | count_by_term(usable, selection)
    return Audit(name, text, sites, selection, trained, head, policy, sites.total - usable.total)


def select(model: nn.Module | Base | Model, text: str, seed: int = 0) -> Selection:
    """The entries of a model that a selection names; tensor names are relative to its encoder."""
    if is_learned(text):
        raise SelectionError(f"{text}: training determines the entries of this selection; use bitfit.train")
    if isinstance(model, Base | Model):
        return select_sites(model.anatomy, text, seed)
    return select_sites(_encoder_anatomy(model), text, seed)


def _shapes(spec: str, inject: str) -> tuple[str, Anatomy, dict[str, tuple[int, ...]]]:
    """Name, sites and head of an architecture without weights."""
    config, name = load_config(spec)
    model = empty_model(config)
    prefix = str(model.base_model_prefix) + "."
    head = {}
    if model.base_model is not model:
        head = {n: tuple(p.shape) for n, p in model.named_parameters() if not n.startswith(prefix)}
    return name, _encoder_anatomy(model, inject), head


def _encoder_anatomy(model: nn.Module, inject: str = NONE) -> Anatomy:
    encoder = getattr(model, "base_model", model)
    config: Any = encoder.config
    parameters = dict(encoder.named_parameters())
    sites = anatomy(config.model_type, {name: tuple(p.shape) for name, p in parameters.items()})
    if not any(parameter.is_meta for parameter in parameters.values()):
        sites = replace(sites, values=lambda name: parameters[name].detach().cpu().numpy())
    return grow(target_of(encoder, config.model_type, sites), inject)


def _has_weights(spec: str) -> bool:
    if Path(spec).is_file():
        return False
    folder = Path(locate(spec)[0])
    return folder.is_dir() and any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
