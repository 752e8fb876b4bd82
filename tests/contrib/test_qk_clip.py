"""QK-clip against the float64 oracle: which rows of which leaves it scales; what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from tests.support.mesh import AUTO, EXPLICIT, make_mesh
from tests.support.reference_qk_clip import clipped
from tests.support.trees import random_like, random_tree

D, K, H, SHARED, LAYERS = 6, 4, 4, 2, 3
THRESHOLD = 2.0
MAXIMA = np.array([1.0, 8.0, 2.5, 3.0], np.float32)


def rows(kernel, heads):
    """A flat kernel (d, heads size) as (heads, size, d)."""
    return np.asarray(kernel, np.float64).T.reshape(heads, K, -1)


def flat(x):
    """The way back."""
    return x.reshape(-1, x.shape[-1]).T


def separate(p, maxima=MAXIMA, heads=H):
    """What the flat kernels and biases of queries and keys become."""
    out = {name: dict(leaves) for name, leaves in p.items()}
    for leaf, take, put in [
        ("kernel", rows, flat),
        ("bias", lambda x, n: np.asarray(x, np.float64).reshape(n, K), np.ravel),
    ]:
        shared = p["key"][leaf].shape[-1] // K
        q, k = clipped(take(p["query"][leaf], heads), take(p["key"][leaf], shared), maxima, 2.0)
        out["query"][leaf], out["key"][leaf] = put(q), put(k)
    return out


def by_axes(p):
    """The same for kernels (d, heads, size) and biases (heads, size)."""
    q, k = (np.moveaxis(np.asarray(p[x]["kernel"]), 0, -1) for x in ("query", "key"))
    q, k = clipped(q, k, MAXIMA, THRESHOLD)
    bias = clipped(p["query"]["bias"], p["key"]["bias"], MAXIMA, THRESHOLD)
    out = {name: dict(leaves) for name, leaves in p.items()}
    for name, kernel, b in zip(("query", "key"), (q, k), bias, strict=True):
        out[name] = {"kernel": np.moveaxis(kernel, -1, 0), "bias": b}
    return out


def torch(p):
    """The same for weights (out, in), without biases."""
    q, k = (np.asarray(p[x]["weight"]).reshape(-1, K, D) for x in ("wq", "wk"))
    q, k = clipped(q, k, MAXIMA, THRESHOLD)
    return p | {"wq": {"weight": q.reshape(-1, D)}, "wk": {"weight": k.reshape(-1, D)}}


def fused(p, order):
    """The same for a fused kernel; ``order`` lists its heads as (kind, number)."""
    blocks = rows(p["qkv"]["kernel"], len(order))
    at = {head: i for i, head in enumerate(order)}
    q, k = [at["q", h] for h in range(H)], [at["k", h] for h in range(SHARED)]
    out = np.array(blocks)
    out[q], out[k] = clipped(blocks[q], blocks[k], MAXIMA, THRESHOLD)
    return p | {"qkv": {"kernel": flat(out)}}


BLOCKS = [("q", h) for h in range(H)] + [(x, g) for x in "kv" for g in range(SHARED)]
BY_HEAD = [("q", 0), ("q", 1), ("k", 0), ("v", 0), ("q", 2), ("q", 3), ("k", 1), ("v", 1)]


def scanned(p):
    """The same for stacked layers, each with maxima of its own."""
    layers = [
        separate(jax.tree.map(lambda x, i=i: x[i], p), m) for i, m in enumerate(STACKED_MAXIMA)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *layers)


STACKED_MAXIMA = np.stack([MAXIMA, MAXIMA[::-1], np.ones(H, np.float32)])


def dense(heads, shared, stack=()):
    sizes = {"query": heads, "key": shared, "value": shared}
    return {
        name: {"kernel": (*stack, D, n * K), "bias": (*stack, n * K)} for name, n in sizes.items()
    }


AXES = {
    name: {"kernel": (D, n, K), "bias": (n, K)}
    for name, n in {"query": H, "key": SHARED, "value": SHARED}.items()
}
CASES = {
    "separate": (dense(H, H), {}, separate),
    "grouped queries": (dense(H, SHARED), {}, separate),
    "one head of keys": (dense(H, 1), {}, separate),
    "axes of heads": (AXES, {}, by_axes),
    "(out, in)": ({n: {"weight": (H * K, D)} for n in ("wq", "wk", "wv")}, {}, torch),
    "fused, blocks": (
        {"qkv": {"kernel": (D, (H + 2 * SHARED) * K)}},
        {"fused": "blocks", "head_size": K},
        lambda p: fused(p, BLOCKS),
    ),
    "fused, by head": (
        {"qkv": {"kernel": (D, (H + 2 * SHARED) * K)}},
        {"fused": "by_head", "head_size": K},
        lambda p: fused(p, BY_HEAD),
    ),
    "stacked layers": (
        dense(H, SHARED, (LAYERS,)),
        {"where": omp.Matrices(layer_axes={"kernel|bias": 0})},
        scanned,
    ),
}


def model(name):
    """Parameters and updates with attention of that case and an MLP beside it."""
    shapes = {"blocks": [{"attn": CASES[name][0], "up": {"kernel": (D, 8)}}]}
    if name == "stacked layers":
        shapes["blocks"][0]["up"]["kernel"] = (LAYERS, D, 8)
    return random_tree(shapes, 0), random_tree(shapes, 1)


def maxima_of(name):
    found = STACKED_MAXIMA if name == "stacked layers" else MAXIMA
    return {"blocks": [{"attn": jnp.asarray(found)}]}


def after(tx, params, updates, maxima):
    """The parameters after a compiled update."""
    step = jax.jit(lambda u, p, m: tx.update(u, tx.init(p), p, max_logits=m)[0])
    return optax.apply_updates(params, step(updates, params, maxima))


@pytest.mark.parametrize("name", CASES)
def test_new_parameters_are_those_of_the_oracle(name):
    _, options, oracle = CASES[name]
    params, updates = model(name)
    new = optax.apply_updates(params, updates)
    expected = {"blocks": [new["blocks"][0] | {"attn": oracle(new["blocks"][0]["attn"])}]}
    found = after(omp.contrib.qk_clip(THRESHOLD, **options), params, updates, maxima_of(name))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), found, new)
    assert any(jax.tree.leaves(moved["blocks"][0]["attn"]))
    assert not any(jax.tree.leaves(moved["blocks"][0]["up"]))


def test_maxima_of_bfloat16_are_clipped_in_float32():
    """A factor of eight bits would leave a logit above the threshold."""
    params, _ = model("separate")
    tx = omp.contrib.qk_clip(THRESHOLD)
    rounded = optax.tree.cast(maxima_of("separate"), jnp.bfloat16)
    zero = jax.tree.map(jnp.zeros_like, params)
    found = after(tx, params, zero, rounded)
    expected = after(tx, params, zero, optax.tree.cast(rounded, jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("largest", [THRESHOLD, 0.0, -3.0, np.nan, np.inf])
def test_heads_within_the_threshold_keep_their_updates_to_the_bit(largest):
    params, updates = model("grouped queries")
    maxima = {"blocks": [{"attn": jnp.full(H, largest)}]}
    tx = omp.contrib.qk_clip(THRESHOLD)
    found, _ = jax.jit(tx.update)(updates, tx.init(params), params, max_logits=maxima)
    jax.tree.map(np.testing.assert_array_equal, found, updates)


@pytest.mark.several_devices
@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "name", ["grouped queries", "axes of heads", "fused, by head", "stacked layers"]
)
def test_sharded_is_unsharded(name, types):
    params, updates = model(name)
    tx, maxima = omp.contrib.qk_clip(THRESHOLD, **CASES[name][1]), maxima_of(name)
    alone = after(tx, params, updates, maxima)
    mesh = make_mesh((2, 2), "ab", types)

    def place(x):
        last = (None,) if name == "axes of heads" and x.shape[-1] == K else ()
        axes = ("a", "b", *last)[-x.ndim :]
        axes = (None,) * (x.ndim - len(axes)) + axes
        axes = [axis if n % 2 == 0 else None for axis, n in zip(axes, x.shape, strict=True)]
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    with jax.set_mesh(mesh):
        found = after(tx, *jax.tree.map(place, (params, updates)), maxima)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, alone)


def test_after_an_optimizer_with_bfloat16_parameters():
    """In a chain, under jit; updates have their dtypes, and bfloat16's rounding is all there is."""
    params = random_like(
        jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16),
            {"attn": dense(H, H)},
            is_leaf=lambda x: isinstance(x, tuple),
        )
    )
    plain = omp.muonplus(0.1)
    tx = optax.chain(plain, omp.contrib.qk_clip(THRESHOLD))
    updates = jax.jit(tx.update)(
        params, tx.init(params), params, max_logits={"attn": jnp.asarray(MAXIMA)}
    )[0]
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    moved, _ = jax.jit(plain.update)(params, plain.init(params), params)
    new = jax.tree.map(lambda p, u: np.float32(p) + np.float32(u), params, moved)["attn"]
    found = jax.tree.map(lambda p, u: np.float32(p) + np.float32(u), params, updates)["attn"]
    expected = separate(new)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0.02, atol=0.02)


