"""What any Optax optimizer promises, and the symmetries and edge cases of this one."""

import functools
import itertools
from typing import NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp

both = pytest.mark.parametrize("maker", [omp.muonplus, omp.muon], ids=["muonplus", "muon"])
# Where the polar factor plays no part: the exact one compiles fastest.
muonplus_svd = functools.partial(omp.muonplus, polar="svd")

SHAPES = {"up": {"kernel": (8, 12), "bias": (12,)}, "down": {"kernel": (12, 8)}}
NORMS = ("none", "col", "row", "col_row", "row_col")


def random_like(shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def first_update(tx, grads, params=None):
    params = grads if params is None else params
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


def assert_trees_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=rtol, atol=atol
        )


# --- wrappers -----------------------------------------------------------------------------------


@both
def test_inject_hyperparams_without_static_args(maker):
    """Numbers become arrays in the state, `ns_steps` too; changing one changes the update."""
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    tx = optax.inject_hyperparams(maker)(learning_rate=0.1, weight_decay=0.0)
    state = jax.jit(tx.init)(params)
    step = jax.jit(lambda g, s, p: tx.update(g, s, p)[0])
    expected = first_update(maker(0.1), grads, params)
    assert_trees_close(step(grads, state, params), expected)

    def changed(**numbers):
        new = {k: jnp.asarray(v, state.hyperparams[k].dtype) for k, v in numbers.items()}
        return state._replace(hyperparams={**state.hyperparams, **new})

    halved = jax.tree.map(lambda u: u / 2, expected)
    assert_trees_close(step(grads, changed(learning_rate=0.05), params), halved)
    fewer = first_update(maker(0.1, ns_steps=2, weight_decay=0.3), grads, params)
    assert_trees_close(step(grads, changed(ns_steps=2, weight_decay=0.3), params), fewer)


def test_inject_hyperparams_with_a_schedule_and_static_args():
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    options = {"ns_coeffs": "you", "ns_steps": 4, "mu_dtype": jnp.bfloat16}
    tx = optax.inject_hyperparams(
        omp.muonplus, static_args=("ns_steps", "mu_dtype", "muon_weight_dimension_numbers")
    )(
        learning_rate=optax.linear_schedule(0.1, 0.0, 2),
        muon_weight_dimension_numbers=omp.muon_dimension_numbers,
        **options,
    )
    _, state = tx.update(grads, tx.init(params), params)
    assert state.hyperparams["learning_rate"] == 0.1
    _, state = tx.update(grads, state, params)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 0.05)


def test_multi_steps_averages_gradients():
    params = random_like(SHAPES)
    first, second = random_like(SHAPES, 1), random_like(SHAPES, 2)
    tx = optax.MultiSteps(muonplus_svd(0.1), every_k_schedule=2)

    def run(params, first, second):
        idle, state = tx.update(first, tx.init(params), params)
        return idle, tx.update(second, state, params)[0]

    idle, updates = jax.jit(run)(params, first, second)
    assert not any(np.any(u) for u in jax.tree.leaves(idle))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    # 1e-4: the running mean is rounded before the iteration amplifies it.
    assert_trees_close(updates, first_update(muonplus_svd(0.1), mean, params), rtol=1e-4, atol=1e-5)


def test_masked_leaves_pass_through():
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    mask = {"up": {"kernel": True, "bias": False}, "down": {"kernel": False}}
    expected = first_update(muonplus_svd(0.1), grads, params)
    expected["up"]["bias"], expected["down"]["kernel"] = (
        grads["up"]["bias"],
        grads["down"]["kernel"],
    )
    assert_trees_close(first_update(optax.masked(muonplus_svd(0.1), mask), grads, params), expected)


