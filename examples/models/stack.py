"""Blocks one after the other: a list of them, or one whose parameters have a leading layer axis.

A list compiles each block by itself, and its parameters are `blocks/0/...`, `blocks/1/...`.
Stacked, they are `blocks/...` with arrays (layer, ...), and one block is compiled for all layers.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from examples.models.config import ModelConfig


def make(block: Callable[[ModelConfig, nnx.Rngs], Any], config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """All blocks of a model; where they are stacked, each has random keys of its own as well."""
    if not config.scan:
        return nnx.List([block(config, rngs) for _ in range(config.n_layer)])
    build = nnx.vmap(lambda rngs: block(config, rngs))
    return nnx.split_rngs(splits=config.n_layer)(build)(rngs)


def run(
    blocks: Any, config: ModelConfig, x: jax.Array, past: Any, *same: jax.Array | int
) -> tuple[jax.Array, Any]:
    """`x` after all blocks, and the past that they leave.

    Each block gets its part of `past`, None if there is none, and `same`, what does not change
    from layer to layer.
    """

    def one(block: Any, x: jax.Array, past: Any, *same: jax.Array | int) -> tuple[jax.Array, Any]:
        return block(x, past, *same)

    step = nnx.remat(one) if config.remat else one
    if config.scan:
        return nnx.scan(
            lambda x, block, past: step(block, x, past, *same),
            in_axes=(nnx.Carry, 0, 0),
            out_axes=(nnx.Carry, 0),
        )(x, blocks, past)
    left = []
    for block, before in zip(blocks, past or [None] * len(blocks), strict=True):
        x, after = step(block, x, before, *same)
        left.append(after)
    return x, left
