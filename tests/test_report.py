"""Statistics against scipy, verdicts that follow from numbers, pages that are whole, honest and harmless."""

from __future__ import annotations

import html.parser
import random
import re
from dataclasses import replace

import pytest
from scipy import stats

from bitfit.report import report, tables
from bitfit.report.findings import Findings
from bitfit.report.statistics import distribution, holm, p_above, p_equal, quantile, spearman, summary
from bitfit.report.verdicts import FAILS, HOLDS, OPEN, judge
from bitfit.study import grid, spec
from bitfit.study.grid import Settings
from bitfit.study.store import Result

STUDIES = {name: spec.load(name) for name in spec.names()}
EVIL = "<script>alert(1)</script>\x1b]0;x\x07|`"


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 400])
def test_students_distribution_is_scipys(freedom):
    for t in (-30.0, -2.0, -0.1, 0.0, 0.5, 3.0, 12.0):
        assert distribution(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-12)
    assert quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_tests_and_intervals_are_scipys():
    draw = random.Random(0)
    values = [draw.gauss(0.4, 1) for _ in range(9)]
    assert p_above(values) == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue)
    one = stats.ttest_1samp(values, -1, alternative="greater").pvalue
    other = stats.ttest_1samp(values, 1, alternative="less").pvalue
    assert p_equal(values, 1.0) == pytest.approx(max(one, other))
    found, known = summary(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))
    other_values = [value + draw.gauss(0, 1) for value in values] + values[:2]
    assert spearman([*values, *values[:2]], other_values) == pytest.approx(
        stats.spearmanr([*values, *values[:2]], other_values).statistic
    )


def test_holm_keeps_order_and_never_lowers_a_p():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


# ---- findings made up, so that what must follow is known


def made_up(study, score, seeds=5, tasks=None, base="made-up", label="t", missing=0.0, sizes=None, gap=0.1):
    """Findings in which method and seed decide the score by a function."""
    settings = Settings(seeds=seeds, tasks=tasks, search="all", lr=(1e-3,))
    points = grid.search(study, settings, base, lambda method: method.rates)
    draw = random.Random(1)
    results = {p: None if draw.random() < missing else _result(p, score(p), gap, label) for p in points}
    manifest = {
        "base": {"name": base, "fingerprint": "f", "layers": 2, "width": 16, "parameters": 1000},
        "runs": [{
            "command": ["bitfit", "study", "run", study.name, "--base", label],
            "methods": [method.name for method in study.methods],
            "frames": {task: {} for task in tasks or study.tasks if task != "mnli-mm"},
            "differences": [f"The base is {label}."],
        }],
        "skipped": {label: label}, "split": study.protocol.split,
        "audit": {m.name: {"encoder": 8, "embedding": 1, "pooler": 1, "head": 2, "total": 100} for m in study.methods},
        "versions": {"bitfit": "0"}, "threads": 1, "points": [],
    }  # fmt: skip
    return Findings(study, manifest, results)


def _result(point, score, gap, label):
    scores = {part: {m: [score, score, score] for m in ("accuracy", "f1")} for part in ("dev", "test")}
    scores["train"] = {m: [score + gap, 0, 0] for m in ("accuracy", "f1")}
    change = {"b_q": [0.02, 0.03], "b_k": [0.0, 0.0], "b_v": [0.001, 0.002], "b_m2": [0.02, 0.02], "b_pool": [0.01]}
    return Result(
        key="k", status="done", base="b", task=point.task, metric="accuracy", trial={},
        rows={"train": point.size or 3000},
        majority=0.4, scores=scores, trained=12, total=100, best_epoch=1.0, change=change,
        loss=[[0.5, 0.9], [1.0, 0.5]], evaluations=[[0.5, 0.8, score], [1.0, 0.7, score]],
        cost={"seconds": 2.0, "memory": 1e8},
    )  # fmt: skip


def verdict(study, claim, *findings):
    return next(v for v in judge(study, list(findings)) if v.claim.id == claim)


