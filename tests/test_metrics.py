"""Metrics against sklearn and scipy, worked by hand at the edges, and intervals that mean what they say."""

from __future__ import annotations

import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from bitfit.data.examples import Examples
from bitfit.errors import DataError, UsageError
from bitfit.tasks import Task, metrics
from bitfit.tasks.metrics import CLASS_METRICS, NUMBER_METRICS, TWO_CLASS_METRICS, Score, evaluate, interval, score
from bitfit.tasks.sums import Sums, share

CLASSIFICATION = ("accuracy", "macro_f1", "matthews")
CORRELATIONS = ("spearman", "pearson")


def labels(seed: int, rows: int, classes: int, right: float = 0.6) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    golds = rng.integers(classes, size=rows)
    return np.where(rng.random(rows) < right, golds, rng.integers(classes, size=rows)), golds


def numbers(seed: int, rows: int, tied: bool = False) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    golds = rng.normal(size=rows)
    predictions = golds + rng.normal(size=rows)
    return (predictions.round(), golds.round()) if tied else (predictions, golds)


def reference(metric: str) -> Callable[..., float]:
    from scipy import stats
    from sklearn import metrics as sk

    table: dict[str, Callable[..., float]] = {
        "accuracy": lambda p, g: sk.accuracy_score(g, p),
        "f1": lambda p, g: sk.f1_score(g, p, zero_division=0),
        "macro_f1": lambda p, g: sk.f1_score(g, p, average="macro", zero_division=0),
        "matthews": lambda p, g: sk.matthews_corrcoef(g, p),
        "precision": lambda p, g: sk.precision_score(g, p, zero_division=0),
        "recall": lambda p, g: sk.recall_score(g, p, zero_division=0),
        "auc": lambda p, g: sk.roc_auc_score(g, p),
        "average_precision": lambda p, g: sk.average_precision_score(g, p),
        "mae": lambda p, g: sk.mean_absolute_error(g, p),
        "rmse": lambda p, g: sk.root_mean_squared_error(g, p),
        "r2": lambda p, g: sk.r2_score(g, p),
        "spearman": lambda p, g: stats.spearmanr(p, g).statistic,
        "pearson": lambda p, g: stats.pearsonr(p, g).statistic,
    }
    return table[metric]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("classes", [2, 3, 20])
@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_classification_equals_sklearn(metric: str, classes: int, seed: int) -> None:
    predictions, golds = labels(seed, rows=60, classes=classes)
    assert score(metric, predictions, golds, classes) == pytest.approx(reference(metric)(predictions, golds))


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("metric", ["f1", "precision", "recall"])
def test_metrics_of_the_positive_class_equal_sklearn(metric: str, seed: int, positive: int) -> None:
    predictions, golds = labels(seed, rows=60, classes=2)
    wanted = reference(metric)(predictions == positive, golds == positive)
    assert score(metric, predictions, golds, positive=positive) == pytest.approx(wanted)


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("metric", ["auc", "average_precision"])
def test_rankings_of_two_classes_equal_sklearn(metric: str, tied: bool, positive: int) -> None:
    values, golds = numbers(5, rows=60, tied=tied)
    truth = (golds > 0.3).astype(int)
    scores = np.stack([-values, values], 1)
    wanted = reference(metric)(values if positive else -values, truth == positive)
    assert score(metric, scores, truth, 2, positive) == pytest.approx(wanted)


@pytest.mark.parametrize("metric", ["auc", "average_precision"])
def test_a_ranking_of_one_class_alone_is_zero_and_says_so(metric: str) -> None:
    with pytest.warns(UserWarning, match="golds are constant"):
        assert score(metric, [[0.1, 0.9], [0.8, 0.2]], [0, 0], 2) == 0


