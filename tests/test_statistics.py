"""Statistics against scipy and by simulation: claims are decided wrongly as seldom as they say."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from bitfit.report import statistics as bitfit_statistics
from bitfit.report import verdicts
from bitfit.report.claim_tests import TESTS
from bitfit.report.statistics import Place, alone, combine, holm, place, regression, spearman, summary, t_quantile
from bitfit.report.verdicts import HOLDS, NO_DIFFERENCE, REFUTED
from bitfit.study import spec
from bitfit.study.spec import Claim, Part
from bitfit.tasks.metrics import CLASS_METRICS, NUMBER_METRICS, TWO_CLASS_METRICS, score

LEVEL = 0.05
TOLERATED = 0.06


def test_an_interval_over_seeds_is_scipys():
    draw = random.Random(0)
    values = [draw.gauss(0.4, 1) for _ in range(9)]
    found, known = summary(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))


@pytest.mark.parametrize("freedom", [1, 2.5, 30, math.inf])
def test_quantiles_are_scipys(freedom):
    known = stats.norm.ppf(0.975) if math.isinf(freedom) else stats.t.ppf(0.975, freedom)
    assert t_quantile(0.975, freedom) == pytest.approx(known)


def test_tasks_of_one_base_are_tested_by_a_t_test():
    effects = [1.2, 0.3, 0.9, 2.1, 0.4]
    found = combine([Place("b", f"t{n}", effect) for n, effect in enumerate(effects)])
    assert found.p("above", 0) == pytest.approx(stats.ttest_1samp(effects, 0, alternative="greater").pvalue)
    assert found.p("below", 2) == pytest.approx(stats.ttest_1samp(effects, 2, alternative="less").pvalue)


def test_hartung_and_knapp_weigh_places_by_what_is_known_of_them():
    places = [
        Place("b", f"t{n}", effect, variance) for n, (effect, variance) in enumerate([(0, 0.1), (3, 9), (0.2, 0.1)])
    ]
    assert combine(places).mean < statistics.fmean(one.effect for one in places)


def test_an_interval_excludes_a_bound_exactly_where_the_test_does():
    found = combine(
        [Place(f"b{n % 3}", f"t{n % 4}", effect) for n, effect in enumerate([1, 2, 1.5, 0.5, 3, 1, 2, 0.7])]
    )
    low, high = found.interval(0.02)
    assert found.p("above", low) == pytest.approx(0.02) and found.p("below", high) == pytest.approx(0.02)


def test_effects_that_do_not_vary_never_give_a_p_of_zero():
    same = combine([Place("b", f"t{n}", 0.5) for n in range(4)])
    assert same.p("above", 0.0) == 1.0 and same.p_within(1.0) == 1.0
    counted = combine([place("b", f"t{n}", [0.0, 0.0], rows=400) for n in range(4)])
    assert 0 < counted.p_within(1.0) < LEVEL


def test_a_place_is_not_known_better_than_one_test_row():
    low, high = place("b", "t", [1.0, 1.0, 1.0], rows=200).interval
    assert low < 0.1 and high > 1.9


def test_holm_is_scipys_and_names_the_level_of_each_step():
    values = {"a": 0.01, "b": 0.04, "c": 0.03}
    found = holm(values)
    assert {name: p for name, (p, _) in found.items()} == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert found["a"][1] == pytest.approx(0.05 / 3) and found["b"][1] == found["c"][1] == pytest.approx(0.05 / 2)
    assert holm({}) == {}


def test_rank_correlation_of_a_constant_is_none():
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


def test_a_slope_over_bases_is_scipys():
    xs, ys = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.5, 2.0, 4.5, 4.0]
    found = regression(xs, [Place(f"b{x}", "t", y) for x, y in zip(xs, ys, strict=True)])
    known = stats.linregress(xs, ys)
    assert found.mean == pytest.approx(known.slope)
    assert found.p("above", 0) == pytest.approx(known.pvalue / 2)


def test_power_says_what_a_test_could_have_seen():
    """A true difference of the size that is named is found in four of five simulations."""
    draw = np.random.default_rng(0)
    seen, found = [], 0
    for _ in range(400):
        one = combine([Place("b", f"t{n}", effect) for n, effect in enumerate(draw.normal(0.0, 1.0, 8))])
        seen.append(one.detectable())
    for _ in range(400):
        effects = draw.normal(statistics.fmean(seen), 1.0, 8)
        found += combine([Place("b", f"t{n}", effect) for n, effect in enumerate(effects)]).p("above", 0) < LEVEL
    assert 0.7 < found / 400 < 0.9


def test_as_many_places_as_are_named_show_the_difference():
    few = combine([Place("b", f"t{n}", effect) for n, effect in enumerate([-1.0, 0.0, 1.0, 2.0, -2.0])])
    count = few.places_to_see(1.0)
    many = combine([Place("b", f"t{n}", few.places[n % 5].effect) for n in range(count)])
    assert count > 5 and 0.8 < many.detectable() <= 1.0  # below 1: the sample variance of more places is smaller


def test_a_difference_that_hundreds_of_places_would_not_show_has_no_number():
    far_apart = combine([Place("b", f"t{n}", effect) for n, effect in enumerate([-9.0, 0.0, 9.0])])
    assert far_apart.places_to_see(0.5) is None


# ---- false alarms, with effects that tasks and bases share


def simulated(draw, tasks, bases, by_task, by_base, by_place, seeds=2, missing=0.0):
    """Places whose true mean effect is 0."""
    task_effects, base_effects = draw.normal(0, by_task, tasks), draw.normal(0, by_base, bases)
    places = []
    for task in range(tasks):
        for base in range(bases):
            if base and draw.random() < missing:
                continue
            shared = task_effects[task] + base_effects[base] + draw.normal(0, by_place)
            places.append(place(f"b{base}", f"t{task}", list(shared + draw.normal(0, 0.8, seeds)), 0.3, 400))
    return places


def test_the_simulation_shows_the_errors_that_it_was_made_for(monkeypatch):
    """Seeds as independent blocks, and places as independent of each other, are wrong in more than one case of ten."""
    draw, blocks, independent = np.random.default_rng(7), 0, 0
    monkeypatch.setattr(bitfit_statistics, "_crossed", lambda *_: None)
    for _ in range(400):
        task_effects = draw.normal(0, 1.0, 3)
        seeds = (task_effects[:, None] + draw.normal(0, 0.8, (3, 3))).ravel()
        blocks += stats.ttest_1samp(seeds, 0, alternative="greater").pvalue < LEVEL
        independent += combine(simulated(draw, 6, 3, 1.0, 1.0, 0.3)).p("above", 0) < LEVEL
    assert blocks / 400 > 0.1 and independent / 400 > 0.1


@pytest.mark.parametrize(
    ("tasks", "bases", "by_task", "by_base", "by_place", "missing"),
    [
        (3, 1, 1.0, 0.0, 0.3, 0.0),  # the layout whose seed x task blocks gave 16% false verdicts
        (9, 1, 2.0, 0.0, 0.3, 0.0),
        (5, 3, 1.0, 0.0, 0.3, 0.0),
        (6, 3, 0.0, 1.0, 0.3, 0.0),
        (6, 3, 1.0, 1.0, 0.3, 0.0),
        (6, 3, 1.0, 1.0, 0.3, 0.6),
        (6, 6, 1.0, 2.0, 0.0, 0.0),
    ],
)
def test_false_verdicts_are_as_rare_as_they_say(tasks, bases, by_task, by_base, by_place, missing):
    draw, runs = np.random.default_rng(7), 2500
    above = below = 0
    for _ in range(runs):
        found = combine(simulated(draw, tasks, bases, by_task, by_base, by_place, missing=missing))
        above += found.p("above", 0) < LEVEL
        below += found.p("below", 0) < LEVEL
    assert above / runs <= TOLERATED and below / runs <= TOLERATED


def test_a_true_difference_inside_the_margin_is_seldom_refuted():
    """A claim of 'as good as' whose true loss is the margin itself is refuted in at most 5%, not in 37%."""
    draw, refuted = np.random.default_rng(3), 0
    for _ in range(600):
        places = [Place(one.base, one.task, one.effect - 1.0, one.variance) for one in simulated(draw, 6, 3, 1, 1, 0.3)]
        refuted += combine(places).p("below", -1.0) < LEVEL
    assert refuted / 600 <= TOLERATED


def test_a_difference_as_large_as_the_margin_is_seldom_said_not_to_matter():
    draw, small = np.random.default_rng(5), 0
    for _ in range(600):
        places = [replace(one, effect=1.0 + 0.3 * one.effect) for one in simulated(draw, 6, 3, 1, 1, 0.3)]
        small += combine(places).p_within(1.0) < LEVEL
    assert small / 600 <= TOLERATED


@pytest.mark.parametrize(("tasks", "bases"), [(1, 5), (3, 4), (3, 6)])
def test_a_slope_over_bases_is_seldom_seen_where_bases_only_differ(tasks, bases):
    """Places of one base share what is special to it, so more tasks do not make more bases."""
    draw, steeper = np.random.default_rng(1), 0
    for _ in range(2000):
        base_effects = draw.normal(0, 1.0, bases)
        xs, places = [], []
        for task in range(tasks):
            for base in range(bases):
                xs.append(float(base))
                places.append(Place(f"b{base}", f"t{task}", base_effects[base] + draw.normal(0, 0.5)))
        steeper += regression(xs, places).p("above", 0) < LEVEL
    assert steeper / 2000 <= TOLERATED


def test_a_slope_needs_three_bases():
    places = [Place(f"b{base}", f"t{task}", base + 0.1 * task * base) for task in range(4) for base in range(2)]
    assert regression([float(one.base[1]) for one in places], places).spreads == ()


def test_a_claim_about_one_place_is_tested_by_its_seeds_and_rows():
    one = alone(place("b", "t", [5.0, 6.0, 5.5], 1.0, 500))
    assert one.p("above", 0) < 0.01 < one.p("above", 5)
    assert alone(Place("b", "t", 5.0)).p("above", 0) == 1.0
    few = place("b", "t", [5.0, 6.0], 1.0, 500)
    assert alone(few).p("above", 0) < 0.01 and alone(few, least_seeds=3).p("above", 0) == 1.0


CLAIMS = (
    Claim("a", "a", parts=(Part("greater", "Full", "BitFit"),)),
    Claim("b", "b", parts=(Part("greater", "Full", "BitFit"),)),
    Claim("c", "c", parts=(Part("greater", "Full", "BitFit"), Part("greater", "Full", "LoRA"))),
    Claim("d", "d", parts=(Part("as_good_as", "Full", "BitFit"), Part("greater", "Full", "LoRA"))),
)


@pytest.mark.parametrize(
    ("effect", "wrong"), [(0.0, HOLDS), (0.0, REFUTED), (-1.0, NO_DIFFERENCE), (1.0, NO_DIFFERENCE), (0.3, REFUTED)]
)
def test_a_study_seldom_has_any_false_verdict(monkeypatch, effect, wrong):
    """All claims of a study together, with parts, their correction, and effects shared by tasks and by bases."""
    draw = np.random.default_rng(11)

    def effects(part, findings):
        moved = effect - part.margin if part.test == "as_good_as" else effect
        return [replace(one, effect=one.effect + moved) for one in simulated(draw, 5, 3, 1, 1, 0.3)]

    tests = {name: replace(TESTS[name], effects=effects) for name in ("greater", "as_good_as")}
    monkeypatch.setattr(verdicts, "TESTS", tests)
    study = replace(spec.load("core"), claims=CLAIMS)
    findings = SimpleNamespace(base="b", trained_tasks=[], done=[])
    runs = 250
    false = 0
    for _ in range(runs):
        false += any(one.outcome == wrong for one in verdicts.judge(study, [findings]))
    assert false / runs <= TOLERATED


# ---- results of single rows


NUMBERS = ("spearman", "pearson", "r2")


def rows_of(metric, golds, predictions):
    """Rows as the tasks make them."""
    from bitfit.data.examples import Examples
    from bitfit.study.examples import Rows
    from bitfit.tasks import Task

    numbers = metric in NUMBERS
    task = Task.of("regression" if numbers else "classification", () if numbers else ("a", "b"), metric)
    return Rows.of(*task.by_row(predictions, Examples(["t"] * len(golds), None, list(golds))))


@pytest.mark.parametrize("metric", [*TWO_CLASS_METRICS, *NUMBERS])
def test_a_resampled_metric_is_the_metric_of_the_drawn_rows(metric):
    from bitfit.report.resampling import draws, metric_of

    draw = np.random.default_rng(0)
    golds = draw.integers(0, 2, 300)
    predictions = np.where(draw.random(300) < 0.7, golds, 1 - golds)
    if metric in NUMBERS:
        golds = 1e5 + draw.normal(size=300)
        predictions = golds + draw.normal(size=300)
    if metric in ("auc", "average_precision"):
        predictions = draw.normal(size=(300, 2)).round(1)  # rounded, so that some are equal
        predictions[:, 1] += golds
    rows = rows_of(metric, golds, predictions)
    weights = draws(300, 3)
    for value, weight in zip(metric_of(rows, metric, weights), weights, strict=True):
        drawn = np.repeat(np.arange(300), weight.astype(int))
        # Ranks are those among all rows, which a resample changes a little.
        allowed = 0.02 if metric == "spearman" else 1e-5
        assert value == pytest.approx(score(metric, predictions[drawn], golds[drawn]), abs=allowed)


def sentences(draw):
    """Tags of 60 sentences, and predictions of which most are right."""
    golds = [tuple(draw.integers(0, 3, draw.integers(1, 12)).tolist()) for _ in range(60)]
    guesses = [np.where(draw.random(len(tags)) < 0.8, tags, 0) for tags in golds]
    return golds, guesses


def label_sets(draw):
    """Label sets of 60 texts, and predictions of which some are right."""
    table, wrong = draw.random((60, 4)) < 0.4, draw.random((60, 4)) < 0.2
    golds = [tuple(np.flatnonzero(row).tolist()) for row in table]
    return golds, [tuple(np.flatnonzero(row).tolist()) for row in table ^ wrong]


@pytest.mark.parametrize(
    ("kind", "metric", "labels", "make"),
    [
        ("tagging", "span_f1", ("O", "B-A", "I-A"), sentences),
        ("tagging", "span_precision", ("O", "B-A", "I-A"), sentences),
        ("tagging", "span_recall", ("O", "B-A", "I-A"), sentences),
        ("tagging", "accuracy", ("O", "B-A", "I-A"), sentences),
        ("multilabel", "micro_f1", ("a", "b", "c", "d"), label_sets),
        ("multilabel", "exact_match", ("a", "b", "c", "d"), label_sets),
    ],
)
def test_rows_of_sentences_and_sets_give_the_metric_of_the_drawn_rows(kind, metric, labels, make):
    from bitfit.data.examples import Examples
    from bitfit.report.resampling import METRICS, draws, metric_of
    from bitfit.study.examples import Rows
    from bitfit.tasks import Task

    golds, guesses = make(np.random.default_rng(0))
    task, examples = Task.of(kind, labels, metric), Examples(["t"] * 60, None, golds)
    rows = Rows.decode(Rows.of(*task.by_row(guesses, examples)).encode())
    assert metric in METRICS[rows.form]
    weights = draws(60, 3)
    for value, weight in zip(metric_of(rows, metric, weights), weights, strict=True):
        drawn = np.repeat(np.arange(60), weight.astype(int)).tolist()
        expected = task.score([guesses[row] for row in drawn], examples.take(drawn))
        assert value == pytest.approx(expected, abs=1e-3)  # of float16


def test_only_sets_by_macro_f1_cannot_be_resampled():
    """Every other metric that a task can be trained for has rows that give its score."""
    from bitfit.report.resampling import METRICS
    from bitfit.tasks.answering import METRICS as ANSWERING
    from bitfit.tasks.tagging import SPAN_METRICS

    known = {*METRICS["classes"], *METRICS["values"]}
    assert {*TWO_CLASS_METRICS, *CLASS_METRICS, *NUMBER_METRICS} - known == {"mae", "rmse"}
    assert {*SPAN_METRICS, *ANSWERING, "micro_f1"} <= set(METRICS["ratio"])


def trial_with_rows(metric, rows, value):
    from bitfit.study.store import Result

    scores = {"test": {metric: [value, 0.0, 1.0]}}
    return Result("k", "done", "b", "t", metric, {}, {}, 0.5, scores, examples={"test": rows.encode()})


def test_rows_that_do_not_give_the_score_are_not_resampled():
    """Earlier versions stored the mean of each row's F1 for micro_f1."""
    from bitfit.report.resampling import score_variance, variance_from_rows
    from bitfit.study.examples import Rows

    rows = Rows.of("ratio", [1.0, 0.5, 0.0], [1.0, 1.0, 1.0])
    good, old = trial_with_rows("micro_f1", rows, 0.5), trial_with_rows("micro_f1", rows, 0.6)
    assert score_variance([good], "test") > 0
    assert score_variance([good, old], "test") is None
    assert variance_from_rows([(good, old)], "test") is None
    assert score_variance([trial_with_rows("macro_f1", rows, 0.5)], "test") is None


def test_without_the_variance_over_rows_a_place_has_no_interval():
    one = place("b", "t", [1.0, 1.2, 1.1], None, 300)
    assert one.interval is None
    assert alone(one).p("above", 0) == 1.0


@pytest.mark.parametrize("metric", ["accuracy", "f1", "spearman"])
def test_rows_are_stored_and_read_again(metric):
    from bitfit.study.examples import Rows

    draw = np.random.default_rng(0)
    golds, predictions = draw.integers(0, 2, 1001), draw.integers(0, 2, 1001)
    rows = rows_of(metric, golds, predictions)
    text = rows.encode()
    again = Rows.decode(text)
    assert len(again) == 1001 and again.form == rows.form
    np.testing.assert_allclose(again.columns[0], np.asarray(rows.columns[0]), rtol=1e-3)
    if metric == "accuracy":
        assert len(text) < 250
