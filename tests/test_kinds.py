"""Tagging, answering and several labels: from a user's file to answers, by every path."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bitfit import Delta, Predictor, export, predict, train
from bitfit.bank.packed import Packed
from bitfit.cli.main import run
from bitfit.data import loading
from bitfit.data.examples import Answer, Examples
from bitfit.data.readers import READERS
from bitfit.data.readers.reader import counts_by_name
from bitfit.errors import DataError, DeltaError, Interrupted, UsageError
from bitfit.model.task_model import Model
from bitfit.prediction.export import stock_class
from bitfit.tasks import KINDS, Task
from bitfit.tasks.encode import Encoder
from bitfit.tasks.spans import spans
from bitfit.tasks.tagging import Tagging
from support import ARCHITECTURES, WORDS, StopAt, delta_of, meta_of, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
QUICK = {"lr": 2e-2, "epochs": 2, "batch": 4}
TAG = {word: ("ADJ" if i < 6 else "NOUN" if i < 10 else "X") for i, word in enumerate(WORDS)}
CONTEXT = "the film was long and the cast is great but the plot was not fine"


def sentences(count: int = 24) -> list[list[str]]:
    return [text.split() for text, _ in reviews(count)]


@pytest.fixture
def tagged(tmp_path):
    path = tmp_path / "tagged.jsonl"
    rows = [{"tokens": words, "tags": [TAG[word] for word in words]} for words in sentences()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conllu(words: list[list[str]]) -> str:
    """Sentences with a multiword range and an empty node each, which are no words."""
    made = []
    for own in words:
        lines = ["# sent_id = x", "1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_"]
        lines += [f"{i}\t{w}\t{w}\t{TAG[w]}\t{TAG[w]}2\t_\t0\tx\t_\t_" for i, w in enumerate(own, 1)]
        made.append("\n".join([*lines, "1.1\tgone\t_\tVERB\t_\t_\t_\t_\t_\t_"]) + "\n\n")
    return "".join(made)


def squad(count: int = 12, **changes: Any) -> dict[str, Any]:
    """Questions in SQuAD's form; every answer lies in its context."""
    words = CONTEXT.split()
    found = []
    for i in range(count):
        answer = words[1 + i % (len(words) - 1)]
        qa = {"id": f"q{i}", "question": f"is {answer}", "answers": [{"text": answer, "answer_start": 0}]}
        context = f"{words[i % len(words)]} {CONTEXT}"
        qa["answers"][0]["answer_start"] = context.index(answer)
        found.append({"context": context, "qas": [{**qa, **changes}]})
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": found}]}


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(squad()))
    return path


