"""What bitfit costs, against its targets: `make bench`, or `python benchmarks/bench.py --only mixed --quick`.

Both sides of a figure run in turn on the same batches in one process, on one thread; what counts is CPU time: for an
epoch the sum over its batches, else the median of the ratios. The stock side is transformers with dynamic padding, SDPA
attention and fused AdamW; dropout is 0.1 on both sides. Tokenizing is in neither.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from sides import (
    PEERS,
    ROOT,
    DenseMask,
    Ours,
    Peft,
    PlainRun,
    Served,
    Step,
    Stock,
    batch,
    bert_base,
    mini,
    peft_mixed,
    rows_of,
    shaped,
    some_delta,
    source,
    texts,
)

import bitfit
from bitfit import Base, Delta, Model
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.data import loading
from bitfit.delta.fold import serving_form
from bitfit.model.language import select
from bitfit.model.rows import Rows
from bitfit.training import job

RESULTS = ROOT / "benchmarks" / "results.md"
Sides = Mapping[str, Step]


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None  # None: for information


def at_least(what: str, value: float, target: float) -> Figure:
    return Figure(what, f"{value:.2f}x", f">= {target}x", value >= target)


def at_most(what: str, value: float, target: float, unit: str = "x") -> Figure:
    return Figure(what, f"{value:.3g}{unit}", f"<= {target}{unit}", value <= target)


def note(what: str, value: str) -> Figure:
    return Figure(what, value)


# Measuring


def times(sides: Sides, batches: int) -> dict[str, np.ndarray]:
    """CPU seconds of every side on every batch, the sides in turn; the first batch warms up and does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(batches + 1):
        for name, step in sides.items():
            began = time.process_time()
            step(i)
            if i:
                found[name].append(time.process_time() - began)
    return {name: np.array(seconds) for name, seconds in found.items()}


def total(over: np.ndarray, under: np.ndarray) -> float:
    return float(over.sum() / under.sum())


def ratio(over: np.ndarray, under: np.ndarray) -> float:
    return float(np.median(over / under))


# The figures: one function per section


def steps(n: int) -> Iterator[Figure]:
    """Epochs, timed on 200 batches or the whole of a smaller task; the slow peers on ten batches.

    Stock's class reads the CLS token; a mean over the tokens, this base's default, needs all of the last layer.
    """
    for task, size, target, pools in (("sst2", 8, 2.0, ("cls", "mean")), ("rte", 16, 1.8, ("mean",))):
        name = f"MiniLM, {task} batch {size}, BitFit epoch: faster than"
        ours = {pool: Ours(mini(), task, size, pool=pool) for pool in pools}
        found = times({"stock": Stock(mini(), task, size), **ours}, epoch(task, size, n))
        for pool in ours:
            yield at_least(f"{name} stock bias-only (ours: {pool})", total(found["stock"], found[pool]), target)
            median = ratio(found["stock"], found[pool])
            yield note(f"{name} stock bias-only (ours: {pool}), median of the steps", f"{median:.2f}x")
        recipe = {"recipe": Stock(mini(), task, size, recipe=True)} if task == "sst2" else {}
        peers = {peer: Peft(mini(), task, size, peer) for peer in PEERS}
        found = times({"ours": ours["mean"], **recipe, **peers}, n)
        if recipe:
            against = total(found["recipe"], found["ours"])
            yield at_least(f"{name} the original recipe (pad to 128, eager)", against, 8)
        for peer in peers:
            yield note(f"{name} PEFT {peer}", f"{total(found[peer], found['ours']):.2f}x")
        if not peers:
            yield note(f"{name} PEFT", "`pip install 'bitfit[bench]'` adds it")


