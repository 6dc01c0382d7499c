"""The known architectures: one row per `model_type` of transformers.

A row maps the architecture's module names to the papers' notation. It says whether the packed path computes it, how
texts may share a row, why its biases do not fold, and which configuration settings matter. Adding an architecture means
adding a row here and a tiny configuration to ARCHITECTURES in tests/support.py. A package adds one with an entry point
of the group "bitfit.architectures" whose name is the `model_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..plugins import Registry

INPUTS: Mapping[str, str] = {
    "words": "embeddings.word_embeddings.weight",
    "types": "embeddings.token_type_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "W_project": "embeddings_project.weight",
    "b_project": "embeddings_project.bias",
    "distances": "encoder.relative_attention_bias.weight",
}
"""Tensors without a term in the papers that a forward pass needs, by role, as BERT and its relatives name them."""


@dataclass(frozen=True, slots=True)
class PackedStyle:
    """What the packed path needs to know of an architecture: configuration settings, and whether m1 has dropout."""

    hidden_dropout: str = "hidden_dropout_prob"
    attention_dropout: str = "attention_probs_dropout_prob"
    m1_dropout: bool = True  # whether dropout follows m1


@dataclass(frozen=True, slots=True)
class RowSharing:
    """How several texts share a row of the stock model, which must take an attention mask per pair of tokens."""

    causal: bool = False  # whether a token sees only those before it
    boolean_mask: bool = False  # whether the mask holds 0 and 1; else it is added to the scores
    masks_embeddings: bool = False  # whether the embeddings are multiplied with the mask of a padded batch


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row: everything bitfit knows of an architecture."""

    name: str
    """The name of the family in reports and errors."""
    layer: str
    """A pattern for the names inside a layer: the layer's numbers, then the rest of the name."""
    inside: Mapping[str, str]
    """Module inside a layer -> its name in the papers' formulas. "q k v" are equal parts of the outputs, in order."""
    outside: Mapping[str, str]
    """Module outside the layers -> its name in the papers' formulas."""
    no_fold: str | None
    """Why biases cannot be folded into each other; None if they can (post-LN layers that share no biases)."""
    output_axis: int = 0
    """The axis of the outputs in a weight matrix."""
    packed: PackedStyle | None = None
    """How the packed path computes it; None: only the stock path does."""
    row_sharing: RowSharing | None = None
    """How texts share rows on the stock path; None: they do not."""
    activation: str = "hidden_act"
    """The configuration setting that names the activation between m2 and m3."""
    first_position: int = 0
    """The index of the first token's position embedding; those before it are unused."""
    switches: tuple[str, ...] = ()
    """Configuration settings that give layers a bias which they lack by default."""
    inputs: Mapping[str, str] = field(default_factory=lambda: INPUTS)
    """Role -> name of the tensors without a term that a forward pass needs."""


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
# A gated MLP has two matrices in the role of the papers' W_m2.
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
_SHARED_BIASES = "its layers share their biases, so none can take over the effect of another"
_DISENTANGLED = "its attention compares keys with positions, so b_k has an effect"
_ROTARY = "its rotary positions rotate the keys, so b_k has an effect"
_PRE_LN = "its LayerNorms are inside the residual branches, so their biases cannot be moved"

_PACKED = PackedStyle()
_CAUSAL = RowSharing(causal=True)

