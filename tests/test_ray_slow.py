"""Work on a real Ray cluster of several nodes, with workers that are killed."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import bitfit
from bitfit import Plan, Predictor, load_base, train
from bitfit.cli.main import run
from support import delta_of, make_folder, reviews, shared, write_tasks

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only; Ray reads it when it is imported
pytest.importorskip("ray")
pyarrow = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
MARK = "BITFIT_TEST_MARK"
STUDY_EPOCHS = os.environ.get("BITFIT_TEST_EPOCHS", "800")  # long enough to be killed in the middle
TABLE_ROWS = int(os.environ.get("BITFIT_TEST_ROWS", "100000"))


@pytest.fixture
def head(tmp_path, monkeypatch):
    """The head of a cluster, without cores, reachable from this machine only. Its processes carry a mark of this test.

    Nodes are added with `add_node`.
    """
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # a busy machine would else leave workers next to nothing
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")  # a killed node is noticed after 3 seconds
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]))
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def cluster(head, tmp_path):
    """A cluster of two nodes with one core each."""
    add_node(head, tmp_path / "one")
    add_node(head, tmp_path / "two")
    return head


def add_node(cluster, folder: Path, cores: int = 1, memory: int | None = None, **environment: str):
    """Add a node with a working folder and a cache of its own."""
    folder.mkdir()
    size = {} if memory is None else {"memory": memory}
    return cluster.add_node(num_cpus=cores, env_vars={"BITFIT_CACHE": str(folder), **environment}, **size)


def processes(title: str) -> list[int]:
    """The processes of this test's cluster whose title starts so."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            named = entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(title.encode())
            if named and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill_when(ready, title: str) -> threading.Thread:
    """Kill one process of this title as soon as `ready` says so."""

    def wait() -> None:
        while not ready():
            time.sleep(0.1)
        os.kill(random.choice(processes(title)), signal.SIGKILL)
        killed.append(title)

    killed: list[str] = []
    thread = threading.Thread(target=wait, daemon=True)
    thread.killed = killed  # type: ignore[attr-defined]
    thread.start()
    return thread


def test_a_table_of_many_tasks_is_answered_once_although_a_worker_dies(cluster, tmp_path):
    from bitfit.prediction.ray_table import ray_engine
    from bitfit.prediction.table import Scoring, score

    folder = make_folder(tmp_path / "m", "bert")
    base = load_base(folder)
    (tmp_path / "deltas").mkdir()
    (tmp_path / "in").mkdir()
    names = [f"task{number}" for number in range(50)]
    for seed, name in enumerate(names):
        delta_of(base, seed, labels=2 + seed % 3).save(tmp_path / "deltas" / f"{name}.safetensors")
    draw = random.Random(0)
    texts = [text for text, _ in reviews(2000)]
    rows = [{"key": key, "text": draw.choice(texts), "task": draw.choice(names)} for key in range(TABLE_ROWS)]
    quarter = TABLE_ROWS // 4
    for number in range(4):
        part = rows[quarter * number : quarter * (number + 1)]
        pq.write_table(pyarrow.Table.from_pylist(part), tmp_path / "in" / f"{number}.parquet")
    out = tmp_path / "out"
    killer = kill_when(lambda: len(list(out.glob("*.parquet"))) >= 2, "ray::MapWorker")
    engine = ray_engine(cluster.address, 2)
    found = score(Scoring(str(tmp_path / "deltas"), str(folder), task_column="task"), str(tmp_path / "in"), out, engine)
    assert killer.killed == ["ray::MapWorker"]
    assert found.errors == 0
    assert not found.failures
    assert not list(out.glob(".*"))
    answered = pq.read_table(sorted(out.glob("*.parquet"))).to_pylist()
    assert [row["key"] for row in answered] == list(range(TABLE_ROWS))
    assert Counter(row["task"] for row in answered) == Counter(row["task"] for row in rows)
    for name in names:
        own = [row for row in answered if row["task"] == name]
        expected = list(Predictor(tmp_path / "deltas" / f"{name}.safetensors", base).answers(r["text"] for r in own))
        assert [row["score"] for row in own] == pytest.approx([answer["score"] for answer in expected], abs=1e-5)
        clear = [
            i for i, answer in enumerate(expected) if sorted(answer["scores"].values())[-2] < answer["score"] - 1e-4
        ]
        assert [own[i]["label"] for i in clear] == [expected[i]["label"] for i in clear]


def same(one, other):
    """Whether two deltas are equal up to rounding; the gradient of b_k is nothing but rounding."""
    assert one.tensors.keys() == other.tensors.keys()
    for name, values in one.tensors.items():
        if ".key." not in name:
            np.testing.assert_allclose(values, other.tensors[name], rtol=0, atol=1e-5, err_msg=name)


