"""What serving costs, against its targets: `python benchmarks/bench_serve.py` (`--quick` for a first look).

1,000 tasks on MiniLM-L6 and SST-2 texts, asked by 64 clients on the same cores, beside a plain loop of stock
transformers over one task (batch 32, dynamic padding, tokenizing included). The two take turns, in windows of a few
seconds; what counts is the median of the ratios of neighbouring windows. On a machine that others use too, the ratio of
CPU times says more than that of wall times: it is the throughput of two cores that are ours alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import bitfit
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.data.examples import Columns
from bitfit.delta.delta import Delta
from bitfit.delta.meta import Meta, Score
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.serve.client import Client
from bitfit.serve.load import Load, Result, measure

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("BITFIT_SHARED", ROOT.parent / "shared"))


def texts() -> list[str]:
    """SST-2's dev sentences."""
    with gzip.open(SHARED / "data" / "sst2" / "dev.jsonl.gz", "rt") as file:
        return [json.loads(line)["sentence"] for line in file]


def make_tasks(base: bitfit.Base, folder: Path, count: int, first: int = 0) -> None:
    """Deltas of the whole bias selection with values of their own: their cost does not depend on what they learnt."""
    model = Model(base, 2)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias"))])
    start = bank.values.clone()
    meta = Meta(
        base=base.name, hub=False, fingerprint=base.fingerprint, select="bias", head="full", init="keep",
        pool=model.pool, task="classification", labels=("bad", "good"), center=0.0, spread=1.0,
        columns=Columns("text", None, "label"), max_length=128, metric="accuracy",
        metrics={"dev": {"accuracy": Score(0.5, 0.4, 0.6)}}, trained=start.numel(), total=22_713_216, change={},
        versions={},
    )  # fmt: skip
    for k in range(first, first + count):
        noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(k))
        bank.values.copy_(start + 0.02 * noise)
        Delta(bank.tensors(0), meta).save(folder / f"task-{k:05d}.safetensors")


class Process:
    """A service in a process of its own."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "bitfit", "serve", str(folder), "--port", "0", "--log", "warning", *options]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **environment}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=given)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r'"url": "(http[^"]+)"', line):
                self.url = found[1]
                return
            sys.stderr.write(line)
        raise RuntimeError("the service did not start")

    @property
    def workers(self) -> list[int]:
        """Its model processes."""
        pid = self.process.pid
        return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def cpu(self) -> float:
        """CPU seconds so far, of all its processes."""
        ticks = 0
        for pid in (self.process.pid, *self.workers):
            parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(parts[11]) + int(parts[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def front_cpu(self) -> tuple[float, float]:
        """CPU seconds so far of the event loop's thread, and of the whole front process without its model processes."""
        threads = Path(f"/proc/{self.process.pid}/task")
        seconds = {int(path.name): int((path / "schedstat").read_text().split()[0]) / 1e9 for path in threads.iterdir()}
        return seconds[self.process.pid], sum(seconds.values())

    @property
    def memory(self) -> int:
        """Bytes in memory, of all its processes; what they share counts once."""
        rolls = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (self.process.pid, *self.workers))
        return sum(int(re.search(r"^Pss: +(\d+)", roll, re.M)[1]) for roll in rolls) << 10  # type: ignore[index]

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def served(folder: Path, *options: str, **environment: str) -> Iterator[Process]:
    """A service for a while."""
    process = Process(folder, *options, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        sys.stderr.write(process.process.communicate()[1])


class Stock:
    """The plain loop: one task, batches of 32 in the order of the file, padded to their longest."""

    def __init__(self, base: bitfit.Base, threads: int) -> None:
        self.base, self.head, self.threads = base, torch.nn.Linear(base.width, 2), threads

    def run(self, sentences: list[str], seconds: float) -> tuple[float, float]:
        """Texts per wall second with all threads, and CPU seconds per text with one, which waits for no other."""
        return self._run(sentences, seconds, self.threads)[0], self._run(sentences, seconds / 2, 1)[1]

    def _run(self, sentences: list[str], seconds: float, threads: int) -> tuple[float, float]:
        torch.set_num_threads(threads)
        count, began, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            self.batch([sentences[(count + i) % len(sentences)] for i in range(32)])
            count += 32
        return count / (time.monotonic() - began), (time.process_time() - cpu) / count

    @torch.inference_mode()
    def batch(self, sentences: list[str]) -> list[int]:
        """The classes of some texts."""
        given = self.base.tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")
        hidden, mask = self.base.encoder(**given).last_hidden_state, given["attention_mask"][..., None]
        return self.head((hidden * mask).sum(1) / mask.sum(1)).argmax(-1).tolist()  # type: ignore[no-any-return]


def window(process: Process, load: Load, sentences: list[str], names: list[str]) -> tuple[Result, float]:
    """A load, and the CPU seconds per text of service and clients together."""
    own, other = time.process_time(), process.cpu
    found = measure(load, sentences, names)
    spent = time.process_time() - own + process.cpu - other
    return found, spent / max(1, len(found.latencies) * load.texts)


def throughput(process: Process, stock: Stock, sentences: list[str], names: list[str], per_request: int,
               windows: int, seconds: float) -> dict[str, Any]:  # fmt: skip
    """Ratios of service over stock loop: by wall time and by CPU time."""
    wall, cpu, rates, codes = [], [], [], set()
    for seed in range(windows + 1):
        plain, plain_cpu = stock.run(sentences, seconds)
        found, cost = window(process, Load(process.url, 64, per_request, seconds, seed=seed), sentences, names)
        if seed:  # the first loads the tasks
            rate = found.json()["texts_per_second"]
            wall.append(rate / plain), cpu.append(plain_cpu / cost), rates.append((rate, plain))
            codes |= set(found.codes)
            costs = f"CPU ms {cost * 1e3:.2f} and {plain_cpu * 1e3:.2f}"
            print(f"  {per_request} texts: {rate:.0f}/s, stock {plain:.0f}/s; {costs}", flush=True)
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu), "codes": sorted(codes),
            "texts_per_second": statistics.median(rate for rate, _ in rates)}  # fmt: skip


