"""Gradients and parameters: shapes, the dtype of every pair, and where numbers are rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.trees import SHAPES, assert_trees_close, first_update, random_tree

LEAVES = {"up": {"kernel": (4, 6), "bias": (6,)}, "embed": {"embedding": (5, 4)}}
REAL = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("bool", "uint8", "int32", "float8_e4m3fn")
OPTIMIZERS = {
    "muonplus": omp.muonplus,
    "muon": omp.muon,
    "normuon": functools.partial(omp.optimizer, omp.contrib.NorMuon()),
    "mano": functools.partial(omp.optimizer, omp.contrib.Mano()),
}


def tree(dtype, **others):
    made = random_tree(LEAVES, dtype=dtype)
    for name, value in others.items():
        made["up"][name] = value
    return made


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "name, shape",
    [("kernel", (1, 6)), ("kernel", (4, 1)), ("kernel", (6, 4)), ("kernel", (4, 6, 1)),
     ("bias", (1,)), ("bias", ()), ("bias", (1, 6))],
)  # fmt: skip
def test_gradients_of_another_shape_are_refused(build, name, shape):
    """Those that broadcast, too."""
    params = tree("float32")
    tx = build(0.1)
    grads = tree("float32", **{name: jnp.ones(shape)})
    wanted = params["up"][name].shape
    with pytest.raises(ValueError) as caught:
        tx.update(grads, tx.init(params), params)
    assert f"up/{name} is {shape}, its parameter {wanted}" in str(caught.value)


def test_links_compare_gradients_with_parameters_or_buffers():
    params = {"w": jnp.ones((4, 6))}
    narrow, vector = {"w": jnp.ones((2, 6))}, {"w": jnp.ones((1, 6))}
    normuon = omp.matrix_chain(omp.contrib.NorMuon())
    for link in (omp.momentum(), omp.scale_by_muonplus(), normuon):
        with pytest.raises(ValueError, match=r"mu/w \(\(4, 6\) for \(2, 6\)\)"):
            link.update(narrow, link.init(params))
        with pytest.raises(ValueError, match=r"Not matrices: w|mu/w \(\(4, 6\) for \(1, 6\)\)"):
            link.update(vector, link.init(params))
    for link in (omp.orthogonalize(), omp.normalize(), omp.scale_by_shape()):
        with pytest.raises(ValueError, match=r"w is \(2, 6\), its parameter \(4, 6\)"):
            link.update(narrow, link.init(params), params)
    with pytest.raises(ValueError, match=r"mu/w .*complex64"):
        omp.momentum().update({"w": jnp.ones((4, 6), "complex64")}, omp.momentum().init(params))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_update_dtype_of_every_pair(decay):
    """What gradient and parameter promote to, for matrices and others; buffers stay what they are.

    Integers, floats of 8 bits, and pairs of which one is complex are refused.
    """
    with jax.enable_x64(True):
        options = {"weight_decay": decay, "adam_weight_decay": decay}
        tx = omp.muonplus(0.1, polar="svd", **options)
        others = [
            omp.optimizer(omp.contrib.NorMuon(), 0.1, weight_decay=decay),
            omp.optimizer(omp.contrib.Mano(), 0.1, weight_decay=decay),
            omp.contrib.hyperball(0.1),  # the rate is inside
        ]
        for p in (*REAL, *COMPLEX):
            params = jax.eval_shape(lambda p=p: tree(p))
            state = jax.eval_shape(tx.init, params)
            for g in (*REAL, *COMPLEX, *INTEGERS):
                grads = jax.eval_shape(lambda g=g: tree(g))
                if g in INTEGERS or (g in COMPLEX) != (p in COMPLEX):
                    with pytest.raises(ValueError, match=rf"up/kernel is {g}.* jax.grad returns"):
                        jax.eval_shape(tx.update, grads, state, params)
                    continue
                updates, new = jax.eval_shape(tx.update, grads, state, params)
                assert dtypes(updates) == {jnp.promote_types(g, p)}, (g, p)
                assert dtypes(omp.transforms.find_momentum(new).mu) == {jnp.dtype(p)}
                for other in others if {g, p} == {"float16", "float32"} else ():
                    start = jax.eval_shape(other.init, params)
                    updates, _ = jax.eval_shape(other.update, grads, start, params)
                    assert dtypes(updates) == {jnp.dtype("float32")}
        for p in INTEGERS:
            with pytest.raises(ValueError, match=rf"floating-point, got .*up/kernel \({p}\)"):
                tx.init(jax.eval_shape(lambda p=p: tree(p)))


def dtypes(tree):
    return {x.dtype for x in jax.tree.leaves(tree)}


def test_gradients_of_integers_by_jax_are_refused():
    """``jax.grad(allow_int=True)`` gives them a dtype of no bits."""
    params = tree("float32")
    grads = tree("float32", kernel=np.zeros((4, 6), jax.dtypes.float0))
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=r"up/kernel is .*float0.*, not floating-point"):
        tx.update(grads, tx.init(params), params)


def test_narrow_gradients_of_wide_parameters():
    """In float16 1e-8 times an update is nothing, and the square of 1e3 is infinite."""
    params = tree("float32")
    grads = jax.tree.map(lambda x: (1e3 * x).astype("float16"), params)
    tx = omp.muonplus(1e-8)
    updates, state = tx.update(grads, tx.init(params), params)
    wide = jax.tree.map(lambda x: x.astype("float32"), grads)
    exact, exact_state = tx.update(wide, tx.init(params), params)
    kernels = [x["up"].pop("kernel") for x in (updates, exact)]
    np.testing.assert_allclose(*kernels, rtol=1e-3)  # rounded to float16 once
    for x, y in [(updates, exact), (state, exact_state)]:
        jax.tree.map(np.testing.assert_array_equal, x, y)


def test_leaves_that_are_in_one_tree_only_are_left_alone():
    """Frozen parameters without gradients."""
    params = tree("float32", frozen=jnp.ones((4, 6)))
    grads = tree("float32", frozen=None)
    tx = omp.scale_by_muonplus(
        where=omp.Matrices(weight_dimension_numbers=omp.muon_dimension_numbers)
    )
    kernels = ({"k": t["up"]["kernel"], "f": t["up"]["frozen"]} for t in (grads, params))
    grads, params = kernels
    updates, _ = tx.update(grads, tx.init(grads), params)
    assert updates["f"] is None


@pytest.mark.parametrize("build", [omp.muonplus, omp.muon, OPTIMIZERS["normuon"]])
def test_parameters_may_be_left_out_where_nothing_decays(build):
    params, grads = tree("float32"), jax.tree.map(jnp.cos, tree("float32"))
    mask = jax.tree.map(lambda x: x.ndim > 1, params)
    for tx in (build(0.1), build(0.1, weight_decay=0, weight_decay_mask=mask)):
        state = tx.init(params)
        without, after = tx.update(grads, state)
        jax.tree.map(np.testing.assert_array_equal, without, tx.update(grads, state, params)[0])
        assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["weight_decay", "adam_weight_decay"])
@pytest.mark.parametrize("decay", [0.1, jnp.zeros([]), lambda step: 0.0])
def test_decay_without_parameters_is_refused(name, decay):
    tx = omp.muonplus(0.1, **{name: decay})
    grads = tree("float32")
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        tx.update(grads, tx.init(grads))
    jax.eval_shape(tx.update, grads, tx.init(grads), grads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_of_updates_and_momentum(dtype):
    """Updates and buffers have the parameters' dtype, and are rounded to it once, at the end."""
    with jax.enable_x64(dtype == "float64"):
        shapes = {"up": (8, 12), "down": (12, 8)}
        params, grads = random_tree(shapes, 0, dtype), random_tree(shapes, 1, dtype)
        state, (updates, new) = _init_and_update(omp.muonplus(0.1), grads, params)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
        for s in (state, new):
            assert {x.dtype for x in jax.tree.leaves(s) if x.ndim} == {jnp.dtype(dtype)}

        tx = omp.scale_by_muonplus(match_frobenius=True)
        narrow = first_update(tx, grads)
        wide = first_update(tx, jax.tree.map(lambda x: x.astype(_wide(dtype)), grads))
        for key, expected in wide.items():
            # All but a few that lie between two numbers. Narrow sums would spoil most of them.
            assert np.mean(narrow[key] == expected.astype(dtype)) > 0.95


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def test_links_sum_float16_in_float32():
    """float16 ends at 65504: the squares of 300 are beyond it, their root is not."""
    (x,) = random_tree([(8, 12)])
    for link in (omp.orthogonalize(), omp.normalize("col_row", match_frobenius=True)):
        narrow, _ = link.update({"up": (300 * x).astype(jnp.float16)}, link.init({"up": x}))
        wide, _ = link.update({"up": 300 * x}, link.init({"up": x}))
        assert narrow["up"].dtype == jnp.float16
        assert_trees_close(narrow, wide, rtol=2e-3, atol=2e-3)


def test_mu_dtype_is_honoured_at_init_and_after_updates():
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
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
