"""The sides of a benchmark: texts and models, our training steps, and those of stock transformers and of PEFT."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import random
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

import bitfit
from bitfit import Base, Delta, Model
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.cli import demo
from bitfit.data import loading
from bitfit.data.examples import Columns, Examples
from bitfit.delta.meta import Meta, Score
from bitfit.model.language import select
from bitfit.model.rows import Rows
from bitfit.tasks.encode import Encoder

try:
    import peft
except ImportError:
    peft = None

PEERS: dict[str, tuple[Any, dict[str, Any]]] = {}
"""PEFT's methods: their configuration and its options."""
if peft is not None:
    PEERS = {"LoRA r8": (peft.LoraConfig, {"r": 8})}
    if hasattr(peft, "BeftConfig"):
        PEERS["BEFT"] = (peft.BeftConfig, {})

ROOT = Path(__file__).parents[1]
Step = Callable[[int], None]


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
            found = list(loading.load(demo.write_reviews(Path(temporary))).train.texts)
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
    return shaped("bert-base-shape")


def shaped(name: str, **shape: int) -> Base:
    """A BERT of some shape (BERT-base's, where nothing else is said), with random weights."""
    config = AutoConfig.for_model("bert", vocab_size=mini().config.vocab_size, **shape)
    torch.manual_seed(0)
    encoder = AutoModelForSequenceClassification.from_config(config).base_model.requires_grad_(False).eval()
    return Base(name, config, encoder, mini().tokenizer, frozenset(), "cls")


# The two sides


class Ours:
    """Training steps of a bank, each lane on its own batch, as `bitfit train` makes them."""

    def __init__(
        self,
        base: Base,
        task: str,
        size: int,
        lanes: int = 1,
        pool: str = "cls",
        chosen: str = "bias",
        inject: str = "none",
    ):
        self.model = Model(base, 2, pool, inject)
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


class PlainRun:
    """A whole run of plain transformers: tokenize, train bias-only with warm-up and clipping, evaluate in between.

    The model is made outside of what is timed, as the base is on our side.
    """

    rate, batch, warm_up, evaluated = 1e-3, 8, 0.06, 32

    def __init__(self, base: Base, train: Examples, dev: Examples, epochs: int, evaluations: int):
        self.base, self.train, self.dev, self.epochs, self.evaluations = base, train, dev, epochs, evaluations
        self.stock: Stock | None = None

    def prepare(self) -> None:
        self.stock = Stock(self.base, "sst2", self.batch)

    def __call__(self, _: int) -> None:
        assert self.stock is not None
        model, optimiser = self.stock.model, self.stock.optimiser
        train, dev = self.encoded(self.train), self.encoded(self.dev)
        steps = -(-len(train) // self.batch)
        total, warm = steps * self.epochs, max(1, int(self.warm_up * steps * self.epochs))
        due = {round(steps * part / self.evaluations) for part in range(1, self.epochs * self.evaluations + 1)}
        best, kept = -1.0, []
        for step in range(1, total + 1):
            epoch, place = divmod(step - 1, steps)
            if place == 0:
                order = np.random.default_rng(epoch).permutation(len(train))
            chosen = [train[i] for i in order[place * self.batch : (place + 1) * self.batch]]
            model(**self.padded(chosen)).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.stock.trained, 1.0)
            optimiser.param_groups[0]["lr"] = self.rate * min(step / warm, (total - step + 1) / (total - warm + 1))
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            if step in due:
                score = self.score(model, dev)
                if score > best:
                    best, kept = score, [p.detach().clone() for p in self.stock.trained]
        assert kept

    def encoded(self, examples: Examples) -> list[tuple[list[int], int]]:
        found = self.base.tokenizer(list(examples.texts), truncation=True, max_length=128)["input_ids"]
        return list(zip(found, examples.labels, strict=True))

    def padded(self, chosen: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        width = max(len(ids) for ids, _ in chosen)
        pad = self.base.tokenizer.pad_token_id
        return {
            "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in chosen]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in chosen]),
            "labels": torch.tensor([label for _, label in chosen]),
        }

    def score(self, model: Any, dev: list[tuple[list[int], int]]) -> float:
        model.eval()
        right = 0
        with torch.inference_mode():
            for start in range(0, len(dev), self.evaluated):
                batch = self.padded(dev[start : start + self.evaluated])
                right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
        model.train()
        return right / len(dev)


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


def some_delta(base: Base, model: Model, seed: int = 0) -> Delta:
    """A BitFit delta with values of its own; the numbers mean nothing."""
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, "bias"), seed=seed)])
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.01)
    meta = Meta(
        base=base.name, hub=False, fingerprint=base.fingerprint, select="bias", head="full", init="keep",
        pool=model.pool, task="classification", labels=("0", "1"), center=0.0, spread=1.0,
        columns=Columns("text"), max_length=128, metric="accuracy", metrics={"dev": {"accuracy": Score(0.5, 0.4, 0.6)}},
        trained=bank.gradients.shape[1], total=base.anatomy.total, change={}, versions={},
    )  # fmt: skip
    return Delta(bank.tensors(0), meta)


class Served:
    """Answers for 32 rows, all of one task or the tasks in turn."""

    def __init__(self, bank: Bank, single: bool = False):
        self.bank, self.single = bank, single
        self.order = np.random.default_rng(0).permutation(len(bank.lanes))

    def __call__(self, i: int) -> None:
        rows = batch("sst2", 32, i)
        lane = self.order[0 if self.single else np.arange(32 * i, 32 * i + 32) % len(self.order)]
        lanes = np.broadcast_to(lane, 32)
        with torch.inference_mode():
            self.bank.logits({k: rows.take(np.flatnonzero(lanes == k)) for k in dict.fromkeys(lanes.tolist())})


class Peft(Stock):
    """Training steps of one of PEFT's methods on the stock model; the classifier trains too."""

    def __init__(self, base: Base, task: str, size: int, method: str):
        super().__init__(base, task, size)
        kind, options = PEERS[method]
        config = kind(target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS", **options)
        self.model = peft.get_peft_model(self.model, config).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, 1e-4, weight_decay=0.0, fused=True)


def peft_mixed() -> tuple[dict[str, Step], list[str]]:
    """Single and mixed batches of those of PEFT's methods that can mix (encoder alone, no head), and which cannot."""
    sides: dict[str, Step] = {}
    unmixed: list[str] = []
    for method, (kind, options) in PEERS.items():
        config = kind(target_modules=["query", "value"], **options)
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
