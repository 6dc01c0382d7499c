"""Verdicts that follow from numbers, pages that are whole, honest and harmless."""

from __future__ import annotations

import html
import html.parser
import random
import re
from dataclasses import asdict, replace

import pytest

from bitfit.errors import StudyError
from bitfit.report import figures, report, summary, tables
from bitfit.report.findings import Findings
from bitfit.report.published import published
from bitfit.report.quantities import epochs_to_converge, gap, late_fall
from bitfit.report.statistics import Place, combine, spearman
from bitfit.report.verdicts import HOLDS, NO_DIFFERENCE, OPEN, REFUTED, Comparison, judge
from bitfit.study import grid, spec
from bitfit.study.examples import Rows
from bitfit.study.grid import Settings
from bitfit.study.manifest import BaseFacts, Entry, Frame, Manifest, RunFacts
from bitfit.study.spec import Figure, Part
from bitfit.study.store import Result, Results

STUDIES = {name: spec.load(name) for name in spec.names()}
EVIL = "<script>alert(1)</script>\x1b]0;x\x07|`"
BASES = ("one", "two", "three")


# ---- findings made up, so that what must follow is known


def made_up(study, score, seeds=2, tasks=None, base="one", label="t", missing=0.0, gap=0.1, rates=(1e-4, 1e-3, 1e-2)):
    """Findings in which a function of the point decides the score; the middle rate is the best."""
    settings = Settings(seeds=seeds, tasks=tasks, search="all", lr=rates)
    points = grid.search(study, settings, base, lambda method: method.rates)
    draw = random.Random(1)
    results = {}
    for point in points:
        value = score(point) - (0.05 if point.lr != rates[len(rates) // 2] else 0.0)
        results[point] = None if draw.random() < missing else _result(point, value, gap)
    trained = [task for task in tasks or study.tasks if task not in study.views]
    ran = RunFacts(
        command=("bitfit", "study", "run", study.name, "--base", label),
        methods=tuple(method.name for method in study.methods),
        frames={task: Frame(epochs=1) for task in trained},
        differences=(f"The base is {label}.",),
    )
    counts = {"encoder": 8, "embedding": 1, "pooler": 1, "head": 2, "total": 100}
    manifest = Manifest(
        study=study.name,
        base=BaseFacts(base, "f", 2, 16, 1000),
        split=study.protocol.split,
        audit={method.name: counts for method in study.methods},
        versions={"bitfit": "0"},
        runs=(ran,),
        skipped={label: label},
    )
    return Findings(study, manifest, results)


def _result(point, score, gap):
    parts = ("dev", "test")
    scores = {part: {m: [score, score - 0.02, score + 0.02] for m in ("accuracy", "f1")} for part in parts}
    scores["train"] = {m: [score + gap, 0, 0] for m in ("accuracy", "f1")}
    change = {"b_q": [0.02, 0.03], "b_k": [0.0, 0.0], "b_v": [0.001, 0.002], "b_m2": [0.02, 0.02], "b_pool": [0.01]}
    return Result(
        key="k", status="done", base="b", task=point.task, metric="accuracy", trial={},
        rows={"train": point.size or 3000, "dev": 400, "test": 400},
        majority=0.4, scores=scores, trained=12, total=100, best_epoch=1.0, change=change,
        loss=[[0.5, 0.9], [1.0, 0.5]], evaluations=[[0.5, 0.8, score], [1.0, 0.7, score]],
        cost={"seconds": 2.0, "memory": 1e8},
    )  # fmt: skip


def with_rows(found):
    """The findings with results of single test rows that make up each score."""
    results = {}
    for point, result in found.results.items():
        rows = result.rows["test"]
        right = round(result.score("test") * rows)
        hits = [1] * right + [0] * (rows - right)
        random.Random(str(point)).shuffle(hits)
        results[point] = replace(result, examples={"test": Rows.of("hits", hits, [1] * rows).encode()})
    return replace(found, results=results)


def everywhere(study, score, bases=BASES, **more):
    """The same on several bases."""
    return [made_up(study, score, base=base, **more) for base in bases]


def verdict(study, claim, findings):
    return next(one for one in judge(study, findings) if one.claim.id == claim)


def means(table, spread=0.004, seed=0):
    """Scores by method, with noise."""
    draw = random.Random(seed)

    def score(point):
        return table.get(point.method, 0.7) + draw.gauss(0, spread)

    return score


# ---- outcomes


def test_every_outcome_is_reached_by_a_test_of_its_own():
    study = STUDIES["bitfit-table3"]
    better = everywhere(study, means({"BitFit": 0.8, "rand 100k": 0.7}))
    worse = everywhere(study, means({"BitFit": 0.7, "rand 100k": 0.8}))
    same = everywhere(study, means({}, spread=0.002))
    outcomes = [verdict(study, "random-entries-are-worse", found).outcome for found in (better, worse, same)]
    assert outcomes == [HOLDS, REFUTED, NO_DIFFERENCE]


def test_noise_decides_nothing():
    study = STUDIES["bitfit-table3"]
    found = everywhere(study, means({}, spread=0.06))
    assert verdict(study, "random-entries-are-worse", found).outcome == OPEN
    assert verdict(study, "as-good-as-full", found).outcome == OPEN


def test_as_good_as_is_not_refuted_by_being_better():
    study = STUDIES["bitfit-table3"]
    found = everywhere(study, means({"BitFit": 0.85, "Full": 0.8}))
    assert verdict(study, "as-good-as-full", found).outcome == HOLDS


def test_a_verdict_in_general_needs_five_places_of_three_tasks_and_three_bases():
    study, score = STUDIES["bitfit-table3"], means({"BitFit": 0.8})
    claim = "random-entries-are-worse"
    assert verdict(study, claim, everywhere(study, score)).general
    one_base = verdict(study, claim, everywhere(study, score, bases=("one",)))
    assert one_base.outcome == HOLDS and not one_base.general and "2 more bases" in one_base.needs
    two_tasks = verdict(study, claim, everywhere(study, score, tasks=("rte", "cola")))
    assert not two_tasks.general and "1 more task" in two_tasks.needs


def test_two_places_decide_nothing():
    study = STUDIES["bitfit-table3"]
    found = everywhere(study, means({"BitFit": 0.9}), bases=("one",), tasks=("rte", "cola"))
    assert verdict(study, "random-entries-are-worse", found).outcome == OPEN


def test_seeds_of_one_place_do_not_count_as_places():
    study = STUDIES["bitfit-table3"]
    found = everywhere(study, means({"BitFit": 0.9}), bases=("one",), tasks=("rte",), seeds=20)
    (comparison,) = verdict(study, "random-entries-are-worse", found).comparisons
    assert len(comparison.estimate.places) == 1 and comparison.outcome == OPEN


def test_a_cell_at_the_edge_of_its_rates_is_left_out_and_said():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.7 + (p.lr if p.method == "BitFit" else 0) * 10)
    (comparison,) = verdict(study, "random-entries-are-worse", [found]).comparisons
    assert comparison.estimate is None
    assert any("BitFit chose 0.01, the edge of its rates" in text for text in comparison.left_out)
    assert "rate at the edge" in report.as_markdown(study, [found], [])


def test_the_papers_rates_on_the_papers_base_have_no_edge():
    study = STUDIES["bitfit-table3"]
    method = study.method("BitFit")
    found = made_up(study, lambda p: 0.5 + 200 * p.lr, base=study.protocol.bases[0], rates=method.rates)
    assert not found.at_edge(("BitFit", "rte", None))
    assert made_up(study, lambda p: 0.5 + 200 * p.lr, rates=method.rates).at_edge(("BitFit", "rte", None))


def test_a_place_counts_by_all_methods_and_not_by_the_difference_that_is_judged():
    study = STUDIES["bitfit-table3"]

    def score(point):
        return 0.41 if point.task == "cola" else 0.39 if point.method == "BitFit" else 0.8

    found = made_up(study, score, tasks=("cola", "rte"))
    assert found.without_evidence == {("cola", None)}
    assert "do not beat the majority class" in report.as_html(study, [found], judge(study, [found]))


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("bitfit-table3", "as-good-as-full"),
        ("freeze-low-data", "all-methods-decline-alike"),
        ("freeze-dropout", "dropout-mistake-changes-nothing"),
    ],
)
def test_two_methods_at_the_majority_class_are_no_evidence_that_they_are_alike(name, claim):
    study = STUDIES[name]
    dead, alive = study.trained_tasks[:2]
    (part, *_) = next(one for one in study.claims if one.id == claim).parts
    compared = (part.a, part.b, *part.pair)

    def score(point):
        return 0.4 if point.task == dead and point.method in compared else 0.8

    found = made_up(study, score, tasks=(dead, alive))
    assert not found.without_evidence  # the other methods learn
    comparison = verdict(study, claim, [found]).comparisons[0]
    assert [place.task for place in comparison.estimate.places] == [alive]
    assert any(f"neither {part.a} nor {part.b} beats the majority class" in text for text in comparison.left_out)


