"""What `optax.contrib.muon` should do and does not: one function for each report in README.md.

Each function raises on an Optax that has the defect. They use Optax, JAX and NumPy alone, so that
one can be copied into a report with `python -c`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon


def _gaussian(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def _update(gradient: jax.Array, **arguments: Any) -> jax.Array:
    """Returns the first update of one parameter at rate 1, without its sign."""
    tx = muon(1.0, **arguments)
    params: Any = {"w": gradient}
    updates: Any = tx.update(params, tx.init(params), params)[0]
    return -updates["w"]


def _check_close(actual: jax.Array, desired: jax.Array) -> None:
    """Raises AssertionError for entries that differ by more than 1e-3, or are NaN."""
    np.testing.assert_allclose(actual, desired, atol=1e-3, equal_nan=False)


def adaptive_scales_each_expert_by_its_own_dual_norm() -> None:
    """A leaf of stacked experts gets what its experts get as leaves of their own."""
    experts = _gaussian(3, 12, 20) * jnp.array([1.0, 10.0, 100.0])[:, None, None]
    dims = {"w": MuonDimensionNumbers(1, 2)}
    together = _update(experts, adaptive=True, muon_weight_dimension_numbers=dims)
    alone = jnp.stack([_update(x, adaptive=True) for x in experts])
    np.testing.assert_allclose(together, alone, rtol=1e-3)


def aol_follows_the_dimension_numbers_of_a_matrix() -> None:
    """A square matrix stored as (out, in), and said to be so, gets the transposed update."""
    x = _gaussian(12, 12) * jnp.arange(1.0, 13.0)[:, None]
    dims = {"w": MuonDimensionNumbers(reduction_axis=1, output_axis=0)}
    out_in = _update(x.T, preconditioning="aol", muon_weight_dimension_numbers=dims)
    np.testing.assert_allclose(
        out_in.T, _update(x, preconditioning="aol"), atol=1e-3, equal_nan=False
    )


def more_rows_than_steps_are_enough() -> None:
    """Five rows are enough for three steps."""
    _update(_gaussian(8, 8), ns_coeffs="dion", ns_steps=3)


def fewer_rows_than_steps_are_an_error() -> None:
    """Three rows for five steps are refused, or five steps are made of them."""
    rows = ((3.4445, -4.7750, 2.0315),) * 3
    try:
        three_rows = _update(_gaussian(8, 8), ns_coeffs=rows, ns_steps=5)
    except ValueError:
        return
    np.testing.assert_allclose(
        three_rows, _update(_gaussian(8, 8), ns_steps=5), atol=1e-3, equal_nan=False
    )


def the_preset_that_the_docstring_names_exists() -> None:
    """The docstring lists the presets `muon` and `dion`."""
    assert "presets: `muon`, `dion`" in (muon.__doc__ or "")
    _update(_gaussian(8, 8), ns_coeffs="muon")


def schatten_takes_complex_matrices() -> None:
    """All singular values of an update are near 1, for complex matrices too."""
    x = _gaussian(8, 12) + 1j * _gaussian(12, 8).T
    update = _update(x, preconditioning="schatten", ns_coeffs="dion")
    assert np.isfinite(update).all()
    values = np.linalg.svd(update)[1]
    shape_factor = np.sqrt(12 / 8)
    np.testing.assert_allclose(values / shape_factor, 1.0, atol=0.1)


def eps_reaches_the_preconditioning() -> None:
    """With a tiny `eps` the update does not depend on the size of the gradient."""
    x = _gaussian(12, 20)
    tiny = _update(1e-6 * x, preconditioning="aol", eps=1e-30)
    np.testing.assert_allclose(
        tiny, _update(x, preconditioning="aol", eps=1e-30), atol=1e-3, equal_nan=False
    )


def a_matrix_on_an_explicit_mesh_is_updated() -> None:
    """A kernel that is sharded over a mesh with Explicit axes is trained as one on Auto axes."""
    size = min(2, len(jax.devices()))
    mesh = jax.make_mesh((size,), ("model",), axis_types=(AxisType.Explicit,))
    x = _gaussian(8, 16)
    on_mesh = jax.device_put(x, NamedSharding(mesh, P("model", None)))
    with jax.set_mesh(mesh):
        update = jax.jit(_update)(on_mesh)
    _check_close(update, _update(x))


def large_gradients_are_not_dropped() -> None:
    """A gradient whose squares overflow float32 has a direction like any other."""
    x = _gaussian(8, 12)
    _check_close(_update(1e25 * x), _update(x))


REPORTS = (
    adaptive_scales_each_expert_by_its_own_dual_norm,
    aol_follows_the_dimension_numbers_of_a_matrix,
    more_rows_than_steps_are_enough,
    fewer_rows_than_steps_are_an_error,
    the_preset_that_the_docstring_names_exists,
    schatten_takes_complex_matrices,
    eps_reaches_the_preconditioning,
    a_matrix_on_an_explicit_mesh_is_updated,
    large_gradients_are_not_dropped,
)
