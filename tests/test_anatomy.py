"""Every parameter of every architecture has one name in the papers' notation, and the papers' counts come out."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from bitfit.model import architectures
from bitfit.model.anatomy import TERMS, Anatomy, Site, anatomy, part_of
from support import ARCHITECTURES, SMALL, VARIANTS

# Every architecture joins every test below by standing in the table of support.py: model_type and configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, config) for name, config in ARCHITECTURES.items()}
CASES |= {name: (base, {**ARCHITECTURES[base], **changes}) for name, (base, changes) in VARIANTS.items()}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
ROBERTA = {**BASE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}

# The papers' models: encoder total, each narrow bias, b_m2, layer biases, all biases, b_q + b_m2, gammas of the layers.
COUNTED: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "bert-base-cased": (
        "bert",
        {**BASE, "vocab_size": 28996},
        (108_310_272, 9_216, 36_864, 101_376, 102_912, 46_080, 18_432),
    ),
    "bert-base-uncased": (
        "bert",
        {**BASE, "vocab_size": 30522},
        (109_482_240, 9_216, 36_864, 101_376, 102_912, 46_080, 18_432),
    ),
    "bert-large-cased": (
        "bert",
        {**LARGE, "vocab_size": 28996},
        (333_579_264, 24_576, 98_304, 270_336, 272_384, 122_880, 49_152),
    ),
    "roberta-base": ("roberta", ROBERTA, (124_055_040, 9_216, 36_864, 101_376, 102_144, 46_080, 18_432)),
    "bert-tiny": ("bert", {**TINY, "vocab_size": 30522}, (4_385_920, 256, 1_024, 2_816, 3_072, 1_280, 512)),
}
# Where a family's layers lack a term or have it twice: the layers of its sites.
BIASES = TERMS[:8]
GATED = {"b_m2": [0, 0, 1, 1], "W_m2": [0, 0, 1, 1]}
UNUSUAL: dict[str, dict[str, list[int]]] = {
    "llama": {**GATED, **{term: [] for term in BIASES}},
    "llama-biases": {**GATED, "b_LN1": [], "b_LN2": []},
    "qwen2": {**GATED, **{term: [] for term in BIASES if term not in ("b_q", "b_k", "b_v")}},
    "modernbert": {"g_LN1": [1], **{term: [] for term in BIASES}},
}
LAYER_BIASES = [term for term in TERMS if term.startswith("b_") and term.endswith(("q", "k", "v", "1", "2", "3"))]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def encoder_shapes(model_type: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What stands inside the base model of a sequence classifier, on the meta device: nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **config))
    return {name: tuple(parameter.shape) for name, parameter in model.base_model.named_parameters()}


@cache
def built(key: str) -> tuple[dict[str, tuple[int, ...]], Anatomy, int]:
    model_type, config = CASES[key]
    shapes = encoder_shapes(model_type, config)
    return shapes, anatomy(model_type, shapes), layers_of(AutoConfig.for_model(model_type, **config))


def layers_of(config: Any) -> int:
    """How many layers have parameters of their own: ALBERT's share them."""
    if hasattr(config, "num_hidden_groups"):
        return int(config.num_hidden_groups * config.inner_group_num)
    return int(config.num_hidden_layers)


@cache
def counted(key: str) -> tuple[Anatomy, tuple[int, ...]]:
    model_type, config, numbers = COUNTED[key]
    return anatomy(model_type, encoder_shapes(model_type, config)), numbers


def sizes(parts: Anatomy) -> Counter[str]:
    total: Counter[str] = Counter()
    for site in parts.sites:
        total[site.term] += site.size
    return total


def hits(site: Site) -> npt.NDArray[np.int64]:
    counts = np.zeros(site.shape, np.int64)
    counts[tuple(slice(s.start, s.stop) for s in map(site.span, range(len(site.shape))))] = 1
    return counts


# Importing transformers' DeBERTa compiles a few functions in a way torch discourages.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
every_architecture = pytest.mark.parametrize("key", CASES)
every_counted_model = pytest.mark.parametrize("key", COUNTED)


def test_every_architecture_has_a_tiny_configuration() -> None:
    assert set(architectures.ARCHITECTURES) == set(ARCHITECTURES)


@every_architecture
def test_every_entry_belongs_to_exactly_one_site(key: str) -> None:
    shapes, parts, _ = built(key)
    for name, shape in shapes.items():
        covered = sum((hits(site) for site in parts.sites if site.name == name), np.zeros(shape, int))
        assert (covered == 1).all(), name


