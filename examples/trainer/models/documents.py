"""Documents that follow each other in a row of tokens, and are kept apart in it.

The token that stands between documents begins one: texts are encoded with it in front, and so are
prompts. Tokens before the first one in a row are the rest of an earlier document.
"""

import jax
import jax.numpy as jnp


def numbers(tokens: jax.Array, first: int) -> jax.Array:
    """The number of the document of each token (B, T), counted from the start of its row."""
    return jnp.cumsum(tokens == first, axis=1)


def positions(tokens: jax.Array, first: int) -> jax.Array:
    """The position of each token (B, T) in its document, or in its row if that begins before."""
    place = jnp.arange(tokens.shape[1])[None]
    return place - jax.lax.cummax(jnp.where(tokens == first, place, 0), axis=1)
