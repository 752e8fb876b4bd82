"""The last links of every optimizer: decoupled weight decay, and the step downhill."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muonplus.frame.rates import check_rate
from optax_muonplus.method import check_flag


class DecayedWeights(optax.GradientTransformation):
    """What :func:`decayed_weights` returns.

    Attributes:
      weight_decay: number or schedule.
      name: of the argument, for messages.
    """

    weight_decay: optax.ScalarOrSchedule
    name: str


class LearningRate(optax.GradientTransformation):
    """What :func:`scale_by_learning_rate` returns.

    Attributes:
      learning_rate: number or schedule.
    """

    learning_rate: optax.ScalarOrSchedule


def decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Callable[[optax.Params], Any] | None = None,
    name: str = "weight_decay",
    cautious: bool = False,
) -> DecayedWeights:
    """Decays weights as ``optax_muonplus.transforms.add_decayed_weights`` says.

    Args:
      weight_decay: number or schedule.
      mask: from the parameters to a flag for each.
      name: of the argument, for messages.
      cautious: whether entries are left out that the update moves away from zero.
    """
    check_rate(name, weight_decay)
    check_flag("cautious", cautious)
    link = optax.add_decayed_weights(weight_decay, mask)
    is_zero = isinstance(weight_decay, int | float) and weight_decay == 0

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        if params is not None and cautious:
            return _decayed_where_they_agree(link, promoted(updates, params), state, params)
        if params is not None:
            return link.update(promoted(updates, params), state, params)
        if is_zero:
            return updates, state
        given = "a schedule" if callable(weight_decay) else repr(weight_decay)
        raise ValueError(
            f"{name} is {given}, and decay needs the parameters: call update(gradients, state,"
            " parameters). They may be left out only where weight_decay and adam_weight_decay are"
            " zero as Python numbers, not arrays or schedules."
        )

    transformation = DecayedWeights(link.init, update_fn)
    transformation.weight_decay, transformation.name = weight_decay, name
    return transformation


def _decayed_where_they_agree(
    link: optax.GradientTransformation, updates: optax.Updates, state: Any, params: optax.Params
) -> tuple[optax.Updates, Any]:
    """Returns ``link``'s updates with decay of entries whose update has the parameter's sign."""
    # Mask and schedule are the link's: it makes the decay of updates that are zero.
    decay, state = link.update(optax.tree.zeros_like(updates), state, params)

    def decayed(update: jax.Array, parameter: Any, decay: jax.Array) -> jax.Array:
        # Signs are multiplied, not sizes: the product of small numbers of two signs would be -0.
        agree = jnp.real(jnp.sign(update) * jnp.sign(parameter).conj()) >= 0
        return jnp.where(agree, update + decay, update)

    return jax.tree.map(decayed, updates, params, decay), state


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> LearningRate:
    """``optax.scale_by_learning_rate``, which checks its number and whose rate AdamW can have too.

    Raises:
      ValueError: unless the rate is a finite number, not negative, or a schedule.
    """
    check_rate("learning_rate", learning_rate)
    transformation = LearningRate(*optax.scale_by_learning_rate(learning_rate))
    transformation.learning_rate = learning_rate
    return transformation


def promoted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Returns updates in the dtype that they and their parameters promote to.

    A float16 update of a float32 parameter would underflow when multiplied by the learning rate.
    """
    if params is None:
        return updates

    def promote(update: Any, parameter: Any) -> jax.Array:
        update = jnp.asarray(update)
        return update.astype(jnp.promote_types(update.dtype, jnp.result_type(parameter)))

    return jax.tree.map(promote, updates, params)
