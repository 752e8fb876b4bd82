"""The platform that a program is lowered for."""

from collections.abc import Callable
from typing import Any, Literal

import jax

# "gpu" stands for all other backends too.
Platform = Literal["cpu", "tpu", "gpu"]


def on_its_platform(function: Callable[[Platform], Callable[..., Any]], *args: Any) -> Any:
    """Computes ``function(platform)(*args)`` for the platform that JAX lowers for."""
    # All three are traced and one is lowered; ``jax.export`` keeps one for each of its platforms.
    cpu, tpu, gpu = function("cpu"), function("tpu"), function("gpu")
    return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)


def platform_of(backend: str) -> Platform:
    """Returns the platform of a JAX backend."""
    return backend if backend in ("cpu", "tpu") else "gpu"