@pytest.fixture
def several(tmp_path):
    path = tmp_path / "several.csv"
    lines = [f"{text},{'|'.join(labels_of(text))}" for text, _ in reviews(48)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


def labels_of(text: str) -> list[str]:
    return sorted({TAG[word] for word in text.split()} - {"X"})


@pytest.fixture
def sources(tagged, asked, several):
    return {"tagging": tagged, "answering": asked, "multilabel": several}


NEW = ("tagging", "answering", "multilabel")
INPUTS: dict[str, list[Any]] = {
    "tagging": [["good", "film"], "the plot was very bad", ["a"]],
    "answering": [("is great", CONTEXT), ("was long", CONTEXT[9:])],
    "multilabel": ["good film", "the plot was very bad"],
}


# ---- from file to answers


def test_tagging_learns_from_first_pieces(base, tagged):
    run = train(tagged, base, select="bias", lr=3e-2, epochs=8, batch=4, gap=True)
    assert run.best.scores["train"]["accuracy"].value > 0.9 and run.best.delta.meta.task == "tagging"
    answer = predict(run.best.delta, [["good", "film", "is"]], base)[0]
    assert answer["tokens"] == ["good", "film", "is"] and set(answer["tags"]) <= {"ADJ", "NOUN", "X"}
    assert len(answer["tags"]) == len(answer["scores"]) == 3


def test_several_labels_are_learnt_and_each_has_a_chance_of_its_own(base, several):
    run = train(several, base, task="multilabel", pool="mean", lr=3e-2, epochs=8, batch=4)
    assert run.best.delta.labels == ("ADJ", "NOUN")
    assert run.best.scores["dev"].keys() == {"micro_f1", "macro_f1", "exact_match"} and run.best.dev > 0.8
    answer = predict(run.best.delta, ["good film"], base)[0]
    assert answer["labels"] == [name for name, chance in answer["scores"].items() if chance > 0.5]


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.filterwarnings("ignore:micro_f1")
def test_a_run_is_the_same_bytes_again_resumed_and_beside_other_lanes(base, sources, kind, tmp_path):
    plan = {**QUICK, "task": kind, "select": "bias + random(all, 40)"}
    whole = train(sources[kind], base, **plan).best.delta.encode()
    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(sources[kind], base, out=out, watch=StopAt(3), **plan)
    assert train(sources[kind], base, out=out, resume=True, **plan).best.delta.encode() == whole
    lanes = train(sources[kind], base, **{**plan, "lr": [1e-3, plan["lr"]]}).trials
    for name, values in Delta.load(out).tensors.items():
        # Softmax over keys, and over the tokens of a window, ignores these: their gradients are rounding noise.
        if "key.bias" not in name and (kind, name) != ("answering", "head.classifier.bias"):
            np.testing.assert_allclose(lanes[1].delta.tensors[name], values, atol=2e-4)


@pytest.mark.parametrize("select_", ["none", "all", "bias@last1"])
@pytest.mark.parametrize("kind", ("tagging", "answering"))
def test_every_selection_trains_every_kind(base, sources, kind, select_):
    assert train(sources[kind], base, select=select_, lr=1e-3, epochs=1).best.dev is not None


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.filterwarnings("ignore:micro_f1")
def test_evaluating_the_dev_file_gives_the_dev_scores(base, sources, kind, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train", "dev"):
        (folder / f"{name}{sources[kind].suffix}").write_bytes(sources[kind].read_bytes())
    best = train(folder, base, task=kind, **QUICK).best
    rows, scores, _ = Predictor(best.delta, base).evaluate(folder / f"dev{sources[kind].suffix}")
    assert scores == best.scores["dev"] and rows == len(loading.load(folder, task=kind).dev)


def test_a_conllu_file_says_what_the_jsonl_file_says(base, tagged, tmp_path):
    path = tmp_path / "same.conllu.gz"
    path.write_bytes(gzip.compress(conllu(sentences()).encode()))
    a, b = loading.load(tagged), loading.load(path)
    assert a.train.texts == b.train.texts and a.train.labels == b.train.labels and a.labels == b.labels
    assert loading.load(path, label="xpos").labels == ("ADJ2", "NOUN2", "X2")


CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER

"""


def test_a_file_in_the_form_of_conll_2003_is_read(tmp_path):
    path = tmp_path / "eng.train.txt"
    path.write_text(CONLL * 6)
    dataset = loading.load(path)
    assert dataset.kind == "tagging" and dataset.labels == ("B-ORG", "B-PER", "I-PER", "O")
    assert ("Peter", "Blackburn") in dataset.train.texts
    assert loading.load(path, label="pos").labels == ("NNP", "VBZ")
    path.write_text(CONLL + "lonely\n")
    with pytest.raises(DataError, match="line 9: 4 fields between spaces expected, 1 found"):
        loading.load(path)


def test_a_delta_of_entities_groups_them(base):
    delta = delta_of(base, labels=3, kind="tagging")
    named = Delta(delta.tensors, replace(delta.meta, labels=("B-PER", "I-PER", "O")))
    answer = predict(named, [["good", "film", "the", "plot"]], base)[0]
    assert [(e["type"], e["start"], e["end"]) for e in answer["entities"]] == spans(answer["tags"])
    assert all(e["text"] == " ".join(answer["tokens"][e["start"] : e["end"]]) for e in answer["entities"])


def test_the_line_of_a_tagging_answer_ends_with_the_entities():
    answer = {"tokens": ["Ada", "Lovelace", "met"], "tags": ["B-PER", "I-PER", "O"]}
    entity = {"type": "PER", "text": "Ada Lovelace", "start": 0, "end": 2, "score": 0.9}
    words = "Ada/B-PER Lovelace/I-PER met/O"
    assert Tagging.line(answer) == (words,)
    assert Tagging.line({**answer, "entities": [entity]}) == (words, "PER: Ada Lovelace")
    assert Tagging.line({**answer, "entities": []}) == (words, "(none)")


def test_several_labels_in_one_cell_are_noticed_and_classes_counted(several):
    notes = loading.load(several).notes
    assert any("looks like several labels in one cell; --task multilabel" in note for note in notes)
    assert any(note.startswith("Rows by class: ") for note in notes)


def test_labels_and_tags_are_counted_before_training(several, tmp_path):
    assert any(note.startswith("Rows by label: ") for note in loading.load(several, task="multilabel").notes)
    (tmp_path / "train.conllu").write_text(conllu(sentences(12)))
    assert any(note.startswith("Words by tag: ") for note in loading.load(tmp_path / "train.conllu").notes)


def test_many_classes_are_counted_in_short():
    counts = Counter({number: 40 - number for number in range(12)})
    assert counts_by_name([str(number) for number in range(12)], counts).endswith('"9" 31 and 2 more')


def test_a_folder_of_originals_is_read_by_their_names(tmp_path):
    for part, count in (("train", 12), ("dev", 6), ("test", 4)):
        (tmp_path / f"en_ewt-ud-{part}.conllu").write_text(conllu(sentences(count)))
    dataset = loading.load(tmp_path)
    assert [len(dataset.train), len(dataset.dev), len(dataset.test)] == [12, 6, 4]
    assert "en_ewt-ud-dev.conllu is taken as dev." in dataset.notes


@pytest.mark.parametrize("form", ["lists", "columns"])
def test_label_sets_may_be_lists_or_columns(several, tmp_path, form):
    expected = loading.load(several, task="multilabel")
    path = tmp_path / ("s.jsonl" if form == "lists" else "s.csv")
    texts = [text for text, _ in reviews(48)]
    if form == "lists":
        path.write_text("".join(json.dumps({"text": t, "label": labels_of(t)}) + "\n" for t in texts))
        found = loading.load(path)
    else:
        cells = [f"{t},{int('ADJ' in labels_of(t))},{int('NOUN' in labels_of(t))}" for t in texts]
        path.write_text("text,ADJ,NOUN\n" + "\n".join(cells) + "\n")
        found = loading.load(path, label="ADJ,NOUN")
    assert found.kind == "multilabel" and found.labels == expected.labels
    assert sorted(zip(found.train.texts, found.train.labels, strict=True)) == sorted(
        zip(expected.train.texts, expected.train.labels, strict=True)
    )


@pytest.mark.filterwarnings("ignore:micro_f1")
def test_labels_may_be_separated_by_any_text(base, several, tmp_path):
    path = tmp_path / "s.csv"
    path.write_text(several.read_text().replace("|", " / "))
    best = train(path, base, separator=" / ", **QUICK).best.delta
    best.save(tmp_path / "d.safetensors")
    assert best.meta.task == "multilabel" and best.meta.labels == ("ADJ", "NOUN")
    assert Predictor(tmp_path / "d.safetensors", base).evaluate(path)[0] == 48
    with pytest.raises(UsageError, match="--separator /: classification has one label per row"):
        train(path, base, separator="/", task="classification", **QUICK)


@pytest.mark.parametrize("answers", [["fine"], "fine", {"text": ["fine"], "answer_start": [62]}, [{"text": "fine"}]])
def test_answers_may_be_written_in_several_ways(tmp_path, answers):
    path = tmp_path / "q.jsonl"
    row = {"question": "is fine", "context": CONTEXT, "answers": answers}
    path.write_text("".join(json.dumps({**row, "context": f"{CONTEXT} {i}"}) + "\n" for i in range(12)))
    dataset = loading.load(path)
    assert dataset.kind == "answering" and dataset.train.labels[0] == (Answer("fine", CONTEXT.index("fine")),)


def test_questions_on_one_context_stay_on_one_side_of_the_split(tmp_path):
    table = squad(30)
    for i, paragraph in enumerate(table["data"][0]["paragraphs"]):
        paragraph["context"] = f"{CONTEXT} {i // 5}"
    path = tmp_path / "s.json"
    path.write_text(json.dumps(table))
    dataset = loading.load(path)
    assert not set(dataset.train.pairs) & set(dataset.dev.pairs)


# ---- no words at all, and long inputs


def test_a_sentence_without_words_has_no_tags_and_keeps_its_place(base):
    answers = predict(delta_of(base, labels=3, kind="tagging"), [["good"], [], "", ["film"]], base)
    assert [answer["tokens"] for answer in answers] == [["good"], [], [], ["film"]]
    assert [len(answer["tags"]) for answer in answers] == [1, 0, 0, 1]


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_every_word_of_a_long_document_gets_a_tag(bases, architecture):
    base = bases(architecture)
    words = [WORDS[i % len(WORDS)] for i in range(20_000)]
    answer = predict(delta_of(base, labels=3, kind="tagging"), [words, ["good"]], base)[0]
    assert answer["tokens"] == words and len(answer["tags"]) == len(words)


def test_a_word_counts_where_it_stands_furthest_from_an_edge(base):
    encoded = Encoder(base, 10, 4).encode("words", Examples([tuple(WORDS[:20])], None))
    assert len(encoded.rows) == 4 and sorted(encoded.marks[encoded.marks >= 0]) == list(range(20))
    windows = np.split(encoded.marks[:, 0], encoded.rows.starts[1:-1])
    # Windows of 8 words that share 4: 0-7, 4-11, 8-15, 12-19.
    ends = [(int(w[w >= 0].min()), int(w.max())) for w in windows]
    assert ends == [(0, 5), (6, 9), (10, 13), (14, 19)]


def test_a_word_the_tokenizer_drops_still_gets_a_tag(base):
    answer = predict(delta_of(base, labels=3, kind="tagging"), [["good", "\u200b \x07".strip(), "film"], ""], base)
    assert len(answer[0]["tags"]) == 3 and answer[1]["tags"] == []


def test_a_word_in_a_list_is_read_as_in_running_text():
    from types import SimpleNamespace

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<pad>"])
    backend.train_from_iterator([CONTEXT] * 20, trainer)
    tokenizer = SimpleNamespace(backend_tokenizer=backend, pad_token_id=0, unk_token=None)
    encoder = Encoder(SimpleNamespace(tokenizer=tokenizer, max_length=99, name="bpe"), 99)
    encoded = encoder.encode("words", Examples([("film", "was", "long")], None))
    assert encoded.rows.ids.tolist() == encoder([" film was long"]).ids.tolist()


def test_an_answer_is_found_in_any_window_of_a_long_context(base):
    context = " ".join(WORDS[i % len(WORDS)] for i in range(3000)) + " finale"
    delta = delta_of(base, labels=3, kind="answering")
    answer = predict(delta, [("is good", context)], base)[0]
    assert context[answer["start"] : answer["end"]] == answer["answer"] != "" and 0 < answer["score"] <= 1


def test_each_window_is_told_where_its_answer_is(base):
    task = Task.of("answering", ())
    words = [WORDS[i % len(WORDS)] for i in range(40)]
    context = " ".join(words)
    start = len(" ".join(words[:25])) + 1
    examples = Examples(["is good"], [context], [(Answer(" ".join(words[25:27]), start),)], [1])
    encoded = task.encode(Encoder(base, 20, 5), examples)
    targets = task.targets(encoded, examples)
    found = []
    for begin, end in zip(encoded.rows.starts[:-1], encoded.rows.starts[1:], strict=True):
        first, last = targets[begin:end].argmax(0)
        marks = encoded.marks[begin:end]
        found.append("" if first == 0 else context[marks[first, 0] : marks[last, 1]])
    assert set(found) == {"", " ".join(words[25:27])}
    assert targets.sum(0).tolist() == [len(found)] * 2


def test_a_long_question_is_cut_and_counted(base):
    predictor = Predictor(delta_of(base, labels=3, kind="answering"), base)
    answers = list(predictor.answers([("good " * 500, CONTEXT), ("good", CONTEXT)]))
    assert len(answers) == 2 and predictor.cut == 1


def test_cut_texts_are_counted(base, csv_file):
    predictor = Predictor(delta_of(base, labels=2, kind="classification"), base)
    list(predictor.answers(["good " * 100, "good"]))
    assert predictor.cut == 1


# ---- the same by every path


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("multilabel", "bert"), *((kind, name) for kind in ("tagging", "answering") for name in ARCHITECTURES)],
)
def test_stock_transformers_loads_an_export_and_predicts_the_same(bases, architecture, kind, tmp_path):
    import transformers

    base = bases(architecture)
    delta = delta_of(base, labels=3, kind=kind)
    folder = export(delta, base, tmp_path / "out")
    names = {"tagging": "TokenClassification", "answering": "QuestionAnswering", "multilabel": "SequenceClassification"}
    task = Task.of_delta(delta)
    own_code = (folder / "modeling_bitfit.py").exists()  # transformers has no class with one linear layer on the tokens
    assert own_code == (stock_class(base, Model(base, task.outputs, delta.meta.pool), task) is None)
    loader = getattr(transformers, "AutoModelFor" + names[kind])
    model, info = loader.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=own_code
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    words = ["the", "plot", "was", "very", "bad"]
    text = {"tagging": words, "answering": ("is great", CONTEXT), "multilabel": " ".join(words)}[kind]
    examples = Examples([text[0] if kind == "answering" else text], [text[1]] if kind == "answering" else None)
    encoded = task.encode(Encoder(base, base.max_length), examples)
    own = Predictor(delta, base).outputs(encoded)
    given = text if kind == "answering" else (text,)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code)
    read = tokenizer(*given, is_split_into_words=kind == "tagging")["input_ids"]
    # Open: transformers builds a tokenizer of its own for Qwen2, which reads this one's words otherwise.
    assert read == encoded.rows.ids.tolist() or (kind, architecture) == ("tagging", "qwen2")
    batch = {"input_ids": torch.from_numpy(encoded.rows.ids)[None]}
    batch |= {"token_type_ids": torch.from_numpy(encoded.rows.types)[None]} if base.segments else {}
    with torch.no_grad():
        out = model.eval()(**batch)
    got = torch.stack([out.start_logits, out.end_logits], -1) if kind == "answering" else out.logits
    np.testing.assert_allclose(got[0].numpy().reshape(own.shape), own, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", NEW)
def test_the_lines_on_the_card_run(base, kind, tmp_path, monkeypatch):
    folder = export(delta_of(base, labels=3, kind=kind), base, tmp_path / "out")
    lines = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    monkeypatch.chdir(folder)
    scope: dict[str, Any] = {}
    exec(lines.group(1), scope)
    assert scope["logits"].shape[-1] == (2 if kind == "answering" else 3) and scope["logits"].isfinite().all()


@pytest.mark.parametrize("architecture", ["bert", "albert"])
def test_any_mix_of_kinds_is_answered_as_each_alone(bases, architecture):
    base = bases(architecture)
    assert Packed.supports(Model(base, 2, "tokens")) == (architecture == "bert")
    requests = [
        (delta_of(base, seed, 3, kind=kind), text) for seed, kind in enumerate(KINDS) for text in texts_for(kind)
    ]
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    mixed = predict([requests[i] for i in order], base=base)
    for i, answer in zip(order, mixed, strict=True):
        assert flat(answer) == pytest.approx(flat(predict(requests[i][0], [requests[i][1]], base)[0]), abs=1e-5)


def texts_for(kind: str) -> list[Any]:
    return [*INPUTS.get(kind, ["good film", "bad"]), *([list(WORDS) * 3] if kind == "tagging" else [])]


def flat(answer: dict[str, Any]) -> dict[str, Any]:
    scores = answer.get("scores", {})
    numbers = scores if isinstance(scores, dict) else dict(enumerate(scores))
    words = {key: str(v) for key, v in answer.items() if key not in ("scores", "score", "value")}
    return {**{str(k): v for k, v in numbers.items()}, **words, "n": answer.get("score", answer.get("value", 0.0))}


# ---- the contract of a kind: every one joins by existing


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_and_its_reader_go_by_one_name(kind):
    assert KINDS[kind].kind == kind == READERS[kind].kind and KINDS[kind].reader is READERS[kind]


def one_example(kind: str) -> tuple[Task, Examples, Any]:
    """A task, two labelled examples and predictions of the right form."""
    labels, golds, predictions = {
        "classification": (("a", "b"), [0, 1], np.array([[0.2, 0.8], [0.4, 0.6]])),
        "regression": ((), [0.5, 2.0], np.array([0.4, 0.7])),
        "multilabel": (("a", "b"), [(0,), (0, 1)], [(0,), (1,)]),
        "tagging": (("A", "B"), [(0, 1), (1,)], [np.array([0, 0]), np.array([1])]),
        "answering": ((), [(Answer("film", 0),), (Answer("plot", 0),)], ["film", "cast"]),
    }[kind]
    return Task.of(kind, labels), Examples(["x", "y"], None, golds, [1, 2]), predictions


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_scores_exactly_the_metrics_it_names(kind):
    task, examples, predictions = one_example(kind)
    found = task.scores(predictions, examples)
    assert tuple(found) == task.metric_names(task.labels)
    assert found[task.metric].value == task.score(predictions, examples)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_has_the_fields_of_its_kind(kind):
    from bitfit.serve.schemas import TextInput

    for names in KINDS[kind].fields:
        given = {name: ["good"] if name == "words" else "good" for name in names}
        assert TextInput(**given).value("inputs.0")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_shows_to_try_can_be_tried(base, kind):
    predictor = Predictor(delta_of(base, labels=3, kind=kind), base)
    words = predictor.task.sample_input(predictor.columns.text_pair is not None)
    answer = next(predictor.answers(predictor.texts_of(words)))
    assert all(isinstance(cell, str) for cell in predictor.task.line(answer))


PACKAGE = """
from bitfit.data.readers.texts import Classes
from bitfit.tasks.texts import Classification

class Polls(Classes):
    kind = "poll"

class Poll(Classification):
    kind = "poll"
    reader = Polls
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that adds a kind of task."""
    folder = tmp_path / "site" / "polls-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: polls\nVersion: 1.0\n")
    points = "[bitfit.readers]\npoll = polls:Polls\n[bitfit.kinds]\npoll = polls:Poll\n"
    (folder / "entry_points.txt").write_text(points)
    (folder.parent / "polls.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder.parent)
    for registry in (READERS, KINDS):
        registry.reset()
    yield
    monkeypatch.undo()
    for registry in (READERS, KINDS):
        registry.reset()


def test_an_installed_package_adds_a_kind(installed, base, csv_file, tmp_path):
    run = train(csv_file, base, task="poll", out=tmp_path / "p.safetensors", lr=1e-2, epochs=1)
    answer = predict(tmp_path / "p.safetensors", ["good film"], base)[0]
    assert run.best.delta.meta.task == "poll" and answer["label"] in run.best.delta.meta.labels


# ---- what is refused, and what is said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["X"]}, "line 2: 2 words but 1 tags"),
        ({"tokens": ["a", ""], "tags": ["X", "X"]}, "line 2: word 2 is empty"),
        ({"tokens": ["a", 3], "tags": ["X", "X"]}, "line 2: .* contains no list of words"),
        ({"tokens": ["a"], "tags": "X"}, "line 2: .* contains no list of tags"),
    ],
)
def test_a_sentence_that_does_not_fit_its_tags_is_named(tmp_path, row, message):
    path = tmp_path / "t.jsonl"
    good = {"tokens": ["good", "film"], "tags": ["X", "Y"]}
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        loading.load(path, task="tagging")


@pytest.mark.parametrize("line", ["1\tgood\tADJ", "x\tgood\t_\tADJ\t_\t_\t_\t_\t_\t_"])
def test_a_broken_conllu_line_is_named(tmp_path, line):
    path = tmp_path / "t.conllu"
    path.write_text(conllu(sentences(2)) + line + "\n")
    with pytest.raises(DataError, match=f"line {len(path.read_text().splitlines())}"):
        loading.load(path)


def test_words_without_a_tag_are_counted_and_not_scored(base, tmp_path):
    path = tmp_path / "t.conllu"
    path.write_text(conllu(sentences(12)).replace("\tADJ\t", "\t_\t"))
    dataset = loading.load(path)
    assert any("have no tag" in note for note in dataset.notes) and dataset.labels == ("NOUN", "X")
    assert train(path, base, **QUICK).best.dev is not None


def test_an_unknown_tag_at_evaluation_is_named(base, tagged, tmp_path):
    delta = train(tagged, base, **QUICK).best.delta
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"tokens": ["good"], "tags": ["ADV"]}) + "\n")
    with pytest.raises(DataError, match=r'line 1: tag "ADV" of "good" is not in the training data.*ADJ'):
        Predictor(delta, base).evaluate(path)


@pytest.mark.parametrize("off", [-1, 1, 9])
def test_an_answer_beside_its_offset_is_moved_and_counted(tmp_path, off):
    table = squad()
    table["data"][0]["paragraphs"][3]["qas"][0]["answers"][0]["answer_start"] += off
    path = tmp_path / "s.json"
    path.write_text(json.dumps(table))
    dataset = loading.load(path)
    assert any("1 question (q3) of s.json had an answer_start that does not match" in note for note in dataset.notes)
    for context, answers in zip(dataset.train.pairs, dataset.train.labels, strict=True):
        assert all(context[a.start :].startswith(a.text) for a in answers)


@pytest.mark.parametrize(("answers", "message"), [([{"text": "nowhere"}], "not in its context"), ([], "no answer")])
def test_a_question_without_a_usable_answer_is_counted(tmp_path, answers, message):
    table = squad()
    table["data"][0]["paragraphs"][3]["qas"][0]["answers"] = answers
    path = tmp_path / "s.json"
    path.write_text(json.dumps(table))
    dataset = loading.load(path)
    assert len(dataset.train) + len(dataset.dev) == 11
    assert any(message in note and "q3" in note for note in dataset.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not usable JSON"),
        ("[1]", "record 1: expected a JSON object"),
        ('{"a": 1}', "not a list of records"),
        ('{"data": [{}]}', '"paragraphs" is missing'),
    ],
)
def test_a_json_file_of_another_shape_is_refused(tmp_path, text, message):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        loading.load(path)


def test_a_cell_that_is_neither_0_nor_1_is_named(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("text,a,b\ngood,1,0\nbad,2,1\n")
    with pytest.raises(DataError, match=r'line 3: column "a" contains "2"'):
        loading.load(path, label="a,b")


@pytest.mark.parametrize("kind", NEW)
def test_a_delta_of_one_kind_is_refused_as_another(base, kind, tagged, asked):
    delta = delta_of(base, labels=3, kind=kind)
    other = "classification" if kind != "multilabel" else "tagging"
    meta = meta_of(base, task=other, pool=delta.meta.pool)
    with pytest.raises(DeltaError, match="another kind of task"):
        Predictor(Delta(delta.tensors, meta), base)
    wrong = asked if kind != "answering" else tagged.with_suffix(".conllu")
    wrong.touch()
    with pytest.raises(DataError, match=f"but the delta is for {kind}"):
        Predictor(delta, base).evaluate(wrong)


def test_questions_need_a_context_and_token_tasks_no_pool(base, tagged, asked, csv_file):
    with pytest.raises(UsageError, match="a question and its context"):
        predict(delta_of(base, labels=3, kind="answering"), ["is good"], base)
    with pytest.raises(UsageError, match="every token"):
        train(tagged, base, pool="mean", **QUICK)
    with pytest.raises(UsageError, match="--stride 3"):
        train(csv_file, base, stride=3, **QUICK)
    with pytest.raises(UsageError, match="too short for a question"):
        train(asked, base, max_length=4, **QUICK)
    with pytest.raises(UsageError, match="--stride 90"):
        train(tagged, base, stride=90, **QUICK)
    with pytest.raises(UsageError, match="Did you mean"):
        train(tagged, base, task="taging", **QUICK)


@pytest.mark.parametrize("stride", [15, -1, "4", True])
def test_a_delta_with_an_impossible_stride_is_refused(base, stride):
    with pytest.raises(DeltaError, match="stride"):
        delta_of(base, labels=3, kind="tagging", stride=stride)


# ---- the command line


KEYS = {
    "tagging": {"tokens", "tags", "scores"},
    "answering": {"answer", "start", "end", "score"},
    "multilabel": {"labels", "scores"},
}


@pytest.mark.parametrize("kind", NEW)
def test_predict_answers_words_and_files_and_writes_csv(base, folders, sources, kind, tmp_path, capsys):
    path = tmp_path / "d.safetensors"
    columns = {"tagging": ("tokens", None), "answering": ("question", "context"), "multilabel": ("text", None)}[kind]
    named = {"text": columns[0], "text_pair": columns[1], "label": None}
    delta_of(base, labels=3, kind=kind, columns=named).save(path)
    start, where = ["predict", str(path)], ["--base", str(folders("bert"))]
    words = ["is great", CONTEXT] if kind == "answering" else ["the plot was bad"]
    assert run([*start, *words, *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == KEYS[kind]
    assert run([*start, *words, *where]) == 0 and capsys.readouterr().out.count("\n") == 1
    assert run([*start, *where, "--file", str(sources[kind]), "--json"]) == 0
    rows = sum(1 for _ in loading.rows(sources[kind]))
    assert len(capsys.readouterr().out.splitlines()) == rows
    assert run([*start, *where, "--file", str(sources[kind]), "--out", str(tmp_path / "o.csv")]) == 0
    assert len((tmp_path / "o.csv").read_text().splitlines()) == rows + 1


def test_train_tells_its_baseline_and_how_to_go_on(folders, asked, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", str(asked), "--base", str(folders("bert")), "--lr", "1e-2", "--epochs", "1"]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "the sentence most like the question: f1" in shown and '"a question" "its context"' in shown
