"""Parameters by the names of the paper's code: round trips, orders of heads, and sentences."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from examples.trainer.models import state_dict
from examples.trainer.models.state_dict import abstract, from_state_dict, sizes_of, to_state_dict
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError
from tests.support.model_trees import leaves, stacked

V, D, H, K, F = 7, 6, 2, 3, 8

GPT = ModelConfig(n_layer=2, n_head=H, d_model=D, d_ff=F, context=5)

LLAMA = dataclasses.replace(GPT, family="llama", tied=False)

FUSED, SEPARATE = ({"qkv": form} for form in ("fused", "separate"))

VARIANTS = {
    "gpt": GPT,
    "gpt separate": dataclasses.replace(GPT, **SEPARATE),
    "gpt untied": dataclasses.replace(GPT, tied=False),
    "gpt with the older norm": dataclasses.replace(GPT, final_norm="layer"),
    "llama": LLAMA,
    "llama fused": dataclasses.replace(LLAMA, **FUSED),
    "llama tied": dataclasses.replace(LLAMA, tied=True),
}


def numbered(config):
    """Parameters all of whose numbers differ."""
    shapes = abstract(config, V)
    start = itertools.count(step=10_000)
    return jax.tree.map(
        lambda x: (next(start) + np.arange(x.size, dtype=np.float32)).reshape(x.shape), shapes
    )


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name, strict=True)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trips_are_exact(variant, scan):
    config = dataclasses.replace(VARIANTS[variant], scan=scan)
    params = numbered(config)
    published = to_state_dict(params, config)
    again = from_state_dict(published, config, V)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert_equal(leaves(again), leaves(params))
    assert_equal(to_state_dict(again, config), published)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, published)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_all_trees_of_a_family_have_one_state_dict(config):
    published = to_state_dict(numbered(config), config)
    each = from_state_dict(published, config, V)
    for change in ({"scan": True}, FUSED, SEPARATE, {"scan": True, **FUSED}):
        other = dataclasses.replace(config, **change)
        assert_equal(to_state_dict(from_state_dict(published, other, V), other), published)
    together = from_state_dict(published, dataclasses.replace(config, scan=True), V)
    assert_equal(leaves(together), leaves(jax.tree.map(np.asarray, stacked(each))))


def test_names_and_shapes_are_those_of_the_code():
    shapes = {name: x.shape for name, x in to_state_dict(numbered(GPT), GPT).items()}
    block = {
        "ln_1.weight": (D,),
        "ln_1.bias": (D,),
        "attn.c_attn.weight": (3 * D, D),
        "attn.c_attn.bias": (3 * D,),
        "attn.c_proj.weight": (D, D),
        "attn.c_proj.bias": (D,),
        "ln_2.weight": (D,),
        "ln_2.bias": (D,),
        "mlp.c_fc.weight": (F, D),
        "mlp.c_fc.bias": (F,),
        "mlp.c_proj.weight": (D, F),
        "mlp.c_proj.bias": (D,),
    }
    assert shapes == {
        "transformer.wte.weight": (V, D),
        "transformer.wpe.weight": (5, D),
        "transformer.ln_f.weight": (D,),
        **{f"transformer.h.{i}.{name}": shape for i in range(2) for name, shape in block.items()},
    }


def test_heads_lie_where_the_models_read_them():
    published = to_state_dict(numbered(GPT), GPT)
    rows = published["transformer.h.1.attn.c_attn.weight"].reshape(3, H, K, D)
    bias = published["transformer.h.1.attn.c_attn.bias"].reshape(3, H, K)
    fused = from_state_dict(published, dataclasses.replace(GPT, **FUSED), V)
    attention = fused["blocks"][1]["attn"]["qkv"]
    separate = from_state_dict(published, dataclasses.replace(GPT, **SEPARATE), V)
    for i, name in enumerate(("query", "key", "value")):
        own = separate["blocks"][1]["attn"][name]
        for head in range(H):
            columns = attention["kernel"].reshape(D, H, 3, K)[:, head, i]
            np.testing.assert_array_equal(columns, rows[i, head].T)
            np.testing.assert_array_equal(own["kernel"].reshape(D, H, K)[:, head], columns)
            np.testing.assert_array_equal(
                attention["bias"].reshape(H, 3, K)[head, i], bias[i, head]
            )
            np.testing.assert_array_equal(own["bias"].reshape(H, K)[head], bias[i, head])


def test_tied_head():
    published = to_state_dict(numbered(GPT), GPT, tied_head=True)
    embedding = published["transformer.wte.weight"]
    np.testing.assert_array_equal(published[state_dict.HEAD], embedding)
    params = from_state_dict(published, GPT, V)
    assert "lm_head" not in params
    published[state_dict.HEAD] = embedding + 1
    with pytest.raises(UserError, match=r"lm_head.weight differs from transformer.wte.weight"):
        from_state_dict(published, GPT, V)
    untied = from_state_dict(published, dataclasses.replace(GPT, tied=False), V)
    np.testing.assert_array_equal(untied["lm_head"]["kernel"], (embedding + 1).T)


@pytest.mark.parametrize("variant", ["gpt", "gpt untied", "llama", "llama tied"])
def test_sizes_are_read_off_the_arrays(variant):
    config = VARIANTS[variant]
    published = to_state_dict(numbered(config), config)
    assert sizes_of(published, config.family, H, context=5) == (config, V)


def test_arrays_get_the_type_of_the_parameters():
    config = dataclasses.replace(LLAMA, param_dtype="bfloat16")
    params = from_state_dict(to_state_dict(numbered(LLAMA), LLAMA), config, V)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jax.numpy.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing: give all parameters"),
        (
            {f"model.layers.1.self_attn.{letter}_proj.weight": None for letter in "qkvo"},
            r"k_proj.weight, \S*o_proj.weight, \S*q_proj.weight and 1 more are missing",
        ),
        ({"model.norm.bias": np.ones(D)}, "model.norm.bias is not in a llama of 2 layers: leave"),
        (
            {"model.layers.0.mlp.up_proj.weight": np.ones((D, F))},
            r"up_proj.weight has the shape \(6, 8\), and in a llama .* it has \(8, 6\): give",
        ),
    ],
)
def test_other_names_and_shapes_are_refused(change, words):
    published = {**to_state_dict(numbered(LLAMA), LLAMA), **change}
    with pytest.raises(UserError, match=words):
        from_state_dict({k: x for k, x in published.items() if x is not None}, LLAMA, V)


@pytest.mark.parametrize(
    ("embedding", "words"),
    [
        (None, "embed_tokens.weight is missing"),
        (np.ones(V), r"has the shape \(7,\): give a matrix"),
    ],
)
def test_sizes_need_the_embedding(embedding, words):
    given = {} if embedding is None else {"model.embed_tokens.weight": embedding}
    with pytest.raises(UserError, match=words):
        sizes_of(given, "llama", H, context=5)


def test_networks_that_were_never_published_are_refused():
    gated = dataclasses.replace(GPT, mlp="swiglu")
    with pytest.raises(UserError, match=r"gpt has no blocks/mlp/gate/.*: only a network"):
        to_state_dict(numbered(gated), gated)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("variant", ["gpt", "llama fused"])
def test_numbers_that_are_not_finite_are_named(variant, value):
    config = VARIANTS[variant]
    found = dict(to_state_dict(numbered(config), config))
    name = [each for each in found if "1" in each and each.endswith("proj.weight")][-1]
    found[name] = found[name].astype(np.float64)
    found[name][-1, 2] = value
    with pytest.raises(UserError, match=f"{name} has numbers that are not finite in float32"):
        from_state_dict(found, config, V)