def test_maxima_as_linen_sows_them_and_by_flat_paths():
    params = random_tree({"a": dense(H, H), "b": dense(H, H)})
    updates = jax.tree.map(jnp.zeros_like, params)
    tx, m = omp.contrib.qk_clip(THRESHOLD), jnp.asarray(MAXIMA)
    trees = [
        {"a": {"max_logits": (m,)}, "b": {"max_logits": (2 * m,)}},
        {"a": m, "b": 2 * m},
        {"b/x": 2 * m, "a/y": m},
    ]
    first, *others = (after(tx, params, updates, tree) for tree in trees)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


# What it has no rule for

SIZES = dense(H, H)
NO_MODULE = {"mlp": {"up": {"kernel": (D, D)}}}


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (NO_MODULE, {}, "No module has layers with the names of queries and keys"),
        ({"q_proj": {"kernel": (D, D)}, "kv_proj": {"kernel": (D, D)}}, {}, "layer of keys alone"),
        ({"q_up": {"kernel": (D, D)}, "k_up": {"kernel": (D, D)}}, {}, "latent attention"),
        (SIZES | {"q_norm": {"scale": (K,)}}, {}, "q_norm/scale: norms of queries and keys undo"),
        (SIZES | {"key_ln": {"scale": (K,)}}, {}, "key_ln/scale"),
        ({"qkv": {"kernel": (D, 3 * D)}}, {}, "fused='by_head'"),
        ({"qkv": {"kernel": (D, 3 * D)}}, {"fused": "blocks"}, "head_size="),
        (SIZES, {"where": omp.Matrices(rules=[("query", None)])}, "query/kernel is not a matrix"),
    ],
)
def test_parameters_that_cannot_be_clipped_are_refused_at_init(shapes, options, words):
    tx = omp.contrib.qk_clip(2.0, **options)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        tx.init(random_tree({"attn": shapes}))


