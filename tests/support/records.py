"""Trees of parameters in every layout, runs of a recorder on them, and records compared."""

import functools

import jax
import numpy as np

import optax_muonplus as omp
from optax_muonplus import diagnostics
from tests.support.measures import gaussian

ALL, DISTANCE = (*diagnostics.MEASURES, "distance"), "polar/distance"
FEW = ("rms", "row_spearman", "row_floor_share")  # compiles in half the time
RULES = [
    ("scanned", omp.MuonDimensionNumbers(-2, -1)),
    ("fused", omp.MatrixSpec(0, 1, split_sizes=(4, 6, 4))),
    ("experts", omp.MatrixSpec(2, 3, split_sizes=(3, 3, 2), split_axis=3)),
]
DIMS = functools.partial(omp.muon_dimension_numbers, rules=RULES)
SHAPES = {
    "up": {"kernel": (6, 9), "bias": (9,)},
    "up2": {"kernel": (6, 9)},
    "down": {"weight": (6, 9)},
    "query": {"kernel": (6, 2, 4)},
    "scanned": {"kernel": (3, 6, 9)},
    "fused": {"kernel": (6, 14)},
    "experts": {"kernel": (2, 2, 6, 8)},
    "embed": {"embedding": (7, 6)},
    "nothing": None,
}


def tree(seed=0, dtype=np.float32, shapes=SHAPES):
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten(
        [gaussian(*shape, seed=seed * 100 + i, dtype=dtype) for i, shape in enumerate(leaves)]
    )


def run(tx, steps=2, dtype=np.float32, shapes=SHAPES):
    """Updates of all steps and the state at the end."""
    params = tree(0, dtype, shapes)
    state, update, updates = jax.jit(tx.init)(params), jax.jit(tx.update), []
    for step in range(1, steps + 1):
        done, state = update(tree(step, dtype, shapes), state, params)
        updates.append(done)
    return updates, state


def assert_records_close(one, other, rtol=1e-4):
    assert one.step == other.step and one.values.keys() == other.values.keys()
    for path, values in one.values.items():
        for name, value in values.items():
            np.testing.assert_allclose(
                value, other.values[path][name], rtol, atol=1e-6, err_msg=f"{path} {name}"
            )
