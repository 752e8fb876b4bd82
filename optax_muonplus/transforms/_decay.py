"""The last links of every optimizer: decoupled weight decay, and the step downhill.

A mask of the decay may be written for a whole model.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.frame import DecayedWeights, LearningRate, promoted
from optax_muonplus.method import Kind, check_flag, check_number
from optax_muonplus.trees import FlatTree, broadcast_prefix

RATE = Kind("a finite number, not negative, or a schedule", lambda x: x >= 0)
_FLAG = bool | int | np.bool_ | np.ndarray | jax.Array


def add_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    name: str = "weight_decay",
    cautious: bool = False,
) -> DecayedWeights:
    r"""``optax.add_decayed_weights``, in the dtype that update and parameter promote to.

    With ``cautious`` it decays the entries that the update moves towards zero anyway: for an update
    U, which is subtracted, and a parameter W, by entries,

    .. math::
      U + \lambda\, [U W \ge 0]\, W

    An update without parameters is for a decay of zero only, as a Python number.

    Args:
      weight_decay: number or schedule.
      mask: tree or function of the parameters, as in Optax.
      name: of the argument, for messages.
      cautious: whether other entries are left out. Complex entries agree if the real part of
        :math:`U \bar W` is not negative.

    Raises:
      ValueError: unless the decay is a finite number, not negative, or a schedule, and
        ``cautious`` a flag; for a mask of words or one flag; at init, for a tree that does not
        cover the parameters.

    Source: Chen et al., *Cautious Weight Decay*, arXiv:2510.12402, Algorithm 1.
    """
    _check_mask(name, mask)
    check_rate(name, weight_decay)
    check_flag("cautious", cautious)
    flags = None if mask is None else lambda tree: _flags(mask, tree)
    link = optax.add_decayed_weights(real(weight_decay), flags)
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
    transformation.is_zero = is_zero
    transformation.weight_decay, transformation.name = weight_decay, name
    return transformation


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> LearningRate:
    """``optax.scale_by_learning_rate``, which checks its number and whose rate AdamW can have too.

    Raises:
      ValueError: unless the rate is a finite number, not negative, or a schedule.
    """
    check_rate("learning_rate", learning_rate)
    transformation = LearningRate(*optax.scale_by_learning_rate(real(learning_rate)))
    transformation.learning_rate = learning_rate
    return transformation


def real(number: Any) -> Any:
    """Returns a real number: ``optax.inject_hyperparams`` makes all complex where one array is."""
    return jnp.real(number) if np.iscomplexobj(number) else number


def check_rate(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is a finite number, not negative, or a schedule."""
    if not callable(value):
        check_number(name, value, RATE)


def check_decay(name: str, weight_decay: Any, learning_rate: Any) -> None:
    """Raises ValueError if a step of decay, of numbers, turns parameters round."""
    numbers = weight_decay, learning_rate
    if all(isinstance(x, int | float) for x in numbers) and weight_decay * learning_rate > 1:
        raise ValueError(
            f"{name}={weight_decay} times the learning rate {learning_rate} is more than 1, so that"
            " each update would turn the sign of every parameter. Decay is multiplied by the"
            " learning rate here; 0.1 is usual."
        )


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


def _check_mask(name: str, mask: Any) -> None:
    """Raises ValueError for words, and for what a function gave when it was asked of a number."""
    words = [] if callable(mask) else [x for x in jax.tree.leaves(mask) if isinstance(x, str)]
    if words:
        raise ValueError(
            f"{name}_mask has the word {words[0]!r}, which would count as True. Give a tree of True"
            " and False, or a function from the parameters to one: lambda params:"
            " jax.tree.map(lambda x: x.ndim > 1, params)."
        )
    if isinstance(mask, _FLAG):
        raise ValueError(
            f"{name}_mask is {mask}, one flag for all parameters. optax.inject_hyperparams makes"
            " that of a function, which it calls with the number of the step: add"
            f" static_args=({name + '_mask'!r},) to it. Otherwise leave the mask out, or the decay."
        )


def _flags(mask: Any, tree: Any) -> Any:
    """Returns a flag for each leaf of ``tree``, some leaves of which may have been left out."""
    flat = FlatTree.of(tree)
    return flat.unflatten(broadcast_prefix(mask, flat, _FLAG, "decay masks", "True or False"))
