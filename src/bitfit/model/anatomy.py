"""The papers' notation for the parameters of each architecture: the only module that knows parameter names.

A family is data: how a layer's names begin, and which module stands at which place of the papers' formulas. Joining
a new one means adding a row to FAMILIES (and a tiny config to the table in tests/test_anatomy.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

TERMS: tuple[str, ...] = (
    *("b_q", "b_k", "b_v", "b_m1", "b_LN1", "b_m2", "b_m3", "b_LN2"),
    *("g_LN1", "g_LN2"),
    *("W_q", "W_k", "W_v", "W_m1", "W_m2", "W_m3"),
    *("b_emb", "g_emb", "W_emb", "b_pool", "W_pool"),
    *("b_other", "g_other", "W_other"),
)
"""Every term of the language, in the papers' order."""

PART: Mapping[str, str] = {
    term: {"emb": "embedding", "pool": "pooler"}.get(term.partition("_")[2], "encoder") for term in TERMS
}
"""Which part of a model a term is counted under."""

HEAD = "head."
"""How the names of a head's tensors begin."""

HEADS = ("full", "bias", "frozen")
"""What of the head trains: every paper treats it apart from the selection."""


@dataclass(frozen=True, slots=True)
class Site:
    """A vector or matrix of the base with its place: a whole tensor, or a slice of one along `axis`."""

    term: str
    layer: int | None
    name: str
    shape: tuple[int, ...]
    axis: int = 0
    start: int = 0
    stop: int | None = None

    @property
    def whole(self) -> bool:
        """Whether the site is its whole tensor."""
        return self.stop is None

    @property
    def size(self) -> int:
        """How many entries the site has."""
        return math.prod(len(self.span(axis)) for axis in range(len(self.shape)))

    def span(self, axis: int) -> range:
        """The indices the site occupies along one axis of its tensor."""
        if self.stop is None or axis != self.axis:
            return range(self.shape[axis])
        return range(self.start, self.stop)


@dataclass(frozen=True)
class Anatomy:
    """All sites of one model; every entry of every tensor belongs to exactly one of them."""

    family: str
    sites: tuple[Site, ...]
    layers: int

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """The terms this model offers, in the papers' order."""
        present = {site.term for site in self.sites}
        return tuple(term for term in TERMS if term in present)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The terms this model cannot offer, in the papers' order."""
        return tuple(term for term in TERMS if term not in self.terms)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {site.name: site.shape for site in self.sites}

    @cached_property
    def total(self) -> int:
        """How many entries the model has."""
        return sum(site.size for site in self.sites)

    def layers_below(self, names: Collection[str]) -> int:
        """How many layers are done before any of these tensors is used; what is no part of the encoder comes last."""
        lowest = self.layers
        for site in self.sites:
            if site.name in names and PART[site.term] != "pooler":
                lowest = min(lowest, site.layer or 0)
        return lowest

    def in_layernorm(self, site: Site) -> bool:
        """Whether a site is the gamma or the bias of a LayerNorm, whatever the LayerNorm is called."""
        module, _, leaf = site.name.rpartition(".")
        weight = self.shapes.get(f"{module}.weight", ())
        return site.term.startswith("g_") or (leaf == "bias" and len(weight) == 1)


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of architectures names its modules."""

    name: str
    layer: str
    """A pattern for the names inside a layer: the layer's numbers, then the rest of the name."""
    inside: Mapping[str, str]
    """Module inside a layer -> its place. "q k v" are equal parts of the outputs, in that order."""
    outside: Mapping[str, str]
    """Module outside the layers -> its place."""
    outputs: int = 0
    """The axis of the outputs in a matrix that several places share."""