def by_method(table, spread=0.004):
    def score(point):
        return table.get(point.method, 0.7) + spread * ((point.seed * 7 + len(point.task)) % 5 - 2) / 2

    return score


def test_equal_methods_hold_as_equal_and_unlike_ones_do_not():
    study = STUDIES["bitfit-table3"]

    draw = random.Random(0)
    means = {"Full": 0.8, "BitFit": 0.8, "b_m2, b_q": 0.74}
    found = made_up(study, lambda p: means.get(p.method, 0.7) + draw.gauss(0, 0.005))
    assert verdict(study, "C1", found).verdict == HOLDS
    assert verdict(study, "C4", found).verdict == FAILS


def test_no_significant_difference_is_not_equality():
    study = STUDIES["bitfit-table3"]

    def score(point):
        swing = 0.05 if (point.seed + len(point.task)) % 2 else -0.05
        return 0.7 + (swing if point.method == "BitFit" else 0.0)

    found = made_up(study, score, seeds=2, tasks=("rte", "cola"))
    assert verdict(study, "C1", found).verdict == OPEN


def test_a_claim_of_more_is_refuted_only_when_the_interval_says_so():
    study = STUDIES["bitfit-table3"]
    noisy = random.Random(5)
    worse = made_up(study, lambda p: (0.75 if p.method == "BitFit" else 0.8) + noisy.gauss(0, 0.005))
    unclear = made_up(study, lambda p: 0.7 + (0.1 if p.method == "BitFit" and p.seed == 1 else 0.0), tasks=("rte",))
    better = made_up(study, lambda p: (0.8 if p.method == "BitFit" else 0.7) + noisy.gauss(0, 0.005))
    assert verdict(study, "C3", unclear).verdict == OPEN
    assert verdict(study, "C3", better).verdict == HOLDS
    assert verdict(study, "C3", worse).verdict == FAILS


def test_a_correction_for_many_comparisons_refutes_nothing():
    study = STUDIES["bitfit-table3"]
    lead = {0: 0.003, 1: 0.005, 2: 0.007}
    score = lambda p: 0.7 + (lead[p.seed] if p.method == "BitFit" else 0.0)  # noqa: E731
    (part,) = verdict(study, "C3", made_up(study, score, seeds=3, tasks=("rte",))).comparisons
    assert part.p > 0.05 and summary(part.differences).low > 0 and part.verdict == OPEN


def test_blocks_without_variance_show_what_is_within_a_margin_and_no_more():
    assert p_above([0.0] * 4, -5.0) == 0.0 and p_equal([0.2] * 4, 1.0) == 0.0
    assert p_above([0.5] * 4) == 1.0 and p_equal([1.5] * 4, 1.0) == 1.0
    assert p_above([100 * 0.83 - 100 * 0.82, 100 * 0.57 - 100 * 0.56, 100 * 0.81 - 100 * 0.80]) == 1.0


def test_mismatched_mnli_is_no_evidence_of_its_own():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, by_method({}), seeds=3, tasks=("mnli",))
    twice = {replace(p, task="mnli-mm"): r for p, r in found.results.items()}
    both = Findings(study, found.manifest, {**found.results, **twice})
    assert all(len(c.differences) == 3 for c in verdict(study, "C3", both).comparisons)
    assert report.state(both) == report.state(found)


def test_one_training_size_is_neither_the_smallest_nor_the_largest():
    study = STUDIES["bitfit-squad"]
    one = replace(study, sizes=(500,))
    found = made_up(one, lambda p: 0.7 + (0.02 + p.seed / 1000 if p.method == "BitFit" else 0.0), seeds=3)
    assert verdict(one, "C19", found).verdict == OPEN


def test_a_task_without_full_fine_tuning_is_judged_by_its_best_method():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.8 if p.task == "sst2" else 0.4, tasks=("sst2", "rte"))
    part = {p: r for p, r in found.results.items() if p.task == "sst2" or p.method != "Full"}
    assert Findings(study, found.manifest, part).silent == {("rte", None)}


