"""Golden values of the metrics of tagging, answering and several labels: worked out by hand or by scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from bitfit.data.examples import Answer, Examples
from bitfit.tasks import Task
from bitfit.tasks.answering import exact_match, normalised, word_f1
from bitfit.tasks.metrics import score


def labelled(labels, texts=None, pairs=None):
    return Examples(texts or ["x"] * len(labels), pairs, list(labels), list(range(len(labels))))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The  Cat", "cat"),
        ("a cat, an owl; the dog!", "cat owl dog"),
        ("theatre another", "theatre another"),
        ("U.S.A.", "usa"),
        ("5-time", "5time"),
        ("the", ""),
        ("…", "…"),  # SQuAD removes ASCII punctuation only
        ("", ""),
    ],
)
def test_answers_are_compared_without_articles_and_punctuation(answer, expected):
    assert normalised(answer) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "match", "f1"),
    [
        ("the cat", ["Cat."], 1, 1),
        ("black cat", ["the cat"], 0, 2 / 3),  # precision 1/2, recall 1
        ("cat cat", ["cat"], 0, 2 / 3),  # a word counts as often as it is shared
        ("cat", ["cat cat dog"], 0, 1 / 2),
        ("dog", ["cat", "the dog", "dogs"], 1, 1),  # the best of several golds
        ("big dog", ["cat", "dog", "big bad dog"], 0, 4 / 5),
        ("", ["cat"], 0, 0),
        ("the", ["a"], 1, 1),  # nothing is left of either
        ("!", ["cat"], 0, 0),
        ("cat", ["dog"], 0, 0),
    ],
)
def test_exact_match_and_f1_of_an_answer(prediction, golds, match, f1):
    assert exact_match(prediction, golds) == match
    assert word_f1(prediction, golds) == pytest.approx(f1)


def test_answering_scores_are_means_over_questions():
    task = Task.of("answering", ())
    examples = labelled([(Answer("the cat", 0), Answer("dog", 9)), (Answer("owl", 0),), (Answer("a b c", 0),)])
    scores = task.scores(["dog", "", "b"], examples)
    assert scores["exact_match"].value == pytest.approx(1 / 3)
    assert scores["f1"].value == pytest.approx((1 + 0 + 2 / 3) / 3)  # of "a b c" the article goes
    assert all(0 <= s.low <= s.value <= s.high <= 1 for s in scores.values())


def test_token_accuracy_counts_words_not_sentences():
    task = Task.of("tagging", ("A", "B"))
    examples = labelled([(0, 1, 1), (1,), (0, -1)])
    predictions = [np.array([0, 1, 0]), np.array([0]), np.array([0, 1])]
    scores = task.scores(predictions, examples)["accuracy"]
    assert scores.value == pytest.approx(3 / 5) == task.score(predictions, examples)  # the untagged word is left out
    assert scores.low <= scores.value <= scores.high


def test_the_interval_of_token_accuracy_is_over_sentences():
    task = Task.of("tagging", ("A", "B"))
    golds = [tuple([0] * 50)] * 40
    predictions = [np.full(50, number % 2) for number in range(40)]  # whole sentences right or wrong
    found = task.scores(predictions, labelled(golds))["accuracy"]
    assert found.high - found.low > 0.25  # over words it would be 0.04


SETS = {
    "mixed": ([(0, 1), (2,), (), (1,)], [(0,), (2,), (1,), (1, 2)]),
    "all right": ([(0,), (1, 2)], [(0,), (1, 2)]),
    "all wrong": ([(0,), (1,)], [(1,), (0, 2)]),
    "one label never seen": ([(0,), (0, 1)], [(0,), (1,)]),
    "everything always": ([(0, 1, 2)] * 3, [(0,), (), (1, 2)]),
}


@pytest.mark.parametrize("name", SETS)
def test_scores_of_label_sets_are_those_of_scikit_learn(name):
    from sklearn.metrics import accuracy_score, f1_score

    predictions, golds = SETS[name]
    task = Task.of("multilabel", ("a", "b", "c"))
    matrices = [[[int(i in own) for i in range(3)] for own in sets] for sets in (golds, predictions)]
    scores = task.scores(predictions, labelled(golds))
    assert scores["micro_f1"].value == pytest.approx(f1_score(*matrices, average="micro", zero_division=0))
    assert scores["macro_f1"].value == pytest.approx(f1_score(*matrices, average="macro", zero_division=0))
    assert scores["exact_match"].value == pytest.approx(accuracy_score(*matrices))


def test_no_label_at_all_is_a_warning_and_no_nan():
    task = Task.of("multilabel", ("a", "b"))
    with pytest.warns(UserWarning, match="no label is predicted"):
        scores = task.scores([(), ()], labelled([(0,), (0, 1)]))
    assert scores["micro_f1"].value == 0 and np.isfinite(scores["micro_f1"].high)


@pytest.mark.parametrize("column", [([1, 1, 1], [0, 1, 1]), ([0, 1, 1], [1, 1, 1])])
def test_matthews_of_one_class_is_a_warning_and_no_nan(column):
    with pytest.warns(UserWarning, match=r"matthews.*constant"):
        assert score("matthews", *column) == 0


def test_baselines_are_what_they_say():
    tagging = Task.of("tagging", ("A", "B"))
    train = labelled([(0, 1), (0, 0), (1, 1)], [("x", "y"), ("x", "x"), ("y", "z")])
    dev = labelled([(0, 1, 1, 0)], [("x", "y", "new", "z")])
    # x is A, y is B, z is B; A and B are as frequent, so a new word is A.
    assert tagging.baseline(train, dev) == pytest.approx(2 / 4)
    answering = Task.of("answering", ())
    context = "The cat sleeps. The dog barks loudly."
    found = labelled([(Answer("The dog barks loudly.", 16),)], ["Who barks loudly?"], [context])
    assert answering.baseline(found, found) == 1
    several = Task.of("multilabel", ("a", "b"))
    assert several.baseline(labelled([(0, 1), (0, 1), (0,)]), labelled([(0,), (1,)])) == pytest.approx(4 / 6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_a_score_of_few_rows_lies_in_its_interval(value):
    task = Task.of("answering", ())
    rows = labelled([(Answer("cat", 0),)] * 4)
    found = task.scores(["cat" if number < 4 * value else "dog" for number in range(4)], rows)["exact_match"]
    assert found.low <= found.value == value <= found.high