def test_nested_partition_masked_and_multi_steps():
    """A function of the tree as dimension numbers, asked about trees with holes in them."""
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    dims = functools.partial(omp.muon_dimension_numbers, rules=[("kernel", MuonDimensionNumbers())])
    inner = optax.partition(
        {"a": muonplus_svd(0.1, muon_weight_dimension_numbers=dims), "b": optax.sgd(1.0)},
        {"up": "a", "down": {"kernel": "b"}},
    )
    mask = {"up": {"kernel": True, "bias": False}, "down": {"kernel": True}}
    tx = optax.MultiSteps(optax.masked(inner, mask), every_k_schedule=1)
    updates = first_update(tx, grads, params)
    expected = first_update(muonplus_svd(0.1), grads, params)
    assert_trees_close(updates["up"]["kernel"], expected["up"]["kernel"])
    assert_trees_close(updates["up"]["bias"], grads["up"]["bias"])
    assert_trees_close(updates["down"]["kernel"], -grads["down"]["kernel"])


def test_apply_if_finite_skips_and_recovers():
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), grads)
    tx = optax.apply_if_finite(muonplus_svd(0.1), max_consecutive_errors=5)

    def run(params, bad, grads):
        skipped, state = tx.update(bad, tx.init(params), params)
        return skipped, tx.update(grads, state, params)[0]

    skipped, updates = jax.jit(run)(params, bad, grads)
    assert not any(np.any(u) for u in jax.tree.leaves(skipped))
    assert_trees_close(updates, first_update(muonplus_svd(0.1), grads, params))


def test_extra_args_are_tolerated():
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    tx = optax.chain(muonplus_svd(0.1), optax.scale(1.0))
    state = tx.init(params)
    plain, _ = jax.jit(tx.update)(grads, state, params)
    extra, _ = jax.jit(tx.update)(grads, state, params, value=1.0, loss=jnp.ones(()))
    assert_trees_close(extra, plain)


# --- state, dtypes, compilation -------------------------------------------------------------------


def test_state_is_one_momentum_buffer_for_each_matrix_and_nothing_else():
    """Of every non-scalar leaf; scalars may count steps but not matrices."""
    for options in ({}, {"nesterov": True, "bias_correction": True}, {"ns_coeffs": "cans"}):
        tx = omp.muonplus(0.1, weight_decay=0.1, match_frobenius=True, **options)
        one = {"up": jnp.ones((8, 12))}
        three = {**one, "down": jnp.ones((12, 8)), "more": {"up": jnp.ones((8, 8))}}
        leaves_of_one, leaves = (jax.tree.leaves(tx.init(p)) for p in (one, three))
        assert sorted(x.shape for x in leaves if x.ndim) == [(8, 8), (8, 12), (12, 8)]
        assert len(leaves) == len(leaves_of_one) + 2


