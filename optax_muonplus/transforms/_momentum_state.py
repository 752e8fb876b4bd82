"""What a momentum keeps between updates: floating-point numbers, or eight bits with scales."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_muonplus.frame import flatten_with_names, path_name, wrong_state
from optax_muonplus.method import floating_dtype, narrowed
from optax_muonplus.run import Sources
from optax_muonplus.transforms._int8 import (
    BLOCK,
    blocks_are_cut,
    dequantized,
    quantized,
    zero_scales,
)


class MomentumState(NamedTuple):
    """State of :func:`momentum`.

    Attributes:
      mu: one buffer for each parameter, of its shape.
      count: number of updates so far, for bias correction; None without it.
    """

    mu: optax.Updates
    count: Any


class Int8MomentumState(NamedTuple):
    """State of :func:`momentum` with ``mu_dtype="int8"``; :func:`find_momentum` reads it.

    Attributes:
      codes: integers from -127 to 127 for each parameter, of its shape.
      scales: for each block of codes the float32 that multiplies them: of the parameter's shape,
        with one axis divided by the length of a block, see :func:`momentum`.
      count: as in :class:`MomentumState`.
    """

    codes: optax.Updates
    scales: optax.Updates
    count: Any


Stored = MomentumState | Int8MomentumState


def find_momentum(state: Any, as_stored: bool = False) -> Any:
    """Finds the momentum in an optimizer's state, at any depth.

    Args:
      state: of ``optax_muonplus.muonplus`` or any chain with :func:`momentum` in it.
      as_stored: whether a momentum in eight bits is returned as :class:`Int8MomentumState`, and
        not as numbers in float32.

    Returns:
      A :class:`MomentumState`. Its ``mu`` has ``optax.MaskedNode`` where a parameter is not a
      matrix.

    Raises:
      ValueError: unless there is exactly one.
    """
    states = [x for x in jax.tree.leaves(state, is_leaf=_is_momentum) if _is_momentum(x)]
    if len(states) != 1:
        raise ValueError(
            f"Got a state with {len(states)} momentum states, but one is looked for. Pass the state"
            " of an optimizer made by optax_muonplus, or the part of the state that holds the one"
            " you mean."
        )
    return states[0] if as_stored else widened(states[0])


def _is_momentum(x: Any) -> bool:
    return isinstance(x, Stored)


def widened(state: Any) -> Any:
    """A state of an optimizer with float32 in place of each momentum in eight bits.

    It may come from a checkpoint, as a tree of dicts and lists.
    """

    def wide(x: Any) -> Any:
        if not _is_int8(x):
            return x
        fields = x if isinstance(x, Mapping) else x._asdict()
        codes, scales, count = (fields[name] for name in Int8MomentumState._fields)
        mu = jax.tree.map(lambda c, s: dequantized(jnp.asarray(c), jnp.asarray(s)), codes, scales)
        return {"mu": mu, "count": count} if isinstance(x, Mapping) else MomentumState(mu, count)

    return jax.tree.map(wide, state, is_leaf=_is_int8)


def stored_like(state: Any, like: Any) -> Any:
    """The inverse of :func:`widened`, for a state with numbers in eight bits where ``like`` has."""

    def narrow(old: Any, x: Any) -> Any:
        if not _is_int8(old):
            return x
        kept = Int8MomentumState(x.mu, old.scales, x.count)
        buffers, treedef = buffers_of(kept)
        return state_of(kept, treedef, [quantized(m, s.shape) for m, s in buffers], x.count)

    return jax.tree.map(narrow, like, state, is_leaf=_is_int8)


def _is_int8(x: Any) -> bool:
    on_disk = isinstance(x, Mapping) and set(x) == set(Int8MomentumState._fields)
    return on_disk or isinstance(x, Int8MomentumState)


def momentum_dtype(value: DTypeLike | None) -> np.dtype | None:
    """``mu_dtype`` as a dtype: floating-point, or int8; ValueError for another."""
    # Python's int and a string that is no dtype are for floating_dtype to refuse.
    is_int8 = isinstance(value, str | np.dtype | type) and value in ("int8", jnp.int8, np.int8)
    return jnp.dtype(jnp.int8) if is_int8 else floating_dtype("mu_dtype", value)


def empty_momentum(params: optax.Params, dtype: np.dtype | None, count: Any) -> Stored:
    """The state before the first update, which lies as the parameters do.

    Raises ValueError where JAX would refuse the shardings of the codes.
    """
    zeros = optax.tree.zeros_like(params, dtype=dtype)
    if dtype != jnp.int8:
        return MomentumState(zeros, count)
    paths, codes = flatten_with_names(zeros)
    if cut := [path_name(p) for p, x in zip(paths, codes, strict=True) if blocks_are_cut(x)]:
        raise ValueError(
            f"With mu_dtype='int8' up to {BLOCK} elements along an axis share a scale, and the"
            f" Explicit mesh axes cut such blocks of {', '.join(cut)}. Shard another axis, or fewer"
            " times, or on Auto axes; or use mu_dtype='bfloat16'."
        )
    return Int8MomentumState(zeros, jax.tree.map(zero_scales, zeros), count)


def check_momentum(state: Any, dtype: np.dtype | None, bias_correction: bool) -> None:
    """Raises ValueError unless ``state`` is one for these options."""
    expected = Int8MomentumState if dtype == jnp.int8 else MomentumState
    if getattr(state, "_fields", None) != expected._fields:
        raise wrong_state(state, [expected.__name__])
    if bias_correction and state.count is None:
        raise ValueError(
            "The momentum in this state has no count, but bias_correction=True needs one. Get a"
            " state that has: optax_muonplus.take_over(state, tx.init(params), params)."
        )


def buffers_of(state: Stored) -> tuple[list[Sources], Any]:
    """The arrays that hold each leaf's momentum, and the structure of the tree."""
    first, *others = state[:-1]
    arrays, treedef = jax.tree.flatten(first)
    return list(zip(arrays, *map(treedef.flatten_up_to, others), strict=True)), treedef


def state_of(like: Stored, treedef: Any, buffers: list[Sources], count: Any) -> Any:
    """The inverse of :func:`buffers_of`."""
    columns = zip(*buffers, strict=True) if buffers else ((),) * (len(like) - 1)
    return type(like)(*map(treedef.unflatten, columns), count)


def loaded(*buffer: jax.Array) -> jax.Array:
    """The momentum in the arrays that hold it, or in parts of them."""
    return buffer[0] if len(buffer) == 1 else dequantized(*buffer)


def stored(x: jax.Array, buffer: Sources) -> Sources:
    """A momentum, held as ``buffer`` holds the one before."""
    if len(buffer) == 1:
        return (narrowed(x, buffer[0].dtype),)
    return quantized(x, buffer[1].shape)
