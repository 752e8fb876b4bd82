"""A chain of links for the matrices of a tree, and AdamW for everything else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus._arguments import DECAY, NOT_NEGATIVE, check_number, check_rate
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import ADAM, MUON, ResolvedTree
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.transforms._apply import MatrixTransformation, for_resolved


class AdamWArgs(NamedTuple):
    """Arguments of AdamW, which is the chain that ``optax.adamw`` is, with the same state."""

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    weight_decay: optax.ScalarOrSchedule

    def check(self) -> None:
        """Raises ValueError, with the names that optimizers give them, for one out of range."""
        check_rate("adam_learning_rate", self.learning_rate)
        check_number("adam_b1", self.b1, DECAY)
        check_number("adam_b2", self.b2, DECAY)
        check_number("adam_eps", self.eps, NOT_NEGATIVE)
        check_number("adam_eps_root", self.eps_root, NOT_NEGATIVE)
        check_rate("adam_weight_decay", self.weight_decay)

    def make(self) -> optax.GradientTransformation:
        """The transformation."""
        moments = optax.scale_by_adam(self.b1, self.b2, self.eps, self.eps_root)
        decay = _decay(self.weight_decay, None, "adam_weight_decay")
        return optax.chain(moments, decay, optax.scale_by_learning_rate(self.learning_rate))


def descent(
    learning_rate: optax.ScalarOrSchedule, weight_decay: optax.ScalarOrSchedule, mask: Any
) -> list[optax.GradientTransformation]:
    """The last links of every optimizer: decoupled weight decay, and a step downhill.

    An update without parameters is for a decay of zero only, as a Python number.

    Raises:
      ValueError: unless both are finite numbers or schedules. A negative learning rate goes uphill,
        as in Optax.
    """
    check_rate("learning_rate", learning_rate)
    check_rate("weight_decay", weight_decay)
    return [
        _decay(weight_decay, mask, "weight_decay"),
        optax.scale_by_learning_rate(learning_rate),
    ]


def _decay(rate: optax.ScalarOrSchedule, mask: Any, name: str) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``, which asks for parameters even where the rate is zero."""
    link = optax.add_decayed_weights(rate, mask)
    never = isinstance(rate, int | float) and rate == 0

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        if params is not None:
            return link.update(updates, state, params)
        if never:
            return updates, state
        given = "a schedule" if callable(rate) else repr(rate)
        raise ValueError(
            f"{name} is {given}, and decay needs the parameters: call update(gradients, state,"
            " parameters). They may be left out only where weight_decay and adam_weight_decay are"
            " zero as Python numbers, not arrays or schedules."
        )

    return optax.GradientTransformation(link.init, update_fn)


def partition_with_adamw(
    links: Sequence[optax.GradientTransformation],
    adamw: AdamWArgs,
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> optax.GradientTransformationExtraArgs:
    """A chain of links for the matrices of a tree, and AdamW for everything else.

    Args:
      links: of the chain. A :class:`MatrixTransformation` is told what each matrix is; its own
        dimension numbers and sharding are not used.
      adamw: AdamW's arguments.
      dimension_numbers: as in :func:`muonplus`.
      sharding: as in :func:`muonplus`.
    """
    adamw.check()
    # In float16 AdamW's squares would overflow from a gradient of 256 on, whatever the parameter.
    others = as_wide_as_parameters(adamw.make(), before=True)

    def make(tree: ResolvedTree) -> optax.GradientTransformation:
        matrices = tree.matrices
        made = [
            as_wide_as_parameters(link.make(matrices))
            if isinstance(link, MatrixTransformation)
            else link
            for link in links
        ]
        chain = optax.chain(*made)
        # Labels as a function: Optax would call a tree of labels that is an Equinox module with
        # __call__.
        return optax.partition({MUON: chain, ADAM: others}, lambda _: tree.labels)

    return for_resolved(make, dimension_numbers, sharding)


def as_wide_as_parameters(
    link: optax.GradientTransformation, before: bool = False
) -> optax.GradientTransformation:
    """``link``, with updates of the dtype that gradient and parameter promote to.

    Updates of float16 gradients would else be multiplied by the learning rate in float16, where
    small ones become zero, even if parameters are float32.

    Args:
      link: a transformation.
      before: whether the gradients are widened before it, or the updates after it.
    """

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        updates = _promoted(updates, params) if before else updates
        updates, state = link.update(updates, state, params)
        return updates if before else _promoted(updates, params), state

    return optax.GradientTransformation(link.init, update_fn)


def _promoted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    if params is None:
        return updates

    def promoted(update: Any, parameter: Any) -> jax.Array:
        update = jnp.asarray(update)
        return update.astype(jnp.promote_types(update.dtype, jnp.result_type(parameter)))

    return jax.tree.map(promoted, updates, params)
