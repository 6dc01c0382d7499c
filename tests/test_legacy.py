"""Files written by bitfit 0.1.0, before metadata had types: they load, predict, list and report.

tests/legacy was written by commit 025b80b on the tiny random BERT of conftest.py: two deltas and one study.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bitfit import Delta, predict
from bitfit.cli.main import run
from bitfit.delta import safefile
from bitfit.report import report
from bitfit.serve.repository import Repository
from bitfit.study import spec
from bitfit.study.store import Results

LEGACY = Path(__file__).parent / "legacy"
DELTAS = sorted(LEGACY.glob("*.safetensors"))
LATER = ("inject", "name", "stride", "threads")  # keys that the first deltas lack


@pytest.mark.parametrize("path", DELTAS, ids=lambda path: path.stem)
def test_an_old_delta_loads_and_predicts(path, base):
    delta = Delta.load(path)
    moved = replace(delta, meta=replace(delta.meta, fingerprint=base.fingerprint))
    text = ("good film", "bad film") if delta.meta.pairs else "good film"
    assert predict(moved, [text], base)[0]["label"] in delta.labels


@pytest.mark.parametrize("path", DELTAS, ids=lambda path: path.stem)
def test_an_old_delta_is_written_again_with_the_same_values_and_metadata(path):
    tensors, table = safefile.read(path)
    again, now = safefile.decode(Delta.load(path).encode(), "f")
    assert {name: array.tolist() for name, array in again.items()} == {n: a.tolist() for n, a in tensors.items()}
    assert {key: now[key] for key in table if key != "sha256"} == {k: v for k, v in table.items() if k != "sha256"}


@pytest.mark.parametrize("path", DELTAS, ids=lambda path: path.stem)
def test_a_delta_without_the_keys_that_came_later_has_their_defaults(path):
    tensors, table = safefile.read(path)
    first = {key: value for key, value in table.items() if key not in LATER}
    first["trial"] = {key: value for key, value in table["trial"].items() if key not in LATER}
    meta = Delta.checked(*safefile.decode(safefile.encode(tensors, first), "f"), "f").meta
    assert (meta.inject, meta.name, meta.stride, meta.threads) == ("none", None, 0, 0)


def test_a_key_of_a_newer_version_is_ignored():
    tensors, table = safefile.read(DELTAS[0])
    newer = Delta.checked(tensors, {**table, "invented_later": [1]}, "f")
    assert newer.meta == Delta.load(DELTAS[0]).meta


def test_old_deltas_are_inspected_and_served(tmp_path, capsys):
    for path in DELTAS:
        assert run(["inspect", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["trial"]["lr"] == 0.01
        shutil.copy(path, tmp_path)
    repository = Repository(tmp_path, Delta.load(DELTAS[0]).meta.fingerprint)
    assert list(repository.scan().added) == [path.stem for path in DELTAS]


def test_an_old_study_is_listed_and_reported(tmp_path):
    results = Results(LEGACY / "results")
    assert results.known() == ["bitfit-table3"]
    page, markdown = report.write(spec.load("bitfit-table3"), results, tmp_path)
    assert page.is_file() and "rte" in markdown.read_text()
