"""Golden values of the metrics of tagging, answering and several labels: worked out by hand or by scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from bitfit.data.examples import Answer, Examples
from bitfit.tasks import Task
from bitfit.tasks.answering import exact_match, normalised, word_f1
from bitfit.tasks.metrics import score
from bitfit.tasks.texts import ConstantPrediction


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


# ---- entities


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
BILOU = ("O", "B-PER", "I-PER", "L-PER", "U-PER", "B-LOC", "I-LOC", "L-LOC", "U-LOC")


def sentences_of(labels, seed, count=60):
    """Gold tags and noisy guesses, legal and illegal sequences alike."""
    draw = np.random.default_rng(seed)
    golds = [tuple(draw.integers(len(labels), size=draw.integers(1, 9)).tolist()) for _ in range(count)]
    guesses = []
    for gold in golds:
        noise = draw.integers(len(labels), size=len(gold))
        guesses.append(np.where(draw.random(len(gold)) < 0.7, np.array(gold), noise))
    return golds, guesses


@pytest.mark.parametrize("labels", [TAGS, BILOU], ids=["BIO", "BILOU"])
@pytest.mark.parametrize("seed", range(3))
def test_entities_are_scored_as_seqeval_scores_them(labels, seed):
    from seqeval.metrics import classification_report

    golds, guesses = sentences_of(labels, seed)
    task = Task.of("tagging", labels)
    read = str.maketrans("LU", "ES")  # seqeval's default mode knows these letters by their other names

    def names(rows):
        return [[labels[tag][:1].translate(read) + labels[tag][1:] for tag in row] for row in rows]

    wanted = classification_report(names(golds), names(guesses), output_dict=True, zero_division=0)
    scores = task.scores(guesses, labelled(golds))
    assert task.metric == "span_f1"
    for ours, theirs in (("span_f1", "f1-score"), ("span_precision", "precision"), ("span_recall", "recall")):
        assert scores[ours].value == pytest.approx(wanted["micro avg"][theirs])
    for found in task.by_class(guesses, labelled(golds)):
        expected = wanted[found.label]
        assert (found.precision, found.recall) == pytest.approx((expected["precision"], expected["recall"]))
        assert (found.f1, found.support) == pytest.approx((expected["f1-score"], expected["support"]))


def test_tags_that_mark_no_entities_are_scored_by_word():
    assert Task.of("tagging", ("NOUN", "VERB")).metric_names(("NOUN", "VERB")) == ("accuracy",)
    assert Task.of("tagging", ("B-X", "VERB")).metric == "accuracy"


# ---- by class


def test_a_classification_is_reported_by_class_as_scikit_learn_does():
    from sklearn.metrics import classification_report, confusion_matrix

    draw = np.random.default_rng(0)
    golds, guesses = draw.integers(3, size=50).tolist(), draw.integers(3, size=50)
    task = Task.of("classification", ("a", "b", "c"))
    wanted = classification_report(golds, guesses, target_names=task.labels, output_dict=True, zero_division=0)
    for found in task.by_class(guesses, labelled(golds)):
        expected = wanted[found.label]
        assert (found.precision, found.recall) == pytest.approx((expected["precision"], expected["recall"]))
        assert (found.f1, found.support) == pytest.approx((expected["f1-score"], expected["support"]))
    assert np.array_equal(task.confusion(guesses, labelled(golds)), confusion_matrix(golds, guesses))


def test_label_sets_are_reported_by_label():
    task = Task.of("multilabel", ("a", "b"))
    found = task.by_class([(0,), (0, 1)], labelled([(0,), (1,)]))
    assert [(row.label, row.precision, row.recall, row.support) for row in found] == [("a", 0.5, 1, 1), ("b", 1, 1, 1)]


@pytest.mark.parametrize(
    ("kind", "labels", "predictions", "golds", "wrong"),
    [
        ("classification", ("a", "b"), [0, 1, 1], [0, 0, 1], [1]),
        ("regression", (), np.array([0.0, 5.0, 1.0]), [0.1, 1.0, 1.0], [1]),
        ("multilabel", ("a", "b"), [(0,), (0, 1)], [(0,), (1,)], [1]),
        ("tagging", ("A", "B"), [np.array([0, 1]), np.array([1])], [(0, -1), (0,)], [1]),
        ("answering", (), ["the cat", "dog"], [(Answer("cat", 0),), (Answer("cow", 0),)], [1]),
    ],
)
def test_wrong_answers_are_found(kind, labels, predictions, golds, wrong):
    assert Task.of(kind, labels).wrong(predictions, labelled(golds)) == wrong


def test_one_class_for_all_is_a_warning():
    task = Task.of("classification", ("ham", "spam"))
    with pytest.warns(UserWarning, match='^"ham" is predicted for all 3 texts'):
        task.scores([0, 0, 0], labelled([0, 0, 1]))


def test_a_warning_names_its_trial_if_there_are_several():
    from bitfit.training.evaluation import naming

    task = Task.of("classification", ("ham", "spam"))
    expected = pytest.warns(ConstantPrediction, match='^rate 0.1, seed 1: "ham" is predicted for all 3 texts')
    with expected, naming("rate 0.1, seed 1"):
        task.scores([0, 0, 0], labelled([0, 0, 1]))


def test_the_rarer_class_is_the_positive_one():
    task = Task.of("classification", ("ham", "spam"))
    assert task.fitted(labelled([1, 1, 0])).positive == "ham"
    assert task.fitted(labelled([1, 0])).positive == "spam"
    assert task.with_positive("ham").fitted(labelled([0, 0, 1])).positive == "ham"
    rare = task.fitted(labelled([1, 1, 0]))
    assert rare.scores([0, 1, 1], labelled([0, 0, 1]))["recall"].value == pytest.approx(1 / 2)
