"""Which side of a matrix an optimizer took for its rows."""

import numpy as np

import optax_muonplus as omp


def row_optimizer(dimension_numbers=None):
    """Rows of its first update have the norm 1, whatever the shape."""
    return omp.muonplus(
        1.0,
        norm="row",
        match_frobenius=False,
        shape_scale="none",
        norm_eps=0.0,
        polar="svd",
        beta=0.0,
        muon_weight_dimension_numbers=dimension_numbers,
    )


def assert_rows_are_outputs(update, names, inputs, outputs):
    """Norms over the inputs are 1, and those over the outputs differ: the sides were not exchanged.

    A gradient of one input is the product of a vector over output units and one over inputs, so
    that the normalized rows are equal up to their signs. ``names`` are those of the axes.
    """
    rows, columns = (
        np.sqrt((np.asarray(update) ** 2).sum(tuple(list(names).index(name) for name in side)))
        for side in (inputs, outputs)
    )
    np.testing.assert_allclose(rows, 1, rtol=1e-4)
    assert columns.max() > 1.1 * columns.min()
