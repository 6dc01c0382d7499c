"""Bases in half precision: the outputs of a float32 base with rounded weights, and deltas that fit either."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bitfit import Delta, MixedPredictor, Predictor, export, load_base, train
from bitfit.bank import blocked
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.cli.main import run
from bitfit.delta.fold import fold
from bitfit.errors import UsageError
from bitfit.model.language import select
from bitfit.model.precision import HALF, large_matrices
from bitfit.model.task_model import Model
from bitfit.serve.run import _base as served_base
from bitfit.tasks.encode import Encoder
from support import ARCHITECTURES, INJECT, delta_of, reviews

TYPES = ("bfloat16", "float16")
TEXTS = [text for text, _ in reviews(8)]
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def pairs(folders):
    """A function to a base in half precision and to a float32 one whose matrices are rounded alike."""
    made = {}

    def pair(architecture, dtype="bfloat16"):
        if (architecture, dtype) not in made:
            half, rounded = load_base(folders(architecture), dtype), load_base(folders(architecture))
            for name in large_matrices(rounded.encoder, rounded.missing):
                parameter = rounded.parameters[name]
                parameter.data = parameter.data.to(getattr(torch, dtype)).float()
            made[architecture, dtype] = half, rounded
        return made[architecture, dtype]

    return pair


@pytest.fixture
def usual_products(monkeypatch):
    """Both sides multiply in the same way: a float32 base may else use other products, which round otherwise."""
    monkeypatch.setattr(blocked, "has_fast_products", lambda: False)
    monkeypatch.setattr(blocked, "_BY_ENCODER", WeakKeyDictionary())  # what earlier tests have made


def gradients(base, text, lanes=2, stock=False):
    """The outputs and the flat gradients of some lanes, with dropout."""
    model = Model(base, 3, "auto", INJECT.get(base.config.model_type, "none"))
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, text, k), seed=k) for k in range(lanes)])
    rows = dict.fromkeys(range(lanes), Encoder(base)(TEXTS))
    streams = {k: k + 3 for k in range(lanes)}
    found = bank.stock_logits(rows, streams) if stock else bank.logits(rows, streams)
    torch.stack([logits.square().sum() for logits in found.values()]).sum().backward()
    return torch.stack(list(found.values())).detach(), bank.gradients


@pytest.mark.usefixtures("usual_products")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_half_base_computes_what_a_rounded_float32_base_does(pairs, architecture, dtype):
    half, rounded = pairs(architecture, dtype)
    for ours, theirs in zip(gradients(half, "bias"), gradients(rounded, "bias"), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("usual_products")
@pytest.mark.parametrize("text", ["all", "random(all, 40)", "W_q", "W_emb + b_q", "none"])
@pytest.mark.parametrize("stock", [False, True])
def test_whatever_is_selected_trains_in_float32(pairs, text, stock):
    half, rounded = pairs("bert")
    for ours, theirs in zip(gradients(half, text, stock=stock), gradients(rounded, text, stock=stock), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matrices_are_halved_and_vectors_are_not(pairs, bases, architecture):
    half, full = pairs(architecture)[0], bases(architecture)
    for name, parameter in half.parameters.items():
        assert parameter.dtype == torch.float32 or parameter.dim() == 2
        if parameter.dim() == 1:
            assert torch.equal(parameter, full.parameters[name])
    inside = [name for name, p in half.parameters.items() if p.dim() == 2 and half.anatomy.shapes.get(name)]
    assert sum(half.parameters[name].dtype in HALF for name in inside) > len(inside) // 2
    assert half.bytes < full.bytes


@pytest.mark.parametrize("dtype", TYPES)
def test_the_fingerprint_is_that_of_the_file(folders, bases, dtype):
    assert load_base(folders("bert"), dtype).fingerprint == bases("bert").fingerprint


@pytest.mark.parametrize("architecture", ["bert", "llama"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_file_in_half_precision_is_the_base_that_it_rounds(tmp_path, folders, architecture, dtype):
    folder = folders(architecture)
    for name, kind in (("half", getattr(torch, dtype)), ("full", torch.float32)):
        (tmp_path / name).mkdir()
        for path in folder.iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        weights = load_file(folder / "model.safetensors")
        rounded = {key: value.to(getattr(torch, dtype)).to(kind) for key, value in weights.items()}
        save_file(rounded, tmp_path / name / "model.safetensors", {"format": "pt"})
    of_half, of_full = load_base(tmp_path / "half"), load_base(tmp_path / "full")
    assert of_half.fingerprint == of_full.fingerprint == load_base(tmp_path / "half", dtype).fingerprint
    assert all(parameter.dtype == torch.float32 for parameter in of_half.parameters.values())
    for ours, theirs in zip(gradients(of_half, "bias"), gradients(of_full, "bias"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_mixed_types_keeps_its_float32_values(tmp_path, folders, dtype, legacy):
    """LayerNorms in float32, matrices in half precision; `legacy` names are not recognised and loaded another way."""
    source = folders("bert")
    tensors = {}
    full = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        half = tensor if "LayerNorm" in name else tensor.to(getattr(torch, dtype))
        written = name.replace("LayerNorm.weight", "LayerNorm.gamma") if legacy else name
        tensors[written] = half
        full[name] = half.float()
    for folder, content in (("mixed", tensors), ("full", full)):
        shutil.copytree(source, tmp_path / folder)
        save_file(content, tmp_path / folder / "model.safetensors", {"format": "pt"})
    mixed, expected = load_base(tmp_path / "mixed"), load_base(tmp_path / "full")
    assert mixed.fingerprint == expected.fingerprint
    for name, parameter in mixed.parameters.items():
        assert torch.equal(parameter, expected.parameters[name])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """Each load is measured in a process of its own; the word embedding is more than a third of the weights.

    About one load in ten has a larger peak, for a reason not known. So a load may be repeated twice.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import loading

    tiny = loading.make(tmp_path, 64, 1)[0]
    for folder in loading.make(tmp_path, 512, 8):
        for dtype in loading.TYPES:
            ratios: list[float] = []
            while len(ratios) < 3 and (not ratios or ratios[-1] >= 1.1):
                load = loading.measure_apart(folder, dtype, tiny)
                ratios.append(load["peak"] / load["stored"])
            assert ratios[-1] < 1.1, (folder, dtype, ratios)


