"""A chain of links for the matrices of a tree, and AdamW for everything else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus._arguments import DECAY, NOT_NEGATIVE, check_flag, check_number, check_rate
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import ADAM, MUON, LeafInfo, ResolvedTree
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.transforms._apply import MatrixTransformation, for_resolved


class AdamWArgs(NamedTuple):
    """Arguments of AdamW, which is the chain that ``optax.adamw`` is, with the same state."""

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    nesterov: bool
    weight_decay: optax.ScalarOrSchedule

    def check(self) -> None:
        """Raises ValueError, with the names that optimizers give them, for one out of range."""
        check_rate("adam_learning_rate", self.learning_rate)
        check_number("adam_b1", self.b1, DECAY)
        check_number("adam_b2", self.b2, DECAY)
        check_number("adam_eps", self.eps, NOT_NEGATIVE)
        check_number("adam_eps_root", self.eps_root, NOT_NEGATIVE)
        check_flag("adam_nesterov", self.nesterov)
        check_rate("adam_weight_decay", self.weight_decay)

    def make(self) -> optax.GradientTransformation:
        """The transformation."""
        moments = optax.scale_by_adam(
            self.b1, self.b2, self.eps, self.eps_root, nesterov=self.nesterov
        )
        decay = _decay(self.weight_decay, None, "adam_weight_decay")
        return optax.chain(moments, decay, optax.scale_by_learning_rate(self.learning_rate))


class Descent(NamedTuple):
    """The last links of every optimizer: decoupled weight decay, and a step downhill.

    An update without parameters is for a decay of zero only, as a Python number.
    """

    learning_rate: optax.ScalarOrSchedule
    weight_decay: optax.ScalarOrSchedule
    mask: Any

    def check(self) -> None:
        """Raises ValueError unless both rates are finite numbers or schedules.

        A negative learning rate goes uphill, as in Optax.
        """
        check_rate("learning_rate", self.learning_rate)
        check_rate("weight_decay", self.weight_decay)

    def after(
        self, link: MatrixTransformation, leaves: Sequence[LeafInfo]
    ) -> optax.GradientTransformation:
        """The chain of ``link`` for the matrices of ``leaves``, decay, and the step downhill."""
        rate = optax.scale_by_learning_rate(self.learning_rate)
        decay = _decay(self.weight_decay, self.mask, "weight_decay")
        chain = optax.chain(as_wide_as_parameters(link.make(leaves)), decay, rate)
        if not (link.takes_factor and _is_zero(self.weight_decay)):
            return chain

        def update_fn(
            updates: optax.Updates, state: Any, params: optax.Params | None = None
        ) -> tuple[optax.Updates, Any]:
            if not _are_wide(updates, params):
                return chain.update(updates, state, params)
            inner, nothing, count = state
            dtype = jnp.finfo(jnp.result_type(*jax.tree.leaves(updates), jnp.float32)).dtype
            factor, count = rate.update(jnp.ones([], dtype), count)
            updates, inner = link.make(leaves, factor).update(updates, inner, params)
            return updates, (inner, nothing, count)

        return optax.GradientTransformation(chain.init, update_fn)


def _are_wide(updates: optax.Updates, params: optax.Params | None) -> bool:
    """Whether updates can be multiplied by the learning rate in the dtypes that they have."""

    def is_wide(update: Any, parameter: Any) -> bool:
        dtype = jnp.result_type(update)
        promoted = jnp.promote_types(dtype, jnp.result_type(parameter))
        return jnp.finfo(dtype).bits >= 32 and promoted == dtype

    others = updates if params is None else params
    return all(jax.tree.leaves(jax.tree.map(is_wide, updates, others)))


def _is_zero(rate: optax.ScalarOrSchedule) -> bool:
    """Whether a decay is the number zero; arrays are not looked into."""
    return isinstance(rate, int | float) and rate == 0


def _decay(rate: optax.ScalarOrSchedule, mask: Any, name: str) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``, which asks for parameters even where the rate is zero."""
    link = optax.add_decayed_weights(rate, mask)
    never = _is_zero(rate)

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
    link: MatrixTransformation,
    descent: Descent,
    adamw: AdamWArgs,
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> optax.GradientTransformationExtraArgs:
    """A transformation of the matrices of a tree, and AdamW for everything else.

    Args:
      link: is told what each matrix is; its own dimension numbers and sharding are not used.
      descent: weight decay and learning rate of the matrices.
      adamw: AdamW's arguments.
      dimension_numbers: as in :func:`muonplus`.
      sharding: as in :func:`muonplus`.
    """
    descent.check()
    adamw.check()
    # In float16 AdamW's squares would overflow from a gradient of 256 on, whatever the parameter.
    others = as_wide_as_parameters(adamw.make(), before=True)

    def make(tree: ResolvedTree) -> optax.GradientTransformation:
        chain = descent.after(link, tree.matrices)
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
