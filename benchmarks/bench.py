"""What bitfit costs, against its targets: `make bench`, or `python benchmarks/bench.py --only mixed --quick`.

Both sides of a figure run in turn on the same batches in one process; what counts is the median of the ratios of their
CPU times, on one thread. The stock side is transformers with dynamic padding, SDPA attention and
fused AdamW; dropout is 0.1 on both sides. Tokenizing is in neither.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
import os
import platform
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

import bitfit
from bitfit import Base, Delta, Model, data, demo
from bitfit.bank import Bank, lane_of_delta, lane_to_train
from bitfit.delta import FORMAT
from bitfit.encode import Encoder
from bitfit.folding import serving_form
from bitfit.rows import Rows
from bitfit.selection import select

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.md"
Step = Callable[[int], None]
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


def ratio(over: np.ndarray, under: np.ndarray) -> float:
    return float(np.median(over / under))


# Texts and models


def shared() -> Path | None:
    folder = Path(os.environ.get("BITFIT_SHARED", ROOT.parent / "shared")) / "data"
    return folder if (folder / "sst2").is_dir() and (folder / "rte").is_dir() else None


@cache
def texts(task: str) -> tuple[list[str], list[str] | None]:
    """Texts and second texts, in a seeded order."""
    folder = shared()
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            found = list(data.load(demo.write_reviews(Path(temporary))).train.texts)
        return found, None if task == "sst2" else found[1:] + found[:1]
    with gzip.open(folder / task / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    random.Random(0).shuffle(rows)
    if task == "sst2":
        return [row["sentence"] for row in rows[:4000]], None
    return [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]


def source() -> str:
    return (
        "GLUE (SST-2, RTE) training texts" if shared() else "Rotten Tomatoes reviews of the demo wheel (no GLUE found)"
    )


@cache
def rows_of(task: str) -> Rows:
    first, second = texts(task)
    return Encoder(mini(), 128)(first, second)


def batch(task: str, size: int, i: int) -> Rows:
    rows = rows_of(task)
    return rows.take(np.arange(i * size, (i + 1) * size) % len(rows))


def gold(size: int) -> torch.Tensor:
    return torch.arange(size) % 2


@cache
def mini() -> Base:
    return bitfit.load_base()


@cache
def bert_base() -> Base:
    """BERT-base's shape with random weights, and MiniLM's tokenizer."""
    config = AutoConfig.for_model("bert", vocab_size=mini().config.vocab_size)
    torch.manual_seed(0)
    encoder = AutoModelForSequenceClassification.from_config(config).base_model.requires_grad_(False).eval()
    return Base("bert-base-shape", config, encoder, mini().tokenizer, frozenset(), "cls")


# The two sides


class Ours:
    """Training steps of a bank, each lane on its own batch, as `bitfit train` makes them."""

    def __init__(self, base: Base, task: str, size: int, lanes: int = 1, pool: str = "cls", chosen: str = "bias"):
        self.model = Model(base, 2, pool)
        selection = select(self.model.anatomy, chosen)
        self.bank = Bank(self.model, [lane_to_train(self.model, selection, seed=k) for k in range(lanes)])
        self.optimisers = [self.optimiser(self.bank.trained(k)) for k in range(lanes)]
        self.task, self.size, self.lanes = task, size, lanes

    @staticmethod
    def optimiser(flat: torch.Tensor) -> torch.optim.Optimizer:
        return torch.optim.AdamW([flat], 1e-4, weight_decay=0.0, fused=True)

    def loss(self, i: int) -> torch.Tensor:
        rows = {k: batch(self.task, self.size, i * self.lanes + k) for k in range(self.lanes)}
        logits = self.bank.logits(rows, {k: 1000 * i + k for k in rows})
        return torch.stack([F.cross_entropy(own, gold(self.size)) for own in logits.values()]).sum()

    def __call__(self, i: int) -> None:
        self.loss(i).backward()
        for optimiser in self.optimisers:
            optimiser.step()
        self.bank.gradients.zero_()


class Stock:
    """Training steps of plain transformers."""

    def __init__(self, base: Base, task: str, size: int, full: bool = False, recipe: bool = False):
        config = type(base.config).from_dict({**base.config.to_dict(), "num_labels": 2})
        attention = "eager" if recipe else "sdpa"
        self.model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
        self.model.base_model.load_state_dict(base.encoder.state_dict())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(full or name.endswith("bias") or name.startswith("classifier"))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, 1e-4, weight_decay=0.0, fused=True)
        self.task, self.size, self.width, self.pad = task, size, 128 if recipe else 0, base.tokenizer.pad_token_id
        self.model.train()

    def inputs(self, i: int) -> dict[str, torch.Tensor]:
        arrays = batch(self.task, self.size, i).padded(self.pad)
        missing = max(0, self.width - arrays[0].shape[1])
        wide = [
            F.pad(torch.from_numpy(a), (0, missing), value=v) for a, v in zip(arrays, (self.pad, 0, 0), strict=True)
        ]
        return dict(zip(("input_ids", "token_type_ids", "attention_mask"), wide, strict=True))

    def loss(self, i: int) -> torch.Tensor:
        return self.model(**self.inputs(i), labels=gold(self.size)).loss

    def __call__(self, i: int) -> None:
        self.loss(i).backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


# The figures: one function per section


def steps(n: int) -> Iterator[Figure]:
    for task, size, target in (("sst2", 8, 2.0), ("rte", 16, 1.8)):
        sides = {"stock": Stock(mini(), task, size), "cls": Ours(mini(), task, size)}
        if task == "sst2":
            sides["recipe"] = Stock(mini(), task, size, recipe=True)
        found = times({**sides, "mean": Ours(mini(), task, size, pool="mean")}, 2 * n)
        name = f"MiniLM, {task} batch {size}, BitFit step: faster than"
        yield at_least(f"{name} stock bias-only", ratio(found["stock"], found["cls"]), target)
        yield note(f"{name} stock bias-only, ours mean-pooled", f"{ratio(found['stock'], found['mean']):.2f}x")
        if task == "sst2":
            recipe = ratio(found["recipe"], found["cls"])
            yield at_least(f"{name} the original recipe (pad to 128, eager)", recipe, 8)


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


class DenseMask(Ours):
    """The plain way to train single entries: every gradient, of which the chosen ones are kept."""

    def __init__(self, base: Base, task: str, size: int):
        super().__init__(base, task, size, chosen="all")
        width = self.bank.gradients.shape[1]
        self.chosen = torch.randperm(width, generator=torch.Generator().manual_seed(0))[: width // 1000]
        self.flat = self.bank.values[0, self.chosen].requires_grad_()
        self.optimisers = [self.optimiser(self.flat)]

    def __call__(self, i: int) -> None:
        self.loss(i).backward()
        self.flat.grad = self.bank.gradients[0, self.chosen]
        self.optimisers[0].step()
        self.bank.gradients.zero_()


def masks(n: int) -> Iterator[Figure]:
    for task, size in (("sst2", 8), ("rte", 16)):
        sparse, dense = Ours(mini(), task, size, chosen="random(all, 0.1%)"), DenseMask(mini(), task, size)
        found = times({"bias": Ours(mini(), task, size), "sparse": sparse, "dense": dense}, n)
        name = f"MiniLM, {task} batch {size}, random 0.1% mask against bias step:"
        yield at_most(f"{name} the bank's way", ratio(found["sparse"], found["bias"]), 1.12)
        yield note(f"{name} dense gradient, then mask", f"{ratio(found['dense'], found['bias']):.2f}x")


def some_delta(base: Base, model: Model, seed: int = 0) -> Delta:
    """A BitFit delta with values of its own; the numbers mean nothing."""
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias"), seed=seed)])
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.01)
    words = dict.fromkeys(("select", "head", "init", "metric"), "none") | {"task": "classification", "pool": model.pool}
    rest: dict[str, Any] = {key: {} for key in ("trial", "change", "versions")}
    rest |= {"columns": {"text": "text", "text_pair": None, "label": None}, "hub": False}
    rest |= {"metrics": {"dev": {"none": {"value": 0.0, "low": 0.0, "high": 0.0}}}}
    trained = bank.gradients.shape[1]
    counts = {"format": FORMAT, "max_length": 128, "trained": trained, "total": base.anatomy.total}
    names = {"base": base.name, "fingerprint": base.fingerprint, "labels": ["0", "1"], "center": 0.0, "spread": 1.0}
    return Delta(bank.tensors(0), words | rest | counts | names)


class Served:
    """Answers for 32 rows, all of one task or each of another."""

    def __init__(self, bank: Bank, single: bool = False):
        self.bank, self.single = bank, single
        self.order = np.random.default_rng(0).permutation(len(bank.lanes))

    def __call__(self, i: int) -> None:
        rows = batch("sst2", 32, i)
        present = self.order[np.arange(32 * i, 32 * i + 32) % len(self.order)].tolist()
        own = {0: rows} if self.single else {k: rows.take(np.array([r])) for r, k in enumerate(present)}
        with torch.inference_mode():
            self.bank.logits(own)


def mixed(n: int) -> Iterator[Figure]:
    for pool in ("mean", "cls"):
        model = Model(mini(), 2, pool)
        deltas = [some_delta(mini(), model, seed) for seed in range(1024)]
        began = time.process_time()
        many = Bank(model, [lane_of_delta(model, serving_form(delta, model)) for delta in deltas])
        built = (time.process_time() - began) / 1.024
        few = Bank(model, [lane_of_delta(model, serving_form(delta, model)) for delta in deltas[:32]])
        peers, unmixed = peft_sides() if pool == "mean" else ({}, [])
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


def peft_sides() -> tuple[dict[str, Step], list[str]]:
    """Single and mixed batches of those of PEFT's methods that can mix (encoder alone, no head), and which cannot."""
    try:
        import peft
    except ImportError:
        return {}, []
    sides: dict[str, Step] = {}
    unmixed: list[str] = []
    kinds = {"LoRA r8": ("LoraConfig", {"r": 8}), "BEFT": ("BeftConfig", {})}
    for method, (kind, options) in kinds.items():
        if not hasattr(peft, kind):
            continue
        config = getattr(peft, kind)(target_modules=["query", "value"], **options)
        encoder = AutoModel.from_config(mini().config, attn_implementation="sdpa")
        model = peft.get_peft_model(encoder, config, adapter_name="t0").eval()
        if not can_mix(model):
            unmixed.append(method)
            continue
        for k in range(1, 32):
            model.add_adapter(f"t{k}", config)
        inputs = Stock(mini(), "sst2", 32).inputs

        def run(i: int, model: Any = model, inputs: Any = inputs, **names: list[str]) -> None:
            with torch.inference_mode():
                model(**inputs(i), **names)

        sides[f"{method} single"] = run
        sides[f"{method} mixed"] = partial(run, adapter_names=[f"t{k}" for k in range(32)])
    return sides, unmixed


