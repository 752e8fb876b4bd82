"""The blocks of a model: a list, or one block whose parameters have a leading layer axis.

With a list, each block is compiled by itself, and its parameters are `blocks/0/...`,
`blocks/1/...`. Stacked, the parameters are `blocks/...` with arrays (layer, ...), and one block is
compiled for all layers.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig


def make(
    block: Callable[[ModelConfig, Layout, nnx.Rngs], Any],
    config: ModelConfig,
    layout: Layout,
    rngs: nnx.Rngs,
) -> Any:
    """All blocks of a model; stacked blocks too have different random keys."""
    if not config.scan:
        return nnx.List([block(config, layout, rngs) for _ in range(config.n_layer)])
    build = nnx.vmap(lambda rngs: block(config, layout, rngs))
    return nnx.split_rngs(splits=config.n_layer)(build)(rngs)


def run(
    blocks: Any, config: ModelConfig, x: jax.Array, kv_cache: Any, *shared: jax.Array | int
) -> tuple[jax.Array, Any]:
    """`x` after all blocks, and the KV cache with the new tokens.

    Each block gets its part of `kv_cache`, or None if there is none, and `shared`, which is the
    same for all layers.
    """

    def apply(
        block: Any, x: jax.Array, cache: Any, *shared: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        return block(x, cache, *shared)

    # No gradient is taken with a cache.
    step = nnx.remat(apply) if config.remat and kv_cache is None else apply
    if config.scan:
        return nnx.scan(
            lambda x, block, cache: step(block, x, cache, *shared),
            in_axes=(nnx.Carry, 0, 0),
            out_axes=(nnx.Carry, 0),
        )(x, blocks, kv_cache)
    updated = []
    for block, cache in zip(blocks, kv_cache or [None] * len(blocks), strict=True):
        x, cache = step(block, x, cache, *shared)
        updated.append(cache)
    return x, updated
