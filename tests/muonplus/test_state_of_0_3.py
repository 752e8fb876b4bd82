"""States that version 0.3.0 wrote: every later version until 1.0 reads them by the same paths.

``python -m tests.muonplus.test_state_of_0_3`` wrote tests/data/state_0_3.npz, with version 0.3.0.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support.trees import by_path

FILE = Path(__file__).parents[1] / "data" / "state_0_3.npz"
SHAPES = {
    "embed": (8, 4),
    "layers_0": {"up": {"kernel": (4, 6), "bias": (6,)}, "down": {"kernel": (6, 4)}},
}
FORMS = {
    "muonplus": functools.partial(omp.muonplus, 0.02),
    "scheduled": functools.partial(
        omp.muonplus, optax.linear_schedule(0.02, 0.01, 4), weight_decay=0.1
    ),
    "paper": functools.partial(omp.muonplus, 0.02, **omp.PAPER),
    "int8": functools.partial(omp.muonplus, 0.02, mu_dtype="int8"),
    "muon": functools.partial(omp.muon, 0.02, bias_correction=True),
}


def tree(step):
    """Parameters for step 0 and gradients for later ones, by NumPy, which keeps its draws."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def arrays(form, state, updates):
    """What the file holds of a form, as arrays by path."""
    leaves = by_path({form: {"state": state, "updates": updates}})
    return {path: np.asarray(x) for path, x in leaves.items()}


def write():
    """The state after three steps and the updates of the fourth, of each form."""
    stored = {}
    for form, make in FORMS.items():
        tx, params = make(), tree(0)
        update, state = jax.jit(tx.update), tx.init(params)
        for step in (1, 2, 3):
            _, state = update(tree(step), state, params)
        stored |= arrays(form, state, update(tree(4), state, params)[0])
    np.savez_compressed(FILE, **stored)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_0_3_is_read(form):
    """Paths, shapes and dtypes are those of the file, and so are the next updates."""
    tx, params = FORMS[form](), tree(0)
    with np.load(FILE) as file:
        stored = {path: file[path] for path in file.files if path.startswith(f"{form}/")}
    state = tx.init(params)
    new = arrays(form, state, params)
    assert {path: (x.shape, x.dtype) for path, x in new.items()} == {
        path: (x.shape, x.dtype) for path, x in stored.items()
    }
    old = [stored[path] for path in arrays(form, state, {})]
    state = jax.tree.unflatten(jax.tree.structure(state), old)
    updates, _ = jax.jit(tx.update)(tree(4), state, params)
    for path, update in arrays(form, (), updates).items():
        np.testing.assert_allclose(update, stored[path], rtol=2e-5, atol=2e-7, err_msg=path)


if __name__ == "__main__":
    write()
