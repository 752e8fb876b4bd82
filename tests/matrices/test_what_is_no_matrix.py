"""Every public function on arrays answers integers, vectors and numbers with a sentence."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import coefficients, contrib, diagnostics, matrices, polar

ROOMS = (polar, matrices, coefficients, diagnostics, contrib)
MATRIX = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
ORTHOGONALIZE = [
    polar.Orthogonalize(polar=kind) for kind in ("auto", "newton_schulz", "gram", "svd", jnp.tanh)
]
# Instances of the classes of functions on matrices.
MADE = {
    "Normalize": [matrices.Normalize(), matrices.Normalize("none"), matrices.Normalize("auto")],
    "Orthogonalize": ORTHOGONALIZE,
    "FastPolar": [polar.FastPolar(polar.Orthogonalize())],
    "ScaleByShape": [matrices.ScaleByShape("none"), matrices.ScaleByShape(consistent_rms=0.2)],
}
ABSTRACT = {"MatrixFunction", "Elementwise"}
ON_MATRICES = {
    "polar_factor": polar.polar_factor,
    "svd": polar.svd,
    "normalize_matrix": matrices.normalize_matrix,
    "match_frobenius_norm": lambda x: matrices.match_frobenius_norm(x, x),
    "rows_vary_more": matrices.rows_vary_more,
    "scale_by_pow2": matrices.scale_by_pow2,
    "norm_variance": diagnostics.norm_variance,
    "norm_ratio": diagnostics.norm_ratio,
    "floor_share": lambda x: diagnostics.floor_share(x, norm_eps=30.0),
    "rms": diagnostics.rms,
    "spearman": lambda x: diagnostics.spearman(x, x),
    "polar_distance": lambda x: diagnostics.polar_distance(x, x),
}
# Of any shape, in the dtype of the array.
ELEMENTWISE = {
    "divide_by_pow2": lambda x: matrices.divide_by_pow2(x, jnp.float32(2)),
}
# Of any shape and dtype, in float32 at least: integers give what their numbers give.
WIDENING = {
    "upcast_for_sum": matrices.upcast_for_sum,
    "sum_of_squares": lambda x: matrices.sum_of_squares(x, ()),
    "root": lambda x: matrices.root(matrices.upcast_for_sum(x)),
    "as_real": lambda x: matrices.as_real(x, jnp.float32),
    "evaluate": lambda x: coefficients.evaluate(coefficients.TABLES["jordan"].rows, x),
}
# They take no arrays: dtypes, shapes, numbers, trees, links, states.
OTHERS = re.findall(
    r"\w+",
    """
    matrix_function static normalized_sides check_shape_scale shape_factor matmul_shapes Products
    minimax polar_express relaxed
    check_flag check_number check_word check_matrices known_count Kind
    for_steps restarts_for Coefficients Restarts Table read recorded watched Record RecordState
    AdaMuon adamuon aurora scale_by_aurora Hyperball hyperball scale_by_muon Mano mano
    muoneq scale_by_muoneq NorMuon normuon
    scale_by_turbo_muon turbo_muon AdamH
    """,
)


def functions():
    found = {**ON_MATRICES}
    for room in ROOMS:
        for name, value in vars(room).items():
            is_class = inspect.isclass(value) and issubclass(value, matrices.MatrixFunction)
            if is_class and name not in ABSTRACT:
                for i, function in enumerate(MADE.get(name) or [value()]):
                    found[f"{name}-{i}"] = function
    return found


FUNCTIONS = functions()


def test_every_public_name_is_looked_at():
    """A new function belongs into one of the tables above, or is a class of functions."""
    known = {*ON_MATRICES, *ELEMENTWISE, *WIDENING, *OTHERS, *ABSTRACT}
    known |= {name.partition("-")[0] for name in FUNCTIONS}
    public = {
        name
        for room in ROOMS
        for name, value in vars(room).items()
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
    }
    assert public == known & public and not {*ON_MATRICES, *ELEMENTWISE, *WIDENING} - public
    assert {"polar_factor", "normalize_matrix", "Aurora-0", "Balance-0"} <= FUNCTIONS.keys()


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("name", [*FUNCTIONS, *ELEMENTWISE])
def test_integers_are_refused(name, dtype):
    function = FUNCTIONS.get(name) or ELEMENTWISE[name]
    for x in (MATRIX.astype(dtype), np.asarray(MATRIX).astype(dtype)):
        with pytest.raises(ValueError, match=rf"{dtype} of shape \(3, 4\).* Pass x\.astype\("):
            function(x)
    with pytest.raises(ValueError, match=re.escape(dtype)):
        jax.eval_shape(function, MATRIX.astype(dtype))


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vectors_and_numbers_are_refused(name, shape):
    message = rf"float32 of shape {re.escape(str(shape))}, but rows and columns .* reshape"
    for x in (jnp.ones(shape), np.ones(shape, np.float32)):
        with pytest.raises(ValueError, match=message):
            FUNCTIONS[name](x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_array_is_refused(name):
    for x in ([[1.0, 2.0], [3.0, 4.0]], 1.0, None, "x"):
        with pytest.raises(ValueError, match=rf"got {type(x).__name__}\. Pass jnp\.asarray\(x"):
            FUNCTIONS[name](x)


@pytest.mark.parametrize("name", [*FUNCTIONS, *ELEMENTWISE])
def test_matrices_are_taken(name):
    """Also of NumPy, and in half precision; none comes back as zeros."""
    function = FUNCTIONS.get(name) or ELEMENTWISE[name]
    for x in (MATRIX, np.asarray(MATRIX), MATRIX.astype("bfloat16"), jnp.stack([MATRIX, MATRIX])):
        results = jax.tree.leaves(function(x))
        assert all(np.any(np.asarray(y.astype(jnp.float32))) for y in results)


@pytest.mark.parametrize("name", WIDENING)
def test_integers_are_widened_where_results_are_wide(name):
    for dtype in ("int32", "uint8", "bool"):
        x = MATRIX.astype(dtype)
        expected = WIDENING[name](x.astype(jnp.float32))
        np.testing.assert_array_equal(WIDENING[name](x), expected)


def test_functions_of_a_users_own_are_checked_too():
    class Sign(matrices.Elementwise):
        def __call__(self, x):
            return jnp.sign(x)

    with pytest.raises(ValueError, match=r"int32 of shape \(2, 2\)"):
        Sign()(jnp.eye(2, dtype=jnp.int32))
    np.testing.assert_array_equal(Sign()(-jnp.eye(2)), -jnp.eye(2))


def test_shapes_and_words_without_sense_are_refused():
    with pytest.raises(ValueError, match=r"The shape of matrices is \(\.\.\., out, in\), got \(5,"):
        polar.matmul_shapes((5,))
    with pytest.raises(ValueError, match="Did you mean 'col_row'"):
        matrices.normalized_sides("colrow", 3, 4)
    with pytest.raises(ValueError, match=r"Unknown norm 'rows'\. Known: none, col, row"):
        matrices.shape_factor(2, 3, norm="rows")
    with pytest.raises(ValueError, match=r"shapes \(3, 4\) and \(4, 3\)"):
        matrices.match_frobenius_norm(MATRIX, MATRIX.T)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
@pytest.mark.parametrize(
    "link",
    [omp.momentum(), omp.orthogonalize(), omp.normalize(), omp.scale_by_shape(),
     omp.scale_by_muonplus(), omp.matrix_chain(jnp.sign)],
)  # fmt: skip
def test_links_refuse_them_by_path(link, dtype):
    with pytest.raises(ValueError, match=rf"must be floating-point, got up/kernel \({dtype}\)"):
        link.init({"up": {"kernel": MATRIX.astype(dtype)}})