def front(process: Process, sentences: list[str], names: list[str], windows: int, seconds: float) -> None:
    """Print the CPU of the front process per request: one text of one task, at a fixed rate."""
    for rate in (20, 60):
        loop, whole = [], []
        for seed in range(windows):
            before = process.front_cpu
            found = measure(Load(process.url, 16, 1, seconds, rate, seed), sentences, names[:1])
            after = process.front_cpu
            count = sum(found.codes.values())
            loop.append((after[0] - before[0]) / count * 1e3)
            whole.append((after[1] - before[1]) / count * 1e3)
        costs = f"event loop {statistics.median(loop):.2f} ms, front process {statistics.median(whole):.2f} ms"
        print(f"CPU of the front per request at {rate} requests/s: {costs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--front", action="store_true", help="only the CPU per request of the front process")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the stock loop and the service alike"
    )
    args = parser.parse_args()
    windows, seconds = (2, 4.0) if args.quick else (5, 10.0)
    sentences, base = texts(), bitfit.load_base()
    with tempfile.TemporaryDirectory() as name:
        make_tasks(base, Path(name), args.tasks)
        stock = Stock(base, args.threads)
        with served(Path(name), "--workers", str(args.threads), "--deadline", "60") as process:
            names = [task["name"] for task in Client(process.url).tasks()]
            window(process, Load(process.url, 8, 50, 1, seed=99), sentences, names[:1])
            front(process, sentences, names, windows, seconds / 2)
            if args.front:
                return
            for per_request, target in ((16, 1.0), (1, 0.7)):
                found = throughput(process, stock, sentences, names, per_request, windows, seconds)
                ratios = f"{found['wall']:.2f}x wall, {found['cpu']:.2f}x CPU (target {target}x)"
                print(f"{per_request} texts a request: {ratios}, codes {found['codes']}")
                half = Load(process.url, 64, per_request, 2 * seconds, rate=found["texts_per_second"] / per_request / 2)
                half_load = measure(half, sentences, names)
                print(f"at half of that load:\n{half_load.table()}", flush=True)


if __name__ == "__main__":
    main()
