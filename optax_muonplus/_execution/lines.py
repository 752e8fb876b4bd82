"""Numbers in lines of 128, in which shards are sent.

A TPU stores the last two axes of an array in tiles, of 16 x 128 numbers in bfloat16. A tile of an
array ``(workers, lines, 128)`` belongs to one worker, and an all-to-all moves it as it is. In an
array ``(workers, elements)`` a tile has numbers of 16 workers, and XLA stores all of it anew before
and after the all-to-all. For LLaMA-7B on 256 chips of v5e that makes 42.5 million cycles an update,
by libtpu's estimate, and lines 36.9. Elsewhere it makes no difference.
"""

import jax
import jax.numpy as jnp

LINE = 128


def line_count(elements: int) -> int:
    """How many lines so many elements take; the last one may be filled up with zeros."""
    return -(-elements // LINE)


def in_lines(x: jax.Array) -> jax.Array:
    """Arrays ``(..., elements)`` as ``(..., lines, 128)``."""
    *batch, elements = x.shape
    rest = -elements % LINE
    if rest:
        x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, rest)])
    return x.reshape(*batch, -1, LINE)


def from_lines(x: jax.Array, elements: int) -> jax.Array:
    """The inverse of :func:`in_lines`."""
    return x.reshape(*x.shape[:-2], -1)[..., :elements]
