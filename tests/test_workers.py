"""Model processes: a real service that has them, and how a batch travels."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the serve extra")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from bench_serve import Process, served

from bitfit import predict
from bitfit.prediction.host import Host
from bitfit.serve import workers
from bitfit.serve.client import Client
from service import TEXTS, numbers, until

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="model processes are for Linux"),
]


@pytest.fixture
def process(folders: Any, tasks: Any, tmp_path: Path) -> Any:
    with served(tmp_path, "--base", str(folders("bert")), "--workers", "2") as running:
        yield running


def answered(process: Process, task: str, paired: bool) -> list[list[float]]:
    inputs = [{"text": text, "text_pair": TEXTS[0]} if paired else text for text in TEXTS]
    return [numbers(answer) for answer in Client(process.url).predict(task, inputs)]


def same(process: Process, base: Any, deltas: Any) -> bool:
    return all(
        np.allclose(answered(process, name, name == "pair"), _expected(delta, base, name == "pair"), atol=1e-5)
        for name, delta in deltas.items()
        if name in ("two", "five", "value", "pair", "sparse", "dense", "several")
    )


def _expected(delta: Any, base: Any, paired: bool) -> list[list[float]]:
    texts = [(text, TEXTS[0]) for text in TEXTS] if paired else TEXTS
    return [numbers(answer) for answer in predict(delta, texts, base)]


def test_a_service_with_model_processes_answers_as_predict_does(process, base, tasks):
    assert len(process.workers) == 2 and same(process, base, tasks)


def test_a_killed_model_process_costs_no_answer(process, base, tasks):
    for worker in process.workers:
        os.kill(worker, signal.SIGKILL)
    assert same(process, base, tasks) and Client(process.url).ready()


def test_a_stuck_model_process_is_not_ready(process):
    for worker in process.workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        until(lambda: not Client(process.url).ready(), 6)
    finally:
        for worker in process.workers:
            os.kill(worker, signal.SIGCONT)
    until(lambda: Client(process.url).ready())


def test_a_stop_signal_to_the_whole_group_leaves_the_model_processes_to_the_service(process, base, tasks):
    for worker in process.workers:
        os.kill(worker, signal.SIGTERM)
    assert same(process, base, tasks)
    assert all(Path(f"/proc/{worker}/exe").exists() for worker in process.workers)
    assert process.stop() == 0


def test_a_model_process_holds_no_port_open(process):
    port = int(process.url.rsplit(":", 1)[1].strip("/"))
    for worker in process.workers:
        inodes = [str(file.readlink()) for file in Path(f"/proc/{worker}/fd").iterdir()]
        listening = [line.split() for line in Path(f"/proc/{worker}/net/tcp").read_text().splitlines()[1:]]
        own = {f"socket:[{line[9]}]" for line in listening if line[1].endswith(f":{port:04X}") and line[3] == "0A"}
        assert own and not own & set(inodes)


def test_no_model_process_outlives_a_killed_service(process):
    own = process.workers
    process.process.kill()
    until(lambda: not any(Path(f"/proc/{worker}/exe").exists() for worker in own))


def test_a_batch_travels_with_what_it_shares_written_once(base, tasks, monkeypatch):
    host = Host(base)
    monkeypatch.setattr(workers, "_host_of_process", [host])
    resident = host.admit(tasks["sparse"])
    batch = [(resident, reading.rows) for reading in host.read(resident, TEXTS)]
    back = pickle.loads(workers._pickled(batch))
    assert len({id(resident) for resident, _ in back}) == 1
    assert all(np.array_equal(a, b) for a, b in zip(host.outputs(back), host.outputs(batch), strict=True))


def test_a_pass_that_fails_in_a_process_is_an_error_and_not_its_death(base, tasks):
    pipe = _Pipe((None, "ValueError: odd"))
    worker = workers.Worker.__new__(workers.Worker)
    worker._pipe, worker._alive = pipe, True  # type: ignore[assignment]
    host = Host(base)
    resident = host.admit(tasks["two"])
    with pytest.raises(RuntimeError, match="odd"):
        worker.outputs([(resident, host.read(resident, ["good"])[0].rows)])
    assert worker._alive


class _Pipe:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def send_bytes(self, data: bytes) -> None:
        assert data

    def recv_bytes(self) -> bytes:
        return pickle.dumps(self.answer)
