"""Tiny random bases with real tokenizers, for every architecture: a new one joins the matrix by being added here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits for the first

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 40,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": {**SMALL, "type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {**SMALL, "type_vocab_size": 1, "pad_token_id": 1},
    "camembert": {**SMALL, "type_vocab_size": 1, "pad_token_id": 1},
    "distilbert": {
        "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 64, "max_position_embeddings": 40,
    },
    "electra": {**SMALL, "embedding_size": 8},
    "albert": {**SMALL, "embedding_size": 8},
    "mpnet": {**SMALL, "pad_token_id": 1},
    "deberta-v2": {
        **SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pooler_hidden_size": 16,
    },
    "gpt2": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 40,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    },
    "llama": {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0},
    "qwen2": {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0},
    "opt": {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 0},
    "modernbert": {
        **SMALL, "pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3,
    },
}  # fmt: skip
# What is injected into those whose layers lack biases, so that they have every term that the others have.
INJECT = dict.fromkeys(("llama", "qwen2", "modernbert"), "bias")
WORDS = (
    *("good", "bad", "fine", "poor", "great", "awful", "film", "plot", "cast", "scene"),
    *("the", "a", "is", "was", "very", "not", "and", "but", "long", "short"),
)


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


def make_folder(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Path:
    """A model folder with random weights that are not degenerate: biases and gammas vary."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(architecture, **{**ARCHITECTURES.get(architecture, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if "word_embeddings" in name else 0.05))
    model.save_pretrained(folder)
    tokenizer(config.pad_token_id or 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from architecture to a model folder, made once."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_folder(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return folder


@pytest.fixture(scope="session")
def bases(folders: Any) -> Any:
    """A function from architecture to a loaded base; tests must leave it as it was."""
    from bitfit import load_base

    loaded: dict[str, Any] = {}

    def base(architecture: str) -> Any:
        if architecture not in loaded:
            loaded[architecture] = load_base(folders(architecture))
        return loaded[architecture]

    return base


@pytest.fixture
def base(bases: Any) -> Any:
    """A tiny BERT."""
    return bases("bert")


def reviews(count: int = 64, seed: int = 0) -> list[tuple[str, str]]:
    """Made-up reviews whose label a model can learn: good words or bad words among neutral ones."""
    import random

    draw = random.Random(seed)
    good, bad, rest = ["good", "fine", "great"], ["bad", "poor", "awful"], WORDS[6:]
    rows = []
    for number in range(count):
        words = [*draw.choices(rest, k=draw.randint(2, 9)), draw.choice(good if number % 2 else bad)]
        draw.shuffle(words)
        rows.append((" ".join(words), "positive" if number % 2 else "negative"))
    return rows


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    """A labelled file of 64 reviews."""
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in reviews()), encoding="utf-8")
    return path