@every_architecture
def test_counts_add_up_to_the_model(key: str) -> None:
    shapes, parts, _ = built(key)
    total = sum(map(math.prod, shapes.values()))
    assert sum(sizes(parts).values()) == parts.total == total
    assert parts.shapes == shapes


@every_architecture
def test_terms_are_the_papers_and_keep_their_order(key: str) -> None:
    parts = built(key)[1]
    assert set(parts.terms) | set(parts.missing) == set(TERMS)
    assert not set(parts.terms) & set(parts.missing)
    assert list(parts.terms) == sorted(parts.terms, key=TERMS.index)


@every_architecture
def test_every_layer_has_every_term_of_a_layer(key: str) -> None:
    _, parts, layers = built(key)
    assert parts.layers == layers
    for term in TERMS[:16]:
        expected = UNUSUAL.get(key, {}).get(term, list(range(layers)))
        assert [site.layer for site in parts.sites if site.term == term] == expected, term


@every_architecture
def test_what_stands_outside_the_layers_has_no_layer(key: str) -> None:
    parts = built(key)[1]
    assert all(site.layer is None for site in parts.sites if site.part != "encoder")


@every_architecture
def test_biases_and_gammas_are_vectors_and_the_rest_matrices(key: str) -> None:
    for site in built(key)[1].sites:
        assert (len(site.shape) == 1) == (site.term[0] in "bg"), site


@every_counted_model
def test_the_total_is_the_counted_one(key: str) -> None:
    parts, (total, *_) = counted(key)
    assert parts.total == total


@every_counted_model
def test_each_bias_has_the_counted_size(key: str) -> None:
    parts, (_, narrow, wide, *_) = counted(key)
    expected = {term: wide if term == "b_m2" else narrow for term in LAYER_BIASES}
    assert {term: sizes(parts)[term] for term in LAYER_BIASES} == expected


@every_counted_model
def test_sums_of_terms_have_the_counted_size(key: str) -> None:
    parts, (*_, layer_biases, biases, best_two, gammas) = counted(key)
    count = sizes(parts)
    assert sum(count[term] for term in LAYER_BIASES) == layer_biases
    assert sum(n for term, n in count.items() if term.startswith("b_")) == biases
    assert count["b_q"] + count["b_m2"] == best_two
    assert count["g_LN1"] + count["g_LN2"] == gammas


def test_roberta_offers_a_pooler_only_where_the_model_has_one() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("roberta", **SMALL))
    bare = anatomy("roberta", {name: tuple(p.shape) for name, p in model.named_parameters()})
    assert {"b_pool", "W_pool"} <= set(bare.terms)
    assert {"b_pool", "W_pool"} <= set(built("roberta")[1].missing)


@every_architecture
def test_no_term_takes_a_neighbour_by_substring(key: str) -> None:
    parts = built(key)[1]
    names: dict[str, set[str]] = {}
    for site in parts.sites:
        names.setdefault(site.term, set()).add(site.name)
    for one, other in [("g_LN2", "g_LN1"), ("b_LN2", "b_LN1"), ("b_m3", "b_m1"), ("W_m3", "W_m1")]:
        assert not names.get(one, set()) & names.get(other, set())


def test_the_words_of_bert_are_the_published_modules() -> None:
    by_term = {site.term: site.name for site in built("bert")[1].sites if site.layer == 1}
    assert by_term["b_q"] == "encoder.layer.1.attention.self.query.bias"
    assert by_term["b_m1"] == "encoder.layer.1.attention.output.dense.bias"
    assert by_term["b_m2"] == "encoder.layer.1.intermediate.dense.bias"
    assert by_term["b_m3"] == "encoder.layer.1.output.dense.bias"
    assert by_term["g_LN1"] == "encoder.layer.1.attention.output.LayerNorm.weight"
    assert by_term["g_LN2"] == "encoder.layer.1.output.LayerNorm.weight"


def test_gpt2_shares_one_tensor_among_q_k_and_v() -> None:
    slices = {site.term: site for site in built("gpt2")[1].sites if site.name.startswith("h.0.attn.c_attn")}
    assert [(slices[t].axis, slices[t].start, slices[t].stop) for t in ("b_q", "b_k", "b_v")] == [
        (0, 0, 16),
        (0, 16, 32),
        (0, 32, 48),
    ]
    assert [(slices[t].axis, slices[t].start, slices[t].stop) for t in ("W_q", "W_k", "W_v")] == [
        (1, 0, 16),
        (1, 16, 32),
        (1, 32, 48),
    ]
    assert slices["W_k"].size == 256
    assert not slices["W_k"].whole