def test_a_method_that_collapses_beside_one_that_learns_is_a_result():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.4 if p.method == "BitFit" else 0.8, tasks=("rte",))
    (comparison,) = verdict(study, "as-good-as-full", [found]).comparisons
    assert comparison.estimate.mean == pytest.approx(-40.0) and not comparison.left_out


@pytest.mark.parametrize(
    ("name", "claim", "n"),
    [
        ("bitfit-gap", "smaller-generalisation-gap", 0),
        ("bitfit-gap", "smaller-generalisation-gap", 1),
        ("bitfit-maps", "key-bias-does-not-move", 0),
        ("bitfit-maps", "query-and-middle-move-most", 0),
        ("bitfit-maps", "maps-are-alike", 0),
        ("freeze-table1", "gentler-loss", 0),
    ],
)
def test_a_method_that_does_not_learn_has_no_gap_curve_or_map_that_counts(name, claim, n):
    """Its gap is 0 and its loss falls gently: that would speak for BitFit where BitFit fails."""
    study = STUDIES[name]
    dead = study.trained_tasks[0]
    tasks = study.trained_tasks[:3]
    extra = (*study.methods, *(replace(study.methods[0], name=f"other {n}") for n in range(4)))
    study = replace(study, methods=extra)  # so that the place counts by the other methods

    def score(point):
        return 0.4 if point.task == dead and point.method == "BitFit" else 0.8

    found = made_up(study, score, tasks=tasks)
    assert not found.without_evidence
    comparison = verdict(study, claim, [found]).comparisons[n]
    (used,) = {place.all_tasks for place in comparison.estimate.places if len(place.all_tasks) > 1} or [
        tuple(place.task for place in comparison.estimate.places)
    ]
    assert used == tasks[1:]
    assert comparison.left_out == (f"one, {dead}: BitFit does not beat the majority class",)


def test_a_training_that_is_too_short_to_refute_a_claim_does_not_support_it():
    study = STUDIES["bitfit-rates"]

    def trained(epochs, rows=3000):
        bases = everywhere(study, means({}))
        for found in bases:
            for point, result in list(found.results.items()):
                curve = [[float(epoch), 0.5, 0.8] for epoch in range(1, epochs + 1)]
                found.results[point] = replace(result, evaluations=curve, rows={**result.rows, "train": rows})
        return verdict(study, "converges-in-seven-epochs", bases).comparisons[0]

    assert trained(15).estimate.mean == pytest.approx(1.0) and not trained(15).left_out
    assert trained(15, rows=500).estimate is None
    assert trained(15, rows=500).left_out[0] == "one, qnli: 500 training rows; the claim is about 2,000 or more"
    assert trained(7).estimate is None
    assert trained(7).left_out[0] == "one, qnli: BitFit was not trained for more than 7 epochs"


def test_the_generalisation_gap_is_to_test_rows_because_dev_chose_the_checkpoint():
    scores = {"train": {"accuracy": [0.9, 0, 1]}, "dev": {"accuracy": [0.85, 0, 1]}, "test": {"accuracy": [0.8, 0, 1]}}
    result = Result("k", "done", "b", "t", "accuracy", {}, {}, 0.5, scores=scores)
    assert gap(result) == pytest.approx(10.0)
    without_test = replace(result, scores={"train": scores["train"], "dev": scores["dev"]})
    assert gap(without_test) == pytest.approx(5.0)