def test_change_that_predicts_a_worse_score_predicts_it():
    study = STUDIES["plus-change"]
    found = made_up(study, lambda p: 0.9 - 0.01 * [m.name for m in study.methods].index(p.method), seeds=3)
    moved = {
        p: replace(r, change={"b_q": [0.01 * (1 + [m.name for m in study.methods].index(p.method))] * 2})
        for p, r in found.results.items()
    }
    assert verdict(study, "C9", Findings(study, found.manifest, moved)).verdict == FAILS


def test_scores_of_dev_that_stand_for_test_are_said():
    study = STUDIES["tiny-size"]
    found = made_up(study, by_method({}))
    dev = {p: replace(r, scores={"dev": r.scores["dev"]}) for p, r in found.results.items()}
    said = Findings(study, found.manifest, dev).differences
    assert any("no labelled test part" in text for text in said)
    assert not any("no labelled test part" in text for text in found.differences)


def test_cells_without_evidence_are_marked_in_markdown_too():
    study = STUDIES["freeze-low-data"]
    found = made_up(study, lambda p: 0.4 if p.size == 100 else 0.8, tasks=("cola",))
    assert "no evidence" in report.as_markdown(study, [found], [])


def test_two_blocks_decide_nothing():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, by_method({"BitFit": 0.9, "rand 100k": 0.5}), seeds=2, tasks=("rte",))
    assert verdict(study, "C3", found).verdict == OPEN


def test_a_place_where_full_fine_tuning_learns_nothing_is_no_evidence():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.4 if p.task == "cola" and p.method == "Full" else 0.8)
    assert ("cola", None) in found.silent
    assert all(task != "cola" for task, _ in found.blocks())
    assert "does not beat the majority class" in report.as_html(study, [found], judge(study, [found]))


def test_a_comparison_names_only_the_places_that_gave_it_blocks():
    study = STUDIES["bitfit-table3"]
    both = made_up(study, by_method({}), tasks=("rte", "cola"))
    lacks = {p: None if p.task == "cola" and p.method == "BitFit" else r for p, r in both.results.items()}
    other = made_up(study, lambda p: 0.4, base="silent")
    found = [Findings(study, both.manifest, lacks), other]
    assert {c.places for c in verdict(study, "C1", *found).comparisons} == {"made-up: rte"}


def test_change_claims_follow_the_maps():
    study = STUDIES["bitfit-maps"]
    draw = random.Random(0)
    found = made_up(study, lambda p: 0.8)
    for point, result in list(found.results.items()):
        still = {"b_k": [1e-5 * draw.random(), 1e-5], "b_q": [0.02 + 0.01 * draw.random(), 0.03]}
        found.results[point] = replace(result, change={**result.change, **still})
    assert verdict(study, "C7", found).verdict == HOLDS
    assert verdict(study, "C8", found).verdict == HOLDS


def test_the_order_flips_with_size_when_it_does():
    study = STUDIES["bitfit-squad"]
    draw = random.Random(0)

    def score(point):
        lead = 0.05 if (point.size or 9e9) < 3000 else -0.05
        return 0.7 + (lead if point.method == "BitFit" else 0) + draw.gauss(0, 0.003)

    assert verdict(study, "C19", made_up(study, score)).verdict == HOLDS
    assert verdict(study, "C19", made_up(study, lambda p: 0.7 + draw.gauss(0, 0.003))).verdict == FAILS


# ---- pages


