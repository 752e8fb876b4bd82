"""The norm of a whole gradient, and gradients scaled down to a largest one, in float32."""

import jax
import jax.numpy as jnp
import optax


def global_norm(tree: optax.Updates) -> jax.Array:
    """sqrt(sum of x^2) over all elements of all arrays, a float32 scalar.

    Squares and sums are in float32 also for arrays in 16 bits, where `optax.tree.norm` rounds the
    sum of each array, their sum and its root to 8 bits. The compiler converts elements where it
    sums them, so that no array in float32 is stored.
    """
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scales a gradient g with a norm of at least `largest` to g / norm x `largest`.

    As `optax.clip_by_global_norm`, bit for bit in float32. Gradients in 16 bits are divided by the
    norm in float32, and rounded once, at the end. (Pascanu et al., arXiv:1211.5063, section 3.2.)
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        norm = global_norm(updates)

        def scaled(x: jax.Array) -> jax.Array:
            if x.dtype != jnp.float32:  # else its copy in float32 may be stored, to serve twice
                x = jax.lax.optimization_barrier(x)
            smaller = x.astype(jnp.float32) / norm * largest
            return jnp.where(norm < largest, x, smaller.astype(x.dtype))

        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