_EMBEDDINGS = {
    "embeddings.word_embeddings": "emb",
    "embeddings.position_embeddings": "emb",
    "embeddings.token_type_embeddings": "emb",
    "embeddings.LayerNorm": "emb",
}
_OUTSIDE = {**_EMBEDDINGS, "pooler.dense": "pool"}
_ENCODER_LAYER = r"encoder\.layer\.(\d+)\.(.+)"
_MLP = {"intermediate.dense": "m2", "output.dense": "m3", "output.LayerNorm": "LN2"}
_ATTENTION_OUTPUT = {"attention.output.dense": "m1", "attention.output.LayerNorm": "LN1"}
_BERT = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    **_ATTENTION_OUTPUT,
    **_MLP,
}
_DISTILBERT = {
    "attention.q_lin": "q",
    "attention.k_lin": "k",
    "attention.v_lin": "v",
    "attention.out_lin": "m1",
    "sa_layer_norm": "LN1",
    "ffn.lin1": "m2",
    "ffn.lin2": "m3",
    "output_layer_norm": "LN2",
}
_ALBERT = {
    "attention.query": "q",
    "attention.key": "k",
    "attention.value": "v",
    "attention.dense": "m1",
    "attention.LayerNorm": "LN1",
    "ffn": "m2",
    "ffn_output": "m3",
    "full_layer_layer_norm": "LN2",
}
_MPNET = {
    "attention.attn.q": "q",
    "attention.attn.k": "k",
    "attention.attn.v": "v",
    "attention.attn.o": "m1",
    "attention.LayerNorm": "LN1",
    **_MLP,
}
_DEBERTA = {
    "attention.self.query_proj": "q",
    "attention.self.key_proj": "k",
    "attention.self.value_proj": "v",
    **_ATTENTION_OUTPUT,
    **_MLP,
}
_GPT2 = {
    "attn.c_attn": "q k v",
    "attn.c_proj": "m1",
    "ln_1": "LN1",
    "mlp.c_fc": "m2",
    "mlp.c_proj": "m3",
    "ln_2": "LN2",
}
# A gated MLP widens twice; both matrices stand where the papers have W_m2.
_LLAMA = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "m1",
    "input_layernorm": "LN1",
    "mlp.gate_proj": "m2",
    "mlp.up_proj": "m2",
    "mlp.down_proj": "m3",
    "post_attention_layernorm": "LN2",
}
_OPT = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "m1",
    "self_attn_layer_norm": "LN1",
    "fc1": "m2",
    "fc2": "m3",
    "final_layer_norm": "LN2",
}
_MODERNBERT = {
    "attn.Wqkv": "q k v",
    "attn.Wo": "m1",
    "attn_norm": "LN1",
    "mlp.Wi": "m2",
    "mlp.Wo": "m3",
    "mlp_norm": "LN2",
}
_ALBERT_LAYER = r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.(\d+)\.(.+)"
_OPT_OUTSIDE = {"decoder.embed_tokens": "emb", "decoder.embed_positions": "emb"}
_MODERNBERT_OUTSIDE = {"embeddings.tok_embeddings": "emb", "embeddings.norm": "emb"}
_ROBERTA = Family("roberta", _ENCODER_LAYER, _BERT, _OUTSIDE)

FAMILIES: Mapping[str, Family] = {
    "bert": Family("bert", _ENCODER_LAYER, _BERT, _OUTSIDE),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family("distilbert", r"transformer\.layer\.(\d+)\.(.+)", _DISTILBERT, _EMBEDDINGS),
    "electra": Family("electra", _ENCODER_LAYER, _BERT, _EMBEDDINGS),
    "albert": Family("albert", _ALBERT_LAYER, _ALBERT, {**_EMBEDDINGS, "pooler": "pool"}),
    "mpnet": Family("mpnet", _ENCODER_LAYER, _MPNET, _OUTSIDE),
    "deberta-v2": Family("deberta-v2", _ENCODER_LAYER, _DEBERTA, _EMBEDDINGS),
    "gpt2": Family("gpt2", r"h\.(\d+)\.(.+)", _GPT2, {"wte": "emb", "wpe": "emb"}, outputs=1),
    "llama": Family("llama", r"layers\.(\d+)\.(.+)", _LLAMA, {"embed_tokens": "emb"}),
    "qwen2": Family("qwen2", r"layers\.(\d+)\.(.+)", _LLAMA, {"embed_tokens": "emb"}),
    "opt": Family("opt", r"decoder\.layers\.(\d+)\.(.+)", _OPT, _OPT_OUTSIDE),
    "modernbert": Family("modernbert", r"layers\.(\d+)\.(.+)", _MODERNBERT, _MODERNBERT_OUTSIDE),
}
"""The known families, by the `model_type` of transformers."""

