"""Arrays in eight bits: codes from -127 to 127, and a scale for each block of them.

The code is linear and rounds to nearest. This is enough for Muon's momentum (Gupta et al.,
arXiv:2509.23106); AdamW's second moment needs a logarithmic code (Dettmers et al.,
arXiv:2110.02861). After 200 updates (a mean gradient and three times as much noise, blocks of 16 x
16) a momentum had an error of 2.3%, with stochastic rounding 3.3%, with the logarithmic code 3.7%.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_muonplus._chain.momentum import MomentumState, Storage, buffers_of, state_of
from optax_muonplus._core.precision import saturating_cast

BLOCK = 256  # elements that share a scale of 4 bytes: 1.016 bytes each
_LEAST = 16  # with fewer, an element takes more than 1.25 bytes
_LARGEST = 127


class Int8MomentumState(NamedTuple):
    """State of a momentum with ``mu_dtype="int8"``; :func:`find_momentum` reads it.

    ``codes`` are integers from -127 to 127, with the shapes of parameters. ``scales`` multiply
    them: a float32 number for each block. ``count`` is as in :class:`MomentumState`.
    """

    codes: optax.Updates
    scales: optax.Updates
    count: Any


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array's scales: its own, with one axis divided by a block length."""
    # The axis is the one with the longest block of at most BLOCK elements. Among equals it is the
    # last one other than the final axis, which a TPU would copy to cut. If all are short, as for
    # prime sides, the whole last axis is a block. Only the shape matters: a state fits every mesh.
    if not shape or not math.prod(shape):
        return shape
    longest = [max(b for b in range(1, min(n, BLOCK) + 1) if n % b == 0) for n in shape]
    last = len(shape) - 1
    axis = max(range(len(shape)), key=lambda i: (longest[i], i != last, i))
    axis, block = (axis, longest[axis]) if longest[axis] >= _LEAST else (last, shape[-1])
    return (*shape[:axis], shape[axis] // block, *shape[axis + 1 :])


def quantize(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of a real array, and its scales of ``shape``: largest entries / 127."""
    # A block of zeros, or of numbers below 1e-36, has scale and codes 0.
    blocks, axis = _in_blocks(x, shape)
    most, least = (f(blocks, axis=axis, keepdims=True) for f in (jnp.max, jnp.min))
    scales = saturating_cast(jnp.maximum(most, -least) / _LARGEST, jnp.float32)
    codes = jnp.round(blocks / jnp.where(scales > 0, scales, 1))
    codes = jnp.clip(codes, -_LARGEST, _LARGEST).astype(jnp.int8)
    spec = jax.typeof(x).sharding.spec
    return _reshape(codes, x.shape, spec), _reshape(scales, shape, spec)


def dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns codes times scales in float32; raises ValueError for negative or NaN scales."""
    if not isinstance(scales, jax.core.Tracer) and not jnp.all(scales >= 0):
        raise ValueError(
            f"A momentum in eight bits has scales of shape {scales.shape} that are negative or NaN:"
            " it was damaged, or a gradient was not finite. Continue from an earlier state."
        )
    blocks, axis = _in_blocks(codes, scales.shape)
    x = blocks.astype(jnp.float32) * jnp.expand_dims(scales, axis)
    return _reshape(x, codes.shape, jax.typeof(codes).sharding.spec)


def zero_scales(codes: jax.Array) -> jax.Array:
    """Returns the scales of an array of zeros, with the sharding of its codes."""
    # Each is taken from the codes: XLA would compute maxima of zeros when it compiles.
    strides = [n // max(k, 1) for n, k in zip(codes.shape, scales_shape(codes.shape), strict=True)]
    some = jax.lax.slice(codes, [0] * codes.ndim, codes.shape, [max(s, 1) for s in strides])
    return some.astype(jnp.float32)


def _in_blocks(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, int]:
    """Returns ``x`` with an axis for the elements of a block, and that axis."""
    sizes = enumerate(zip(x.shape, shape, strict=True))
    divided = [i for i, (size, blocks) in sizes if size != blocks]
    axis = 1 + (divided[0] if divided else x.ndim - 1)
    block = [x.shape[i] // shape[i] for i in divided] or [1]
    spec = tuple(jax.typeof(x).sharding.spec)
    spec = (*spec[:axis], None, *spec[axis:])
    return _reshape(x, (*shape[:axis], *block, *shape[axis:]), spec), axis


def _reshape(x: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> jax.Array:
    """Reshapes ``x``; on Explicit axes to ``spec``, as JAX may move a mesh axis of one device."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def find_momentum(state: Any, as_stored: bool = False) -> Any:
    """Finds the momentum in an optimizer's state, at any depth.

    Args:
      state: of ``optax_muonplus.muonplus`` or any chain with :func:`optax_muonplus.momentum` in it.
      as_stored: whether to keep a momentum in eight bits as :class:`Int8MomentumState`.

    Returns:
      A :class:`MomentumState`, with ``optax.MaskedNode`` for a parameter that is not a matrix.

    Raises:
      ValueError: unless there is exactly one.
    """
    states = [x for x in jax.tree.leaves(state, is_leaf=_is_momentum) if _is_momentum(x)]
    if len(states) != 1:
        raise ValueError(
            f"Got a state with {len(states)} momentum states, not one. Pass the state of an"
            " optimizer made by optax_muonplus, or the part of it with the momentum that you mean."
        )
    return states[0] if as_stored else widen(states[0])


def _is_momentum(x: Any) -> bool:
    return isinstance(x, MomentumState | Int8MomentumState)


def widen(state: Any) -> Any:
    """Returns an optimizer's state with each momentum in eight bits as float32."""

    def wide(x: Any) -> Any:
        if not isinstance(x, Int8MomentumState):
            return x
        return MomentumState(jax.tree.map(dequantize, x.codes, x.scales), x.count)

    return jax.tree.map(wide, state, is_leaf=lambda x: isinstance(x, Int8MomentumState))


def store_like(state: Any, like: Any) -> Any:
    """Inverts :func:`widen`: stores in eight bits each momentum that ``like`` stores so."""

    def narrow(old: Any, x: Any) -> Any:
        if not isinstance(old, Int8MomentumState):
            return x
        kept = Int8MomentumState(x.mu, old.scales, x.count)
        buffers, treedef = buffers_of(kept)
        return state_of(kept, treedef, [quantize(m, s.shape) for m, s in buffers], x.count)

    return jax.tree.map(narrow, like, state, is_leaf=lambda x: isinstance(x, Int8MomentumState))


STORAGE = Storage(
    lambda zeros, count: Int8MomentumState(zeros, jax.tree.map(zero_scales, zeros), count),
    load=dequantize,
    store=lambda x, buffer: quantize(x, buffer[1].shape),
)
