"""Parameters of the example models as trees."""

import jax
import jax.numpy as jnp


def stacked(params):
    """The parameters of a model with a list of blocks, as those of one with stacked blocks."""
    blocks = list(params["blocks"].values())
    return {**params, "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)}


def leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(tree)
    }
