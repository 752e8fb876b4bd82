"""Readings of parameters as tables of tests have them."""

import math


def shown(leaf):
    """Writes the matrices of a leaf as out x in x batch, or its group."""
    if leaf.layout is None:
        return leaf.label
    ((batch, rows, columns),) = leaf.layout.block_shapes()
    assert batch * rows * columns == math.prod(leaf.shape)
    return f"{rows}x{columns}" + f"x{batch}" * (batch > 1)
