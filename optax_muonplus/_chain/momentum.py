"""The momentum: the only state that Muon+ has for a matrix."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._chain.checks import StateCheck, check_gradients, check_inexact, wrong_state
from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.arguments import DECAY, check_flag, check_number, floating_dtype
from optax_muonplus._core.function import matrix_function, static
from optax_muonplus._core.momentum import look_ahead, moving_average
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._leaves.paths import flatten_with_names

# The arrays of one momentum. The first has the shape of the parameter. Any others have as many
# axes, and one number for each block of the first.
Buffer = tuple[jax.Array, ...]


class MomentumState(NamedTuple):
    """State of :func:`optax_muonplus.momentum`: a buffer ``mu`` for each parameter.

    ``count`` is the number of updates, or None without bias correction.
    """

    mu: optax.Updates
    count: Any


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the buffers of a momentum are kept between updates.

    The state is a named tuple. Its last field is the count; each field before it is a tree like the
    parameters, with one array of every buffer.
    """

    empty: Callable[[optax.Params, Any], Any]  # (zeros, count) -> the first state
    load: Callable[..., jax.Array]  # (*buffer) -> the momentum
    store: Callable[[jax.Array, Buffer], Buffer]  # (the momentum, old buffer) -> new buffer


NUMBERS = Storage(
    MomentumState,
    load=lambda buffer: buffer,
    store=lambda x, buffer: (saturating_cast(x, buffer[0].dtype),),
)


class MomentumTransformation(optax.GradientTransformation):
    """The transformation that ``optax_muonplus.momentum`` returns."""

    momentum: "PlainMomentum"  # the same as a part of a chain

    def __new__(cls, momentum: "PlainMomentum") -> Self:
        check_state = StateCheck()

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            check_gradients(updates, params)
            check_state(state, momentum.init, updates, params)
            return momentum.update(updates, state)

        self = super().__new__(cls, momentum.init, update)
        self.momentum = momentum
        return self


@matrix_function
class LookAhead:
    """The direction ``a M + b G``, to be orthogonalized, in float32 at least."""

    beta: ArrayLike
    count: Any  # number of updates, or None without bias correction
    nesterov: bool = static()  # whether b is not 0
    load: Callable[..., jax.Array] = static()  # (*buffer) -> M

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        *buffer, g = arrays if self.nesterov else (*arrays, None)
        return look_ahead(self.load(*buffer), g, self.beta, self.count)


@dataclasses.dataclass(frozen=True, eq=False)
class PlainMomentum:
    """A momentum as a part of a chain. A subclass may have another storage."""

    beta: ArrayLike = 0.95
    nesterov: bool = True
    bias_correction: bool = False
    mu_dtype: DTypeLike | None = None
    other_dtype: ClassVar[str] = ""  # a dtype that is not floating-point and has its own storage

    def __post_init__(self) -> None:
        check_number("beta", self.beta, DECAY)
        check_flag("nesterov", self.nesterov)
        check_flag("bias_correction", self.bias_correction)
        self.dtype  # noqa: B018

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of the first array of a buffer; None means the parameter's."""
        return floating_dtype("mu_dtype", self.mu_dtype, self.other_dtype)

    @property
    def storage(self) -> Storage:
        return NUMBERS

    def init(self, params: optax.Params) -> Any:
        paths, leaves = flatten_with_names(params)
        check_inexact(paths, [jnp.result_type(leaf) for leaf in leaves])
        is_real = self.dtype is not None and not jnp.issubdtype(self.dtype, jnp.complexfloating)
        if is_real and any(map(jnp.iscomplexobj, leaves)):
            raise ValueError(
                f"mu_dtype={self.dtype} cannot hold the momentum of complex parameters. Pass"
                " None, or give complex parameters an optimizer of their own."
            )
        count = jnp.zeros([], jnp.int32) if self.bias_correction else None
        zeros = optax.tree.zeros_like(params, dtype=self.dtype)
        return self.storage.empty(zeros, count)

    def update(self, updates: optax.Updates, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        state, directions = self.advance(updates, state)
        return jax.tree.structure(state[0]).unflatten([x.load() for x in directions]), state

    def advance(self, updates: optax.Updates, state: Any) -> tuple[Any, list[Operand]]:
        """Returns the state after one update, and a direction for each leaf."""
        storage = self.storage
        buffers, treedef = buffers_of(state)
        dtypes = {jnp.result_type(m[0]) for m in buffers}
        if self.dtype is not None and dtypes - {jnp.result_type(self.dtype)}:
            raise wrong_state(f"momentum in {dtypes.pop()}, and mu_dtype is {self.dtype}")
        grads = [jnp.asarray(g) for g in treedef.flatten_up_to(updates)]
        pairs = zip(buffers, grads, strict=True)
        sums = [moving_average(storage.load(*m), g, self.beta) for m, g in pairs]
        kept = [storage.store(x, m) for x, m in zip(sums, buffers, strict=True)]
        count = optax.safe_increment(state.count) if self.bias_correction else None
        new = state_of(state, treedef, kept, count)
        compute = LookAhead(self.beta, count, self.nesterov, storage.load)
        directions = []
        for x, m, g in zip(sums, kept, grads, strict=True):
            # A direction is computed from a buffer of several arrays. A single array is read only
            # if the direction is rounded to its dtype anyway; otherwise the unrounded sum is.
            arrays = (*(m if len(m) > 1 else (x,)), *([g] if self.nesterov else []))
            stored = m[0] if len(m) == 1 and m[0].dtype != x.dtype else None
            directions.append(Operand(arrays, x.dtype, compute, stored))
        return new, directions


def buffers_of(state: Any) -> tuple[list[Buffer], Any]:
    """Returns the buffer of each leaf, and the structure of the tree."""
    first, *others = state[:-1]
    arrays, treedef = jax.tree.flatten(first)
    return list(zip(arrays, *map(treedef.flatten_up_to, others), strict=True)), treedef


def state_of(like: Any, treedef: Any, buffers: list[Buffer], count: Any) -> Any:
    columns = zip(*buffers, strict=True) if buffers else ((),) * (len(like) - 1)
    return type(like)(*map(treedef.unflatten, columns), count)
