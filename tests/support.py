"""What the tests share: tiny models, generated data, deltas and a few helpers. No test lives here.

A test module imports from here and never from another test module; fixtures are in conftest.py.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bitfit import Delta
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_to_train
from bitfit.data import named
from bitfit.data.named import NamedTask
from bitfit.delta.meta import Meta, read_meta
from bitfit.model.base import Base
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.tasks import Task

# ---- tiny models

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 40,
}
# One tiny configuration per architecture. A new architecture joins every test that runs over them by its row here.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": {**SMALL, "type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {**SMALL, "type_vocab_size": 1, "pad_token_id": 1},
    "camembert": {**SMALL, "type_vocab_size": 1, "pad_token_id": 1},
    "distilbert": {**SMALL, "hidden_dim": 32},
    "electra": {**SMALL, "embedding_size": 8},
    "albert": {**SMALL, "embedding_size": 8},
    "mpnet": {**SMALL, "pad_token_id": 1},
    "deberta-v2": {
        **SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pooler_hidden_size": 16,
    },
    "gpt2": {**SMALL, "n_inner": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
    "llama": {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0},
    "qwen2": {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0},
    "opt": {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 0},
    "modernbert": {
        **SMALL, "pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3,
    },
}  # fmt: skip
# Settings under which an architecture has other parameters than by default: its name and what changes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert-groups": ("albert", {"num_hidden_groups": 2, "inner_group_num": 2}),
    "deberta-v2-conv": ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu", "share_att_key": False}),
    "llama-biases": ("llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
}
# What is injected into those whose layers lack biases, so that they have every term that the others have.
INJECT = dict.fromkeys(("llama", "qwen2", "modernbert"), "bias")
WORDS = (
    *("good", "bad", "fine", "poor", "great", "awful", "film", "plot", "cast", "scene"),
    *("the", "a", "is", "was", "very", "not", "and", "but", "long", "short"),
)
GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")


def shared() -> Path:
    """The team's folder of real data and weights; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("BITFIT_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip("needs the folder of real data and weights; set BITFIT_SHARED")
    return folder


def tokenizer(pad: int) -> Any:
    """A word-level tokenizer over WORDS with BERT's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    special[0], special[pad] = special[pad], special[0]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def config_of(architecture: str, **changes: Any) -> Any:
    """The tiny configuration of an architecture, with some values changed."""
    from transformers import AutoConfig

    values = {**ARCHITECTURES.get(architecture, SMALL), **changes}
    return AutoConfig.for_model(architecture, **values)


def make_folder(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Path:
    """A model folder with random weights that are not degenerate: biases and gammas vary."""
    from transformers import AutoModel

    config = config_of(architecture, **changes)
    torch.manual_seed(seed)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if "word_embeddings" in name else 0.05))
    model.save_pretrained(folder)
    tokenizer(config.pad_token_id or 0).save_pretrained(folder)
    return folder


# ---- data


def reviews(count: int = 64, seed: int = 0) -> list[tuple[str, str]]:
    """Made-up reviews whose label a model can learn: good words or bad words among neutral ones."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        words = [*draw.choices(WORDS[6:], k=draw.randint(2, 9)), draw.choice(GOOD if number % 2 else BAD)]
        draw.shuffle(words)
        rows.append((" ".join(words), "positive" if number % 2 else "negative"))
    return rows


