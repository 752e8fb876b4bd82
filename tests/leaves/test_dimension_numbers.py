"""Layouts of parameters as matrices (batch, out, in), and the way back."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from optax_muonplus._leaves.layout import MatrixLayout
from tests.support.property_search import SEARCH


@pytest.mark.parametrize(
    "shape, spec, message",
    [
        ((5,), Dims(), r"must name one or more of the axes of shape \(5,\).*gets None"),
        ((3, 4), Dims(0, 0), "names an axis of shape .* twice"),
        ((3, 4), Dims((0, 1), 1), "names an axis of shape .* twice"),
        ((3, 4), Dims(0, 2), "output_axis of .* must name one or more of the axes"),
        ((3, 4), Dims((), 1), "reduction_axis of .* must name one or more"),
        ((3, 4, 5), Dims((0, -3), 1), "names an axis of shape .* twice"),
        ((3, 4), omp.MatrixSpec(split_sizes=(1, 2)), r"add up to 4.*they add up to 3"),
        ((3, 4), omp.MatrixSpec(split_sizes=(4, 0)), "must be positive"),
        ((3, 4, 5), omp.MatrixSpec(0, (1, 2), (2, 3)), "several output axes"),
        ((3, 4, 5), omp.MatrixSpec(1, 2, (1, 2), split_axis=0), "must be one of the reduction or"),
        ((3, 4), omp.MatrixSpec(0, 1, (1, 3), split_axis=2), "must be one of the reduction or"),
        ((3, 4), omp.MatrixSpec(0, 1, (1, 3), split_axis=-3), "must be one of the reduction or"),
    ],
)
def test_what_is_no_matrix_is_refused(shape, spec, message):
    with pytest.raises(ValueError, match=message):
        MatrixLayout.of(shape, spec)


@st.composite
def layouts(draw):
    """A shape, which axes are output, reduction and batch, and sizes that cut one of them."""
    ndim = draw(st.integers(2, 5))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    axes = draw(st.permutations(range(ndim)))
    n_output = draw(st.integers(1, ndim - 1))
    n_reduction = draw(st.integers(1, ndim - n_output))
    output, reduction = axes[:n_output], axes[n_output : n_output + n_reduction]
    split = draw(st.sampled_from([None, *output, *reduction]))
    sizes = None
    if split is not None:
        cuts = draw(st.sets(st.integers(1, max(1, shape[split] - 1)), max_size=3))
        cuts = sorted({0, *(c for c in cuts if c < shape[split]), shape[split]})
        sizes = tuple(stop - start for start, stop in itertools.pairwise(cuts))
    # Axes may be counted from the end.
    signed = [tuple(a - ndim * draw(st.booleans()) for a in side) for side in (reduction, output)]
    return shape, tuple(output), tuple(reduction), omp.MatrixSpec(*signed, sizes, split)


@SEARCH
@given(layouts())
def test_layouts_are_a_transposition_and_come_back(layout):
    shape, output, reduction, spec = layout
    x = np.arange(math.prod(shape)).reshape(shape)
    batch = tuple(a for a in range(len(shape)) if a not in output + reduction)
    layout = MatrixLayout.of(shape, spec)
    stored = layout.to_matrices(x)  # in NumPy where it can be: JAX would compile for each shape
    np.testing.assert_array_equal(layout.from_matrices(stored), x)
    matrices = [np.swapaxes(m, 1, 2) if layout.transposed else m for m in stored]
    assert layout.transposed == (min(reduction) < min(output))
    assert layout.block_shapes() == [m.shape for m in matrices]
    # Cutting and flattening by NumPy, in one go.
    cuts = [] if spec.split_sizes is None else np.cumsum(spec.split_sizes)[:-1]
    parts = []
    for part in np.split(x, cuts, axis=spec.split_axis or 0):
        size = [math.prod(part.shape[a] for a in side) for side in (batch, output, reduction)]
        parts.append(part.transpose(batch + output + reduction).reshape(size))
    # Blocks of one size that follow each other are a batch, within that of the batch axes.
    runs = [list(run) for _, run in itertools.groupby(parts, np.shape)]
    for run, matrix in zip(runs, matrices, strict=True):
        np.testing.assert_array_equal(matrix, np.stack(run, 1).reshape(-1, *run[0].shape[1:]))


HEADS_FIRST = Dims((0, 1), 2)  # (heads, head, embed): columns are heads and what is in them


@pytest.mark.parametrize(
    ("shape", "spec", "blocks", "fits"),
    [
        ((4, 8, 6), HEADS_FIRST, (4, 2, 6), True),
        ((4, 8, 6), HEADS_FIRST, (1, 8, 6), False),  # of several heads, which lie apart
        ((4, 8, 6), HEADS_FIRST, (4, 8, 2), True),
        ((6, 4, 8), Dims(0, (1, 2)), (6, 1, 8), False),
        ((3, 4, 8), Dims(1, 2), (1, 4, 8), False),  # of several layers
        ((6, 12), omp.MatrixSpec(0, 1, (4, 8)), (6, 6), True),
        ((6, 12), omp.MatrixSpec(0, 1, (4, 8)), (6, 2), False),  # of two fused matrices
        ((6, 12), omp.MatrixSpec(0, 1, (4, 8)), (3, 12), True),
    ],
)
def test_blocks_of_a_parameter_are_blocks_of_its_matrices(shape, spec, blocks, fits):
    """As those of which a momentum in eight bits has a scale each."""
    layout = MatrixLayout.of(shape, spec)
    of_blocks = layout.of_blocks(blocks)
    assert (of_blocks is not None) == fits

    def repeated(x, sizes):
        for axis, (n, m) in enumerate(zip(sizes, x.shape, strict=True)):
            x = np.repeat(x, n // m, axis)
        return x

    x = np.arange(math.prod(blocks)).reshape(blocks)
    found = of_blocks.to_matrices(x) if fits else []
    for few, many in zip(found, layout.to_matrices(repeated(x, shape)), strict=fits):
        np.testing.assert_array_equal(repeated(few, many.shape), many)


def test_sizes_may_be_a_list_and_integers_of_numpy():
    spec = omp.MatrixSpec(split_sizes=[np.int64(2), 4])
    assert spec == omp.MatrixSpec(split_sizes=(2, 4)) and hash(spec) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_axis": 0}, "split_axis=0 without split_sizes cuts nothing"),
    ],
)
def test_an_axis_to_split_needs_a_number_and_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        omp.MatrixSpec(**options)


@pytest.mark.parametrize("axis", ["in", ("0",), 0.0, None])
def test_axes_that_are_no_numbers_are_refused(axis):
    for spec in (omp.MatrixSpec(axis, 1), Dims(1, axis)):
        with pytest.raises(ValueError, match="must name one or more of the axes"):
            MatrixLayout.of((4, 6), spec)