def epoch(task: str, size: int, n: int) -> int:
    return n if n <= 2 else min(20 * n, len(rows_of(task)) // size)


def kept_bytes(loss: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, parameters aside."""
    kept: dict[int, torch.UntypedStorage] = {}
    aside = {p.untyped_storage().data_ptr() for p in parameters}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in aside:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        alive = loss()
    total = sum(storage.nbytes() for storage in kept.values())
    del alive
    return total


def full(n: int) -> Iterator[Figure]:
    ours, stock = Ours(bert_base(), "rte", 8), Stock(bert_base(), "rte", 8, full=True)
    found = times({"ours": ours, "stock": stock}, max(2, n // 2))
    own = [*bert_base().encoder.parameters(), ours.bank.values]
    # A gradient and two moments per trained number.
    mine = kept_bytes(lambda: ours.loss(0), own) + 3 * ours.bank.gradients.nbytes
    theirs = kept_bytes(lambda: stock.loss(0), list(stock.model.parameters())) + 3 * sum(
        p.nbytes for p in stock.trained
    )
    name = "BERT-base shape, rte batch 8, BitFit step against stock full fine-tuning:"
    yield at_most(f"{name} time", ratio(found["ours"], found["stock"]), 0.5)
    yield at_most(f"{name} activations + gradients + optimiser state", mine / theirs, 0.4)
    yield note(f"{name} those in MB", f"{mine / 1e6:.0f} / {theirs / 1e6:.0f}")


def rates(n: int) -> Iterator[Figure]:
    one, stock = Ours(mini(), "sst2", 8), Stock(mini(), "sst2", 8)

    def four(step: Step) -> Step:
        return lambda i: [step(4 * i + k) for k in range(4)] and None

    sides = {"pass": Ours(mini(), "sst2", 8, lanes=4), "own": four(one), "stock": four(stock)}
    found = times(sides, n)
    name = "MiniLM, sst2 batch 8, 4 rates in one pass: faster than"
    yield at_least(f"{name} 4 stock runs", ratio(found["stock"], found["pass"]), 2.5)
    yield at_least(f"{name} 4 own runs one after the other", ratio(found["own"], found["pass"]), 1.25)


def masks(n: int) -> Iterator[Figure]:
    for task, size in (("sst2", 8), ("rte", 16)):
        sparse, dense = Ours(mini(), task, size, chosen="random(all, 0.1%)"), DenseMask(mini(), task, size)
        found = times({"bias": Ours(mini(), task, size), "sparse": sparse, "dense": dense}, 2 * n)
        name = f"MiniLM, {task} batch {size}, random 0.1% mask against bias step:"
        yield at_most(f"{name} the bank's way", ratio(found["sparse"], found["bias"]), 1.12)
        yield note(f"{name} dense gradient, then mask", f"{ratio(found['dense'], found['bias']):.2f}x")


GRAFTS = {"LoRA r8": "lora(W_q + W_v, 8)", "adapters of 64": "adapter(64)"}


def grafts(n: int) -> Iterator[Figure]:
    """LoRA and adapters: training steps, and 32 of them in one batch."""
    sides: dict[str, Step] = {"bias": Ours(mini(), "sst2", 8)}
    sides |= {name: Ours(mini(), "sst2", 8, chosen="injected", inject=text) for name, text in GRAFTS.items()}
    if "LoRA r8" in PEERS:
        sides["PEFT"] = Peft(mini(), "sst2", 8, "LoRA r8")
    found = times(sides, 4 * n)
    if "PEFT" in sides:
        against = total(found["PEFT"], found["LoRA r8"])
        yield at_least("MiniLM, sst2 batch 8, LoRA r8 step: faster than PEFT's", against, 1.7)
    for name, text in GRAFTS.items():
        yield note(
            f"MiniLM, sst2 batch 8, {name}: step against a bias step", f"{total(found[name], found['bias']):.2f}x"
        )
        model = Model(mini(), 2, "mean", text)
        chosen = select(model.anatomy, "injected")
        bank = Bank(model, [lane_to_train(model, chosen, seed=k) for k in range(32)])
        mixed = times({"single": Served(bank, single=True), "32": Served(bank)}, 2 * n)
        against = ratio(mixed["32"], mixed["single"])
        figure = f"MiniLM (mean), sst2, 32 rows: batch of 32 tasks of {name} against a single task"
        if name == "LoRA r8":
            yield at_most(figure, against, 1.15)
        else:
            yield note(figure, f"{against:.2f}x")


def mixed(n: int) -> Iterator[Figure]:
    for pool in ("mean", "cls"):
        model = Model(mini(), 2, pool)
        deltas = [some_delta(mini(), model, seed) for seed in range(1024)]
        began = time.process_time()
        many = Bank(model, [lane_of_delta(model, serving_form(delta, model)) for delta in deltas])
        built = (time.process_time() - began) / 1.024
        few = Bank(model, [lane_of_delta(model, serving_form(delta, model)) for delta in deltas[:32]])
        peers, unmixed = peft_mixed() if pool == "mean" else ({}, [])
        sides = {"single": Served(few, single=True), "32": Served(few), "32 of 1,024": Served(many)}
        found = times({**sides, **peers}, 2 * n)
        name = f"MiniLM ({pool}), sst2,"
        for tasks in ("32", "32 of 1,024"):
            against = ratio(found[tasks], found["single"])
            yield at_most(f"{name} 32 rows: batch of {tasks} tasks against a single task", against, 1.07)
        per_task = f"{built:.2f} ms to build, {many.values.nbytes / 1024e3:.0f} KB"
        yield note(f"{name} 1,024 tasks from deltas to a bank: per task", per_task)
        for peer in (peer for peer in peers if peer.endswith("mixed")):
            alone = ratio(found[peer], found[peer.replace("mixed", "single")])
            ours = ratio(found[peer], found["32"])
            yield note(
                f"PEFT {peer}, 32 adapters: against its single batch; against our 32", f"{alone:.2f}x; {ours:.2f}x"
            )
        for method in unmixed:
            yield note(f"PEFT {method}: mixed batches", "not in the installed peft")
        if pool == "mean" and not peers:
            yield note("PEFT: mixed batches", "`pip install peft` adds them")


def delta(n: int) -> Iterator[Figure]:
    base = bert_base()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta.safetensors"
        size = some_delta(base, Model(base, 2, "cls")).save(path)
        seconds = []
        for _ in range(5 * n):
            began = time.process_time()
            undo = Delta.load(path).apply(base)
            seconds.append(time.process_time() - began)
            undo()
    yield at_most("BERT-base shape, delta: load and apply", 1000 * float(np.median(seconds)), 2, " ms")
    yield at_most("BERT-base shape, delta: file", size / 1000, 450, " KB")


def step_flops(base: Base, rows: Rows) -> float:
    """Multiplications and additions a BitFit step cannot do without: forward, and gradients of inputs, CLS head."""
    config, tokens, count = base.config, len(rows.ids), len(rows)
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    square, mlp = 2 * width * width, 4 * width * inner
    linears = (layers - 1) * tokens * (4 * square + mlp) + tokens * 2 * square + count * (2 * square + mlp)
    attention = 4 * width * ((layers - 1) * float((rows.lengths**2).sum()) + tokens)
    return 2 * linears + 3 * attention


def peak(n: int) -> Iterator[Figure]:
    a, b = torch.randn(2, 1024, 1024)
    base, size = bert_base(), 12
    found = times(
        {"step": Ours(base, "rte", size), "product": lambda _: [a @ b for _ in range(8)] and None}, max(2, n // 2)
    )
    rows = [batch("rte", size, i + 1) for i in range(len(found["step"]))]
    speed = np.array([step_flops(base, own) for own in rows]) / found["step"]
    top = 8 * 2 * 1024**3 / found["product"]
    tokens = int(np.median([len(own.ids) for own in rows]))
    name = f"BERT-base shape, BitFit step of {tokens} tokens: share of the fp32 peak"
    share = ratio(speed, top)
    yield Figure(name, f"{share:.0%}", ">= 75%", share >= 0.75)
    yield note("fp32 peak, product of 1024 x 1024 matrices", f"{np.median(top) / 1e9:.0f} GFLOP/s")


def prefix(n: int) -> Iterator[Figure]:
    """`--select none` over epochs, its frozen layers computed once or in every epoch."""
    epochs, seconds = 20 if n > 2 else 2, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.csv"
        write_texts(path, PREFIX_TEXTS)
        for room in (job.PREFIX_BYTES, 0):
            job.PREFIX_BYTES, before = room, job.PREFIX_BYTES
            began = time.process_time()
            bitfit.train(path, mini(), select="none", recipe="plain", lr=[1e-3], epochs=epochs, threads=1)
            seconds.append(time.process_time() - began)
            job.PREFIX_BYTES = before
    name = f"MiniLM, `--select none`, {epochs} epochs of {PREFIX_TEXTS} sst2 texts: faster than uncached"
    yield at_least(name, seconds[1] / seconds[0], 10)


def whole(n: int) -> Iterator[Figure]:
    """Runs from a file to a delta in memory: reading, tokenizing, steps, two evaluations an epoch, scores."""
    texts_, epochs = (RUN_TEXTS, 1) if n > 2 else (64, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.csv"
        write_texts(path, texts_)
        dataset = loading.load(path)
        plain = PlainRun(mini(), dataset.train, dataset.dev, epochs, 2)
        options = {"recipe": "plain", "epochs": epochs, "threads": 1}
        sides: dict[str, Step] = {
            "one": lambda _: ignore(bitfit.train(path, mini(), lr=1e-3, **options)),
            "four": lambda _: ignore(bitfit.train(path, mini(), lr=FOUR_RATES, **options)),
        }
        found: dict[str, list[float]] = {name: [] for name in ("plain", *sides)}
        bitfit.train(path, mini(), lr=1e-3, train_size=16, **options)  # warms up
        for i in range(RUNS if n > 2 else 1):
            plain.prepare()
            for name, step in {"plain": plain, **sides}.items():
                began = time.process_time()
                step(i)
                found[name].append(time.process_time() - began)
    seconds = {name: np.array(values) for name, values in found.items()}
    name = f"MiniLM, {texts_:,} sst2 rows, {epochs} epoch, evaluated twice, end to end: faster than"
    yield at_least(f"{name} a plain loop", ratio(seconds["plain"], seconds["one"]), 2.0)
    yield at_least(f"{name} four plain loops, 4 rates in one pass", ratio(4 * seconds["plain"], seconds["four"]), 2.5)
    taken = " / ".join(f"{np.median(values):.1f}" for values in seconds.values())
    yield note(f"{name}: CPU seconds of the plain loop / one rate / four rates", taken)


def ignore(_: object) -> None:
    """A step returns nothing."""


def write_texts(path: Path, count: int) -> None:
    """A labelled file of sst2 texts; its labels mean nothing."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((text, i % 2) for i, text in enumerate(texts("sst2")[0][:count]))


def scaling(n: int) -> Iterator[Figure]:
    """Time per step against lanes, tasks, tokens and layers."""
    yield from against(
        "lanes in one pass", {k: Ours(mini(), "sst2", 8, lanes=k, pool="mean") for k in POWERS}, n, "lane"
    )
    model = Model(mini(), 2, "mean")
    lanes = [lane_of_delta(model, some_delta(mini(), model, seed)) for seed in range(1024)]
    tasks = {k: Served(Bank(model, lanes[:k])) for k in (1, 4, 16, 64, 256, 1024)}
    yield from against("tasks resident, 32 rows answered", tasks, n)
    sizes = {int(rows_of("sst2").lengths.mean() * k): Ours(mini(), "sst2", k, pool="mean") for k in POWERS}
    yield from against("tokens", sizes, n, "token")
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
    deep = {k: Ours(shaped("layers", num_hidden_layers=k, **shape), "sst2", 8) for k in (2, 4, 6, 12, 24)}
    yield from against("layers", deep, n, "layer")


PREFIX_TEXTS = 500
RUN_TEXTS = 1000
RUNS = 3
FOUR_RATES = [4e-4, 1e-3, 2e-3, 4e-3]
POWERS = (1, 2, 4, 8, 16, 32)


def against(what: str, sides: Mapping[int, Step], n: int, each: str = "") -> Iterator[Figure]:
    found = times({str(k): step for k, step in sides.items()}, max(2, n // 2))
    for k in sides:
        took = 1000 * float(np.median(found[str(k)]))
        yield note(
            f"MiniLM shape, sst2, one step, {what}: {k}",
            f"{took:.0f} ms" + (f", {took / k:.3g} per {each}" if each else ""),
        )


SECTIONS: dict[str, Callable[[int], Iterator[Figure]]] = {
    f.__name__: f for f in (steps, full, rates, whole, masks, grafts, mixed, prefix, delta, peak, scaling)
}


def line(figure: Figure) -> str:
    verdict = {True: "met", False: "**missed**", None: ""}[figure.met]
    return f"| {figure.what} | {figure.value} | {figure.target} | {verdict} |"


def machine() -> str:
    """What the figures were measured with, and how busy it was."""
    chips = [row for row in _lines("/proc/cpuinfo") if row.startswith("model name")]
    chip = chips[0].partition(":")[2].strip() if chips else platform.processor() or platform.machine()
    packages = ", ".join(f"{name} {_version(name)}" for name in ("bitfit", "torch", "transformers", "peft"))
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    python = f"Python {sys.version.split()[0]}"
    return f"{chip}, {os.cpu_count()} cores ({load} at the start), one thread, fp32; {python}, {packages}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; may be given again")
    parser.add_argument("--quick", action="store_true", help="two batches per figure: does it run, not how fast")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    out = [f"{source()}; {machine()}.", "", "| figure | value | target | |", "|---|---|---|---|"]
    print("\n".join(out))
    for name in asked.only or SECTIONS:
        for figure in SECTIONS[name](2 if asked.quick else 10):
            out.append(line(figure))
            print(out[-1], flush=True)
    out += ["", f"{(time.monotonic() - began) / 60:.1f} minutes."]
    print("\n".join(out[-2:]))
    if not asked.quick and not asked.only:  # a part of the table must not stand for all of it
        RESULTS.write_text(
            "# What it costs\n\n`make bench` writes this page.\n\n" + "\n".join(out) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