def test_the_spread_of_guesses_is_no_stability():
    study = STUDIES["bitfit-stability"]

    def score(point):
        base = 0.4 if point.method == "BitFit" else 0.8
        return base + random.Random(str(point)).gauss(0, 0.001 if point.method == "BitFit" else 0.01)

    found = made_up(study, score, seeds=4, tasks=("rte",))
    comparison = verdict(study, "more-stable", [found]).comparisons[0]
    assert comparison.estimate is None


def test_parts_of_a_claim_must_all_hold_and_claims_are_corrected_together():
    study = STUDIES["bitfit-table3"]
    found = everywhere(study, means({"b_m2, b_q": 0.8, "b_m2": 0.7, "b_q": 0.9}))
    one = verdict(study, "both-terms-are-needed", found)
    assert {part.outcome for part in one.comparisons} == {HOLDS, REFUTED} and one.outcome == REFUTED
    assert all(part.levels.holds <= 0.05 for part in one.comparisons)
    assert min(part.levels.holds for verdict in judge(study, found) for part in verdict.comparisons) < 0.02


def test_an_interval_on_the_page_agrees_with_its_verdict():
    study = STUDIES["bitfit-table3"]
    for spread in (0.002, 0.01, 0.03):
        for one in judge(study, everywhere(study, means({"BitFit": 0.71}, spread))):
            for part in one.comparisons:
                if part.part.test == "greater" and part.outcome == HOLDS:
                    assert part.estimate.interval(part.level)[0] > part.part.by


def test_views_of_a_task_are_no_evidence_of_their_own():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, means({}), tasks=("mnli",))
    twice = {replace(point, task="mnli-mm"): result for point, result in found.results.items()}
    both = Findings(study, found.manifest, {**found.results, **twice})
    (comparison,) = verdict(study, "random-entries-are-worse", [both]).comparisons
    assert [place.task for place in comparison.estimate.places] == ["mnli"]
    assert report.state(both) == report.state(found)


def test_a_comparison_names_only_the_places_it_used():
    study = STUDIES["bitfit-table3"]
    both = made_up(study, means({}), tasks=("rte", "cola"))
    lacks = {p: None if p.task == "cola" and p.method == "BitFit" else r for p, r in both.results.items()}
    other = made_up(study, lambda p: 0.4, base="silent")
    one = verdict(study, "as-good-as-full", [Findings(study, both.manifest, lacks), other])
    assert report.scope_in_words(one) == "Judged on one: rte."


def test_a_map_at_the_edge_of_its_rates_is_left_out():
    study = STUDIES["bitfit-maps"]
    found = made_up(study, lambda p: 0.7 + 10 * p.lr)
    for claim in ("key-bias-does-not-move", "query-and-middle-move-most", "maps-are-alike"):
        (comparison,) = verdict(study, claim, [found]).comparisons
        assert comparison.estimate is None and comparison.left_out


def test_change_claims_follow_the_maps():
    study, draw = STUDIES["bitfit-maps"], random.Random(0)
    bases = everywhere(study, lambda p: 0.8)
    for found in bases:
        for point, result in list(found.results.items()):
            still = {"b_k": [1e-5 * draw.random(), 1e-5], "b_q": [0.02 + 0.01 * draw.random(), 0.03]}
            found.results[point] = replace(result, change={**result.change, **still})
    assert verdict(study, "key-bias-does-not-move", bases).outcome == HOLDS
    assert verdict(study, "query-and-middle-move-most", bases).outcome == HOLDS


def test_change_that_predicts_a_worse_score_predicts_it():
    study, draw = STUDIES["plus-change"], random.Random(0)
    order = [method.name for method in study.methods]
    bases = everywhere(study, lambda p: 0.9 - 0.01 * order.index(p.method))
    for found in bases:
        for point, result in list(found.results.items()):
            change = {"b_q": [0.01 * (1 + order.index(point.method) + 2 * draw.random())] * 2}
            found.results[point] = replace(result, change=change)
    assert verdict(study, "change-does-not-predict-score", bases).outcome == REFUTED


def test_maps_are_compared_once_for_each_base():
    """Pairs of tasks that share a task are not independent, so the tasks of one base are one place."""
    study = STUDIES["bitfit-maps"]
    one = verdict(study, "maps-are-alike", everywhere(study, lambda p: 0.8))
    (comparison,) = one.comparisons
    assert [place.base for place in comparison.estimate.places] == list(BASES)
    assert comparison.estimate.places[0].all_tasks == ("rte", "cola", "mrpc", "stsb")
    assert comparison.missing == ["2 more places"]


def test_change_and_score_are_compared_at_one_rate():
    """A method that took a larger rate changed more for that alone."""
    study = STUDIES["plus-change"]
    order = [method.name for method in study.methods]
    changes = [3, 7, 1, 5, 2, 6, 4]
    found = made_up(study, lambda p: 0.9 - 0.01 * order.index(p.method), rates=(1e-3, 1e-2, 1e-1))
    for point, result in list(found.results.items()):
        rank = order.index(point.method)
        found.results[point] = replace(result, change={"b_q": [changes[rank] * point.lr] * 2})
        if point.lr == 1e-2 and rank == 1:  # it has the largest change, and must choose another rate than the others
            found.results[point] = None
    (comparison,) = verdict(study, "change-does-not-predict-score", [found]).comparisons
    expected = spearman(changes, [-rank for rank in range(len(order))])
    assert [place.effect for place in comparison.estimate.places] == pytest.approx([expected] * 3)


def test_a_method_that_was_not_run_is_the_reason_not_the_majority_class():
    study = STUDIES["bitfit-table3"]
    (found,) = everywhere(study, means({}, spread=0.0), bases=("tiny",), tasks=study.tasks[:1])
    weak = {point: replace(result, majority=0.9) for point, result in found.results.items() if point.method != "Full"}
    one = verdict(study, "as-good-as-full", [replace(found, results=weak)])
    comparison = next(each for each in one.comparisons if "Full" in each.says)
    assert comparison.left_out == (f"tiny, {study.tasks[0]}: Full was not run",)
    assert comparison.needs.startswith("run Full; needs ")
    shown = report.verdict_grid([one]).markdown()
    assert "Full was not run" in shown and f"to decide it: {one.needs}" in shown


