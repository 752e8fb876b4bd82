"""The default rules, on paths and nested_shapes of parameters of real models."""

import jax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from tests.support.trees import nested_shapes

# Path and shape of parameters of real models, and what they are: dimension numbers or None.
KNOWN = [
    ("wte/embedding", (100, 8), None),
    ("wpe/embedding", (100, 8), None),
    ("Embed_0/embedding", (100, 8), None),
    ("token_embed/kernel", (8, 8), None),
    ("tok_embeddings/kernel", (100, 8), None),
    ("tok_emb/w", (100, 8), None),
    ("model/embed_tokens/embedding", (100, 8), None),
    ("lm_head/kernel", (8, 100), None),
    ("head/kernel", (8, 100), None),
    ("logits_dense/kernel", (8, 100), None),
    ("output/kernel", (8, 100), None),
    ("params/output/kernel", (8, 100), None),
    ("pos_embedding", (1, 16, 8), None),
    ("posemb/pos", (16, 8), None),
    ("encoder/position_table", (16, 8), None),
    ("blocks/ln_1/scale", (4, 8), None),
    ("blocks/LayerNorm_0/bias", (4, 8), None),
    ("blocks/RMSNorm_0/weight", (4, 8), None),
    ("attn/query/bias", (2, 4), None),
    ("blocks/mlp/Dense_0/bias", (4, 8), None),
    ("linear/b", (3, 8), None),
    ("b", (3, 8), Dims(0, 1)),
    ("final_norm/weight", (4, 8), None),
    ("q_norm", (4, 8), None),
    ("norm_proj/kernel", (8, 8), Dims(0, 1)),
    ("normalizer/kernel", (8, 8), Dims(0, 1)),
    ("subnormal", (8, 8), Dims(0, 1)),
    ("layer_norm/offset", (8,), None),
    ("h/0/attn/qkv/kernel", (8, 24), Dims(0, 1)),
    ("attention/output/dense/kernel", (8, 8), Dims(0, 1)),
    ("multi_head/kernel", (8, 8), Dims(0, 1)),
    ("time_embed/Dense_0/kernel", (8, 8), Dims(0, 1)),
    ("overhead/w", (8, 8), Dims(0, 1)),
    ("lnear/w", (8, 8), Dims(0, 1)),
    ("attn/query/kernel", (8, 8), Dims(0, 1)),
    ("attn/query/kernel", (8, 2, 4), Dims(0, (1, 2))),
    ("attn/out/kernel", (2, 4, 8), Dims((0, 1), 2)),
    ("layers/0/weight", (16, 8), Dims(1, 0)),
    ("transformer/~/linear/w", (8, 8), Dims(0, 1)),
]


@pytest.mark.parametrize("path, shape, expected", KNOWN)
def test_default_rules(path, shape, expected):
    tree = nested_shapes(**{path.replace("/", "__"): shape})
    (spec,) = jax.tree.leaves(
        omp.muon_dimension_numbers(tree), is_leaf=lambda x: x is None or isinstance(x, Dims)
    )
    assert spec == expected