def test_modernbert_shares_one_tensor_by_rows() -> None:
    shared = [site for site in built("modernbert")[1].sites if site.name == "layers.0.attn.Wqkv.weight"]
    assert [(s.term, s.shape, s.axis, s.start, s.stop) for s in shared] == [
        ("W_q", (48, 16), 0, 0, 16),
        ("W_k", (48, 16), 0, 16, 32),
        ("W_v", (48, 16), 0, 32, 48),
    ]


@pytest.mark.parametrize(
    ("key", "name", "term"),
    [
        ("electra", "embeddings_project.bias", "b_other"),
        ("albert", "encoder.embedding_hidden_mapping_in.weight", "W_other"),
        ("mpnet", "encoder.relative_attention_bias.weight", "W_other"),
        ("deberta-v2", "encoder.rel_embeddings.weight", "W_other"),
        ("deberta-v2", "encoder.LayerNorm.weight", "g_other"),
        ("deberta-v2-conv", "encoder.conv.LayerNorm.bias", "b_other"),
        ("deberta-v2-conv", "encoder.conv.conv.weight", "W_other"),
        ("deberta-v2-conv", "encoder.layer.1.attention.self.pos_key_proj.weight", "W_other"),
        ("gpt2", "ln_f.weight", "g_other"),
        ("albert", "pooler.bias", "b_pool"),
        ("llama", "norm.weight", "g_other"),
        ("llama-biases", "layers.1.mlp.gate_proj.bias", "b_m2"),
        ("qwen2", "layers.0.input_layernorm.weight", "g_LN1"),
        ("opt", "decoder.final_layer_norm.bias", "b_other"),
        ("opt", "decoder.layers.0.final_layer_norm.bias", "b_LN2"),
        ("modernbert", "embeddings.norm.weight", "g_emb"),
        ("modernbert", "final_norm.weight", "g_other"),
    ],
)
def test_what_the_papers_have_no_name_for_is_other_by_form(key: str, name: str, term: str) -> None:
    assert [site.term for site in built(key)[1].sites if site.name == name] == [term]


def test_a_stranger_in_a_known_family_keeps_its_layer_and_is_not_lost() -> None:
    shapes = {**built("bert")[0], "encoder.layer.1.adapter.down.bias": (3,), "encoder.layer.1.output.dense.scale": (8,)}
    strangers = {site.name: (site.term, site.layer) for site in anatomy("bert", shapes).sites if "other" in site.term}
    assert strangers == {
        "encoder.layer.1.adapter.down.bias": ("b_other", 1),
        "encoder.layer.1.output.dense.scale": ("W_other", 1),
    }


def test_names_are_matched_whole() -> None:
    shapes = {"my.encoder.layer.0.output.dense.bias": (8,), "encoder.layer.0.output.dense.bias.copy": (8,)}
    assert [site.term for site in anatomy("bert", shapes).sites] == ["b_other", "W_other"]


def test_an_unknown_architecture_offers_the_other_terms_only() -> None:
    shapes = encoder_shapes("fnet", {**SMALL, "tpu_short_seq_length": 16, "pad_token_id": 0})
    parts = anatomy("fnet", shapes)
    assert (parts.family, parts.layers) == ("unknown", 0)
    assert parts.terms == ("b_other", "g_other", "W_other")
    assert "b_q" in parts.missing
    assert parts.total == sum(map(math.prod, shapes.values()))


def test_a_layernorm_is_known_by_its_form() -> None:
    parts = anatomy("made-up", {"a.weight": (4,), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,), "scalar": ()})
    assert [site.name for site in parts.sites if parts.in_layernorm(site)] == ["a.weight", "a.bias"]
    assert parts.total == 4 + 4 + 16 + 4 + 1


def test_parts_tell_encoder_embedding_and_pooler_apart() -> None:
    assert {term for term in TERMS if part_of(term) == "embedding"} == {"b_emb", "g_emb", "W_emb"}
    assert {term for term in TERMS if part_of(term) == "pooler"} == {"b_pool", "W_pool"}
