"""Strategies that look at the base's values, and strategies of installed packages."""

from __future__ import annotations

import numpy as np
import pytest

from bitfit.errors import SelectionError
from bitfit.model.audit import count
from bitfit.model.language import select
from bitfit.model.selection import Selection


def values_of(base, selection: Selection) -> np.ndarray:
    """The base's absolute values at the selected entries."""
    found = []
    for name, indices in selection.entries.items():
        values = np.abs(base.values(name).reshape(-1))
        found.append(values if indices is None else values[indices])
    return np.concatenate(found)


@pytest.mark.parametrize("text", ["all", "W_q + W_m2@1", "bias + gamma - b_q"])
@pytest.mark.parametrize("amount", ["1", "40", "7%"])
def test_magnitude_takes_the_largest_values_and_exactly_as_many_as_asked(base, text, amount):
    operand = select(base.anatomy, text)
    sample = select(base.anatomy, f"magnitude({text}, {amount})")
    expected = int(amount) if amount.isdigit() else round(operand.count * 0.07)
    assert sample.count == expected
    rest = operand - sample
    assert rest.count == operand.count - expected
    assert values_of(base, sample).min() >= values_of(base, rest).max()


def test_magnitude_does_not_depend_on_the_seed(base):
    first, second = (select(base.anatomy, "magnitude(all, 1%)", seed) for seed in (0, 1))
    assert first == second


def test_of_equal_values_the_first_are_taken(base, bases):
    import torch

    name = "encoder.layer.0.attention.self.query.weight"
    parameter = base.encoder.get_parameter(name)
    before = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.fill_(0.5)
        assert select(base.anatomy, "magnitude(W_q@0, 3)").entries[name].tolist() == [0, 1, 2]
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def test_nothing_and_everything_can_be_asked_for(base):
    assert not select(base.anatomy, "magnitude(W_q, 0)")
    assert select(base.anatomy, "magnitude(W_q, 100%)") == select(base.anatomy, "W_q")


def test_a_bare_configuration_has_no_values_to_compare(folders):
    config = str(folders("bert") / "config.json")
    assert count(config, "random(all, 1%)").selection.count
    with pytest.raises(SelectionError, match=r"magnitude\(all, 1%\): .* only a configuration; pass the folder"):
        count(config, "magnitude(all, 1%)")


def test_count_reads_the_weights_of_a_base_that_is_named(folders, monkeypatch):
    folder = folders("bert")
    expected = count(str(folder), "magnitude(W_q, 1%)").trained
    monkeypatch.setenv("BITFIT_MODELS", str(folder.parent))
    assert expected["W_q"] and count(folder.name, "magnitude(W_q, 1%)").trained == expected


def test_count_loads_a_base_only_for_a_selection_that_needs_its_weights(base, folders, monkeypatch):
    from bitfit.model import audit

    asked = []
    monkeypatch.setattr(audit, "_has_weights", lambda spec: False)  # as for a hub id
    monkeypatch.setattr(audit, "load_base", lambda spec: asked.append(spec) or base)
    folder = str(folders("bert"))
    assert count(folder, "bias").selection.count and not asked
    assert count(folder, "magnitude(W_q, 1%)").selection.count and asked == [folder]


def test_magnitude_trains_and_its_delta_is_sparse(base, csv_file):
    from bitfit import train

    delta = train(csv_file, base, select="magnitude(W_q + W_v, 2%)", lr=1e-3, epochs=1).best.delta
    assert all(index is not None for index, _ in delta.entries.values())
    assert sum(values.size for _, values in delta.entries.values()) == round(0.02 * 4 * 256)
