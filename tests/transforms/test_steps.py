"""What Muon+ does to one matrix, as values."""

import jax.numpy as jnp

import optax_muonplus as omp
from optax_muonplus.transforms._steps import muonplus_steps


def first_step(adaptive):
    polar_factor = omp.polar.Orthogonalize(compute_dtype="bfloat16")
    steps = muonplus_steps(
        polar_factor, omp.matrices.Normalize(), omp.matrices.ScaleByShape(), adaptive
    )
    return steps[0]


def test_matrices_may_be_rounded_early_unless_a_step_needs_them_exactly():
    """The dual norm is an inner product with the momentum itself."""
    assert first_step(adaptive=False).input_dtype == jnp.bfloat16
    assert first_step(adaptive=True).input_dtype is None
