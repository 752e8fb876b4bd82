"""What a chain makes of its functions: one read and write of each matrix."""

import jax.numpy as jnp

import optax_muonplus as omp
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import DualNorm, Momentum, links_of


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


def test_the_factor_by_shape_knows_the_normalization_before_it():
    parts = [Orthogonalize(), Normalize("row", match_frobenius=True), ScaleByShape("none", 0.2)]
    scale = steps_of(*parts)[-1]
    assert (scale.norm, scale.match_frobenius) == ("row", True)