def test_a_claim_about_one_base_needs_that_base_only():
    study = STUDIES["tiny-imdb"]
    table = {"Without BitFit": 0.85, "With BitFit": 0.6}
    rates = study.method("With BitFit").rates
    tiny = with_rows(made_up(study, means(table, 0.005), base="bert-tiny", rates=rates, seeds=3))
    other = made_up(study, means({"Without BitFit": 0.6, "With BitFit": 0.85}), base="other", rates=rates, seeds=3)
    one = verdict(study, "full-is-far-ahead-on-tiny", [tiny, other])
    assert one.outcome == HOLDS and one.general
    assert report.scope_in_words(one) == "Judged on bert-tiny: imdb."
    assert verdict(study, "full-is-far-ahead-on-tiny", [other]).outcome == OPEN


def test_a_claim_that_cannot_be_decided_here_says_why_until_it_is():
    study = STUDIES["freeze-initbias"]
    one_base = verdict(study, "zeroed-biases-depend-on-the-task", [made_up(study, means({}), tasks=("cola",))])
    assert one_base.outcome == OPEN and one_base.needs.startswith("CoLA needs three bases")
    against = everywhere(study, means({"BitFit": 0.6, "InitBias+BitFit": 0.8}))
    assert not verdict(study, "zeroed-biases-depend-on-the-task", against).needs.startswith("CoLA")


def test_rates_that_are_ours_have_an_edge_also_where_a_study_fixes_them():
    study = STUDIES["tiny-imdb"]
    rates = study.method("With BitFit").rates
    found = made_up(study, lambda point: 0.7 + 300 * point.lr, base="bert-tiny", rates=rates, seeds=3)
    edges = {method: found.at_edge((method, "imdb", None)) for method in found.methods}
    assert not edges["Without BitFit"] and not edges["With BitFit"]  # the homework's grid
    assert edges["With BitFit, whole head"] and edges["With BitFit, frozen head, more rates"]
    assert verdict(study, "frozen-head-costs", [found]).comparisons[0].estimate is None


def test_an_open_claim_is_never_said_to_be_decided():
    study = STUDIES["bitfit-table3"]
    one = verdict(study, "as-good-as-full", everywhere(study, lambda point: 0.8))
    still = [replace(place, variance=0.0) for place in one.comparisons[0].estimate.places]
    same = replace(one.comparisons[0], estimate=combine(still))
    assert same.outcome == OPEN and not same.missing
    assert same.needs == "more places (the places do not vary)"


def test_methods_do_not_decline_alike_if_the_lead_shrinks():
    """The same slope must not be a trend in one claim and none in the other."""
    study = STUDIES["freeze-low-data"]
    margins = {}
    for claim in study.claims:
        margins[claim.id] = {part.margin for part in claim.parts}
    assert margins["all-methods-decline-alike"] == margins["lead-shrinks-with-data"]


@pytest.mark.parametrize(("seeds", "why"), [(1, "one seed; a test needs 3"), (2, "2 seeds; a test needs 3")])
def test_few_seeds_of_one_place_decide_nothing(seeds, why):
    study = STUDIES["tiny-imdb"]
    tiny = made_up(
        study,
        means({"Without BitFit": 0.9, "With BitFit": 0.6}),
        base="bert-tiny",
        rates=study.method("With BitFit").rates,
        seeds=seeds,
    )
    one = verdict(study, "full-is-far-ahead-on-tiny", [with_rows(tiny)])
    (comparison,) = one.comparisons
    assert (comparison.outcome, comparison.why_open) == (OPEN, why)
    assert not one.general and one.needs == f"needs {3 - seeds} more seed{'s' if seeds == 1 else ''}"


def test_a_model_that_learns_nothing_is_a_result_where_its_reference_learns():
    study = STUDIES["freeze-reinit"]
    fixed = replace(study.methods[0], rates=(1e-4, 1e-3, 1e-2))
    study = replace(study, methods=(fixed, study.methods[1]), tasks=("cola", "rte", "sst2"))

    def score(point):
        return 0.4 if point.method == "Reinit+BitFit" else 0.4 if point.task == "cola" else 0.8

    (comparison,) = verdict(study, "reinitialised-learns-nothing", everywhere(study, score)).comparisons
    assert {place.task for place in comparison.estimate.places} == {"rte", "sst2"}
    assert comparison.outcome == HOLDS and comparison.ps.holds > 0
    assert not any("rate" in text for text in comparison.left_out)


def test_a_rate_that_is_lucky_on_test_does_not_refute_that_nothing_is_learnt():
    """Six rates at pure chance, in many simulations: the best of them on test lies above the margin."""
    study = STUDIES["freeze-reinit"]
    rates = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    reinit = replace(study.methods[0], rates=rates)
    study = replace(study, methods=(reinit, study.methods[1]), tasks=("rte", "sst2", "qnli"))
    refuted = 0
    for run in range(20):
        bases = everywhere(study, lambda point: 0.8, rates=rates, seeds=2)
        for found in bases:
            draw = random.Random(f"{run} {found.base}")
            for point, result in list(found.results.items()):
                if point.method == "Reinit+BitFit":
                    found.results[point] = at_chance(result, draw)
        refuted += verdict(study, "reinitialised-learns-nothing", bases).outcome == REFUTED
    assert refuted <= 1


def at_chance(result, draw):
    """A result whose scores are those of guessing, on 400 rows."""
    scores = {}
    for part in ("dev", "test"):
        value = result.majority + draw.gauss(0, 0.025)
        scores[part] = {"accuracy": [value, value - 0.05, value + 0.05]}
    return replace(result, scores=scores)


