"""Functions on matrices refuse integers, whose results would be rounded to zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import matrices, polar

FUNCTIONS = {
    **{kind: polar.Orthogonalize(polar=kind) for kind in ("auto", "newton_schulz", "gram", "svd")},
    "polar_factor": polar.polar_factor,
    "FastPolar": polar.FastPolar(polar.Orthogonalize()),
    "svd function": polar.svd,
    "Normalize": matrices.Normalize(),
    "no norm": matrices.Normalize("none"),
    "row": matrices.Normalize("row", match_frobenius=False),
    "ScaleByShape": matrices.ScaleByShape(),
    "no scale": matrices.ScaleByShape("none"),
}
MATRIX = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_integers_are_refused(name, dtype):
    with pytest.raises(ValueError, match=rf"{dtype}.* Pass x\.astype\("):
        jax.eval_shape(FUNCTIONS[name], MATRIX.astype(dtype))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matrices_are_taken(name):
    """Also of NumPy, and in half precision; none comes back as zeros."""
    for x in (MATRIX, np.asarray(MATRIX), MATRIX.astype("bfloat16"), jnp.stack([MATRIX, MATRIX])):
        assert np.any(np.asarray(FUNCTIONS[name](x).astype(jnp.float32)))


def test_words_without_sense_are_refused():
    with pytest.raises(ValueError, match=r"Unknown norm 'rows'\. Known: none, col, row"):
        matrices.Normalize("rows")
    with pytest.raises(ValueError, match=r'Unknown norm None\. .* Write norm="none"'):
        omp.muonplus(0.1, norm=None)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
@pytest.mark.parametrize(
    "link",
    [omp.momentum(), omp.orthogonalize(), omp.normalize(), omp.scale_by_shape(),
     omp.scale_by_muonplus(), omp.matrix_chain(jnp.sign)],
)  # fmt: skip
def test_links_refuse_them_by_path(link, dtype):
    with pytest.raises(ValueError, match=rf"must be floating-point, got up/kernel \({dtype}\)"):
        link.init({"up": {"kernel": MATRIX.astype(dtype)}})
