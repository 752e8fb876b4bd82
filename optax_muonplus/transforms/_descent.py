"""The last links of every optimizer: decoupled weight decay, and the step downhill."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._arguments import check_rate
from optax_muonplus._parameters.leaves import LeafInfo


@dataclasses.dataclass(frozen=True, eq=False)
class DecayedWeights:
    """Adds decoupled weight decay to updates, in the dtype that update and parameter promote to.

    An update without parameters is for a decay of zero only, as a Python number.

    Attributes:
      weight_decay: number or schedule.
      mask: tree or function of the parameters, as in ``optax.add_decayed_weights``.
      name: of the argument, for messages.
    """

    weight_decay: optax.ScalarOrSchedule = 0.0
    mask: Any = None
    name: str = "weight_decay"

    def __post_init__(self) -> None:
        """Raises ValueError unless the decay is a finite number or a schedule."""
        check_rate(self.name, self.weight_decay)

    @functools.cached_property
    def _link(self) -> optax.GradientTransformation:
        return optax.add_decayed_weights(self.weight_decay, self.mask)

    @property
    def is_zero(self) -> bool:
        """Whether the decay is zero as a Python number."""
        return not callable(self.weight_decay) and _is_python_zero(self.weight_decay)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo] = ()) -> Any:
        """Returns the state of ``optax.add_decayed_weights``."""
        del leaves
        return self._link.init(params)

    def update(
        self, updates: Any, state: Any, params: Any = None, leaves: Sequence[LeafInfo] = ()
    ) -> tuple[optax.Updates, Any]:
        """Returns the updates with the decay added, and the state."""
        del leaves
        if params is not None:
            return self._link.update(promoted(updates, params), state, params)
        if self.is_zero:
            return updates, state
        given = "a schedule" if callable(self.weight_decay) else repr(self.weight_decay)
        raise ValueError(
            f"{self.name} is {given}, and decay needs the parameters: call update(gradients, state,"
            " parameters). They may be left out only where weight_decay and adam_weight_decay are"
            " zero as Python numbers, not arrays or schedules."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class LearningRate:
    """Multiplies updates by the negative learning rate; a negative rate goes uphill, as in Optax.

    Attributes:
      learning_rate: number or schedule.
    """

    learning_rate: optax.ScalarOrSchedule

    def __post_init__(self) -> None:
        """Raises ValueError unless the rate is a finite number or a schedule."""
        check_rate("learning_rate", self.learning_rate)

    @functools.cached_property
    def _link(self) -> optax.GradientTransformation:
        return optax.scale_by_learning_rate(self.learning_rate)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo] = ()) -> Any:
        """Returns the state of ``optax.scale_by_learning_rate``."""
        del leaves
        return self._link.init(params)

    def update(
        self, updates: Any, state: Any, params: Any = None, leaves: Sequence[LeafInfo] = ()
    ) -> tuple[optax.Updates, Any]:
        """Returns the multiplied updates, and the state."""
        del leaves
        return self._link.update(updates, state, params)

    def factor(self, updates: optax.Updates, state: Any) -> tuple[jax.Array, Any]:
        """Returns what updates of these dtypes would be multiplied by, and the new state."""
        dtype = jnp.finfo(jnp.result_type(*jax.tree.leaves(updates), jnp.float32)).dtype
        factor, state = self._link.update(jnp.ones([], dtype), state)
        return jnp.asarray(factor), state


def are_wide(updates: optax.Updates, params: optax.Params | None) -> bool:
    """Whether updates can be multiplied by the learning rate in the dtypes that they have."""

    def is_wide(update: Any, parameter: Any) -> bool:
        dtype = jnp.result_type(update)
        promoted = jnp.promote_types(dtype, jnp.result_type(parameter))
        return jnp.finfo(dtype).bits >= 32 and promoted == dtype

    others = updates if params is None else params
    return all(jax.tree.leaves(jax.tree.map(is_wide, updates, others)))


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


def _is_python_zero(x: Any) -> bool:
    return isinstance(x, int | float) and x == 0