@pytest.mark.parametrize("trained, used", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_a_delta_of_one_type_answers_on_a_base_of_another(folders, csv_file, trained, used):
    delta = train(csv_file, str(folders("bert")), lr=1e-2, epochs=1, dtype=trained).best.delta
    assert delta.meta.dtype == trained
    same = list(Predictor(delta, load_base(folders("bert"), trained)).answers(TEXTS))
    other = list(Predictor(delta, load_base(folders("bert"), used)).answers(TEXTS))
    assert [answer["score"] for answer in same] == pytest.approx([answer["score"] for answer in other], abs=0.02)
    assert [answer["score"] for answer in same] != [answer["score"] for answer in other]


def test_a_predictor_takes_the_type_of_the_training(folders, csv_file, tmp_path):
    run = train(csv_file, str(folders("bert")), lr=1e-2, epochs=1, dtype="bfloat16", out=tmp_path / "d.safetensors")
    assert Predictor(tmp_path / "d.safetensors", str(folders("bert"))).base.dtype == "bfloat16"
    assert Predictor(run.best.delta, str(folders("bert")), dtype="float32").base.dtype == "float32"
    assert served_base(tmp_path, str(folders("bert")), None).dtype == "float32"
    assert served_base(tmp_path, str(folders("bert")), "float16").dtype == "float16"
    assert any("stored in bfloat16" in note for note in run.notes)


def test_the_starts_of_trained_vectors_are_those_of_the_file(pairs, bases):
    half, full = pairs("bert")[0], bases("bert")
    starts = []
    for base in (half, full):
        model = Model(base, 2)
        starts.append(lane_to_train(model, select(model.anatomy, "bias + gamma")).start)
    assert torch.equal(*starts)


def test_applying_a_delta_with_matrices_can_be_undone(pairs):
    half = pairs("bert")[0]
    before = {name: parameter.clone() for name, parameter in half.parameters.items()}
    for text in ("all", "random(all, 30)"):
        delta_of(half, select_text=text).apply(half)()
        assert all(torch.equal(parameter, before[name]) for name, parameter in half.parameters.items())


def test_an_exported_half_base_answers_alike_in_transformers(pairs, tmp_path):
    from transformers import AutoModelForSequenceClassification

    half = pairs("bert")[0]
    delta = delta_of(half, labels=3)
    folder = export(delta, half, tmp_path / "out")
    model = Model(half, 3, "cls")
    bank = Bank(model, [lane_of_delta(model, delta)])
    rows = Encoder(half)(TEXTS)
    stock = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ours, theirs = bank.logits({0: rows})[0], stock(**model._batch(rows)).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    sizes = {name: value.dtype for name, value in load_file(folder / "model.safetensors").items()}
    assert torch.bfloat16 in sizes.values()


def test_folding_and_mixed_answers_work_on_a_half_base(pairs):
    half = pairs("bert")[0]
    deltas = [delta_of(half, seed) for seed in range(3)]
    mixed = MixedPredictor(deltas, half)
    found = mixed.outputs([(k, text) for k in range(3) for text in TEXTS])
    expected = []
    for delta in deltas:
        assert fold(delta, Model(half, 2, "cls")).meta.folded
        predictor = Predictor(delta, half)
        expected += list(predictor.outputs(predictor._host.encode(predictor._resident, TEXTS).encoded))
    np.testing.assert_allclose(np.concatenate(found), np.stack(expected), atol=1e-4)


def test_a_run_of_another_type_is_not_continued(folders, csv_file, tmp_path):
    from bitfit.training.plan import Plan
    from bitfit.training.run import prepare, run_key

    keys = set()
    for dtype in ("float32", "bfloat16"):
        plan = Plan(lr=1e-2, dtype=dtype)
        job, trials = prepare(csv_file, str(folders("bert")), plan, lambda _: None)
        keys.add(run_key(job, [trials], plan))
    assert len(keys) == 2


def test_a_loaded_base_of_another_type_is_refused(bases, csv_file):
    with pytest.raises(UsageError, match="loaded in float32"):
        train(csv_file, bases("bert"), lr=1e-2, dtype="bfloat16")
    with pytest.raises(UsageError, match='no "float64"'):
        load_base("anything", "float64")


def test_the_commands_take_a_type(folders, csv_file, tmp_path, capsys):
    out, base = str(tmp_path / "d.safetensors"), str(folders("bert"))
    assert run(["train", str(csv_file), "--base", base, "--dtype", "bfloat16", "--lr", "1e-2", "--epochs", "1",
                 "--out", out]) == 0  # fmt: skip
    capsys.readouterr()
    assert run(["inspect", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    answers = {}
    for dtype in ("float32", "bfloat16"):
        assert run(["predict", out, *TEXTS, "--base", base, "--dtype", dtype, "--json"]) == 0
        answers[dtype] = capsys.readouterr().out
    assert run(["predict", out, *TEXTS, "--base", base, "--json"]) == 0
    assert capsys.readouterr().out == answers["bfloat16"] != answers["float32"]
    assert Delta.load(out).meta.dtype == "bfloat16"
