"""Reports on `optax.contrib.muon` and `MultiSteps`: `python -m pytest lab/tests/optax_reports.py`.

Each test says what Optax should do, and fails on an Optax that does not (all ten on 0.2.8 with jax
0.10.2). pytest does not collect this file by itself. The tests use Optax, JAX and NumPy alone, so
that one can be copied into an issue at google-deepmind/optax, which asks for an issue first; the
mend in its docstring then comes with the test in `optax/contrib/_muon_test.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon


def gaussian(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def update(gradient, **arguments):
    """The first update of one parameter at rate 1, without its sign."""
    tx = muon(1.0, **arguments)
    params = {"w": gradient}
    return -tx.update(params, tx.init(params), params)[0]["w"]


def check_close(actual, desired):
    np.testing.assert_allclose(actual, desired, atol=1e-3, equal_nan=False)


def test_schatten_takes_complex_matrices():
    """The update is NaN: the first step needs the conjugate transpose, as the other kinds take."""
    x = gaussian(8, 12) + 1j * gaussian(12, 8).T
    found = update(x, preconditioning="schatten", ns_coeffs="dion")
    assert np.isfinite(found).all()
    shape_factor = np.sqrt(12 / 8)
    np.testing.assert_allclose(np.linalg.svd(found)[1] / shape_factor, 1.0, atol=0.1)


def test_more_rows_than_steps_are_enough():
    """Five rows for three steps raise "Not enough coeffs", which three for five do not.

    Mend, in `scale_by_muon`: `if ns_coeffs_.shape[0] < ns_steps:` and `ns_coeffs_[:ns_steps]`.
    """
    update(gaussian(8, 8), ns_coeffs="dion", ns_steps=3)


def test_fewer_rows_than_steps_are_an_error():
    """Three rows for five steps do three steps without a word. Mend: the same two lines."""
    rows = ((3.4445, -4.7750, 2.0315),) * 3
    try:
        three_rows = update(gaussian(8, 8), ns_coeffs=rows, ns_steps=5)
    except ValueError:
        return
    check_close(three_rows, update(gaussian(8, 8), ns_steps=5))


def test_the_preset_that_the_docstring_names_exists():
    """The docstring lists `muon` and `dion`; the dictionary has `standard`. Mend: the docstring."""
    assert "presets: `muon`, `dion`" in (muon.__doc__ or "")
    update(gaussian(8, 8), ns_coeffs="muon")


def test_eps_reaches_the_preconditioning():
    """`aol` and `schatten` clamp at 1e-8 whatever `eps` is. Mend: pass it on, inside the root."""
    x = gaussian(12, 20)
    tiny = update(1e-6 * x, preconditioning="aol", eps=1e-30)
    check_close(tiny, update(x, preconditioning="aol", eps=1e-30))


def test_adaptive_scales_each_expert_by_its_own_dual_norm():
    """Stacked experts share one factor. Mend: sum over reduction and output axes only."""
    experts = gaussian(3, 12, 20) * jnp.array([1.0, 10.0, 100.0])[:, None, None]
    dims = {"w": MuonDimensionNumbers(1, 2)}
    together = update(experts, adaptive=True, muon_weight_dimension_numbers=dims)
    alone = jnp.stack([update(x, adaptive=True) for x in experts])
    np.testing.assert_allclose(together, alone, rtol=1e-3)


def test_aol_follows_the_dimension_numbers_of_a_matrix():
    """A leaf of two axes is read as (in, out), whatever it is said to be; `aol` scales one side."""
    x = gaussian(12, 12) * jnp.arange(1.0, 13.0)[:, None]
    dims = {"w": MuonDimensionNumbers(reduction_axis=1, output_axis=0)}
    out_in = update(x.T, preconditioning="aol", muon_weight_dimension_numbers=dims)
    check_close(out_in.T, update(x, preconditioning="aol"))


def test_a_matrix_on_an_explicit_mesh_is_updated():
    """The Gram matrix would be sharded over one axis twice. `jax.make_mesh` makes such axes.

    Mend, at the head of `orthogonalize_via_newton_schulz`:
    `if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:` and
    `x = jax.sharding.reshard(x, jax.P())`.
    """
    size = min(2, len(jax.devices()))
    mesh = jax.make_mesh((size,), ("model",), axis_types=(AxisType.Explicit,))
    x = gaussian(8, 16)
    on_mesh = jax.device_put(x, NamedSharding(mesh, P("model", None)))
    with jax.set_mesh(mesh):
        found = jax.jit(update)(on_mesh)
    check_close(found, update(x))


def test_large_gradients_are_not_dropped():
    """Squares above 1e38 overflow, and the update is zero. Mend: divide by the largest entry."""
    x = gaussian(8, 12)
    check_close(update(1e25 * x), update(x))


def test_multi_steps_calls_the_optimizer_once_in_k_calls():
    """It runs the inner update in each call: a Muon does k times its products, with their memory.

    Mend, in `MultiSteps.update`: `emit` comes first, and the inner update stands in
    `lax.cond(emit, run, keep, grads, inner_state)`. That may copy the state in each call. Or say in
    the docstring that the inner update runs in each call.
    """
    calls = []

    def counted(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(None))
        return updates, state

    tx = optax.MultiSteps(optax.GradientTransformation(lambda _: optax.EmptyState(), counted), 4)
    params = {"w": gaussian(2, 2)}
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(4):
        _, state = step(params, state, params)
    jax.effects_barrier()
    assert len(calls) == 1
