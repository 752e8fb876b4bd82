"""AdamW's epsilon where the paper's code adds it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

EPS = 1e-8  # Optax's, and that of the paper's code


class Counted(NamedTuple):
    """The state of a rule that is built anew for each step."""

    count: jax.Array
    """Steps that were made."""
    inner: optax.OptState


def before_correction(
    rule: Callable[[ArrayLike], optax.GradientTransformation], b2: float
) -> optax.GradientTransformation:
    """The rule of an epsilon, with AdamW's update m sqrt(1 - b2^t) / ((1 - b1^t) (sqrt(v) + eps)).

    Optax divides the moments by 1 - b^t first and then adds its epsilon. Both are the same for an
    epsilon of eps / sqrt(1 - b2^t), which is larger in the first steps.
    """

    def init(params: optax.Params) -> Counted:
        return Counted(jnp.zeros((), jnp.int32), rule(EPS).init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Counted]:
        count = state.count + 1
        eps = EPS / jnp.sqrt(1 - b2**count)
        updates, inner = rule(eps).update(updates, state.inner, params)
        return updates, Counted(count, inner)

    return optax.GradientTransformation(init, update)