def can_mix(model: Any) -> bool:
    """Whether a PEFT model's layers look at `adapter_names`: some accept the argument and ignore it."""
    layers = (m for name, m in model.named_modules() if name.endswith("attention.self.query"))
    return all("adapter_names" in inspect.getsource(type(layer).forward) for layer in layers)


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


def lanes(n: int) -> Iterator[Figure]:
    counts = (1, 2, 4, 8, 16)
    found = times({str(k): Ours(mini(), "sst2", 8, lanes=k) for k in counts}, n)
    one = float(np.median(found["1"]))
    for k in counts:
        took = float(np.median(found[str(k)]))
        name = f"MiniLM, sst2 batch 8, lanes in one pass: {k}"
        yield note(name, f"{1000 * took:.0f} ms, {took / one / k:.2f} per lane")


SECTIONS: dict[str, Callable[[int], Iterator[Figure]]] = {
    f.__name__: f for f in (steps, full, rates, masks, mixed, delta, peak, lanes)
}


def line(figure: Figure) -> str:
    verdict = {True: "met", False: "**missed**", None: ""}[figure.met]
    return f"| {figure.what} | {figure.value} | {figure.target} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; may be given again")
    parser.add_argument("--quick", action="store_true", help="two batches per figure: does it run, not how fast")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    versions = f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, fp32"
    out = [f"{source()}; {versions}.", "", "| figure | value | target | |", "|---|---|---|---|"]
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