def test_two_workers_train_minilm_as_one_process_does(cluster, tmp_path):
    from bitfit.training.ray_training import train_on_ray

    with gzip.open(shared() / "data" / "sst2" / "dev.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    path = tmp_path / "sst2.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:500]))
    plan = Plan(lr=[5e-4, 1e-3], batch=8, epochs=2, threads=1)
    said: list[str] = []
    together = train_on_ray(
        str(path), None, plan, tmp_path / "d.safetensors", say=said.append, address=cluster.address, workers=2
    )
    alone = train(path, plan=plan)
    assert alone.best.history.losses[-1].step >= 100
    for own, other in zip(alone.trials, together.trials, strict=True):
        same(own.delta, other.delta)
    assert any("2 workers summed" in text for text in said)


def test_a_training_whose_worker_dies_ends_in_the_same_delta(cluster, tmp_path):
    from bitfit.training.ray_training import train_on_ray

    folder = make_folder(tmp_path / "m", "bert")
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews(640)))
    plan = Plan(lr=[1e-3, 3e-3], batch=4, epochs=20, threads=1)
    out = tmp_path / "d.safetensors"
    killer = kill_when(lambda: list(tmp_path.glob("d.run/*.checkpoint")), "ray::Worker.train")
    said: list[str] = []
    options = {"address": cluster.address, "workers": 2, "checkpoint_seconds": 0.2, "say": said.append}
    together = train_on_ray(str(path), str(folder), plan, out, **options)
    assert killer.killed
    assert any("A worker died" in text for text in said)
    alone = train(path, str(folder), plan=plan)
    for own, other in zip(alone.trials, together.trials, strict=True):
        same(own.delta, other.delta)
    assert not list(tmp_path.glob("d.run/*.checkpoint"))


def study_words(base, data, results, *more):
    """A study of two tasks and several passes, as a command."""
    command = ["study", "run", "bitfit-table3", "--base", str(base), "--data", str(data), "--results", str(results)]
    small = ["--tasks", "sst2,rte", "--seeds", "2", "--lr", "1e-2", "--method", "BitFit", "--lanes", "1"]
    return [*command, *small, "--epochs", STUDY_EPOCHS, "--threads", "1", *more]


