"""Work on a real Ray cluster of several nodes, with workers that are killed."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bitfit import Plan, Predictor, load_base, train
from bitfit.cli.main import run
from bitfit.errors import UsageError
from support import delta_of, make_folder, reviews, shared, write_tasks

pytest.importorskip("ray")
pyarrow = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
MARK = "BITFIT_TEST_MARK"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two nodes of one core each, reachable from this machine only. Its processes carry a mark of this test."""
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # a busy machine would else leave workers next to nothing
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]))
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


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
    rows = [{"key": key, "text": draw.choice(texts), "task": draw.choice(names)} for key in range(100_000)]
    for number in range(4):
        own = rows[25_000 * number : 25_000 * (number + 1)]
        pq.write_table(pyarrow.Table.from_pylist(own), tmp_path / "in" / f"{number}.parquet")
    out = tmp_path / "out"
    killer = kill_when(lambda: len(list(out.glob("*.parquet"))) >= 2, "ray::MapWorker")
    engine = ray_engine(cluster.address, 2)
    found = score(Scoring(str(tmp_path / "deltas"), str(folder), task_column="task"), str(tmp_path / "in"), out, engine)
    assert killer.killed == ["ray::MapWorker"]
    assert found.errors == 0
    assert not found.failures
    assert not list(out.glob(".*"))
    answered = pq.read_table(sorted(out.glob("*.parquet"))).to_pylist()
    assert [row["key"] for row in answered] == list(range(100_000))
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


def test_a_study_on_bare_nodes_gives_the_results_of_one_machine(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BITFIT_CHECKPOINT_SECONDS", "0.2")
    base = make_folder(tmp_path / "tiny", "bert", num_hidden_layers=4)
    data = write_tasks(tmp_path / "data", ("sst2", "rte"), rows=24)
    nodes = [cluster.add_node(num_cpus=1, env_vars={"BITFIT_CACHE": str(tmp_path / f"node{n}")}) for n in range(2)]
    words = ["study", "run", "bitfit-table3", "--base", str(base), "--data", str(data), "--threads", "1"]
    words += ["--tasks", "sst2,rte", "--seeds", "2", "--lr", "1e-2", "--epochs", "400", "--method", "BitFit"]
    assert run([*words, "--results", str(tmp_path / "local")]) == 0
    disturbed = []

    def disturb() -> None:
        while not list((tmp_path / "ray").glob("passes/*/*/*/*.checkpoint")):
            time.sleep(0.1)
        cluster.remove_node(nodes[0], allow_graceful=False)
        disturbed.append(not ended)
        cluster.add_node(num_cpus=1, env_vars={"BITFIT_CACHE": str(tmp_path / "node2")})

    ended: list[bool] = []
    thread = threading.Thread(target=disturb)
    thread.start()
    more = ["--results", str(tmp_path / "ray"), "--engine", "ray", "--address", cluster.address]
    assert run([*words, *more]) == 0
    ended.append(True)
    thread.join()
    assert disturbed == [True]
    assert outcomes(tmp_path / "ray") == outcomes(tmp_path / "local")
    logs = list(
        tmp_path.glob("node[12]/nodes/*/unpacked")
    )  # not of the node that was killed, perhaps while it unpacked
    assert logs
    assert all(len(log.read_text().splitlines()) == 1 for log in logs)  # base and data came once to each node


def outcomes(folder: Path) -> dict[str, dict[str, object]]:
    """Every result by name, without what it cost."""
    found = {path.name: json.loads(path.read_text()) for path in (folder / "trials").glob("*.json")}
    return {name: {k: v for k, v in table.items() if k != "cost"} for name, table in found.items()}


def test_a_node_with_another_version_is_refused(monkeypatch):
    from bitfit.study import shipping

    class Ray:
        class util:
            get_node_ip_address = staticmethod(lambda: "10.0.0.7")

    with pytest.raises(UsageError, match=r"node 10\.0\.0\.7 has bitfit .*, the study runs 0\.0\.1"):
        shipping.unpacked(None, shipping.Shipment("0.0.1", None, None), Ray)
