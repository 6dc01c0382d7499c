"""Studies that several machines run in turn: base, data, checkpoints and results travel by a storage."""

from __future__ import annotations

import json
import shutil
import time
import uuid

import pytest

from bitfit.cli.main import run
from bitfit.data.storage import Storage
from bitfit.errors import Interrupted, UsageError
from bitfit.study import passes, runner
from bitfit.study.grid import Settings
from bitfit.study.runner import Campaign
from bitfit.study.shipping import base_here, data_here, storing_inputs
from bitfit.study.spec import load
from bitfit.study.stored import Lease, StoredResults
from support import StopAt, make_folder, write_tasks


@pytest.fixture(params=["folder", "memory"])
def storage(request, tmp_path):
    """A folder, and a storage that is no file system."""
    return Storage(str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny base and the data of two tasks."""
    folder = make_folder(tmp_path_factory.mktemp("models") / "tiny", "bert")
    return folder, write_tasks(tmp_path_factory.mktemp("data"), ("sst2", "rte"), rows=24)


def words(base, data, results, storage, *more):
    """A small study as a command."""
    command = ["study", "run", "bitfit-table3", "--base", str(base), "--data", str(data), "--results", str(results)]
    small = ["--tasks", "sst2,rte", "--seeds", "1", "--lr", "1e-2", "--epochs", "2", "--method", "BitFit"]
    return [*command, *small, "--threads", "1", "--storage", storage.url, *more]


def outcomes(folder):
    """Every result by name, without what it cost."""
    found = {path.name: json.loads(path.read_text()) for path in (folder / "trials").glob("*.json")}
    return {name: {k: v for k, v in table.items() if k != "cost"} for name, table in found.items()}


def test_files_come_and_go(storage, tmp_path):
    (tmp_path / "local").write_bytes(b"abc")
    storage.upload(tmp_path / "local", "a/b/local")
    storage.write("a/c", b"x")
    storage.write("a/c", b"y")
    storage.download("a/b/local", tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == b"abc"
    assert storage.read("a/c") == b"y"
    assert storage.read("a/d") is None
    assert storage.names("a") == ["a/b/local", "a/c"]
    assert storage.names("nothing") == []
    storage.remove("a/b")
    storage.remove("a/b")
    assert storage.names("a") == ["a/c"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path))
    storage.write("a", b"before")

    def fail(path, content):
        (tmp_path / path.rpartition("/")[2]).write_bytes(content[:1])
        raise OSError("the network is gone")

    monkeypatch.setattr(storage._system, "pipe_file", fail)
    with pytest.raises(OSError, match="network"):
        storage.write("a", b"after")
    assert storage.read("a") == b"before"
    assert storage.names("") == ["a"]


def test_an_unknown_kind_of_storage_is_refused():
    with pytest.raises(UsageError, match="--storage teapot://x: Protocol not known"):
        Storage("teapot://x")


def test_another_machine_without_base_and_data_finds_the_results(tiny, storage, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BITFIT_CACHE", str(tmp_path / "cache"))
    base, data = tiny
    assert run(words(base, data, tmp_path / "first", storage)) == 0
    gone = tmp_path / "elsewhere"
    assert run(words(gone / "tiny", gone / "data", tmp_path / "second", storage)) == 0
    assert "0 trials trained, 2 had been trained before" in capsys.readouterr().err
    assert outcomes(tmp_path / "second") == outcomes(tmp_path / "first")
    assert len(outcomes(tmp_path / "first")) == 2
    assert not storage.names("passes")
    assert (tmp_path / "second" / "bitfit-table3" / "report.html").is_file()
    capsys.readouterr()
    assert run(words(gone / "other", data, tmp_path / "second", storage)) == 4  # no such base, here or there


def test_another_machine_goes_on_from_the_checkpoint(tiny, storage, tmp_path, monkeypatch):
    monkeypatch.setenv("BITFIT_CACHE", str(tmp_path / "cache"))
    base, data = tiny
    assert run(words(base, data, tmp_path / "whole", Storage(str(tmp_path / "other")))) == 0

    def campaign(folder, base, folders):
        settings = Settings(tasks=("sst2", "rte"), seeds=1, lr=(1e-2,), epochs=2, methods=("BitFit",))
        results = StoredResults(tmp_path / folder, storage)
        return Campaign(load("bitfit-table3"), base, settings, None, results, 1, None, 0.0, folders=folders)

    def stopped(works, progress):
        yield from ((work, passes.perform(work, StopAt(5))) for work in works)

    def perform(campaign, engine):
        engine = storing_inputs(engine, storage)
        return runner.run(campaign, engine, ["x"], lambda _: None, lambda *_: None)

    here = {"sst2": str(data), "rte": str(data)}
    with pytest.raises(Interrupted):
        perform(campaign("first", str(base), here), stopped)
    assert any(name.endswith(".checkpoint") for name in storage.names("passes"))
    steps = []

    def counted(works, progress):
        for work in works:
            yield work, passes.perform(work, lambda part, step, total, runners: steps.append(step))

    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    elsewhere = base_here(storage, "/nowhere/tiny"), data_here(storage, ("sst2", "rte"), "/nowhere")
    assert elsewhere[0] != str(base)
    assert perform(campaign("second", *elsewhere), counted) == 2
    assert steps[0] == 6
    assert outcomes(tmp_path / "second") == outcomes(tmp_path / "whole")
    assert not storage.names("passes")


def test_a_pass_that_finished_after_its_run_was_killed_counts(tiny, storage, tmp_path, monkeypatch):
    monkeypatch.setenv("BITFIT_CACHE", str(tmp_path / "cache"))
    base, data = tiny
    assert run(words(base, data, tmp_path / "first", storage)) == 0
    whole = outcomes(tmp_path / "first")
    tables = [json.loads(storage.read(name)) for name in storage.names("trials")]
    storage.remove("trials")
    storage.write("passes/bitfit-table3/tiny/abc/results.json", json.dumps(tables).encode())
    assert run(words(base, data, tmp_path / "second", storage)) == 0
    assert outcomes(tmp_path / "second") == whole
    assert len(storage.names("trials")) == len(whole)
    assert not storage.names("passes")


def test_a_run_is_refused_while_another_machine_gives_signs_of_life(storage):
    alive, other = (Lease(storage, "s/.run", beat=0.05, dead=1.0) for _ in range(2))
    with alive.held(), pytest.raises(UsageError, match="being run by"), other.held():
        pass
    assert storage.read("s/.run") is None


def test_a_run_begins_when_the_other_one_is_dead(storage):
    storage.write("s/.run", b'{"host": "other"}')
    began = time.monotonic()
    with Lease(storage, "s/.run", beat=0.05, dead=0.3).held():
        assert time.monotonic() - began >= 0.3