def test_gates_in_the_kernel_of_queries_are_refused():
    """They would be scaled, and a key that another head reads; heads of values may be longer."""
    gated = {f"{x}_proj": {"kernel": (D, n * K)} for x, n in (("q", 2 * H), ("k", H), ("v", H))}
    for out in ({"o_proj": {"kernel": (H * K, D)}}, {"out": {"kernel": (H, K, D)}}):
        params = random_tree({"attn": gated | out})
        with pytest.raises(ValueError, match=r"attn/q_proj/kernel of shape .* Gates beside"):
            omp.contrib.qk_clip(2.0).init(params)
        with pytest.raises(ValueError, match="does not have the heads"):
            tx = omp.contrib.qk_clip(2.0, head_size=K)
            tx.update(params, tx.init(params), params, max_logits={"attn": MAXIMA})
    right = {"attn": gated | {"q_proj": {"kernel": (D, H * K)}, "o_proj": {"kernel": (H * K, D)}}}
    omp.contrib.qk_clip(2.0).init(random_tree(right))
    longer = {"attn": right["attn"] | {"o_proj": {"kernel": (2 * H * K, D)}}}
    omp.contrib.qk_clip(2.0, head_size=K).init(random_tree(longer))


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
    tx = omp.contrib.qk_clip(2.0)
    with pytest.raises(ValueError, match=words):
        tx.update(params, tx.init(params), params, max_logits=maxima)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0.0}, "threshold must be a positive"),
        ({"threshold": lambda step: 1.0}, "threshold must be a positive"),
        ({"fused": "interleaved"}, "Unknown fused"),
        ({"head_size": 0}, "head_size must be"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        omp.contrib.qk_clip(**options)


def test_a_size_of_heads_that_the_kernel_has_not_is_named():
    """It is a size, and no count of what is written out in a program."""
    params = random_tree({"attn": {"qkv": {"kernel": (D, 3 * D)}}})
    tx = omp.contrib.qk_clip(head_size=2**30, fused="blocks")
    with pytest.raises(ValueError, match="with 1073741824 outputs each"):
        tx.update(params, tx.init(params), params, max_logits={"attn": MAXIMA})


def test_without_parameters_is_refused():
    params = random_tree({"attn": SIZES})
    tx = omp.contrib.qk_clip()
    with pytest.raises(ValueError, match="state, parameters, max_logits="):
        tx.update(params, tx.init(params), max_logits={"attn": MAXIMA})