def test_the_order_turns_with_size_when_it_does():
    study = STUDIES["bitfit-squad"]

    def score(point):
        lead = 0.05 if (point.size or 9e9) < 3000 else -0.05
        return 0.7 + (lead if point.method == "BitFit" else 0) + random.Random(str(point)).gauss(0, 0.003)

    bases = everywhere(study, score, bases=("a", "b", "c", "d", "e"))
    assert verdict(study, "order-turns-with-data", bases).outcome == HOLDS
    assert verdict(study, "lead-shrinks-with-data", bases).outcome == HOLDS
    one_size = replace(study, sizes=(500,))
    few = everywhere(one_size, score, bases=("a", "b", "c"))
    assert verdict(one_size, "order-turns-with-data", few).outcome == OPEN


def test_smaller_bases_lose_more_by_the_slope_over_all_bases():
    study = STUDIES["tiny-size"]
    bases = []
    for n, name in enumerate(("a", "b", "c", "d", "e")):
        score = means({"Full": 0.8, "BitFit": 0.7 + 0.02 * n, "BitFit, head bias": 0.6}, 0.003, n)
        found = made_up(study, score, base=name)
        base = replace(found.manifest.base, parameters=10**6 * 2**n)
        bases.append(Findings(study, replace(found.manifest, base=base), found.results))
    (comparison,) = verdict(study, "smaller-models-lose-more", bases).comparisons
    assert comparison.outcome == HOLDS and comparison.estimate.mean == pytest.approx(2.0, abs=0.3)


def test_paired_rows_make_the_interval_of_a_place_narrower():
    """Two methods that are right on the same rows differ little, whatever rows are drawn."""
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.8, tasks=("rte",), seeds=1)
    golds = [1] * 400
    alike = [1] * 320 + [0] * 80
    apart = [0] * 80 + [1] * 320
    places = {}
    for name, other in (("alike", alike), ("apart", apart)):
        for point, result in found.results.items():
            predicted = other if point.method == "BitFit" else alike
            rows = {"test": Rows.of("hits", [int(guess) for guess in predicted], golds).encode()}
            found.results[point] = replace(result, examples=rows)
        (comparison,) = verdict(study, "random-entries-are-worse", [found]).comparisons
        (places[name],) = comparison.estimate.places
    assert places["alike"].variance < 0.1 < 1 < places["apart"].variance


# ---- quantities


def curve(scores):
    evaluations = [[n / 10, 0.5, score] for n, score in enumerate(scores, 1)]
    return Result("k", "done", "b", "t", "accuracy", {}, {}, 0.5, evaluations=evaluations)


def test_noise_on_a_flat_curve_is_no_late_fall():
    draw, falls = random.Random(0), []
    for _ in range(200):
        falls.append(late_fall(curve([0.8 + draw.gauss(0, 0.01) for _ in range(200)])))
    assert abs(sum(falls) / len(falls)) < 0.15
    assert late_fall(curve([0.8] * 100 + [0.7] * 100)) == pytest.approx(10, abs=1)
    assert late_fall(curve([0.8] * 5)) is None


def timed(study, cost):
    """Three bases where every trial cost what a function of its point says."""
    bases = everywhere(study, means({}))
    for found in bases:
        for point, result in list(found.results.items()):
            found.results[point] = replace(result, cost=cost(point))
    return bases


def test_a_method_is_slower_by_the_processor_time_of_separate_trainings():
    study = STUDIES["freeze-table1"]

    def alone(point):  # the wall time says the opposite
        slow = point.method == "Random"
        noise = random.Random(str(point)).gauss(0, 0.1)
        return {"seconds": 1.0 if slow else 9.0, "cpu": (3.0 if slow else 1.5) + noise, "lanes": 1}

    (comparison,) = verdict(study, "random-is-slower", timed(study, alone)).comparisons
    assert comparison.outcome == HOLDS and comparison.estimate.mean == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("cost", [{"seconds": 1.0, "cpu": 1.0}, {"seconds": 1.0, "cpu": 1.0, "lanes": 4}])
def test_the_time_of_a_shared_pass_is_not_the_time_of_a_method(cost):
    study = STUDIES["freeze-table1"]
    bases = timed(study, lambda point: cost)
    one = verdict(study, "random-is-slower", bases)
    assert one.outcome == OPEN and one.comparisons[0].estimate is None
    assert "no place has the time of a separate training" in report.card(one)["parts"][0]["details"]
    assert "no place has the time of a separate training" in report.verdict_grid([one]).markdown()


def test_a_plateau_converges_where_it_begins():
    assert epochs_to_converge(curve([0.5, 0.8, 0.799, 0.801, 0.8])) == pytest.approx(0.2)


# ---- the papers' own numbers


# Claims that a paper's own numbers decide under our tests, and why the others stay open.
DECIDED = {
    ("bitfit-table1", "as-good-as-full"),
    ("bitfit-table2", "as-good-as-full"),
    ("bitfit-table3", "as-good-as-full"),
    ("bitfit-table3", "random-entries-are-worse"),
    ("bitfit-table3", "frozen-is-much-worse"),
    ("bitfit-tagging", "tagging-is-equal"),
}
OPEN_BECAUSE = {
    ("bitfit-table1", "competitive-with-sparse-methods"): ("over 4 places does not exclude -1",),
    ("bitfit-table3", "two-terms-nearly-suffice"): ("over 8 places does not exclude -1",),
    ("bitfit-table3", "both-terms-are-needed"): ("over 8 places does not exclude 0",),
    ("freeze-initbias", "zeroed-biases-depend-on-the-task"): ("1 place; a test needs 3",),
    ("freeze-low-data", "no-gain-in-low-data"): ("2 places; a test needs 3",),
    ("freeze-low-data", "all-methods-decline-alike"): ("2 places; a test needs 3",),
    ("freeze-low-data", "better-when-data-is-scarce"): ("2 places; a test needs 3",),
    ("freeze-low-data", "lead-shrinks-with-data"): ("2 places; a test needs 3",),
    ("freeze-table1", "few-parameters-are-competitive"): ("over 4 places does not exclude -1",),
    ("freeze-table1", "layernorm-is-worse-on-qnli"): ("1 place; a test needs 3",),
    ("freeze-table1", "random-comes-close-to-full"): ("over 3 places does not exclude -2",),
    ("freeze-table1", "random-is-worse-on-rte"): ("1 place; a test needs 3",),
    ("freeze-table1", "random-is-best-on-sst2"): ("1 place; a test needs 3",),
    ("freeze-table1", "zeroed-biases-depend-on-the-task"): ("1 place; a test needs 3",),
    ("plus-figure7", "comparable-to-full"): ("over 3 places does not exclude -1",),
    ("plus-figure7", "random-entries-are-worse"): ("over 3 places does not exclude 0",),
    ("plus-figure7", "two-terms-nearly-suffice"): ("over 3 places does not exclude -1",),
    ("plus-figure7", "frozen-is-much-worse"): ("over 3 places does not exclude +3",),
    ("tiny-imdb", "full-is-far-ahead-on-tiny"): ("single numbers without a spread",),
}