def write_tasks(folder: Path, tasks: tuple[str, ...], rows: int = 48) -> Path:
    """A data folder with train, dev and test files of each task."""
    for name in tasks:
        task = named.find(name)
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        extra = ("dev_mismatched",) if name == "mnli" else ("dev_in_domain",) if name == "cola" else ()
        for part in ("train", "dev_matched" if name == "mnli" else "dev", "test", *extra):
            draw = random.Random(f"{name} {part}")
            lines = [_study_row(task, n, draw) for n in range(rows if part == "train" else rows // 2)]
            (place / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _study_row(task: Any, number: int, draw: random.Random) -> dict[str, Any]:
    """One row whose words tell its label."""
    good = number % 2
    words = [*draw.choices(WORDS[6:], k=draw.randint(2, 7)), draw.choice(GOOD if good else BAD)]
    draw.shuffle(words)
    columns = {role: names[0] for role, names in task.columns.items()}
    if task.kind == "tagging":
        tags = ["ADJ" if word in (*GOOD, *BAD) else "X" for word in words]
        return {columns["text"]: words, columns["label"]: tags}
    if task.kind == "answering":
        answer = next(word for word in words if word in (*GOOD, *BAD))
        context = " ".join(words)
        found = {"text": [answer], "answer_start": [context.index(answer)]}
        return {
            "id": str(number),
            columns["text"]: "is the film",
            columns["text_pair"]: context,
            columns["label"]: found,
        }
    row: dict[str, Any] = {columns["text"]: " ".join(words)}
    if "text_pair" in columns:
        row[columns["text_pair"]] = " ".join(draw.choices(WORDS, k=3))
    value: Any = good if len(task.labels) < 3 else number % len(task.labels)
    row[columns["label"]] = round(draw.random() * 2 + 3 * good, 2) if task.kind == "regression" else value
    return row


def mini_rows(task: NamedTask, count: int, labelled: bool = True) -> list[dict[str, Any]]:
    """Rows with the task's columns: texts of known words, labels by number as public files give them."""
    rows = []
    for i in range(count):
        words = [WORDS[i % 10], WORDS[(i * 3 + 1) % 20], str(i)]
        label = {
            "classification": lambda i=i: i % len(task.labels),
            "regression": lambda i=i: (i % 11) / 2,
            "tagging": lambda i=i: ["ADJ", "NOUN", "NUM"],
            "answering": lambda i=i, words=words: {"text": [words[1]], "answer_start": [len(words[0]) + 1]},
        }[task.kind]()
        row = {names[0]: words if task.kind == "tagging" else " ".join(words) for names in task.columns.values()}
        rows.append({**row, task.columns["label"][0]: label if labelled else -1})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as compressed JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


# ---- deltas


def delta_of(
    base: Base,
    seed: int = 0,
    labels: int = 2,
    pool: str = "cls",
    select_text: str = "bias",
    kind: str | None = None,
    **changes: Any,
) -> Delta:
    """A delta with random values and all the metadata of a trained one.

    `labels=0` without a kind is regression. `changes` are keys of the metadata.
    """
    kind = kind or ("classification" if labels else "regression")
    names = () if kind in ("answering", "regression") else tuple(f"c{i}" for i in range(labels))
    task = Task.of(kind, names)  # type: ignore[arg-type]
    model = Model(base, task.outputs, task.pool("auto") if task.by_token else pool)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, select_text, seed), seed=seed)])
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.3)
    facts = {
        "select": select_text,
        "pool": model.pool,
        "task": kind,
        "labels": list(names),
        "metric": task.metric,
        "stride": 5 if task.by_token else 0,
        "center": 0.5 if kind == "regression" else 0.0,
        "spread": 2.0 if kind == "regression" else 1.0,
        "columns": {"text": "text", "label": "label", "text_pair": "context" if kind == "answering" else None},
    }
    return Delta(bank.tensors(0), meta_of(base, **facts | changes))


def meta_of(base: Base, **changes: Any) -> Meta:
    """Complete metadata of a delta for a base, read as from a file that says `changes`."""
    table = {
        "format": 1,
        "base": base.name,
        "hub": False,
        "fingerprint": base.fingerprint,
        "select": "bias",
        "head": "full",
        "init": "keep",
        "pool": "cls",
        "task": "classification",
        "labels": ["c0", "c1"],
        "metric": "accuracy",
        "max_length": 20,
        "center": 0.0,
        "spread": 1.0,
        "columns": {"text": "text", "label": "label", "text_pair": None},
        "trained": 1,
        "total": 1,
        "trial": {},
        "change": {},
        "versions": {},
        **changes,
    }
    scores = {"dev": {table["metric"]: {"value": 0.5, "low": 0.0, "high": 1.0}}}
    return read_meta({"metrics": scores, **table}, "test")


# ---- interruption


class StopAt:
    """Asks to stop, as Ctrl-C does, when a step is reached."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, part: int, step: int, total: int, runners: Any) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
