"""Storages that several machines reach: studies that they run in turn, and tables whose files are there."""

from __future__ import annotations

import json
import shutil
import sys
import time
import uuid

import pytest
from fsspec.registry import _registry

from bitfit.cli.main import run
from bitfit.data.storage import Storage, url_of
from bitfit.errors import Interrupted, UsageError
from bitfit.study import passes, runner
from bitfit.study.grid import Settings
from bitfit.study.runner import Campaign
from bitfit.study.shipping import base_here, data_here, storing_inputs
from bitfit.study.spec import load
from bitfit.study.stored import Lease, StoredResults
from support import StopAt, delta_of, make_folder, reviews, write_tasks


@pytest.fixture(scope="module")
def server():
    """The address of a server that speaks S3, on this machine only."""
    reason = 's3 is tested with moto and s3fs: pip install "bitfit[dev]"'
    pytest.importorskip("s3fs", reason=reason)
    moto = pytest.importorskip("moto.server", reason=reason)
    running = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def s3(server, tmp_path, monkeypatch):
    """The URL of an empty bucket. Its address and its keys are in the environment, as an operator gives them."""
    import s3fs

    settings = {"ENDPOINT_URL": server, "ACCESS_KEY_ID": "nobody", "SECRET_ACCESS_KEY": "nothing"}
    files = {"CONFIG_FILE": str(tmp_path / "none"), "SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    for name, value in {**settings, **files, "DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = uuid.uuid4().hex
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    """The URL of a folder, of a storage that is no file system, and of one that is reached by the network."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/store"
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def storage(url):
    return Storage(url)


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


def test_a_driver_that_is_missing_is_named_in_one_line(monkeypatch, tmp_path, capsys):
    """As where s3fs is not installed."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    assert run(["study", "run", "bitfit-table3", "--results", str(tmp_path), "--storage", "s3://bucket/study"]) == 2
    assert capsys.readouterr().err == "bitfit: --storage s3://bucket/study: Install s3fs to access S3\n"


@pytest.mark.parametrize(
    "settings, bucket, message",
    [
        ({"ENDPOINT_URL": "http://127.0.0.1:1"}, "", 'Could not connect to the endpoint URL: "http://127.0.0.1:1/'),
        ({"ACCESS_KEY_ID": "", "SECRET_ACCESS_KEY": ""}, "", "Unable to locate credentials"),
        ({}, "-mistyped", "The specified bucket does not exist"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_line(s3, settings, bucket, message, tmp_path, monkeypatch, capsys):
    import s3fs

    for name, value in {**settings, "MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    url = f"{s3}{bucket}/study"
    assert run(["study", "run", "bitfit-table3", "--results", str(tmp_path), "--storage", url]) == 1
    assert capsys.readouterr().err.startswith(f"bitfit: --storage {url}: {message}")


def test_a_lost_connection_is_an_error_that_callers_expect(s3, monkeypatch):
    """Checkpoints and signs of life go on after an OSError; the errors of drivers are of other classes."""
    storage = Storage(f"{s3}/store")

    def fail(*_, **__):
        raise RuntimeError("no answer")

    monkeypatch.setattr(storage._system, "cat_file", fail)
    with pytest.raises(OSError, match=r"--storage s3://.*: no answer"):
        storage.read("a")


@pytest.mark.parametrize(
    "path, url",
    [
        ("s3:/bucket/rows/*.csv", "s3://bucket/rows/*.csv"),  # what pathlib makes of the next one
        ("s3://bucket/rows/*.csv", "s3://bucket/rows/*.csv"),
        ("rows/*.csv", None),
        ("/rows/a:b.csv", None),
        ("C:/rows/a.csv", None),
        ("file:///rows/a.csv", None),
    ],
)
def test_a_url_is_told_from_a_path(path, url):
    assert url_of(path) == url


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


# ---- tables in a storage

remote = pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)  # tests/test_table.py has folders


@pytest.fixture
def table(url, base, folders, tmp_path):
    """Parquet files and one CSV file in the storage and in a folder; the words that answer their rows."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    delta_of(base, 0).save(tmp_path / "d.safetensors")
    texts = [text for text, _ in reviews(60)]
    for number, name in enumerate(("a/one", "a/two", "b/three")):
        path = tmp_path / "in" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"key": key, "text": text} for key, text in enumerate(texts[20 * number :][:20])]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (tmp_path / "in" / "four.csv").write_text("key,text\n1,good film\n2,bad\n")
    storage = Storage(url)
    for path in (tmp_path / "in").rglob("*.*"):
        storage.upload(path, path.relative_to(tmp_path / "in").as_posix())
    return ["predict", str(tmp_path / "d.safetensors"), "--base", str(folders("bert")), "--json"]


def written(folder):
    """The files in a folder and below it, without the list of inputs."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "scoring.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@remote
@pytest.mark.parametrize("pattern", ["a/", "a/*.parquet", "*/*.parquet", "**/*.parquet", "*.csv"])
def test_files_of_a_storage_are_answered_as_those_of_a_folder(table, url, pattern, tmp_path, capsys):
    assert run([*table, "--file", f"{url}/{pattern}", "--out", str(tmp_path / "far")]) == 0
    assert run([*table, "--file", str(tmp_path / "in" / pattern), "--out", str(tmp_path / "near")]) == 0
    far, near = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert far == near
    assert near["parts"] >= 1
    assert written(tmp_path / "far") == written(tmp_path / "near")


@remote
def test_a_second_run_keeps_the_parts_and_notices_a_file_that_changed(table, url, tmp_path, capsys):
    command = [*table, "--file", f"{url}/*/*.parquet", "--out", str(tmp_path / "out")]
    assert run(command) == 0
    (tmp_path / "out" / "a" / "two-00000.parquet").unlink()
    assert run(command) == 0
    assert [json.loads(line)["kept"] for line in capsys.readouterr().out.splitlines()] == [0, 2]
    Storage(url).upload(tmp_path / "in" / "a" / "two.parquet", "a/one.parquet")
    assert run(command) == 2
    assert "a/one.parquet has changed" in capsys.readouterr().err


@remote
def test_a_file_of_a_storage_that_cannot_be_read_does_not_lose_the_others(table, url, tmp_path, capsys):
    storage = Storage(url)
    storage.write("a/broken.parquet", b"PAR1 nothing")
    storage.write("a/empty.parquet", b"")
    assert run([*table, "--file", f"{url}/a/*", "--out", str(tmp_path / "out")]) == 3
    shown = capsys.readouterr()
    scored = json.loads(shown.out)
    assert {name.rpartition("/")[2] for name in scored["failures"]} == {"broken.parquet", "empty.parquet"}
    assert scored["parts"] == 2
    assert "://" in next(iter(scored["failures"]))
    assert set(written(tmp_path / "out")) == {"one-00000.parquet", "two-00000.parquet"}


@remote
def test_a_table_that_is_not_there_is_one_line(table, url, tmp_path, capsys):
    assert run([*table, "--file", f"{url}/none*.parquet", "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err.endswith("none*.parquet: no such files\n")


@remote
def test_parts_are_not_written_to_a_url(table, url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert run([*table, "--file", f"{url}/*.csv", "--out", f"{url}/out"]) == 2
    message = f"--out {url}/out: parts are written to a folder that all workers see; name one"
    assert capsys.readouterr().err == f"bitfit: {message}\n"
    assert set(tmp_path.iterdir()) == before