def test_the_papers_own_numbers_give_the_papers_own_conclusions_or_a_page_says_why_not():
    outcomes = {}
    for name, study in STUDIES.items():
        verdicts = judge(study, [], published(study))
        page = html.unescape(report.as_html(study, [], verdicts))
        for one in verdicts:
            if one.published_outcome is None:
                continue
            outcomes[name, one.claim.id] = one.published_outcome
            for reason in OPEN_BECAUSE.get((name, one.claim.id), ()):
                assert reason in one.why_published_is_open, (name, one.claim.id)
            assert all(part.why_open in page for part in one.published if part.estimate is not None)
    assert {key for key, outcome in outcomes.items() if outcome == HOLDS} == DECIDED
    assert {key for key, outcome in outcomes.items() if outcome == OPEN} == set(OPEN_BECAUSE)
    assert len(outcomes) == len(DECIDED) + len(OPEN_BECAUSE)  # none is refuted


def test_scores_of_the_hidden_test_set_are_compared_with_each_other_only():
    study = STUDIES["bitfit-table1"]
    (one,) = [one for one in judge(study, [], published(study)) if one.claim.id == "competitive-with-sparse-methods"]
    on_test, on_dev = (part.estimate for part in one.published)
    assert [round(place.effect, 1) for place in on_test.places] == [1.3, 0.1, -0.4, -1.3]
    assert [round(place.effect, 1) for place in on_dev.places] == [-0.9, 0.0, -1.0, 0.4]


@pytest.mark.parametrize(
    ("name", "setting"),
    [("plus-figure7", "seeds"), ("freeze-reinit", "seeds"), ("bitfit-squad", "epochs"), ("tiny-size", "batch sizes")],
)
def test_what_no_text_says_is_marked_as_our_choice(name, setting):
    assert "our choice" in dict(report.facts(STUDIES[name]))[setting]


# ---- pages