class Checker(html.parser.HTMLParser):
    """Every element that opens closes, and none of them is active or reaches out."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.names, self.outside = [], set(), []

    def handle_starttag(self, name, attributes):
        self.names.add(name)
        self.outside += [a for a in attributes if a[0] in ("src", "href", "style") or a[0].startswith("on")]
        if name not in self.VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name


def check(text):
    checker = Checker()
    checker.feed(text)
    assert not checker.open and not checker.outside
    assert not checker.names & {"script", "iframe", "link", "img", "object", "form"}
    return checker


@pytest.mark.parametrize("name", STUDIES)
def test_every_table_and_figure_of_a_study_is_on_its_page(name):
    study = STUDIES[name]
    found = made_up(study, by_method({"Full": 0.8}, 0.03), seeds=3)
    text = report.as_html(study, [found], judge(study, [found]))
    checker = check(text)
    assert "svg" in checker.names or not study.figures
    for item in (*study.tables, *study.figures):
        assert f"<h3>{html.escape(item.name)}" in text, item.name
    assert "Nothing to draw yet" not in text
    for claim in study.claims:
        assert html.escape(claim.text) in text
    for word in ("Time and memory", "Parameters trained", "Generalisation gap", "How to reproduce"):
        assert word in text


def test_a_page_without_results_shows_the_published_numbers_and_what_to_run():
    study = STUDIES["bitfit-table3"]
    text = report.as_html(study, [], judge(study, []))
    check(text)
    assert "bitfit study run bitfit-table3" in text and "92.7" in text and "Nothing to draw yet" in text


def test_a_study_half_done_reports_what_it_has():
    study = STUDIES["freeze-low-data"]
    found = made_up(study, by_method({"Full": 0.6}, 0.05), seeds=2, missing=0.6)
    text = report.as_html(study, [found], judge(study, [found]))
    check(text)
    assert "the rest is missing below" in text


def test_hostile_text_stays_text_in_page_and_markdown():
    study = STUDIES["bitfit-table3"]
    methods = tuple(replace(m, name=EVIL if m.name == "Frozen" else m.name) for m in study.methods)
    tables = tuple(replace(t, rows=tuple(replace(r, label=EVIL) for r in t.rows)) for t in study.tables)
    evil = replace(study, title=EVIL, name=EVIL, about=EVIL, methods=methods, tables=tables, contradictions=(EVIL,))
    found = made_up(evil, by_method({}, 0.05), seeds=2, tasks=(EVIL,), base=EVIL, label=EVIL)
    text = report.as_html(evil, [found], judge(evil, [found]))
    check(text)
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    markdown = report.as_markdown(evil, [found], judge(evil, [found]))
    tables_only = re.sub(r"`[^`\n]*`\n", "", markdown)
    assert "<script" not in tables_only


def test_the_policy_of_a_page_allows_its_own_style_and_nothing_else():
    import base64
    import hashlib

    text = report.as_html(STUDIES["bitfit-maps"], [], [])
    style = re.search(r"<style>(.*?)</style>", text, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1))
    assert policy.startswith("default-src 'none'; ") and f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_a_cell_shows_ours_the_papers_and_the_difference():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.8 + 0.01 * p.seed, seeds=3)
    text = report.as_markdown(study, [found], [])
    assert "81.0 ± 1.0 (paper 92.5, -11.5)" in text


def test_a_task_of_no_table_has_a_table_of_its_training_sizes():
    study = STUDIES["freeze-low-data"]
    found = made_up(study, by_method({"Full": 0.8}), tasks=("sst2",))
    table = next(table for table in tables.tables(study, [found]) if table.name.startswith("Training sizes, sst2"))
    assert table.head[-2:] == ["200", "100"] and table.rows[0][0] == "Full, chosen rate"
    assert table.rows[0][1].text == "80.0 ± 0.3"


def test_failed_runs_count_as_the_majority_and_are_shown_apart():
    study = STUDIES["freeze-table1"]
    found = made_up(study, by_method({}, 0.05), seeds=3, tasks=("cola",))
    point = next(p for p in found.results if p.method == "InitBias+BitFit")
    found.results[point] = replace(found.results[point], status="diverged", scores={})
    assert found.points(found.results[point]) == pytest.approx(40.0)
    assert "(1 failed)" in report.as_html(study, [found], [])
