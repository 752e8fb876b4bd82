"""An array of the old state in the dtype and the place of the new one's."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_muonplus.matrices._precision import narrowed


def absence(x: Any) -> str | None:
    """Why there are no numbers in ``x``, None if there are."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "is a shape without an array"
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
        return "was donated to a compiled function and is gone"
    return None


def misfit(old: Any, new: Any) -> str | None:
    """Why ``old`` cannot take the place of ``new``, None if it can."""
    if np.shape(old) != np.shape(new):
        return f"is {np.shape(old)}, the new one {np.shape(new)}"
    if jnp.iscomplexobj(old) and not jnp.iscomplexobj(new):
        return f"is {jnp.result_type(old)}, the new one {jnp.result_type(new)}"
    return None


def placed(old: Any, new: Any, copy: bool) -> Any:
    """``old`` with the dtype of ``new``, and sharded like it where ``new`` was put somewhere.

    Nothing is gathered: each device sends and receives what it lacks.

    Args:
      old: an array, which may lie on the host.
      new: the array whose place it takes.
      copy: whether the result must have memory of its own, so that both can be donated.
    """
    if jnp.result_type(old) == new.dtype:
        x = old
    elif jnp.issubdtype(new.dtype, jnp.inexact):
        x = narrowed(jnp.asarray(old), new.dtype)
    else:
        x = jnp.asarray(old, new.dtype)
    if isinstance(x, jax.core.Tracer) or isinstance(new, jax.core.Tracer):
        here, wanted = jax.typeof(x).sharding, jax.typeof(new).sharding
        return x if here == wanted else jax.sharding.reshard(x, wanted)
    if new.committed:
        x = jax.device_put(x, new.sharding)
    elif not new.shape:  # a count that was read onto one device would not go with arrays on a mesh
        x = np.asarray(x)
    return jnp.array(x) if copy else jnp.asarray(x)
