"""Transformations of gradients that the optimizer of a run is wrapped in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike


def global_norm(tree: optax.Updates) -> jax.Array:
    """sqrt(sum of x^2) over all elements of all arrays, a float32 scalar.

    Squares and sums are in float32 also for arrays in 16 bits, where `optax.tree.norm` rounds the
    sum of each array, their sum and its root to 8 bits. The compiler converts elements where it
    sums them, so that no array in float32 is stored.
    """
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
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


ADAM_EPSILON = 1e-8  # Optax's, and that of the paper's code


class Counted(NamedTuple):
    """The state of a rule that is built anew for each step."""

    count: jax.Array
    """Steps that were made."""
    inner: optax.OptState


def epsilon_before_correction(
    rule: Callable[[ArrayLike], optax.GradientTransformation], b2: float
) -> optax.GradientTransformation:
    """The rule of an epsilon, with AdamW's update m sqrt(1 - b2^t) / ((1 - b1^t) (sqrt(v) + eps)).

    Optax divides the moments by 1 - b^t first and then adds its epsilon. Both are the same for an
    epsilon of eps / sqrt(1 - b2^t), which is larger in the first steps.
    """

    def init(params: optax.Params) -> Counted:
        return Counted(jnp.zeros((), jnp.int32), rule(ADAM_EPSILON).init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Counted]:
        count = state.count + 1
        eps = ADAM_EPSILON / jnp.sqrt(1 - b2**count)
        updates, inner = rule(eps).update(updates, state.inner, params)
        return updates, Counted(count, inner)

    return optax.GradientTransformation(init, update)
