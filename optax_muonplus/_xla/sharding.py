"""Shardings of intermediate results, where the compiler would choose others, and Manual axes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp


def constrain_sharding_like(
    references: Sequence[jax.Array], results: Sequence[jax.Array]
) -> list[jax.Array]:
    """``results``, on a mesh with Auto axes sharded as ``references`` of the same shapes.

    Under ``jax.jit`` nobody knows how the references are sharded, so that
    ``jax.lax.with_sharding_constraint`` has nothing to be given. Instead each result is selected
    against its reference by a condition that is never true but that the compiler cannot see
    through: both then get one sharding. It costs another read of each reference, which is saved
    where there is one device.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in references)
    if not traced or jax.device_count() == 1:
        return list(results)
    never = jax.lax.optimization_barrier(jnp.array(False))
    return [
        jax.lax.select(never, x.astype(y.dtype), y)
        for x, y in zip(references, results, strict=True)
    ]


def varying_axes(typed: Any) -> frozenset[str]:
    """The Manual axes over which an array varies, by its type; none under ``check_vma=False``."""
    kinds = getattr(typed, "manual_axis_type", None)  # since jax 0.10
    return typed.vma if kinds is None else kinds.varying


def varying_like(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """``x`` as an array that varies over the Manual axes that one of ``others`` does."""
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(other)) for other in others))
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):  # since jax 0.8.2
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)
