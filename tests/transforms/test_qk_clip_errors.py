"""QK-clip refuses, in words, parameters and maxima that it has no rule for."""

import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.trees import random_tree

D, H, K = 6, 4, 4
MAXIMA = np.array([1.0, 8.0, 2.5, 3.0], np.float32)
SIZES = {name: {"kernel": (D, H * K), "bias": (H * K,)} for name in ("query", "key", "value")}
NO_MODULE = {"mlp": {"up": {"kernel": (D, D)}}}


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (NO_MODULE, {}, "No module has layers with the names of queries and keys"),
        ({"q_proj": {"kernel": (D, D)}, "kv_proj": {"kernel": (D, D)}}, {}, "name of keys alone"),
        ({"q_up": {"kernel": (D, D)}, "k_up": {"kernel": (D, D)}}, {}, "latent attention"),
        (SIZES | {"q_norm": {"scale": (K,)}}, {}, "q_norm/scale: norms of queries and keys undo"),
        (SIZES | {"key_ln": {"scale": (K,)}}, {}, "key_ln/scale"),
        ({"qkv": {"kernel": (D, 3 * D)}}, {}, "fused='by_head'"),
        ({"qkv": {"kernel": (D, 3 * D)}}, {"fused": "blocks"}, "head_size="),
        (SIZES, {"rules": [("query", None)]}, "query/kernel is no matrix"),
    ],
)
def test_parameters_that_cannot_be_clipped_are_refused_at_init(shapes, options, words):
    tx = omp.transforms.qk_clip(2.0, **options)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        tx.init(random_tree({"attn": shapes}))


@pytest.mark.parametrize(
    ("maxima", "words"),
    [
        (None, "max_logits={'path/of/attention'"),
        ({}, "Without maxima: attn"),
        (
            {"attn": MAXIMA, "mlp": MAXIMA},
            r"than one for a module: mlp \[4\]",
        ),
        ({"attn": {"a": MAXIMA, "b": MAXIMA}}, r"attn/b \[4\]"),
        ({"attn": np.float32(3.0)}, r"attn \[\]"),
        ({"attn": MAXIMA[:3]}, "3 heads of queries"),
        ({"attn": np.ones(64, np.float32)}, "64 heads of queries"),
        ({"attn": np.stack([MAXIMA] * 2)}, "2,.* layers"),
    ],
)
def test_maxima_of_other_heads_are_refused(maxima, words):
    params = random_tree({"attn": SIZES})
    tx = omp.transforms.qk_clip(2.0)
    with pytest.raises(ValueError, match=words):
        tx.update(params, tx.init(params), params, max_logits=maxima)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0.0}, "threshold must be a positive"),
        ({"threshold": lambda step: 1.0}, "threshold must be a number"),
        ({"fused": "interleaved"}, "Unknown fused"),
        ({"head_size": 0}, "head_size must be"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        omp.transforms.qk_clip(**options)


def test_a_size_of_heads_that_the_kernel_has_not_is_named():
    """Also one beyond 32 bits: it is a size, and no count of what is written out in a program."""
    params = random_tree({"attn": {"qkv": {"kernel": (D, 3 * D)}}})
    tx = omp.transforms.qk_clip(head_size=2**31, fused="blocks")
    with pytest.raises(ValueError, match="with 2147483648 outputs each"):
        tx.update(params, tx.init(params), params, max_logits={"attn": MAXIMA})


def test_without_parameters_is_refused():
    params = random_tree({"attn": SIZES})
    tx = omp.transforms.qk_clip()
    with pytest.raises(ValueError, match="state, parameters, max_logits="):
        tx.update(params, tx.init(params), max_logits={"attn": MAXIMA})
