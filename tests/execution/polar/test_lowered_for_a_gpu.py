"""Numbers of what is lowered for a GPU, run on this CPU, against the float64 oracle.

`jax.export` lowers for CUDA without such a device. Of the program only its name of a platform is
changed, so that stacks, slices, padding and the iteration of a GPU run here. Products are those of
XLA's CPU backend, in float32 for operands of half precision.
"""

import dataclasses
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus._execution.device import gpu
from optax_muonplus._execution.loops import concatenate
from optax_muonplus._execution.lower import lower
from optax_muonplus.polar import FastPolar, Orthogonalize
from tests.support import reference
from tests.support.half_precision import matrix, polynomial

pytestmark = pytest.mark.cpu_program

# Stored alike, `out_in`, `layers` and `in_out` share a stack of four, in two layouts and of unequal
# leaves; `rest` is cut into a slice of four and one of three; `even` into two of three.
SHAPES = {
    "out_in": (24, 40),
    "layers": (2, 24, 40),
    "in_out": (24, 40),
    "rest": (7, 24, 40),
    "even": (6, 24, 40),
    "odd": (33, 33),
    "fused": (20, 24),
}
STACK_BYTES = 4 * 24 * 40 * 4
DIMS = {
    "out_in": omp.MuonDimensionNumbers(1, 0),
    "layers": omp.MuonDimensionNumbers(2, 1),
    "in_out": omp.MuonDimensionNumbers(0, 1),
    "rest": omp.MuonDimensionNumbers(1, 2),
    "even": omp.MuonDimensionNumbers(1, 2),
    "odd": omp.MuonDimensionNumbers(0, 1),
    "fused": omp.MatrixSpec(0, 1, split_sizes=(8, 10, 6)),
}


def matrices(name, leaf):
    """The matrices (out, in) of a leaf."""
    leaf = np.asarray(leaf, np.float64)
    if name in ("out_in", "layers"):
        return leaf.reshape(-1, 24, 40)
    if name == "fused":
        return [block.T for block in np.split(leaf, [8, 18], axis=1)]
    return np.swapaxes(leaf.reshape(-1, *leaf.shape[-2:]), 1, 2)


def run_here(function, *args, platform="cuda"):
    """The program of ``function`` for another platform, as a function on this one, and as text."""
    exported = jax.export.export(jax.jit(function), platforms=[platform])(*args)
    here = dataclasses.replace(exported, platforms=("cpu",))
    return jax.jit(here.call), exported.mlir_module()


def full_of_nan(shape, dtype, out_sharding):
    return jnp.full(shape, jnp.nan, dtype)


def lowered_update(monkeypatch, **options):
    """The first update of gradients, with ``eps``, as it is lowered for a GPU."""
    monkeypatch.setattr("optax_muonplus._execution.device.gpu.STACK_BYTES", STACK_BYTES)
    # A CPU cannot give memory that nothing was written to in a GPU's way.
    monkeypatch.setattr(jax.lax, "empty", full_of_nan)

    def update(grads, eps):
        where = omp.Matrices(weight_dimension_numbers=DIMS)
        tx = omp.scale_by_muonplus(eps=eps, where=where, **options)
        return tx.update(grads, tx.init(grads))[0]

    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    return run_here(update, shapes, jax.ShapeDtypeStruct((), jnp.float32))


