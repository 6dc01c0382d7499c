"""An architecture for bitfit: ERNIE, whose layers have BERT's names. It runs on the stock path of transformers."""

from bitfit.model.architectures import Architecture

ERNIE = Architecture(
    name="ernie",
    layer=r"encoder\.layer\.(\d+)\.(.+)",
    inside={
        "attention.self.query": "q",
        "attention.self.key": "k",
        "attention.self.value": "v",
        "attention.output.dense": "m1",
        "attention.output.LayerNorm": "LN1",
        "intermediate.dense": "m2",
        "output.dense": "m3",
        "output.LayerNorm": "LN2",
    },
    outside={
        "embeddings.word_embeddings": "emb",
        "embeddings.position_embeddings": "emb",
        "embeddings.token_type_embeddings": "emb",
        "embeddings.LayerNorm": "emb",
        "pooler.dense": "pool",
    },
    no_fold=None,
)
