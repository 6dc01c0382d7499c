"""The quality benchmark's page: what is compared with what."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def report(monkeypatch):
    """The module that writes the page."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent.parent / "benchmarks"), *sys.path])
    import quality_report

    return quality_report


def result(method: str, score: float, **further: Any) -> dict[str, Any]:
    facts = {"task": "sst2", "size": 32, "draw": 0, "method": method, "score": score, "seconds": 1.0}
    return facts | {"low": score - 0.03, "high": score + 0.03} | further


def test_differences_are_of_the_same_draws(report):
    found = [result("bitfit", 0.7), result("bitfit", 0.9, draw=1), result("linear", 0.6), result("linear", 0.1, draw=2)]
    assert report.differences(found, "linear") == {("sst2", 32): [pytest.approx(10.0)]}


def test_results_of_an_older_recipe_are_left_out(report):
    found = [result("linear", 0.6), result("bitfit", 0.1, recipe=1), result("bitfit", 0.7, recipe=2, draw=1)]
    page = report.report(found)
    assert "Version 2 of the recipe. 1 results of older versions are left out." in page
    assert "10.0" not in page and "70.0" in page


def test_a_cell_is_worse_only_beyond_the_interval(report):
    within = [result("linear", 0.60), result("bitfit", 0.58)]
    beyond = [result("linear", 0.60), result("bitfit", 0.56)]
    assert report._within_intervals(within)[2] == "none"
    assert report._within_intervals(beyond)[2] == "sst2 32"


def test_the_hindsight_is_the_best_trial_less_the_chosen_one(report):
    trials = [{"test": 0.75, "chosen": False}, {"test": 0.7, "chosen": True}]
    assert report.hindsight(result("bitfit", 0.7, trials=trials)) == pytest.approx(0.05)
    assert report.hindsight(result("linear", 0.7)) is None


def test_nothing_is_lost_where_the_head_alone_beats_every_trial(report):
    trials = [{"test": 0.75, "chosen": False}, {"test": 0.7, "chosen": False}]
    assert report.hindsight(result("bitfit", 0.8, trials=trials)) == 0


def test_equal_scores_share_a_rank(report):
    found = [result("linear", 0.6), result("bitfit", 0.7), result("head alone", 0.7)]
    page = "\n".join(report.summary(found))
    assert page.count("| 70.00 | 1.50 |") == 2 * page.count("| 60.00 | 3.00 |") > 0


def test_targets_count_up_to_a_thousand_rows(report):
    found = [result("linear", 0.6), result("bitfit", 0.7)]
    larger = [result("linear", 0.6, size=5000), result("bitfit", 0.1, size=5000)]
    assert "+10.00 (1 cells)" in report.report([*found, *larger])


def test_a_size_that_a_task_does_not_have_is_left_out(report, monkeypatch, tmp_path):
    import quality

    computed = []
    monkeypatch.setattr(quality, "_ready", lambda args: None)
    monkeypatch.setattr(quality, "training_rows", lambda data, task: 400)
    monkeypatch.setattr(quality, "compute", lambda cell, *others: computed.append(cell.size))
    quality.run(SimpleNamespace(tasks=["sst2"], sizes=[300, 5000], draws=1, methods=["bitfit"], data=tmp_path))
    assert computed == [300]


def test_calibration_is_a_mean_over_cells(report):
    def one(size: int, before: float, after: float, draw: int = 0) -> dict[str, Any]:
        errors = {"log_loss": after, "calibration_error": after}
        return result("bitfit", 0.7, size=size, draw=draw, **errors) | {"before": dict.fromkeys(errors, before)}

    found = [one(32, 0.2, 0.1), one(32, 0.4, 0.3, draw=1), one(300, 0.1, 0.0)]
    assert [row[2] for row in report._calibration(found)] == 2 * ["0.200 before, 0.100 after (2 cells)"]


def test_the_spread_over_seeds_stands_beside_that_of_the_old_default(report):
    found = []
    for method, spread in (("bitfit", 0.01), ("bitfit plain", 0.02), ("old default", 0.04)):
        found += [result(method, 0.7, seed=1), result(method, 0.7 + spread, seed=2)]
    assert report._seed_spread(found)[2] == "sst2 32: 0.71, 1.41, 2.83"


def test_tasks_that_no_setting_was_chosen_on_have_a_table(report):
    page = report.unseen([result("bitfit", 0.7), result("linear", 0.5, task="qqp"), result("bitfit", 0.6, task="qqp")])
    assert "| qqp | 32 | 50.0 |  | 60.0 |  |" in page and "sst2" not in page