def gradients(sizes):
    rng = np.random.default_rng(0)
    return {
        name: (sizes.get(name, 1) * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def assert_near_the_oracle(found, grads, limit, **options):
    for name, leaf in found.items():
        pairs = zip(matrices(name, leaf), matrices(name, grads[name]), strict=True)
        for i, (update, g) in enumerate(pairs):
            # Squares of 1e30 fit into float64.
            step, _ = reference.muonplus_step(g, 0 * g, g, 1, learning_rate=-1.0, **options)
            distance = np.linalg.norm(update - step) / np.linalg.norm(step)
            assert distance < limit, f"{name} {i}: {distance}"


# Largest entries from next to the smallest to next to the largest number: matrices of a stack have
# their own.
SIZES = {"layers": 1e-35, "out_in": 1e30, "in_out": 1e-20, "rest": 1e25, "odd": 1e-30}
# In half precision about twice the distance of products rounded once.
EXACT = {"compute_dtype": "float32"}
PAPER = {"norm": "col_row", "match_frobenius": False, "shape_scale": "spectral"}
PROGRAMS = {
    "default": ({}, 0.08),
    "float32": (EXACT, 2e-4),
    "col_row": (EXACT | PAPER, 2e-4),
    "gram": (EXACT | {"polar": "gram"}, 2e-4),
    "bfloat16": ({"compute_dtype": "bfloat16"}, 0.08),
    "bfloat16, plain": ({"compute_dtype": "bfloat16", "polar": "newton_schulz"}, 0.08),
    "bfloat16, gram": (
        {"compute_dtype": "bfloat16", "polar": "gram", "norm": "row", "match_frobenius": False},
        0.08,
    ),
    "bfloat16, aol": ({"compute_dtype": "bfloat16", "preconditioning": "aol"}, 0.08),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_stacks_and_slices_give_the_oracles_updates(name, monkeypatch):
    options, limit = PROGRAMS[name]
    update, _ = lowered_update(monkeypatch, **options)
    same = {k: v for k, v in options.items() if k not in ("compute_dtype", "polar")}
    # Float32 has no digits left for small entries of the smallest matrix.
    exact = options.get("compute_dtype") == "float32"
    grads = gradients(SIZES | {"layers": 1e-30} if exact else SIZES)
    assert_near_the_oracle(update(grads, 0.0), grads, limit, eps=0.0, **same)
    # An eps as large as the norm of the direction, which is 0.0975 G, is felt in every unit.
    if "norm" not in options:
        grads = gradients({})
        assert_near_the_oracle(update(grads, 3.0), grads, limit, eps=3.0, **same)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    assert not any(x.any() for x in jax.tree.leaves(update(zeros, 0.0)))


def test_equal_slices_leave_no_rest(monkeypatch):
    _, program = lowered_update(monkeypatch, compute_dtype="bfloat16", polar="newton_schulz")
    grams = set(re.findall(r"dot_general.*-> tensor<(\d+)x24x24xbf16>", program))
    assert grams == {"4", "3"}  # the stack, and slices of four with a rest of three, or of three


def test_the_lowered_iteration_is_as_near_to_the_polynomial():
    """Where squares are completed: in distances of the plain form on a CPU."""
    spectra = ("gaussian", "log", "rank 10")
    xs = np.stack([matrix(spectrum, 64, 64) for spectrum in spectra])
    exact = np.stack([polynomial(x, "jordan", 5) for x in xs])
    # Roundings differ with the scale, and with it the distance of one matrix by a fifth.
    scales = np.geomspace(1, 2, 8, endpoint=False, dtype=np.float32)
    scaled = (scales[:, None, None, None] * xs).reshape(-1, 64, 64)
    options = Orthogonalize(compute_dtype="bfloat16", polar="newton_schulz")
    lowered, _ = run_here(FastPolar(options, "gpu"), scaled)
    squares = [
        np.sum((np.reshape(np.asarray(f(scaled)), (8, *xs.shape)) - exact) ** 2, (0, -2, -1))
        for f in (lowered, FastPolar(options, "cpu"))
    ]
    ratios = np.sqrt(squares[0] / squares[1])
    assert ratios.max() < 1.1, dict(zip(spectra, ratios, strict=True))  # found: 1.01


SIMILAR = {
    **{"square": (24, 24), "wide": (24, 40), "wider": (24, 56), "x": (24, 40)},
    **{"tall": (40, 24), "taller": (72, 24)},
}


@pytest.mark.parametrize(
    ("dtype", "preconditioning", "limit", "stacks"),
    [
        ("float32", "frobenius", 2e-4, 2),  # the wide ones and the square, and the tall ones
        ("bfloat16", "frobenius", 0.08, 2),
        ("float32", "aol", 2e-4, 5),  # each side of a matrix has its own norms
    ],
)
def test_similar_shapes_share_a_stack(dtype, preconditioning, limit, stacks, monkeypatch):
    """Zeros lengthen the longer side for the polar factor alone: norms and factors are by shape."""
    rng = np.random.default_rng(0)
    grads = {
        name: {"kernel": 10**i * rng.standard_normal((n, m)).astype(np.float32)}
        for i, (name, (n, m)) in enumerate(SIMILAR.items())
    }
    grads["wide"]["kernel"] *= 1e20
    grads["wide"]["kernel"][0] *= 1e-30  # a first row that says nothing of the largest entry
    options = {"polar": "newton_schulz", "preconditioning": preconditioning}
    tx = omp.scale_by_muonplus(compute_dtype=dtype, **options)

    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    found, together = run_here(update, grads)
    updates = found(grads)
    for name, g in grads.items():
        g = g["kernel"].T.astype(np.float64)
        norm = {"preconditioning": preconditioning}
        step, _ = reference.muonplus_step(g, 0 * g, g, 1, learning_rate=-1.0, **norm)
        distance = np.linalg.norm(updates[name]["kernel"].T - step) / np.linalg.norm(step)
        assert distance < limit, f"{name}: {distance}"
    monkeypatch.setattr("optax_muonplus._execution.device.gpu.STACK_FLOPS", 0)
    _, apart = run_here(lambda grads: update(grads), grads)
    # Three products in each of five steps.
    assert together.count("stablehlo.dot_general") == stacks * 15
    assert apart.count("stablehlo.dot_general") == 5 * 15
    assert together.count("stablehlo.rsqrt") == apart.count("stablehlo.rsqrt")  # once for a shape


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        # GPT-Small: the squares would take four times the work.
        ([(48, 768, 768), (12, 768, 3072), (12, 3072, 768)], [0, 1, 2]),
        # ResNet-50's, of a short side of 256.
        ([(1, 512, 256), (5, 1024, 256), (6, 2304, 256), (6, 256, 1024)], [2, 2, 2, 3]),
        # Its two of 2048 x 512 stay: 27 GFLOP are less than a stack's launches, passes are not.
        ([(1, 1024, 512), (2, 2048, 512), (3, 4608, 512)], [1, 1, 2]),
        ([(1, 64, 64), (4, 64, 256), (3, 576, 64)], [1, 1, 2]),
        ([(1, 56, 256), (4, 64, 256)], [0, 1]),  # of another short side
    ],
)
def test_which_shapes_share_a_stack(shapes, expected):
    program = lower([Orthogonalize()], "gpu")
    assert gpu._stack_shapes(program, shapes) == [shapes[i][1:] for i in expected]


def test_powers_of_long_rows_stay_in_range():
    """Of a matrix of ones the thirteenth power of an unscaled Gram matrix is 2^150."""
    ones = np.ones((1, 64, 64), np.float32)
    options = Orthogonalize([(1.5, -0.5, *[0.0] * 12)] * 2, 2, compute_dtype="bfloat16")
    lowered, _ = run_here(FastPolar(options, "gpu"), ones)
    np.testing.assert_allclose(lowered(ones), 1 / 64, rtol=0.02)


def test_arrays_of_several_matrices_are_joined_in_order():
    arrays = [np.full((n, 2, 3), n, np.float32) for n in (2, 1, 3)]
    found = jax.jit(concatenate)(arrays)
    np.testing.assert_array_equal(found, np.concatenate(arrays))
