"""From sites back to text: the expression of the selection language that names them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from .anatomy import Anatomy, Site


def expression(anatomy: Anatomy, chosen: Collection[Site]) -> str:
    """A text that selects exactly these sites of a model; `none` for no site."""
    biases = {site for site in anatomy.sites if site.term.startswith("b_")}
    rest = set(chosen)
    words = []
    if biases and biases <= rest:
        words.append("bias")
        rest -= biases
    for term in anatomy.terms:
        of_term = [site for site in anatomy.sites if site.term == term]
        chosen_of_term = [site for site in of_term if site in rest]
        if chosen_of_term:
            words.append(_term(term, of_term, chosen_of_term))
    return " + ".join(words) or "none"


def _term(term: str, of_term: Sequence[Site], chosen: Sequence[Site]) -> str:
    """The chosen sites of one term: the term, the term in some layers, or a pattern of names."""
    if len(chosen) == len(of_term):
        return term
    layers = {site.layer for site in chosen}
    in_these_layers = [site for site in of_term if site.layer in layers]
    if len(in_these_layers) > len(chosen) or None in layers:
        names = "|".join(re.escape(site.name) for site in chosen)
        return f're:"{names}"'
    numbers = sorted(layer for layer in layers if layer is not None)
    return " + ".join(f"{term}@{run}" for run in _runs(numbers))


def _runs(numbers: Sequence[int]) -> list[str]:
    """Sorted numbers as runs: 0, 1, 2, 5 are 0-2 and 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
