"""Random trees of arrays, and comparisons of trees leaf by leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# A small network: two kernels as Flax stores them, (in, out), and a bias.
SHAPES = {"up": {"kernel": (8, 12), "bias": (12,)}, "down": {"kernel": (12, 8)}}


def random_like(tree, seed=0):
    """Gaussian arrays with the shapes and dtypes of ``tree``, whose leaves have both."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return treedef.unflatten([make(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


def random_tree(shapes, seed=0, dtype=np.float32):
    """Gaussian arrays for a tree whose leaves are shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def first_update(tx, grads, params=None):
    """The updates of the first step, compiled; the gradients stand in for absent parameters."""
    params = grads if params is None else params
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


def assert_trees_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=rtol, atol=atol
        )


def by_path(tree, is_leaf=None):
    """Leaves by their paths as the library writes them; a variable of Flax has no name more."""
    found = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    paths = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found)
    return {path.removesuffix("/value"): x for path, (_, x) in zip(paths, found, strict=True)}


def nested_shapes(**paths):
    """A nested dict of nested_shapes from keywords with double underscores for slashes."""
    tree: dict = {}
    for path, shape in paths.items():
        *parents, name = path.split("__")
        node = functools.reduce(lambda d, key: d.setdefault(key, {}), parents, tree)
        node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree
