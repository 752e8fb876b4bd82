"""Functions of matrices of which it is known at run time only whether they are transposed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus.method import Normalize, ScaleByShape, compose
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.run.batches import MatrixBatch

LAST = [Normalize(bounded=True), ScaleByShape()]
STEPS = {
    "all": [Orthogonalize(), *LAST],
    "bfloat16": [Orthogonalize(compute_dtype="bfloat16"), *LAST],
    "float16": [Orthogonalize(compute_dtype="float16"), *LAST],
    "exact": [Orthogonalize(polar="svd", compute_dtype="bfloat16"), *LAST],
    "one-sided": [Orthogonalize(preconditioning="aol"), *LAST],
    "none that is alike": LAST,
    "all alike": [Orthogonalize()],
}


@pytest.mark.parametrize("name", STEPS)
def test_a_layout_known_at_run_time_gives_the_same(name):
    """Nothing that a branch gets was rounded to more than the digits that it has."""
    x = jax.random.normal(jax.random.key(0), (2, 20, 28))
    steps = compose(STEPS[name])

    def applied(transposed, array):
        return MatrixBatch(x, transposed, x.dtype, x.dtype).apply(steps)(array)

    for transposed in (False, True):
        traced = jax.jit(applied).trace(jnp.array(transposed), x)
        branches = [x for x in traced.jaxpr.eqns if x.primitive.name == "cond"]
        assert len(branches) == (name != "all alike")  # one for all steps that ask for the layout
        entering = {str(x.aval.dtype) for branch in branches for x in branch.invars[1:]}
        assert entering <= {"bfloat16" if name == "bfloat16" else "float32"}
        found = jax.jit(applied)(jnp.array(transposed), x)
        expected = jax.jit(applied, static_argnums=0)(transposed, x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