def test_scores_of_classes_are_read_as_their_best_class() -> None:
    scores = [[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]
    assert score("accuracy", scores, [1, 2], 3) == score("accuracy", [1, 0], [1, 2], 3) == 0.5


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e200])
@pytest.mark.parametrize("metric", ["mae", "rmse", "r2"])
def test_errors_equal_sklearn_at_any_scale(metric: str, scale: float) -> None:
    predictions, golds = numbers(1, rows=60)
    wanted = reference(metric)(predictions, golds) * (1 if metric == "r2" else scale)
    assert score(metric, predictions * scale, golds * scale) == pytest.approx(wanted)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("metric", CORRELATIONS)
def test_correlations_equal_scipy(metric: str, seed: int, tied: bool) -> None:
    predictions, golds = numbers(seed, rows=60, tied=tied)
    assert score(metric, predictions, golds) == pytest.approx(reference(metric)(predictions, golds))


def test_values_worked_by_hand() -> None:
    predictions, golds = [1, 1, 0, 0, 1], [1, 0, 0, 1, 1]  # tp 2, fp 1, fn 1, tn 1
    assert score("accuracy", predictions, golds) == pytest.approx(3 / 5)
    assert score("f1", predictions, golds) == pytest.approx(2 / 3)
    assert score("macro_f1", predictions, golds) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert score("matthews", predictions, golds) == pytest.approx((2 * 1 - 1 * 1) / 6)


def test_ties_share_their_average_rank() -> None:
    # Ranks 1.5 1.5 3 4 against 1 2 3.5 3.5.
    assert score("spearman", [5, 5, 6, 9], [0, 1, 2, 2]) == pytest.approx(4 / 4.5)


def test_macro_f1_averages_over_the_classes_that_occur() -> None:
    assert score("macro_f1", [0, 0, 4], [0, 0, 0], classes=9) == pytest.approx((4 / 5 + 0) / 2)


def test_f1_without_positives_is_zero() -> None:
    assert score("f1", [0, 0], [0, 0]) == 0.0


@pytest.mark.filterwarnings("ignore:matthews")
@pytest.mark.parametrize(("metric", "value"), [("accuracy", 1.0), ("macro_f1", 1.0), ("matthews", 0.0)])
def test_one_class_and_one_row(metric: str, value: float) -> None:
    assert score(metric, [2, 2, 2], [2, 2, 2]) == value
    assert score(metric, [2], [2]) == value


