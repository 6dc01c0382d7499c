"""The change map: how much each term of each layer of a delta differs from the base."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ..arrays import Array
from ..model.anatomy import Site
from ..model.task_model import Model
from .delta import INDEX, VALUE


def change_map(
    model: Model, tensors: Mapping[str, Array], starts: Mapping[str, Tensor] | None = None
) -> dict[str, list[float | None]]:
    """Mean absolute change per term and layer against the base, as in the papers; None for a layer without the term.

    The mean is over all entries of a vector, even if only some of them were trained: 1/dim(b) in the papers. What a
    graft adds is compared with `starts`, its values before training, and with zero where they are not known.
    """
    starts = starts or {}
    sums: dict[tuple[str, int | None], tuple[float, int]] = {}
    for site in model.anatomy.sites:
        base = starts.get(site.name, model.original(site.name)).detach().cpu().numpy()
        change = _site_change(base, site, tensors)
        total, count = sums.get((site.term, site.layer), (0.0, 0))
        if change.size:
            sums[site.term, site.layer] = total + float(change.sum(dtype=np.float64)), count + site.size
    table: dict[str, list[float | None]] = {}
    for (term, layer), (total, count) in sums.items():
        row = table.setdefault(term, [None] * (1 if layer is None else model.anatomy.layers))
        row[layer or 0] = total / count
    return {term: table[term] for term in model.anatomy.terms if term in table}


def _site_change(base: Array, site: Site, tensors: Mapping[str, Array]) -> Array:
    span = site.span(site.axis)
    if site.name in tensors:
        difference = np.abs(tensors[site.name] - base)
        return difference if site.whole else np.take(difference, span, axis=site.axis)
    if site.name + INDEX not in tensors:
        return np.empty(0, np.float32)
    index = tensors[site.name + INDEX]
    values = tensors[site.name + VALUE]
    position = np.unravel_index(index, base.shape)[site.axis]
    inside = (position >= span.start) & (position < span.stop)
    change: Array = np.abs(values[inside] - base.reshape(-1)[index[inside]])
    return change