@both
def test_state_keeps_structure_shapes_and_dtypes(maker):
    """So that it can be carried through lax.scan, and made by eval_shape."""
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    options = {"nesterov": True, "bias_correction": True, "weight_decay": 0.1}
    tx = maker(optax.linear_schedule(0.1, 0.0, 5), **options)
    state = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    _, new = jax.jit(tx.update)(grads, state, params)

    def description(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert description(abstract) == description(state) == description(new)
    _, stacked = jax.lax.scan(lambda s, _: tx.update(grads, s, params)[::-1], state, length=3)
    assert jax.tree.structure(stacked) == jax.tree.structure(params)


@both
def test_jit_and_eager_agree(maker):
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    tx = maker(0.1, weight_decay=0.1)
    eager, _ = tx.update(grads, tx.init(params), params)
    assert_trees_close(first_update(tx, grads, params), eager)


def test_buffers_can_be_donated():
    """Every buffer of parameters and state is reused; JAX warns, hence fails, if one is not."""
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    tx = omp.muonplus(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.tree.map(jnp.copy, tx.init(params))
    jax.block_until_ready(step(params, state, grads))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_of_updates_and_momentum(dtype):
    """Updates and buffers have the parameters' dtype, and are rounded to it once, at the end."""
    with jax.enable_x64(dtype == "float64"):
        shapes = {"up": (8, 12), "down": (12, 8)}
        params, grads = random_like(shapes, 0, dtype), random_like(shapes, 1, dtype)
        state, (updates, new) = _init_and_update(omp.muonplus(0.1), grads, params)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
        for s in (state, new):
            assert {x.dtype for x in jax.tree.leaves(s) if x.ndim} == {jnp.dtype(dtype)}

        tx = omp.scale_by_muonplus(nesterov=True, match_frobenius=True)
        narrow = first_update(tx, grads)
        wide = first_update(tx, jax.tree.map(lambda x: x.astype(_wide(dtype)), grads))
        for key, expected in wide.items():
            # All but a few that lie between two numbers. Narrow sums would spoil most of them.
            assert np.mean(narrow[key] == expected.astype(dtype)) > 0.95


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def test_links_sum_in_float32():
    """float16 ends at 65504: the squares of 300 are beyond it, their root is not."""
    (x,) = random_like([(8, 12)])
    for link in (omp.orthogonalize(), omp.normalize("col_row", match_frobenius=True)):
        narrow, _ = link.update({"up": (300 * x).astype(jnp.float16)}, link.init({"up": x}))
        wide, _ = link.update({"up": 300 * x}, link.init({"up": x}))
        assert narrow["up"].dtype == jnp.float16
        assert_trees_close(narrow, wide, rtol=2e-3, atol=2e-3)


def test_mu_dtype_is_honoured_at_init_and_after_updates():
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    tx = omp.muonplus(0.1, mu_dtype="bfloat16")
    state, (updates, new) = _init_and_update(tx, grads, params)
    for s in (state, new):
        matrices = [x for x in jax.tree.leaves(s) if x.ndim == 2]
        assert [x.dtype for x in matrices] == [jnp.bfloat16] * 2
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    # The buffer is rounded, what the polar factor is taken of is not.
    assert_trees_close(updates, first_update(omp.muonplus(0.1), grads, params))


def _init_and_update(tx, grads, params):
    state = tx.init(params)
    return state, jax.jit(tx.update)(grads, state, params)


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "bias_correction": True}], ids=str)
def test_state_survives_serialization(tmp_path, options):
    """Flax's bytes and an Orbax checkpoint; training goes on as if nothing had happened."""
    params, grads = random_like(SHAPES), random_like(SHAPES, 1)
    tx = omp.muonplus(0.1, **options)
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(params), params)
    expected, _ = update(grads, state, params)

    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx.init(params), data)
    assert_trees_close(update(grads, restored, params)[0], expected, rtol=0, atol=0)

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(tx.init, params)
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_trees_close(update(grads, restored, params)[0], expected, rtol=0, atol=0)


def test_state_can_be_mapped_as_parameters_are():
    """By optax.tree.map_params, with which trainers place the state as they place parameters."""
    tx = omp.muonplus(0.1, nesterov=True, bias_correction=True)
    mapped = optax.tree.map_params(
        tx,
        lambda x: f"as {x.shape}",
        tx.init(random_like(SHAPES)),
        transform_non_params=lambda x: f"scalar {x.shape}",
    )
    found = [x for x in jax.tree.leaves(mapped) if x != "scalar ()"]
    assert sorted(found) == ["as (12, 8)", "as (12,)", "as (12,)", "as (8, 12)"]


def test_ensembles_under_vmap():
    """One model of a vmapped ensemble is updated as it would be alone."""
    ensemble = [random_like(SHAPES, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *ensemble)
    tx = omp.muonplus(0.1, preconditioning="aol", norm="row_col")
    updates = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0]))(stacked)
    last = jax.tree.map(lambda x: x[2], updates)
    assert_trees_close(last, first_update(tx, ensemble[2]))


# --- edge cases -----------------------------------------------------------------------------------

