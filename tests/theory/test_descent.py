"""The descent bound: exact where it must be, and what updates gain by it."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus import polar, theory
from tests.support import flat
from tests.support.curvature import compiled, mlp, mlp_loss


def test_bound_is_exact_where_blocks_are_multiples_of_the_identity():
    """L = sum_j h_j |w_j|^2 / 2 over rows: the theorem holds with equality."""
    rng = np.random.default_rng(5)
    h = jnp.asarray(rng.uniform(0.5, 4, (1, 6)), jnp.float32)
    kernel, update = (jnp.asarray(rng.standard_normal((4, 6)), jnp.float32) for _ in range(2))

    def loss(params):
        return 0.5 * jnp.sum(h * jnp.square(params["kernel"]))

    params, gradients = {"kernel": kernel}, {"kernel": h * kernel}
    curvatures = compiled(loss, params, key=jax.random.key(0))
    bound = theory.descent_bound(curvatures, gradients, {"kernel": update})["kernel"]
    total = jnp.sum(h * jnp.square(update))
    slope = jnp.sum(h * kernel * update)
    np.testing.assert_allclose(bound.curvature, [total], rtol=1e-5)
    np.testing.assert_allclose(bound.slope, [slope], rtol=1e-5)
    np.testing.assert_allclose(bound.mean_curvature, [total / jnp.sum(update**2)], rtol=1e-5)
    for eta in (0.1, float(bound.step_size[0])):
        change = loss({"kernel": kernel - eta * update}) - loss(params)
        np.testing.assert_allclose(
            change, -eta * bound.slope[0] + eta**2 / 2 * bound.curvature[0], rtol=1e-3, atol=1e-5
        )
    lowest = loss(params) - loss({"kernel": kernel - bound.step_size[0] * update})
    np.testing.assert_allclose(bound.decrease, [lowest], rtol=1e-3)


def test_slope_of_the_polar_factor_is_the_nuclear_norm_and_flat_updates_meet_less_curvature():
    """Gradient and curvature both large in the same rows, as the paper finds: Muon+ meets less."""
    rng = np.random.default_rng(6)
    scale = np.linspace(1, 4, 8)[None]
    params = {"kernel": jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)}
    h = jnp.asarray(scale**2, jnp.float32)

    def loss(params):
        return 0.5 * jnp.sum(h * jnp.square(params["kernel"]))

    gradients = jax.grad(loss)(params)
    curvatures = compiled(loss, params, key=jax.random.key(0))
    bounds = []
    for norm in ("none", "row"):
        tx = flat.scale_by_muonplus(norm=norm, polar=polar.svd, shape_scale="none")
        updates, _ = tx.update(gradients, tx.init(params), params)
        bounds.append(theory.descent_bound(curvatures, gradients, updates)["kernel"])
    nuclear = np.linalg.svd(gradients["kernel"], compute_uv=False).sum()
    np.testing.assert_allclose(bounds[0].slope, [nuclear], rtol=1e-5)
    # Rows of equal norms weigh all curvatures alike.
    np.testing.assert_allclose(bounds[1].mean_curvature, [np.mean(scale**2)], rtol=1e-4)
    assert bounds[1].mean_curvature < bounds[0].mean_curvature


def test_a_zero_update_gains_nothing_and_scale_cancels():
    params, x, y = mlp()
    gradients = jax.grad(mlp_loss)(params, x, y)
    curvatures = compiled(lambda p: mlp_loss(p, x, y), params, key=jax.random.key(0), only="down")
    zero, one, ten = (
        theory.descent_bound(curvatures, gradients, jax.tree.map(lambda g, c=c: c * g, gradients))
        for c in (0, 1, 10)
    )
    assert all(float(value[0]) == 0 for value in zero["down/weight"])
    for name, power in zip(theory.DescentBound._fields, (1, 2, 0, -1, 0), strict=True):
        small, large = getattr(one["down/weight"], name), getattr(ten["down/weight"], name)
        np.testing.assert_allclose(large, small * 10.0**power, rtol=1e-4)
