"""Rotary positions: each pair of numbers of a head turns by an angle that grows with the position.

The pairs are (i, i + K / 2), as in Hugging Face's LLaMA. Source: Su et al., RoFormer (arXiv
2104.09864), section 3.2.

Glossary of shapes: B rows, T tokens, H heads, K width of a head.
"""

import jax
import jax.numpy as jnp

from examples.trainer.models.layout import RULES, Layout, shard_count

LANES = 128  # numbers in a row of a TPU's vector registers, and of its matrix unit


def angles(positions: jax.Array, k: int, base: float) -> jax.Array:
    """The angle by which each pair of a head is rotated at each position, (T, K / 2)."""
    speeds = base ** (-jnp.arange(0, k, 2) / k)  # radians per token, from 1 down
    return positions[:, None] * speeds[None]


def rotate_heads(x: jax.Array, angles: jax.Array, layout: Layout) -> jax.Array:
    """:func:`rotate`, or on a TPU the same by :func:`rotate_by_product`."""
    if layout.platform != "tpu":
        return rotate(x, angles)
    h, k = x.shape[2:]
    shards = shard_count(layout.mesh, RULES["heads"]) if layout.mesh else 1
    group = max(1, LANES // k)
    return rotate_by_product(x, angles, 1 if h % (group * shards) else group)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K / 2) of each head of `x` (B, T, H, K) by (T, K / 2) `angles`.

    The product of a query and a key then depends only on the difference of their positions.
    """
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotate_by_product(x: jax.Array, angles: jax.Array, group: int) -> jax.Array:
    """The same numbers: (a, b) cos + (b, a) (-sin, sin), with a product that exchanges halves.

    A TPU has to move numbers between lanes to cut heads in halves. Its matrix unit exchanges them
    on the way, and the product is exact, as each sum has one term. `group` heads are taken
    together, so that they fill the lanes.
    """
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    tables = (jnp.concatenate(halves, axis=-1) for halves in ((cos, cos), (-sin, sin)))
    cos, sin = (jnp.tile(table, (1, group))[None, :, None] for table in tables)
    k = x.shape[-1]
    exchange = jnp.kron(jnp.eye(group), jnp.roll(jnp.eye(k), k // 2, axis=0)).astype(x.dtype)
    return turn(x.reshape(*x.shape[:2], -1, group * k), cos, sin, exchange).reshape(x.shape)


@jax.custom_vjp
def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, exchange: jax.Array) -> jax.Array:
    """Computes x cos + (x exchange) sin in float32; only `x` has a gradient."""
    exchanged = jnp.matmul(x, exchange, precision="highest", preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + exchanged * sin).astype(x.dtype)


def turn_forward(x: jax.Array, *tables: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return turn(x, *tables), tables


def turn_backward(
    tables: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, None, None, None]:
    """Turns the gradient back, which rounds it once; JAX's own transpose would round it twice."""
    cos, sin, exchange = tables
    return turn(g, cos, -sin, exchange), None, None, None


turn.defvjp(turn_forward, turn_backward)
