"""The example packages: installed beside bitfit, what they add is there as if bitfit had brought it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import make_folder, reviews

pytestmark = pytest.mark.slow  # installs packages; CI runs them
EXAMPLES = Path(__file__).parents[1] / "examples"
BOTH_PATHS = """
import sys
import torch
import bitfit
from bitfit.bank.lanes import lane_to_train
from bitfit.model.language import select
from bitfit.tasks.encode import Encoder

base = bitfit.load_base(sys.argv[1])
model = bitfit.Model(base, 2, "cls", "scale(W_q + W_v + W_m3)")
bank = bitfit.Bank(model, [lane_to_train(model, select(model.anatomy, "injected + b_q"), seed=k) for k in (0, 1)])
bank.values += 0.2 * torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(1))
read = Encoder(base)
rows = {0: read(["a good film", "the plot is bad"]), 1: read(["great"])}
found = []
for path in (bank.logits, bank.stock_logits):
    bank.gradients.zero_()
    out = path(rows)
    sum(value.square().sum() for value in out.values()).backward()
    found.append((torch.cat([out[0], out[1]]).detach(), bank.gradients.clone()))
(packed, d_packed), (stock, d_stock) = found
assert bank._packed is not None and d_stock.abs().max() > 0
assert torch.allclose(packed, stock, atol=1e-5), (packed, stock)
assert torch.allclose(d_packed, d_stock, atol=1e-4), (d_packed - d_stock).abs().max()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process that finds the packages installed."""
    target = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target))
    packages = [str(EXAMPLES / "strategy"), str(EXAMPLES / "members")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def bitfit(environment, *words):
    return subprocess.run([sys.executable, "-m", "bitfit", *words], env=environment, capture_output=True, text=True)


def test_an_installed_strategy_counts(installed, folders):
    done = bitfit(installed, "count", str(folders("bert")), "--select", "smallest(W_q, 10)", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["terms"]["W_q"]["trained"] == 10


def test_an_installed_strategy_selects_the_smallest_entries(installed, folders):
    script = (
        "import sys, numpy as np, bitfit\n"
        "base = bitfit.load_base(sys.argv[1])\n"
        "chosen = bitfit.select(base, 'smallest(b_q, 5)').entries\n"
        "values = {n: np.abs(p.detach().numpy()) for n, p in base.parameters.items() if n.endswith('query.bias')}\n"
        "largest = max(values[name][index].max() for name, index in chosen.items())\n"
        "assert sum((value <= largest).sum() for value in values.values()) == 5\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folders("bert"))], env=installed, check=True)


def test_without_the_package_the_word_is_unknown(folders):
    done = bitfit(None, "count", str(folders("bert")), "--select", "smallest(W_q, 10)")
    assert done.returncode == 2 and "smallest" in done.stderr


def test_an_installed_graft_trains_and_answers(installed, folders, csv_file):
    folder = csv_file.parent
    base = ("--base", str(folders("bert")))
    options = ("--inject", "scale(W_k + W_v)", "--select", "injected", "--epochs", "1", "--lr", "1e-2")
    delta = str(folder / "scaled.safetensors")
    done = bitfit(installed, "train", str(csv_file), *base, *options, "--out", delta, "--json")
    assert done.returncode == 0, done.stderr
    counted = bitfit(installed, "count", str(folders("bert")), *options[:4], "--json")
    assert json.loads(counted.stdout)["terms"]["s_k"]["trained"] == 2 * 16  # layers, width
    answered = bitfit(installed, "predict", delta, "a good film", *base)
    assert answered.returncode == 0, answered.stderr
    refused = bitfit(None, "predict", delta, "a good film", *base)
    assert refused.returncode == 4, refused.stderr


def test_a_graft_that_reads_one_of_several_outputs_is_the_same_on_both_paths(installed, folders):
    done = subprocess.run(
        [sys.executable, "-c", BOTH_PATHS, str(folders("bert"))], env=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_installed_kind_trains_and_answers(installed, folders, tmp_path):
    lines = [f"{text},{text.count('good') + text.count('great')}" for text, _ in reviews()]
    data = tmp_path / "counts.csv"
    data.write_text("text,label\n" + "\n".join(lines) + "\n")
    base = ("--base", str(folders("bert")))
    delta = str(tmp_path / "counts.safetensors")
    words = ("train", str(data), "--task", "count", "--epochs", "1", "--lr", "1e-2", "--out", delta)
    done = bitfit(installed, *words, *base)
    assert done.returncode == 0, done.stderr
    answered = bitfit(installed, "predict", delta, "a good film", *base, "--json")
    assert answered.returncode == 0 and json.loads(answered.stdout)["value"] > 0, answered.stderr
    data.write_text(data.read_text() + "a film,-1\n")
    refused = bitfit(installed, *words, *base)
    assert refused.returncode == 3 and "not a count" in refused.stderr


def test_an_installed_architecture_has_terms(installed, tmp_path):
    folder = make_folder(tmp_path / "ernie", "ernie")
    known = bitfit(installed, "count", str(folder), "--select", "b_q", "--json")
    assert known.returncode == 0 and json.loads(known.stdout)["terms"]["b_q"]["trained"] == 2 * 16, known.stderr
    unknown = bitfit(None, "count", str(folder), "--select", "b_q")
    assert unknown.returncode == 2 and "b_q" in unknown.stderr