class Checker(html.parser.HTMLParser):
    """Every element that opens closes, and none of them is active or reaches out."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.names, self.outside = [], set(), []

    def handle_starttag(self, name, attributes):
        self.names.add(name)
        self.outside += [a for a in attributes if a[0] in ("src", "style") or a[0].startswith("on")]
        self.outside += [a for a in attributes if a[0].endswith("href") and not re.fullmatch(r"#\w+|[\w/.-]+", a[1])]
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
    rates = study.methods[0].rates if study.methods[0].fixed else (1e-4, 1e-3, 1e-2)
    found = made_up(study, means({"Full": 0.8}, 0.03), seeds=2, rates=rates, tasks=study.trained_tasks[:1])
    text = report.as_html(study, [found], judge(study, [found], published(study)))
    checker = check(text)
    assert "svg" in checker.names or not study.figures
    for item in (*study.tables, *study.figures):
        assert f"<h3>{html.escape(item.name)}" in text, item.name
    assert "Nothing to draw yet" not in text
    for claim in study.claims:
        assert html.escape(claim.text, quote=False) in html.unescape(text).replace("&", "&amp;")
        assert claim.paper in text
    for word in ("Time and memory", "Parameters trained", "Generalisation gap", "How to reproduce"):
        assert word in text


def test_a_page_without_results_shows_the_published_numbers_and_what_it_would_cost():
    study = STUDIES["bitfit-table3"]
    text = report.as_html(study, [], judge(study, []))
    check(text)
    assert "bitfit study run bitfit-table3" in text and "92.7" in text and report.PLACE_NOTE in text
    assert "hours of one core" in text and "of a GPU" in text


def test_a_study_half_done_reports_what_it_has():
    study = STUDIES["freeze-low-data"]
    found = made_up(study, means({"Full": 0.6}, 0.05), missing=0.6)
    text = report.as_html(study, [found], judge(study, [found]))
    check(text)
    assert "the rest is missing below" in text


def test_hostile_text_stays_text_in_page_and_markdown():
    study = STUDIES["bitfit-table3"]
    methods = tuple(replace(m, name=EVIL if m.name == "Frozen" else m.name) for m in study.methods)
    rows = tuple(replace(t, rows=tuple(replace(r, label=EVIL) for r in t.rows)) for t in study.tables)
    evil = replace(study, title=EVIL, name=EVIL, about=EVIL, methods=methods, tables=rows, contradictions=(EVIL,))
    claims = tuple(claim for claim in evil.claims if claim.id != "frozen-is-much-worse")
    evil = replace(evil, claims=(*claims, replace(claims[0], id="evil", text=EVIL, paper=EVIL, where=EVIL)))
    found = made_up(evil, means({}, 0.05), tasks=(EVIL,), base=EVIL, label=EVIL)
    text = report.as_html(evil, [found], judge(evil, [found]))
    check(text)
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    markdown = report.as_markdown(evil, [found], judge(evil, [found]))
    outside_of_code = re.sub(r"```\n.*?\n```\n", "", markdown, flags=re.S)
    assert "<script" not in outside_of_code


def test_the_policy_of_a_page_allows_its_own_style_and_nothing_else():
    import base64
    import hashlib

    text = report.as_html(STUDIES["bitfit-maps"], [], [])
    style = re.search(r"<style>(.*?)</style>", text, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1))
    assert policy.startswith("default-src 'none'; ") and f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_published_values_are_subtracted_only_where_base_and_data_agree():
    study = STUDIES["bitfit-table3"]
    score = lambda p: 0.8 + 0.01 * p.seed  # noqa: E731
    other = report.as_markdown(study, [made_up(study, score)], [])
    assert "80.5 ± 0.7 (paper 92.5)" in other
    rates = study.method("BitFit").rates
    same = report.as_markdown(study, [made_up(study, score, base=study.protocol.bases[0], rates=rates)], [])
    assert "80.5 ± 0.7 (paper 92.5, -12.0)" in same


def test_a_folder_with_the_name_of_the_papers_base_is_not_the_papers_base():
    study = STUDIES["tiny-imdb"]
    hub = study.protocol.bases[0]
    rates = study.method("With BitFit").rates
    folder = made_up(study, means({}), base=hub.rpartition("/")[2], rates=rates)
    assert not folder.comparable("imdb") and made_up(study, means({}), base=hub, rates=rates).comparable("imdb")
    judged = [summary.Judged(study, [folder], [])]
    assert "None of them is a base of the papers." in summary._conditions(judged)


def test_the_history_of_a_base_is_in_conditions_and_tables():
    study = STUDIES["tiny-size"]
    found = made_up(study, means({}), base="bert-tiny")
    facts = replace(found.manifest, base=replace(found.manifest.base, fingerprint="97c852902e24"))
    known = replace(found, manifest=facts)
    says = "bert-tiny is Google's BERT-tiny, fine-tuned as a question classifier"
    assert says in report.all_conditions([known]) and says not in report.all_conditions([found])
    assert all(says in table.markdown() for table in tables.tables(study, [known]))


def test_a_table_has_an_average_only_of_all_its_tasks():
    study = STUDIES["plus-figure7"]
    some, every = made_up(study, means({}), tasks=("mrpc",)), made_up(study, means({}))
    assert "average" not in next(t for t in tables.tables(study, [some]) if t.name.startswith("Figure 7")).head
    assert "average" in next(t for t in tables.tables(study, [every]) if t.name.startswith("Figure 7")).head


def test_the_share_of_trained_parameters_is_our_own():
    study = STUDIES["bitfit-table3"]
    table = tables.tables(study, [made_up(study, means({}))])[0]
    row = next(row for row in table.rows if row[0] == "BitFit")
    assert (row[1].text, row[1].note) == ("10.204%", "paper 0.09%")  # 10 of 100 - 2


def test_a_published_table_without_a_number_of_ours_is_not_called_ours():
    study = STUDIES["freeze-low-data"]
    found = made_up(study, means({}), tasks=("sst2",))
    assert [table.name for table in tables.tables(study, [found])] == ["Training sizes, sst2, on one"]
    assert {t.name for t in tables.published_tables(study, [found])} == {
        "Table II (as published)", "Table III (as published)"
    }  # fmt: skip


def test_failed_runs_count_as_the_majority_and_are_shown_apart():
    study = STUDIES["freeze-table1"]
    found = made_up(study, means({}, 0.05), seeds=3, tasks=("cola",))
    cell = ("InitBias+BitFit", "cola", None)
    points = [p for p in found.results if p.cell == cell and p.seed == 0]
    results = {**found.results, **{p: replace(found.results[p], status="diverged", scores={}) for p in points}}
    lost = Findings(study, found.manifest, results)
    assert lost.points(results[points[0]]) == pytest.approx(40.0)
    assert "(1 failed)" in report.as_html(study, [lost], [])


def test_scores_of_dev_that_stand_for_test_are_said():
    study = STUDIES["tiny-size"]
    found = made_up(study, means({}))
    dev = {p: replace(r, scores={"dev": r.scores["dev"]}) for p, r in found.results.items()}
    said = Findings(study, found.manifest, dev).differences
    assert any("scored on the dev rows" in text for text in said)
    assert not any("scored on the dev rows" in text for text in found.differences)


def test_a_method_has_one_colour_in_all_studies():
    from bitfit.report.drawing import colour

    assert (
        len(
            {
                colour(study.method("BitFit").kind)
                for study in STUDIES.values()
                if "BitFit" in [m.name for m in study.methods]
            }
        )
        == 1
    )
    assert colour("Full") != colour("BitFit")


@pytest.mark.parametrize("name", sorted(set(STUDIES) - {"plus-terms"}))  # which numbers its 36 pairs
def test_methods_of_a_study_have_colours_of_their_own(name):
    from bitfit.report.drawing import colour

    kinds = [method.kind for method in STUDIES[name].methods]
    assert len({colour(kind) for kind in kinds}) == len(set(kinds))


def test_panels_of_a_figure_share_their_axis():
    study = STUDIES["bitfit-table3"]
    found = made_up(study, lambda p: 0.9 if p.task == "sst2" else 0.5, tasks=("sst2", "rte"))
    drawn = figures.panels(study.figures[0], study, [found])
    assert len({panel.figure.axes[0].get_xlim() for panel in drawn}) == 1 and len(drawn) == 2
    assert "400 test rows, 2 seeds" in drawn[0].figure.axes[0].get_xlabel()
    curves = figures.panels(Figure("Loss", "loss"), study, [found])
    assert len({panel.figure.axes[0].get_ylim() for panel in curves}) == 1 and len(curves) == 2


def test_a_score_has_one_interval_in_all_figures():
    """From seeds and test rows; two seeds alone make it ten times as wide."""
    study = STUDIES["freeze-table1"]
    found = made_up(study, means({}, spread=0.01), tasks=("sst2",))
    ends = []
    for kind in ("dots", "failed"):
        (panel,) = figures.panels(Figure("Scores", kind, methods=("Full",)), study, [found])
        line = panel.figure.axes[0].lines[0]
        ends.append(tuple(line.get_xdata()))
    assert ends[0] == ends[1]


def test_figures_of_tasks_that_were_not_run_say_so_and_are_drawn_once():
    study = STUDIES["bitfit-maps"]
    other = report.as_html(study, [made_up(study, means({}), tasks=("trec",))], [])
    check(other)
    assert other.count("<figure") == 1 + len(report.CURVES)
    assert "rte was not run on one. The panels show what was." in other
    assert "stsb was not run on one. The panels are those of Figure 1." in other
    own = report.as_html(study, [made_up(study, means({}), tasks=("rte", "stsb"))], [])
    assert "rte was not run" not in own and "cola was not run" in own


def test_a_long_label_has_two_lines_and_is_not_cut():
    study = STUDIES["tiny-imdb"]
    found = made_up(study, means({}), rates=study.methods[0].rates)
    (panel,) = figures.panels(Figure("Scores", "dots"), study, [found])
    labels = [label.get_text() for label in panel.figure.axes[0].get_yticklabels()]
    assert [label.replace("\n", " ") for label in labels] == [method.name for method in study.methods]
    assert max(label.count("\n") for label in labels) == 1


def test_markdown_says_where_commands_find_data_and_bases():
    study = STUDIES["bitfit-table3"]
    text = report.as_markdown(study, [made_up(study, means({}))], [])
    (line,) = [line for line in text.splitlines() if "BITFIT" in line]
    assert "DATA" in line and "MODELS" in line and text.index(line) < text.index("bitfit study run")


def test_a_random_share_of_the_biases_is_counted_beside_the_terms():
    study = STUDIES["core"]
    found = made_up(study, means({}), tasks=("trec",))
    counts = {**found.manifest.audit, "randbias": {**found.manifest.audit["randbias"], "encoder": 1267}}
    text = report.as_markdown(study, [replace(found, manifest=replace(found.manifest, audit=counts))], [])
    assert "randbias trains 1,269 entries without the head, b\\_m2, b\\_q 10." in text


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_figures_are_saved_for_a_paper(kind, tmp_path):
    from bitfit.report import drawing

    study = STUDIES["bitfit-maps"]
    panel = figures.panels(study.figures[0], study, [made_up(study, means({}), tasks=("rte",))])[0]
    saved = drawing.save(panel, tmp_path, "Figure 1", kind)
    assert saved.name == f"Figure--1-rte--BitFit--one.{kind}"
    assert saved.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('test = "as_good_as"', 'test = "as_god_as"'), 'no test "as_god_as". Did you mean "as_good_as"?'),
        (('a = "BitFit", b = "Full"', 'a = "BitFit", b = "Full", quantity = "scor"'), 'no quantity "scor"'),
    ],
)
def test_an_unknown_test_or_quantity_is_one_error_with_a_suggestion(change, says, tmp_path):
    (tmp_path / "mine.toml").write_text((spec.FOLDER / "bitfit-table2.toml").read_text().replace(*change))
    with pytest.raises(StudyError, match=re.escape(says)):
        judge(spec.load(str(tmp_path / "mine.toml")), [])


# ---- the summary


def test_the_summary_lists_every_claim_and_every_study(tmp_path):
    store = Results(tmp_path)
    found = made_up(STUDIES["bitfit-table3"], means({}), tasks=("rte",), seeds=1)
    point, result = next(iter(found.results.items()))
    store.commit(tmp_path / "passes/a/b/c", [result])
    store.write_manifest(replace(found.manifest, points=(Entry(**asdict(point), key=result.key),)))
    text = summary.as_html(store)
    check(text)
    shown = html.unescape(text)
    assert all(claim.text in shown for claim in spec.known_claims().values())
    assert all(name in shown for name in STUDIES)
    assert shown.count(">not run<") == len(STUDIES) - 1 and 'href="bitfit-table3/report.html"' in text
    assert "as published, GPU hours" in shown and "bitfit study run NAME --base bert-tiny" in shown
    assert "the paper's numbers: holds" in shown and "(2 places; a test needs 3)" in shown
    assert "the paper prints no numbers by task for it" in shown


def test_the_main_comparison_is_the_mean_over_places_against_full():
    study = STUDIES["core"]
    bases = everywhere(study, means({"Full": 0.8, "BitFit": 0.78, "LoRA": 0.7}, spread=0.001))
    judged = [summary.Judged(study, bases, [])]
    rows = {row[0]: row for row in summary._methods(judged).rows}
    places = sum(len(findings.tasks) for findings in bases)
    assert rows["BitFit"][1] == "-2.0" and rows["LoRA"][1] == "-10.0"
    assert rows["BitFit"][4].text == str(places) and "Full" not in rows


def test_a_decided_claim_has_its_conditions_beside_it():
    study = STUDIES["bitfit-table3"]
    bases = everywhere(study, means({"BitFit": 0.8, "Frozen": 0.6}))
    judged = [summary.Judged(study, bases, judge(study, bases))]
    rows = {row[0].text: row for row in summary._claims(judged).rows}
    assert "judged by bitfit-table3: one (0.0M parameters), two" in rows["A frozen encoder is much worse"][1].note
    assert "3,000 training rows, 1 epoch, 2 seeds" in rows["A frozen encoder is much worse"][1].note


def test_a_claim_whose_runs_say_nothing_says_why():
    study = STUDIES["bitfit-rates"]
    found = made_up(study, lambda point: 0.4, tasks=("sst2",))
    judged = [summary.Judged(study, [found], judge(study, [found]))]
    rows = {row[0].text: row[2] for row in summary._claims_without_numbers(judged).rows}
    cell = rows["BitFit converges within 7 epochs on most tasks"]
    assert cell.text == "a run of bitfit-rates"
    assert cell.note == "so far one, sst2: the methods do not beat the majority class"


@pytest.mark.parametrize(("mean", "places"), [(7.0, "about 34"), (4.0, "more than 100")])
def test_what_would_decide_a_claim_takes_the_effect_as_it_was_seen(mean, places):
    effects = [Place(BASES[n % 3], f"t{n}", mean + (-6.0, 0.0, 6.0)[n % 3] + n % 2) for n in range(6)]
    one = Comparison(Part("greater", "BitFit", "Frozen", by=3.0), combine(effects), {}, ())
    assert one.outcome == OPEN
    assert one.needs == f"{places} places like these, if the effect stays at {mean + 0.5:+.1f} points"


def test_the_figures_of_the_summary_are_saved_beside_it(tmp_path):
    study = STUDIES["core"]
    judged = [summary.Judged(study, everywhere(study, means({"Full": 0.8})), [])]
    lines = summary._save_figures(judged, tmp_path / "figures")
    for line in lines:
        assert (tmp_path / re.search(r"\]\((figures/[^)]+\.png)\)", line)[1]).is_file()
    assert len(lines) == len(list((tmp_path / "figures").iterdir())) > 0