@pytest.mark.parametrize("metric", CORRELATIONS)
def test_constants_correlate_with_nothing_and_say_so(metric: str) -> None:
    third = [0.1, 0.1, 0.1]  # its mean is not 0.1 exactly
    with pytest.warns(UserWarning, match=f"^{metric}: predictions are constant, counted as 0$"):
        assert score(metric, third, [1, 2, 4]) == 0.0
    with pytest.warns(UserWarning, match=f"^{metric}: golds are constant, counted as 0$"):
        assert score(metric, [1, 2, 4], third) == 0.0
    with pytest.warns(UserWarning, match="constant"):
        assert score(metric, [1.0], [2.0]) == 0.0


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e308])
def test_pearson_survives_extreme_sizes(scale: float) -> None:
    assert score("pearson", np.array([0.1, 0.5, 0.3, 1.0]) * scale, [1, 5, 3, 10]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("metric", [*CLASSIFICATION, "f1", *CORRELATIONS])
def test_what_cannot_be_scored_is_a_data_error(metric: str) -> None:
    for predictions, golds in (
        ([], []),
        ([0, 1], [0, 1, 1]),
        ([math.nan, 1], [0, 1]),
        ([0, 1], [0, math.inf]),
        (["a", "b"], ["a", "b"]),
        ([[0, 1]], [[0, 1]]),
    ):
        with pytest.raises(DataError):
            score(metric, predictions, golds)


@pytest.mark.parametrize("bad", [0.5, -1, 3, 1e30])
def test_a_class_index_out_of_range_names_its_row(bad: float) -> None:
    with pytest.raises(DataError, match="in row 1"):
        score("accuracy", [0, bad], [0, 1], classes=3)


def test_an_unknown_metric_is_corrected() -> None:
    with pytest.raises(UsageError, match='Did you mean "accuracy"'):
        score("acuracy", [0], [0])
    with pytest.raises(UsageError, match="Known: spearman, pearson"):
        Task.of("regression", (), "accuracy")
    with pytest.raises(UsageError, match='Did you mean "regression"'):
        Task.of("regresion", ())


def test_an_error_cannot_pick_the_best_checkpoint() -> None:
    with pytest.raises(UsageError, match=r"must be better when higher; use r2"):
        Task.of("regression", (), "mae")


def test_f1_refuses_more_than_two_classes() -> None:
    with pytest.raises(UsageError, match="macro_f1"):
        score("f1", [0, 2], [0, 1])
    with pytest.raises(UsageError, match="macro_f1"):
        score("f1", [0, 1], [0, 1], classes=3)


def test_the_main_metric_comes_first() -> None:
    assert Task.of("classification", ("a", "b")).metric == "accuracy"
    assert Task.of("regression", ()).metric == "spearman"


@pytest.mark.filterwarnings("ignore:matthews", "ignore:auc", "ignore:average_precision")
@pytest.mark.parametrize("rows", [1, 2, 5, 80])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_an_interval_holds_its_value(rows: int, right: float) -> None:
    for classes in (2, 4):
        predictions, golds = labels(rows, rows, classes, right)
        for metric in TWO_CLASS_METRICS if classes == 2 else CLASS_METRICS:
            low, high = interval(metric, predictions, golds, classes, resamples=200)
            assert -1 <= low <= score(metric, predictions, golds, classes) <= high <= 1


@pytest.mark.parametrize("rows", [2, 3, 80])
@pytest.mark.parametrize("metric", CORRELATIONS)
def test_undefined_resamples_count_as_zero_in_silence(metric: str, rows: int) -> None:
    predictions, golds = numbers(rows, rows)
    low, high = interval(metric, predictions, golds, resamples=200)
    assert -1 <= low <= score(metric, predictions, golds) <= high <= 1
    assert interval(metric, np.ones(rows), golds) == (0.0, 0.0)


@pytest.mark.parametrize("metric", ["f1", *CLASSIFICATION])
def test_an_interval_depends_on_the_seed_alone(metric: str) -> None:
    predictions, golds = labels(0, rows=200, classes=2)
    again = interval(metric, predictions[::-1], golds[::-1], seed=1)
    assert interval(metric, predictions, golds, seed=1) == again
    assert (interval(metric, predictions, golds, seed=2) == again) == (metric == "accuracy")


@pytest.mark.parametrize("metric", CORRELATIONS)
def test_a_correlation_interval_depends_on_the_seed_alone(metric: str) -> None:
    predictions, golds = numbers(0, rows=50)
    assert interval(metric, predictions, golds, seed=1) == interval(metric, predictions, golds, seed=1)
    assert interval(metric, predictions, golds, seed=1) != interval(metric, predictions, golds, seed=2)


def test_the_interval_of_a_perfect_accuracy_has_a_width() -> None:
    # Wilson at 10 of 10: 10 / (10 + 1.96 ** 2).
    assert interval("accuracy", [1] * 10, [1] * 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert interval("accuracy", [0] * 10, [1] * 10) == (0.0, pytest.approx(0.2775, abs=1e-4))


def test_accuracy_intervals_cover_in_about_95_percent() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(1000):
        low, high = interval("accuracy", (rng.random(50) < 0.8).astype(int), np.ones(50, int))
        covered.append(low <= 0.8 <= high)
    assert 0.92 <= np.mean(covered) <= 0.98


def naive_interval(metric: str, predictions: NDArray, golds: NDArray, resamples: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(7)
    draws = [rng.integers(len(golds), size=len(golds)) for _ in range(resamples)]
    return np.quantile([reference(metric)(predictions[rows], golds[rows]) for rows in draws], [0.025, 0.975])


@pytest.mark.parametrize("metric", ["f1", "macro_f1", "matthews"])
def test_drawing_cells_agrees_with_drawing_rows(metric: str) -> None:
    predictions, golds = labels(3, rows=80, classes=2)
    ours = interval(metric, predictions, golds, resamples=20_000)
    assert ours == pytest.approx(naive_interval(metric, predictions, golds, 500), abs=0.04)


@pytest.mark.parametrize("metric", CORRELATIONS)
def test_correlation_intervals_agree_with_drawing_rows(metric: str) -> None:
    predictions, golds = numbers(3, rows=80, tied=True)
    ours = interval(metric, predictions, golds, resamples=5000)
    assert ours == pytest.approx(naive_interval(metric, predictions, golds, 500), abs=0.04)


def test_the_block_size_bounds_memory_and_changes_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions, golds = numbers(1, rows=40)
    whole = interval("spearman", predictions, golds, resamples=50)
    monkeypatch.setattr(metrics, "_BLOCK", 90)
    assert interval("spearman", predictions, golds, resamples=50) == whole


@pytest.mark.parametrize("metric", ["macro_f1", "matthews", *CORRELATIONS])
def test_ten_thousand_rows_are_quick(metric: str) -> None:
    predictions, golds = labels(0, rows=10_000, classes=5)
    start = time.process_time()
    interval(metric, predictions, golds)
    assert time.process_time() - start < 3  # measured 0.01 to 0.7 s; the rest is for a busy machine


def test_evaluate_scores_every_metric_of_the_kind() -> None:
    predictions, golds = labels(0, rows=100, classes=2)
    scores = evaluate(TWO_CLASS_METRICS, predictions, golds, 2, resamples=100, seed=4)
    assert tuple(scores) == TWO_CLASS_METRICS
    low, high = interval("f1", predictions, golds, resamples=100, seed=4)
    assert scores["f1"] == Score(score("f1", predictions, golds), low, high)
    assert tuple(evaluate(NUMBER_METRICS, *numbers(0, rows=20))) == NUMBER_METRICS


def baseline(kind: str, metric: str, train: list[float], dev: list[float]) -> float:
    names = () if kind == "regression" else tuple("abc"[: max(2, int(max(train)) + 1)])
    parts = (Examples(["x"] * len(golds), None, golds, []) for golds in (train, dev))
    return Task.of(kind, names, metric).baseline(*parts)


def test_the_baseline_is_the_most_frequent_training_class() -> None:
    assert baseline("classification", "accuracy", [2, 2, 0], [2, 0, 0, 1]) == pytest.approx(1 / 4)
    assert baseline("classification", "accuracy", [1, 0, 1, 0], [0, 0, 1]) == pytest.approx(2 / 3)
    assert baseline("classification", "f1", [1, 1, 0], [1, 0]) == pytest.approx(2 / 3)
    assert baseline("classification", "matthews", [1, 1, 0], [1, 0]) == 0.0


def test_the_regression_baseline_is_a_constant_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert baseline("regression", "spearman", [0.5, 1.5], [1.0, 2.0]) == 0.0
        assert baseline("regression", "r2", [0.5, 1.5], [1.0, 2.0]) == pytest.approx(-1.0)


def test_metrics_need_neither_scipy_nor_sklearn() -> None:
    code = (
        "import sys; from bitfit.tasks import metrics;"
        "metrics.evaluate(metrics.TWO_CLASS_METRICS, [0, 1], [0, 0], 2);"
        "metrics.evaluate(metrics.NUMBER_METRICS, [0, 1], [0, 2]);"
        "sys.exit(any(name in sys.modules for name in ('scipy', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("metric", ["f1", "macro_f1", "precision", "recall"])
def test_few_rows_that_are_all_right_do_not_make_a_score_certain(metric):
    labels = [0, 1] * 4
    low, high = interval(metric, labels, labels)
    assert high == 1.0 and low < 0.7
    low, high = interval(metric, [1 - label for label in labels], labels)
    assert low == 0.0 and high > 0.3


def test_few_sentences_that_are_all_right_do_not_make_a_score_certain():
    score = Sums(np.ones((8, 2))).score(share(0, 1))
    assert score.value == score.high == 1.0 and score.low < 0.7
