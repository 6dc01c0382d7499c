"""Storages that several machines reach: studies that they run in turn, and tables whose files are there."""

from __future__ import annotations

import json
import shutil
import sys
import time
import uuid
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from bitfit.cli.main import run
from bitfit.data.storage import Storage, matching, shown, stamp, url_of
from bitfit.errors import DataError, Interrupted, UsageError
from bitfit.prediction.table import Scorer, Scoring, score
from bitfit.study import forecast, passes, ray_engine, runner
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


def test_a_path_that_exists_is_no_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ab:").mkdir()
    (tmp_path / "ab:" / "x").touch()
    assert url_of("ab:/x") is None
    assert url_of("ab:/y") == "ab://y"
    assert url_of("s3://bucket/" + 300 * "y") is not None


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The URL of a folder on a server, whose driver forgets the user and the host, as that of sftp does."""

    class Server(LocalFileSystem):
        protocol = ("host",)

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.partition("://")[2].partition("/")[2].rstrip("/") if "://" in path else path

    monkeypatch.setitem(_registry, "host", Server)
    (tmp_path / "rows" / "b").mkdir(parents=True)
    for name in ("a.csv", "b/c.csv"):
        (tmp_path / "rows" / name).write_text("text\ngood\n")
    return f"host://me:secret@there{tmp_path}"


@pytest.mark.parametrize(
    "pattern, files",
    [
        ("rows/a.csv", {"rows/a.csv": "a.csv"}),
        ("rows", {"rows/a.csv": "a.csv"}),
        ("rows/", {"rows/a.csv": "a.csv"}),
        ("*/*.csv", {"rows/a.csv": "rows/a.csv"}),
        ("rows/**/*.csv", {"rows/a.csv": "a.csv", "rows/b/c.csv": "b/c.csv"}),
    ],
)
def test_files_keep_the_host_of_their_url(host, pattern, files):
    assert matching(f"{host}/{pattern}") == {f"{host}/{name}": below for name, below in files.items()}


def test_a_storage_keeps_the_host_of_its_url(host):
    assert Storage(f"{host}/store").url == f"{host}/store"


@pytest.mark.parametrize(
    "text, public",
    [
        ("sftp://me:a@b@host/rows/a@b.csv", "sftp://host/rows/a@b.csv"),
        ("403, url='https://host/a.csv?sig=x/y&z=1'", "403, url='https://host/a.csv'"),
        ("https://host/a.csv?secret", "https://host/a.csv"),
        ("s3://bucket/a.csv?versionId=3", "s3://bucket/a.csv"),
        ("s3://bucket/rows-?/year=2024/*.csv", "s3://bucket/rows-?/year=2024/*.csv"),
    ],
)
def test_messages_show_urls_without_secrets(text, public):
    assert shown(text) == public


def test_errors_show_urls_without_secrets(host, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise PermissionError(f"{host}/rows: forbidden")

    command = ["predict", str(tmp_path / "d.safetensors"), "--out", str(tmp_path / "out"), "--file"]
    assert run([*command, f"{host}/none*.csv"]) == 3
    assert run([*command[:2], "--out", f"{host}/out", "--file", f"{host}/rows"]) == 2
    monkeypatch.setattr(_registry["host"], "ls", fail)
    assert run([*command, f"{host}/rows"]) == 1
    error = capsys.readouterr().err
    assert error.count("host://there/") == 4
    assert "secret" not in error


@pytest.mark.parametrize(
    "info, version",
    [
        ({"created": 1, "ETag": "x"}, ["x"]),
        ({"ETag": None, "Last-Modified": "today"}, ["today"]),
        ({"modify": 3}, ["3"]),
        ({"blob_id": "b"}, ["b"]),
        ({}, []),
    ],
)
def test_a_stamp_is_the_size_and_the_version(info, version, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *_: {"size": 5, **info})
    assert stamp("memory://a") == [5, *version]


@pytest.mark.parametrize("url", ["folder", "s3"], indirect=True)
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


@pytest.mark.parametrize("url", ["folder", "s3"], indirect=True)
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


@pytest.mark.parametrize("url", ["folder", "s3"], indirect=True)
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
@pytest.mark.parametrize("method, parts", [("info", 2), ("cat_file", 3), ("get_file", 2)])
def test_an_object_that_is_forbidden_does_not_lose_the_others(table, url, method, parts, tmp_path, monkeypatch, capsys):
    """Its size, its end, or all of it cannot be read. Its end is not needed: the file is then not divided."""
    system = Storage(url)._system
    real = getattr(system, method)

    def forbidden(path, *others, **options):
        if path.endswith("one.parquet"):
            raise PermissionError("forbidden")
        return real(path, *others, **options)

    monkeypatch.setattr(system, method, forbidden)
    code = run([*table, "--file", f"{url}/*/*.parquet", "--out", str(tmp_path / "out")])
    scored = json.loads(capsys.readouterr().out)
    assert scored["parts"] == parts
    assert [name.rpartition("/")[2] for name in scored["failures"]] == (3 - parts) * ["one.parquet"]
    assert code == (0 if parts == 3 else 3)


@remote
def test_a_storage_that_does_not_tell_versions_keeps_no_parts(table, url, tmp_path, monkeypatch, capsys):
    command = [*table, "--file", f"{url}/*.csv", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("bitfit.data.storage.STAMPS", ())
    assert run(command) == 0
    assert run(command) == 2
    assert "four.csv may have changed, its storage does not tell" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0


@remote
def test_two_scorings_into_one_folder_have_copies_of_their_own(table, url, tmp_path, monkeypatch):
    """The second one runs while the first reads its copy."""
    command = [*table, "--file", f"{url}/a/*", "--out", str(tmp_path / "out")]
    real = Scorer._score_part

    def both(self, *arguments):
        monkeypatch.setattr(Scorer, "_score_part", real)
        (copy,) = (tmp_path / "out").glob(".inputs-*/*.parquet")
        assert run(command) == 0
        assert copy.is_file()
        return real(self, *arguments)

    monkeypatch.setattr(Scorer, "_score_part", both)
    assert run(command) == 0
    assert set(written(tmp_path / "out")) == {"one-00000.parquet", "two-00000.parquet"}
    assert not list((tmp_path / "out").glob(".inputs*"))


@pytest.mark.parametrize(
    "below", ["/a.csv", "b//a.csv", "../a.csv", "b/../../a.csv", "./a.csv", "b\\a.csv", "C:/a.csv"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(below, tmp_path, monkeypatch):
    monkeypatch.setattr("bitfit.data.storage.matching", lambda url: {f"s3://bucket/rows/{below}": below})
    with pytest.raises(DataError, match=r"^s3://bucket/rows/.*: cannot be the name of a file"):
        score(Scoring("d.safetensors"), "s3://bucket/rows/*", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_name_in_s3_is_refused(s3, tmp_path):
    Storage(s3).write("rows//2024/a.csv", b"text\ngood\n")
    with pytest.raises(DataError, match=r"^s3://.*/rows//2024/a\.csv: cannot be the name of a file"):
        score(Scoring("d.safetensors"), f"{s3}/rows/**/*.csv", tmp_path / "out")


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


# ---- what a cluster needs for a study


def test_a_node_that_is_away_ends_no_study(monkeypatch):
    """Passes that no node can take are refused before the first of them begins, and never later."""
    large = {"Alive": True, "Resources": {"CPU": 4.0, "memory": 2e9}}
    cluster = SimpleNamespace(nodes=lambda: [large])
    queue = SimpleNamespace(run=lambda progress: iter(()))
    monkeypatch.setattr(ray_engine, "connect", lambda *_: cluster)
    monkeypatch.setattr(ray_engine, "_Queue", lambda *_: queue)
    works = [SimpleNamespace(threads=1, memory=size, opening=SimpleNamespace(task="sst2")) for size in (1e6, 1e9)]
    said = []

    def run_stage(engine, works):
        return list(engine(works, lambda _: None))

    engine = ray_engine.ray_engine(say=said.append)
    run_stage(engine, works)
    large["Alive"] = False
    run_stage(engine, works)
    assert said == [
        "--threads 1: no node of the cluster has so many cores (at most 0); the study waits for such a node"
    ]
    large.update(Alive=True, Resources={"CPU": 4.0, "memory": 5e8})
    engine = ray_engine.ray_engine()
    run_stage(engine, [])  # a stage whose trials are all there
    with pytest.raises(UsageError, match="a pass needs about 1,000 MB of memory"):
        run_stage(engine, works)


@pytest.mark.parametrize("name, copied", [("bert", True), ("gpt2", False)])
def test_the_memory_of_copies_is_counted_where_there_are_copies(bases, name, copied):
    class NoRows(tuple):
        ids = ()

    base = bases(name)
    job = SimpleNamespace(base=base, train=SimpleNamespace(rows=NoRows()))
    selection = SimpleNamespace(count=0, learned=None)
    trial = SimpleNamespace(trial=SimpleNamespace(batch=8), resolution=SimpleNamespace(selection=selection))
    beside_the_base = forecast.memory(job, [trial]) - 4 * base.anatomy.total
    assert beside_the_base > 76e6 if copied else beside_the_base == 0
