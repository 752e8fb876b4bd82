"""Functions of matrices with rows and columns of zeros behind them, as TPUs get them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.method.function import (
    ArrayFunction,
    MatrixFunction,
    ViaTranspose,
    compose,
    for_layout,
    with_zeros,
)
from optax_muonplus.method.normalize import Normalize
from optax_muonplus.method.scale import ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.run.batches import MatrixBatch
from optax_muonplus.transforms._steps import ScaleByDualNorm

# Padded to squares: one-sided scalings would then scale the other side.
SHAPE, FILLED = (20, 28), (32, 32)
STEPS = [Orthogonalize(), Normalize(bounded=True), ScaleByShape()]


@omp.matrices.matrix_function
class Centred(MatrixFunction):
    """Makes something of zeros, and says nothing of padding."""

    def __call__(self, x):
        return x - jnp.mean(x, axis=-1, keepdims=True) + 1


FUNCTIONS = {
    "polar": Orthogonalize(),
    "svd": Orthogonalize(polar="svd"),
    "one-sided": Orthogonalize(preconditioning="aol"),
    "the caller's": Orthogonalize(polar=lambda x: x + 1),
    "normalize": Normalize(match_frobenius=True),
    "the longer side": Normalize("long", match_frobenius=True),
    "the side that varies more": Normalize("auto"),
    "shape": ScaleByShape(),
    "dual norm": ScaleByDualNorm(compose(STEPS[:2]), STEPS[2]),
    "several": compose(STEPS),
    "unknown": ArrayFunction(lambda x: x * x.shape[-1] + 1),
    "unknown, transposed": ViaTranspose(Centred()),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_zeros_behind_a_matrix_change_nothing_and_stay(name, transposed):
    x = jax.random.normal(jax.random.key(0), (2, *SHAPE))
    expected = for_layout(FUNCTIONS[name], transposed)(x)
    found = for_layout(FUNCTIONS[name], transposed, SHAPE)(with_zeros(x, FILLED))
    np.testing.assert_allclose(found, with_zeros(expected, FILLED), rtol=2e-4, atol=2e-5)


STEPS_FOR_A_LAYOUT = {
    "all": STEPS,
    "bfloat16": [Orthogonalize(compute_dtype="bfloat16"), *STEPS[1:]],
    "float16": [Orthogonalize(compute_dtype="float16"), *STEPS[1:]],
    "exact": [Orthogonalize(polar="svd", compute_dtype="bfloat16"), *STEPS[1:]],
    "one-sided": [Orthogonalize(preconditioning="aol"), *STEPS[1:]],
    "none that is alike": STEPS[1:],
    "all alike": STEPS[:1],
}


@pytest.mark.parametrize(
    "name, padded", [*((name, True) for name in STEPS_FOR_A_LAYOUT), ("all", False)]
)
def test_a_layout_known_at_run_time_gives_the_same(name, padded):
    """Nothing that a branch gets was rounded to more than the digits that it has."""
    x = jax.random.normal(jax.random.key(0), (2, *SHAPE))
    steps = compose(STEPS_FOR_A_LAYOUT[name])

    def applied(transposed, array):
        batch = MatrixBatch(x, transposed, x.dtype, x.dtype)
        return batch.apply(steps, padded)(array)

    array = with_zeros(x, FILLED) if padded else x
    for transposed in (False, True):
        traced = jax.jit(applied).trace(jnp.array(transposed), array)
        branches = [x for x in traced.jaxpr.eqns if x.primitive.name == "cond"]
        assert len(branches) == (name != "all alike")  # one for all steps that ask for the layout
        entering = {str(x.aval.dtype) for branch in branches for x in branch.invars[1:]}
        assert entering <= {"bfloat16" if name == "bfloat16" else "float32"}
        found = jax.jit(applied)(jnp.array(transposed), array)
        expected = jax.jit(applied, static_argnums=0)(transposed, array)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
