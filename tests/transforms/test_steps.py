"""What a chain makes of its functions: one read and write of each matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import DualNorm, Momentum, links_of
from tests.support.trees import first_update, random_tree


def steps_of(*parts):
    (link,) = links_of(omp.matrix_chain(*parts))
    return link.steps


def first_step(*before_scale):
    polar_factor = Orthogonalize(compute_dtype="bfloat16")
    parts = [Momentum(), polar_factor, Normalize(), *before_scale, ScaleByShape()]
    return steps_of(*parts)[0]


def test_matrices_may_be_rounded_early_unless_a_step_needs_them_exactly():
    """The dual norm is an inner product with the momentum itself."""
    assert first_step().input_dtype == jnp.bfloat16
    assert first_step(DualNorm()).input_dtype is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [((), ("row", True)), (("col",), ("col", False)), (("none", True), ("none", True))],
)
def test_the_factor_by_shape_knows_the_normalization_before_it_unless_it_is_told(given, expected):
    factor = ScaleByShape("none", 0.2, *given)
    scale = steps_of(Orthogonalize(), Normalize("row", match_frobenius=True), factor)[-1]
    assert (scale.norm, scale.match_frobenius) == expected


def test_an_adaptive_step_has_the_size_of_the_corrected_momentum():
    """Which at the first step is the gradient, with whatever decay.

    In float64: in float32 either of the two is off by 6e-6 for entries up to 10, which is five
    roundings of these, and they agree to 1e-6 or not by the order that a version of XLA adds in.
    """
    options = {"adaptive": True, "nesterov": False}
    corrected = omp.scale_by_muonplus(beta=0.9, bias_correction=True, **options)
    memoryless = omp.scale_by_muonplus(beta=0.0, **options)
    with jax.enable_x64(True):
        grads = {"kernel": random_tree([(4, 6)], dtype=jnp.float64)[0]}
        found, expected = (first_update(tx, grads) for tx in (corrected, memoryless))
        np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-12)