INPUTS: Mapping[str, str] = {
    "words": "embeddings.word_embeddings.weight",
    "types": "embeddings.token_type_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "W_project": "embeddings_project.weight",
    "b_project": "embeddings_project.bias",
    "distances": "encoder.relative_attention_bias.weight",
}
"""What the papers have no term for but a forward pass of the BERT family must find, by its part in it."""

SWITCHES = ("attention_bias", "mlp_bias", "norm_bias", "enable_bias")
"""What configurations call the settings that give layers without a bias one."""

UNKNOWN = Family("unknown", r"(?!)", {}, {})
"""Stands in for every other architecture: no layers, and all terms are *_other."""


def anatomy(model_type: str, shapes: Mapping[str, tuple[int, ...]]) -> Anatomy:
    """Name every parameter of an encoder in the papers' notation, from its parameter names and shapes."""
    family = FAMILIES.get(model_type, UNKNOWN)
    layers = _layers(family, shapes)
    sites = tuple(site for name, shape in shapes.items() for site in _sites(family, name, tuple(shape), layers))
    return Anatomy(family.name, sites, len(layers))


def _split(family: Family, name: str) -> tuple[tuple[int, ...], str]:
    """The numbers of the layer a name is in (none: outside the layers), and the rest of the name."""
    match = re.fullmatch(family.layer, name)
    if match is None:
        return (), name
    *numbers, rest = match.groups()
    return tuple(int(number) for number in numbers), rest


def _layers(family: Family, names: Mapping[str, object]) -> dict[tuple[int, ...], int]:
    """Number the layers one after the other: ALBERT counts groups and layers within them."""
    numbers = {_split(family, name)[0] for name in names} - {()}
    return {key: layer for layer, key in enumerate(sorted(numbers))}


def _sites(family: Family, name: str, shape: tuple[int, ...], layers: Mapping[tuple[int, ...], int]) -> Iterator[Site]:
    """The sites of one tensor: one, or one per place where several share it."""
    numbers, rest = _split(family, name)
    modules = family.inside if numbers else family.outside
    outputs = shape[family.outputs] if len(shape) > 1 else math.prod(shape)
    terms = _terms(modules.get(rest.rpartition(".")[0], "other"), name, len(shape), outputs)
    if len(terms) == 1:
        yield Site(terms[0], layers.get(numbers), name, shape)
        return
    axis = family.outputs if len(shape) > 1 else 0
    width = shape[axis] // len(terms)
    for i, term in enumerate(terms):
        yield Site(term, layers.get(numbers), name, shape, axis, i * width, (i + 1) * width)


def _terms(places: str, name: str, axes: int, outputs: int) -> list[str]:
    """The terms of a tensor at these places; what the papers have no term for is *_other by its form."""
    leaf = name.rpartition(".")[2]
    form = {"bias": "b", "weight": "g"}.get(leaf, "W") if axes == 1 else "W"
    terms = [f"{form}_{place}" for place in places.split()]
    # A module may hold more than its weight and its bias (a scale, say), and those have no place in the papers.
    named = set(terms) <= set(TERMS) and (leaf == "weight" or form == "b")
    divisible = outputs % len(terms) == 0
    return terms if named and divisible else [f"{form}_other"]