POLARS = [
    *(
        {"preconditioning": word}
        for word in ("frobenius", "spectral", "schatten", "aol", "aol_out")
    ),
    {"polar": "svd"},
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_zero_gradients_give_zero_updates(dtype):
    """On the first step, in every dtype, with and without epsilons; decay goes on as ever."""
    with jax.enable_x64(dtype == "float64"):
        zero = jnp.zeros((3, 4), dtype)
        for options in POLARS:
            extra = {"norm_eps": 0.0, "eps": 0.0, "match_frobenius": True, "adaptive": True}
            for more in [{}, extra] if dtype == "float32" else [{}]:
                update = first_update(omp.scale_by_muonplus(**options, **more), {"w": zero})["w"]
                np.testing.assert_array_equal(update, zero, err_msg=str((options, more)))
        decayed = first_update(omp.muonplus(0.5, weight_decay=0.25), {"w": zero}, {"w": zero + 1})
        np.testing.assert_array_equal(decayed["w"], zero - 0.125)


def test_weight_decay_obeys_its_mask_and_ignores_the_shape_factor():
    params, zeros = random_like(SHAPES), jax.tree.map(jnp.zeros_like, random_like(SHAPES))
    mask = {"up": {"kernel": True, "bias": True}, "down": {"kernel": False}}
    for given in (mask, lambda p: mask):
        tx = omp.muonplus(0.5, weight_decay=0.25, weight_decay_mask=given)
        updates = first_update(tx, zeros, params)
        assert_trees_close(updates["up"]["kernel"], -0.125 * params["up"]["kernel"])
        assert not np.any(updates["down"]["kernel"])
        assert not np.any(updates["up"]["bias"])


@pytest.mark.parametrize("options", POLARS, ids=str)
def test_degenerate_matrices(options):
    """Finite; what is zero stays zero; 1 x n and n x 1 give unit vectors under an exact factor."""
    svd = options.get("polar") == "svd"
    rng = np.random.default_rng(0)
    full = rng.normal(size=(6, 9)).astype(np.float32)
    grads = {
        "zero_input": np.where(np.arange(6)[:, None] == 2, 0, full),
        "zero_output": np.where(np.arange(9) == 2, 0, full),
        "rank_one": np.outer(full[:, 0], full[0]),
        "one_entry": np.zeros_like(full) + np.eye(6, 9, 3) * (np.arange(6) == 1)[:, None],
        "identical_rows": np.ones((6, 9), np.float32),
        "one_input": full[:1],
        "one_output": full[:, :1],
        "scalar": full[:1, :1],
        "huge": full * 1e37,
        "tiny": full * 1e-37,
        "underflowing": full * np.float32(1e-40),
    }
    grads = {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}
    transformations = [
        omp.scale_by_muonplus(norm=norm, shape_scale="none", **extra, **options)
        for norm, extra in [
            ("none", {}),
            ("col_row", {"norm_eps": 1e-8 if svd else 0.0, "match_frobenius": True}),
            ("row_col", {}),
        ]
    ]
    results = jax.jit(lambda g: [tx.update(g, tx.init(g))[0] for tx in transformations])(grads)
    for updates in results:
        for key, update in updates.items():
            assert np.all(np.isfinite(update)), key
        # A singular vector's zeros are zeros to 6e-8, which norm_eps = 1e-8 lets grow to 6e-4.
        noise = 1e-2 if svd else 0.0
        assert np.abs(updates["zero_input"][2]).max() <= noise
        assert np.abs(updates["zero_output"][:, 2]).max() <= noise
        assert np.count_nonzero(updates["one_entry"]) == 1
    if svd:
        for key in ("one_input", "one_output", "rank_one", "scalar"):
            size = np.linalg.norm(grads[key])
            np.testing.assert_allclose(results[0][key], grads[key] / size, rtol=1e-5, atol=1e-6)


def test_empty_trees_and_missing_leaves():
    tx = omp.muonplus(0.1)
    for empty in ({}, {"a": {}}, {"a": None}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert updates == empty
    grads = random_like(SHAPES)
    with_none = {**grads, "frozen": {"kernel": None}, "act": None}
    updates = first_update(tx, with_none)
    assert updates["frozen"] == {"kernel": None}
    assert updates["act"] is None
    assert_trees_close({k: updates[k] for k in SHAPES}, first_update(tx, grads))


def test_a_field_called_value_keeps_its_name():
    """Flax NNX adds a last "value" to every path at init; a module's own field is not that."""

    class Attention(NamedTuple):
        query: jax.Array
        key: jax.Array
        value: jax.Array

    params = Attention(*random_like([(4, 4)] * 3))
    dims = omp.muon_dimension_numbers(params, rules=[("value$", None)])
    assert omp.partition_labels(params, dims) == Attention("muon", "muon", "adam")


# --- symmetries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("options", POLARS, ids=str)
def test_gradients_of_every_size_give_one_update(options, dtype):
    """c * G for c from 1e-20 to 1e20 (and a zero among them), each matrix of a stack by itself."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=(6, 9))
    if dtype == np.complex64:
        g = g + 1j * rng.normal(size=(6, 9))
    sizes = np.array([0.0, *10.0 ** np.arange(-20, 21)])
    stack = jnp.asarray((sizes[:, None, None] * g).astype(dtype))
    tx = omp.scale_by_muonplus(**options, weight_dimension_numbers=MuonDimensionNumbers(1, 2))
    updates = np.asarray(first_update(tx, stack))
    assert not np.any(updates[0])
    reference = updates[21]  # c = 1
    # c * G is rounded to 6e-8, which no singular value here is small enough to amplify by 50.
    error = np.abs(updates[1:] - reference).max(axis=(1, 2)) / np.abs(reference).max()
    assert error.max() < 3e-6, dict(zip(sizes[1:], error, strict=True))
    assert np.abs(reference).max() > 0.1


def _updates(grads, dims=None, **options):
    """Updates of several arrays with their own dimension numbers, in one program."""
    tx = omp.scale_by_muonplus(weight_dimension_numbers=dims, **options)
    return first_update(tx, grads)


def _identity(x):
    return x


def test_transposed_storage_transposes_the_update():
    (kernel,) = random_like([(8, 12)])
    dims = {"flax": MuonDimensionNumbers(0, 1), "torch": MuonDimensionNumbers(1, 0)}
    updates = _updates({"flax": kernel, "torch": kernel.T}, dims, preconditioning="aol")
    # One is turned, the other is not: products in another order, to rounding of numbers of size 1.
    np.testing.assert_allclose(updates["torch"].T, updates["flax"], rtol=1e-6, atol=2e-6)
    swapped = _updates({"flax": kernel}, MuonDimensionNumbers(1, 0), preconditioning="aol")
    assert np.abs(swapped["flax"] - updates["flax"]).max() > 0.1  # the layout does matter


@pytest.mark.parametrize("norm", NORMS)
def test_swapping_inputs_and_outputs_swaps_rows_and_columns(norm):
    """The update of W^T is the transpose of W's under the norm with its words swapped."""
    polar = "newton_schulz" if norm == "none" else _identity
    kernels = random_like({"tall": (8, 12), "square": (8, 8)})
    swap = {"row": "col", "col": "row", "row_col": "col_row", "col_row": "row_col", "none": "none"}
    swapped = _updates(kernels, norm=norm, shape_scale="none", polar=polar)
    straight = _updates(
        jax.tree.map(jnp.transpose, kernels), norm=swap[norm], shape_scale="none", polar=polar
    )
    for key in kernels:
        np.testing.assert_allclose(straight[key].T, swapped[key], rtol=1e-4, atol=1e-5)


def test_permuting_units_permutes_the_update():
    (kernel,) = random_like([(8, 12)])
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(8), rng.permutation(12)
    permuted = kernel[rows][:, columns]
    for options in ({"norm": "col_row"}, {"norm": "row_col", "preconditioning": "aol"}):
        updates = _updates({"given": kernel, "permuted": permuted}, **options)
        expected = updates["given"][rows][:, columns]
        np.testing.assert_allclose(updates["permuted"], expected, rtol=1e-4, atol=1e-5)


def test_batch_axes_are_independent_matrices():
    """Experts in front, scanned layers in the middle, heads behind: the same as one by one."""
    matrices = [random_like([(6, 10)], seed)[0] for seed in range(3)]
    grads = {
        "experts": jnp.stack(matrices, 0),
        "layers": jnp.stack(matrices, 1),
        "both": jnp.stack([jnp.stack(matrices), jnp.stack(matrices[::-1])], -1),
        "transposed": jnp.stack(matrices, 1).transpose(2, 1, 0),
    }
    dims = {
        "experts": MuonDimensionNumbers(1, 2),
        "layers": MuonDimensionNumbers(0, 2),
        "both": MuonDimensionNumbers(1, 2),
        "transposed": MuonDimensionNumbers(-1, 0),
    }
    options = {"adaptive": True, "match_frobenius": True, "norm": "col_row"}
    updates = _updates(grads, dims, **options)
    alone = _updates(dict(enumerate(matrices)), None, **options)
    for i in range(3):
        for update in (
            updates["experts"][i],
            updates["layers"][:, i],
            updates["both"][i, :, :, 0],
            updates["both"][2 - i, :, :, 1],
            updates["transposed"][:, i].T,
        ):
            np.testing.assert_allclose(update, alone[i], rtol=1e-4, atol=1e-5)


def test_several_axes_on_a_side_are_flattened():
    """Attention kernels (embed, heads, head) and back, and a convolution (h, w, in, out)."""
    (q, o, conv) = random_like([(6, 4, 3), (4, 3, 6), (2, 2, 3, 5)])
    updates = _updates(
        {"q": q, "o": o, "conv": conv},
        {
            "q": MuonDimensionNumbers(0, (1, 2)),
            "o": MuonDimensionNumbers((0, 1), 2),
            "conv": MuonDimensionNumbers((0, 1, 2), 3),
        },
        polar="svd",
    )
    flat = {"q": q.reshape(6, 12), "o": o.reshape(12, 6), "conv": conv.reshape(12, 5)}
    flat = _updates(flat, polar="svd")
    for key, update in updates.items():
        np.testing.assert_allclose(update.reshape(flat[key].shape), flat[key], rtol=1e-4, atol=1e-5)


def test_split_axes_are_separate_parameters():
    """Each block gets its own polar factor, norms and shape factor, also under a batch axis."""
    (qkv, gate_up, fused_in) = random_like([(8, 20), (2, 6, 10), (14, 8)])
    dims = {
        "qkv": omp.MatrixSpec(0, 1, split_sizes=(8, 8, 4)),
        "gate_up": omp.MatrixSpec(1, 2, split_sizes=(5, 5)),
        "fused_in": omp.MatrixSpec(0, 1, split_sizes=(6, 8), split_axis=0),
    }
    fused = {"qkv": qkv, "gate_up": gate_up, "fused_in": fused_in}
    updates = _updates(fused, dims, polar="svd")
    blocks = {
        "qkv": [qkv[:, :8], qkv[:, 8:16], qkv[:, 16:]],
        "gate_up": [gate_up[:, :, :5], gate_up[:, :, 5:]],
        "fused_in": [fused_in[:6], fused_in[6:]],
    }
    plain = MuonDimensionNumbers(0, 1)
    dims = {"qkv": plain, "gate_up": MuonDimensionNumbers(1, 2), "fused_in": plain}
    alone = _updates(blocks, dims, polar="svd")
    for key, axis in [("qkv", 1), ("gate_up", 2), ("fused_in", 0)]:
        joined = np.concatenate(alone[key], axis)
        np.testing.assert_allclose(updates[key], joined, rtol=1e-4, atol=1e-5)


def test_exact_polar_factors_leave_one_side_to_normalize():
    """Square: none. More outputs than inputs: columns are unit already. Fewer: rows are."""
    grads = random_like({"square": (8, 8), "tall": (8, 12), "wide": (12, 8)})
    updates = {norm: _updates(grads, polar="svd", norm=norm, shape_scale="none") for norm in NORMS}
    unchanged = {"square": NORMS, "tall": ("none", "col"), "wide": ("none", "row")}
    for key, norm in itertools.product(grads, NORMS):
        change = np.abs(updates[norm][key] - updates["none"][key]).max()
        assert change < 1e-6 if norm in unchanged[key] else change > 0.02, (key, norm)


def test_the_last_side_named_ends_with_unit_norms():
    """To float32 rounding, in all three shapes, and if nothing was orthogonalized before."""
    grads = random_like({"square": (8, 8), "tall": (8, 12), "wide": (12, 8)})
    for norm in NORMS[1:]:
        axis = 0 if norm.endswith("row") else 1  # a row is an output unit: a column of (in, out)
        for key, update in _updates(grads, norm=norm, shape_scale="none", polar=_identity).items():
            sizes = np.linalg.norm(update, axis=axis)
            np.testing.assert_allclose(sizes, 1, rtol=1e-6, err_msg=f"{key} {norm}")
            other = np.linalg.norm(update, axis=1 - axis)
            assert np.abs(other - 1).max() > 0.01, "the other side should not be unit too"