def start_study(folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """A driver in a process of its own, with a working folder and a cache of its own."""
    folder.mkdir()
    environment = {**os.environ, "BITFIT_CACHE": str(folder / "cache")}
    with (folder / "said").open("wb") as said:
        return subprocess.Popen([sys.executable, "-m", "bitfit", *words], cwd=folder, env=environment, stderr=said)


def wait_for(ready, process=None, seconds=900.0) -> None:
    """Wait until something is so; an error if a process ends before."""
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "waited too long"
        assert process is None or process.poll() is None, "the process ended too early"
        time.sleep(0.05)


def test_a_study_survives_the_loss_of_nodes_and_of_its_driver(head, tmp_path, monkeypatch, capsys):
    """Three nodes with nothing but bitfit; one is killed, one joins, the driver is killed and starts elsewhere."""
    monkeypatch.setenv("BITFIT_CHECKPOINT_SECONDS", "0.2")
    base = make_folder(tmp_path / "tiny", "bert", num_hidden_layers=4)
    data = write_tasks(tmp_path / "data", ("sst2", "rte"), rows=24)
    assert run(study_words(base, data, tmp_path / "local")) == 0
    nodes = [add_node(head, tmp_path / f"node{number}") for number in range(3)]
    store = tmp_path / "store"

    def checkpoints() -> list[Path]:
        return list(store.glob("passes/*/*/*/*.checkpoint"))

    def said() -> str:
        return (tmp_path / "machine1" / "said").read_text()

    ray_words = ["--engine", "ray", "--address", head.address, "--storage", str(store)]
    first = start_study(tmp_path / "machine1", study_words(base, data, "results", *ray_words))
    wait_for(lambda: len({path.parent for path in checkpoints()}) >= 3, first)
    head.remove_node(nodes[0], allow_graceful=False)
    add_node(head, tmp_path / "node3")
    wait_for(lambda: "joined" in said() and "left; its passes run again elsewhere" in said(), first)
    wait_for(lambda: "a pass lost its worker and began again (attempt 2)" in said(), first)
    first.kill()
    first.wait()
    assert checkpoints()
    # The other machine has neither the base nor the data, and another folder of results.
    base.rename(tmp_path / "moved-base")
    data.rename(tmp_path / "moved-data")
    second = start_study(tmp_path / "machine2", study_words(base, data, "results", *ray_words))
    assert second.wait(timeout=1500) == 0, (tmp_path / "machine2" / "said").read_text()
    whole = outcomes(tmp_path / "local")
    assert len(whole) == 4
    assert outcomes(tmp_path / "machine2" / "results") == whole
    assert outcomes(store) == whole
    assert not list(store.glob("passes/*/*/*"))
    logs = list(tmp_path.glob("node[123]/nodes/*/fetched"))  # node 0 was killed, perhaps while it fetched
    assert logs
    assert all(len(log.read_text().splitlines()) == 1 for log in logs)


def test_the_workers_of_a_node_share_one_copy_of_the_base(head, tmp_path):
    """Two workers of a node train at once. The node fetched the weights once, and both map that file."""
    base = make_folder(tmp_path / "wide", "bert", intermediate_size=1 << 16)
    size = (base / "model.safetensors").stat().st_size
    data = write_tasks(tmp_path / "data", ("sst2", "rte"), rows=24)
    add_node(head, tmp_path / "node", cores=2)
    ray_words = ["--engine", "ray", "--address", head.address, "--storage", str(tmp_path / "store")]
    driver = start_study(tmp_path / "machine", study_words(base, data, "results", *ray_words, "--epochs", "40"))
    shared: dict[int, dict[str, int]] = {}

    def look() -> bool:
        for pid in processes("ray::_perform"):
            found = mapped(pid, str(tmp_path / "node"))
            if found.get("Rss", 0) > size / 2:
                shared[pid] = found
        return len(shared) >= 2

    wait_for(look, driver)
    assert driver.wait(timeout=1500) == 0
    for found in shared.values():
        assert found["Private_Dirty"] < size / 100
    logs = list((tmp_path / "node").glob("nodes/*/fetched"))
    assert sorted(log.read_text() for log in logs) == ["rte\n", "sst2\n", "wide\n"]


def mapped(pid: int, folder: str) -> dict[str, int]:
    """How a process holds the weights that lie in a folder, in bytes: all, and what only this process has."""
    found: dict[str, int] = {}
    counts = False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        key, _, value = line.partition(":")
        if " " in key:  # the head of a mapping
            counts = folder in line and line.endswith(".safetensors")
        elif counts and key in ("Rss", "Private_Dirty"):
            found[key] = found.get(key, 0) + 1024 * int(value.split()[0])
    return found


def test_passes_are_placed_by_their_threads(head, tmp_path, capsys):
    base = make_folder(tmp_path / "tiny", "bert")
    data = write_tasks(tmp_path / "data", ("sst2",), rows=24)
    add_node(head, tmp_path / "small", cores=1)
    add_node(head, tmp_path / "large", cores=2)
    words = study_words(base, data, tmp_path / "results", "--tasks", "sst2", "--epochs", "1")
    ray_words = ["--engine", "ray", "--address", head.address]
    assert run([*words, *ray_words, "--threads", "9"]) == 2
    assert "--threads 9: no node of the cluster has so many cores (at most 2)" in capsys.readouterr().err
    assert run([*words, *ray_words, "--threads", "2"]) == 0
    assert list((tmp_path / "large").iterdir())
    assert not list((tmp_path / "small").iterdir())


def test_passes_are_placed_by_their_memory(head, tmp_path, capsys):
    """Two passes, which may run at once. The head has memory enough, but no cores."""
    base = make_folder(tmp_path / "wide", "bert", intermediate_size=1 << 14)
    data = write_tasks(tmp_path / "data", ("sst2",), rows=24)
    words = study_words(base, data, tmp_path / "results", "--tasks", "sst2", "--epochs", "1")
    ray_words = ["--engine", "ray", "--address", head.address]
    add_node(head, tmp_path / "small", cores=2, memory=2_000_000)
    assert run([*words, *ray_words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"sst2: a pass needs about [1-9]\d* MB of memory, no node .* \(at most 2 MB\); use fewer", error)
    add_node(head, tmp_path / "large", cores=1, memory=500_000_000)
    assert run([*words, *ray_words]) == 0
    assert list((tmp_path / "large").iterdir())
    assert not list((tmp_path / "small").iterdir())
    assert len(outcomes(tmp_path / "results")) == 2


def test_a_node_with_another_version_is_refused_in_one_line(head, tmp_path, capsys):
    """The other node imports a copy of bitfit that says it is another version."""
    other = tmp_path / "other" / "bitfit"
    shutil.copytree(Path(bitfit.__file__).parent, other)
    text = (other / "__init__.py").read_text()
    (other / "__init__.py").write_text(text.replace(f'"{bitfit.__version__}"', '"0.0.1"'))
    add_node(head, tmp_path / "node", PYTHONPATH=os.pathsep.join([str(other.parent), os.environ["PYTHONPATH"]]))
    base = make_folder(tmp_path / "tiny", "bert")
    data = write_tasks(tmp_path / "data", ("sst2",), rows=24)
    words = study_words(base, data, tmp_path / "results", "--tasks", "sst2", "--epochs", "1")
    assert run([*words, "--engine", "ray", "--address", head.address]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "has bitfit 0.0.1, this command is of" in error


def outcomes(folder: Path) -> dict[str, dict[str, object]]:
    """Every result by name, without what it cost."""
    found = {path.name: json.loads(path.read_text()) for path in (folder / "trials").glob("*.json")}
    return {name: {k: v for k, v in table.items() if k != "cost"} for name, table in found.items()}