BERT = Architecture("bert", _ENCODER_LAYER, _BERT, _OUTSIDE, no_fold=None, packed=_PACKED)
ROBERTA = Architecture("roberta", _ENCODER_LAYER, _BERT, _OUTSIDE, no_fold=None, packed=_PACKED, first_position=2)
DISTILBERT = Architecture(
    "distilbert",
    r"transformer\.layer\.(\d+)\.(.+)",
    _DISTILBERT,
    _EMBEDDINGS,
    no_fold=None,
    packed=PackedStyle("dropout", "attention_dropout", m1_dropout=False),
    activation="activation",
)
ELECTRA = Architecture("electra", _ENCODER_LAYER, _BERT, _EMBEDDINGS, no_fold=None, packed=_PACKED)
ALBERT = Architecture(
    "albert",
    _ALBERT_LAYER,
    _ALBERT,
    {**_EMBEDDINGS, "pooler": "pool"},
    no_fold=_SHARED_BIASES,
    row_sharing=RowSharing(),
)
MPNET = Architecture("mpnet", _ENCODER_LAYER, _MPNET, _OUTSIDE, no_fold=None, packed=_PACKED, first_position=2)
DEBERTA_V2 = Architecture(
    "deberta-v2",
    _ENCODER_LAYER,
    _DEBERTA,
    _EMBEDDINGS,
    no_fold=_DISENTANGLED,
    row_sharing=RowSharing(boolean_mask=True, masks_embeddings=True),
)
GPT2 = Architecture(
    "gpt2",
    r"h\.(\d+)\.(.+)",
    _GPT2,
    {"wte": "emb", "wpe": "emb"},
    no_fold=_PRE_LN,
    output_axis=1,
    row_sharing=_CAUSAL,
    activation="activation_function",
)
LLAMA = Architecture(
    "llama",
    r"layers\.(\d+)\.(.+)",
    _LLAMA,
    {"embed_tokens": "emb"},
    no_fold=_ROTARY,
    row_sharing=_CAUSAL,
    switches=("attention_bias", "mlp_bias"),
)
QWEN2 = Architecture(
    "qwen2", r"layers\.(\d+)\.(.+)", _LLAMA, {"embed_tokens": "emb"}, no_fold=_ROTARY, row_sharing=_CAUSAL
)
OPT = Architecture(
    "opt",
    r"decoder\.layers\.(\d+)\.(.+)",
    _OPT,
    {"decoder.embed_tokens": "emb", "decoder.embed_positions": "emb"},
    no_fold=_PRE_LN,
    row_sharing=_CAUSAL,
    activation="activation_function",
    switches=("enable_bias",),
)
MODERNBERT = Architecture(
    "modernbert",
    r"layers\.(\d+)\.(.+)",
    _MODERNBERT,
    {"embeddings.tok_embeddings": "emb", "embeddings.norm": "emb"},
    no_fold=_ROTARY,
    activation="hidden_activation",
    switches=("attention_bias", "mlp_bias", "norm_bias"),
)

UNKNOWN = Architecture(
    "unknown",
    r"(?!)",
    {},
    {},
    no_fold="its layers are not known by name",
    switches=("attention_bias", "mlp_bias", "norm_bias", "enable_bias"),
)
"""The row of every other architecture: no layers, and all terms are *_other."""

ARCHITECTURES: Registry[Architecture] = Registry(
    "bitfit.architectures",
    {
        "bert": "bitfit.model.architectures:BERT",
        "roberta": "bitfit.model.architectures:ROBERTA",
        "xlm-roberta": "bitfit.model.architectures:ROBERTA",
        "camembert": "bitfit.model.architectures:ROBERTA",
        "distilbert": "bitfit.model.architectures:DISTILBERT",
        "electra": "bitfit.model.architectures:ELECTRA",
        "albert": "bitfit.model.architectures:ALBERT",
        "mpnet": "bitfit.model.architectures:MPNET",
        "deberta-v2": "bitfit.model.architectures:DEBERTA_V2",
        "gpt2": "bitfit.model.architectures:GPT2",
        "llama": "bitfit.model.architectures:LLAMA",
        "qwen2": "bitfit.model.architectures:QWEN2",
        "opt": "bitfit.model.architectures:OPT",
        "modernbert": "bitfit.model.architectures:MODERNBERT",
    },
)
"""The known architectures, by the `model_type` of transformers."""


def architecture(model_type: str) -> Architecture:
    """The row of an architecture; UNKNOWN if there is none."""
    return ARCHITECTURES.get(model_type, UNKNOWN)
