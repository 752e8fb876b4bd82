"""Decoupled weight decay, with a mask that may be written for a whole model."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from optax_muonplus import frame
from optax_muonplus.frame import DecayedWeights, decayed_weights
from optax_muonplus.method import check_flag
from optax_muonplus.trees import FlatTree, broadcast_prefix

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
    flags = None if mask is None else lambda tree: _flags(mask, tree)
    return decayed_weights(weight_decay, flags, name, cautious)


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW(frame.AdamW):
    """AdamW's arguments; the chain is that of ``optax.adamw``, with the same state.

    Attributes:
      learning_rate: number or schedule; None means that of the matrices.
      b1: first decay.
      b2: second decay.
      eps: epsilon.
      eps_root: epsilon inside the root. It must be positive where updates are differentiated and
        gradients may be zero, as Optax says: the derivative of the root is infinite there.
      nesterov: whether it looks one step ahead (NAdamW).
      weight_decay: number or schedule; 0 here, where ``optax.adamw`` has 1e-4.
      weight_decay_mask: tree or function of the parameters, as in ``optax.add_decayed_weights``.
      cautious_weight_decay: see :func:`add_decayed_weights`.
    """

    weight_decay_mask: Any = None
    cautious_weight_decay: bool = False

    def decay(self) -> DecayedWeights:
        """Returns the link that decays weights."""
        mask, cautious = self.weight_decay_mask, self.cautious_weight_decay
        check_flag("adam_cautious_weight_decay", cautious)
        return add_decayed_weights(self.weight_decay, mask, "adam_weight_decay", cautious)


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
