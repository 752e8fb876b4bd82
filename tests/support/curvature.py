"""Losses with known Hessians, and block curvatures of them as one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import optax_muonplus as omp
from optax_muonplus import theory


def symmetric(n, seed=0):
    """Indefinite, with as much between blocks as within, and gaps that power iteration likes."""
    a = np.random.default_rng(seed).standard_normal((n, n))
    return a + a.T


def quadratic(hessian, path):
    """The loss 1/2 x^T H x + sum(x) of one leaf, flattened in its own order, and 0 of others."""
    h = jnp.asarray(hessian, jnp.float32)

    def loss(params):
        x = functools.reduce(lambda tree, name: tree[name], path.split("/"), params).reshape(-1)
        return 0.5 * jnp.dot(x, h @ x) + jnp.sum(x)

    return loss


def places(shape):
    return np.arange(np.prod(shape)).reshape(shape)


def in_tree(path, leaf):
    outer, inner = path.split("/")
    return {outer: {inner: leaf, "bias": jnp.ones(3)}, "norm": {"scale": jnp.ones(2)}}


def numbers(path, spec):
    return functools.partial(omp.muon_dimension_numbers, rules=[(path, spec)])


def compiled(loss, params, *arguments, **options):
    """block_curvatures as one program, which compiles faster than its parts."""
    return jax.jit(lambda p: theory.block_curvatures(loss, p, *arguments, **options))(params)


def flat(arrays):
    """Batch and fused blocks as one list of matrices, in the order of weighted_curvature."""
    return [row for array in arrays for row in np.asarray(array)]


def mlp_loss(params, x, y):
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None])
    out = hidden @ params["down"]["weight"].T
    return jnp.mean(jnp.square(out - y))


def mlp():
    rng = np.random.default_rng(3)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    params = {
        "up": {"kernel": jnp.asarray(normal((4, 6))), "bias": jnp.asarray(normal(6))},
        "down": {"weight": jnp.asarray(normal((3, 6)))},
    }
    return params, jnp.asarray(normal((20, 4))), jnp.asarray(normal((20, 3)))
