"""The platform that a program is lowered for."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

# "gpu" also stands for every backend without a name here.
Platform = Literal["cpu", "tpu", "gpu"]


PLATFORMS: tuple[Platform, ...] = get_args(Platform)


def on_its_platform(
    work: Callable[[Platform], Callable[..., Any]], *args: Any, platform: Platform | None = None
) -> Any:
    """Computes ``work(platform)(*args)`` for the platform that the program is lowered for.

    All three are traced, and one is lowered; ``jax.export`` to several platforms keeps several. So
    this question is asked in one place, the outermost, and the answer handed down. If ``platform``
    is given, it is the only one.
    """
    if platform is not None:
        return work(platform)(*args)
    cpu, tpu, gpu = map(work, PLATFORMS)
    return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)


def platform_of(backend: str) -> Platform:
    """Returns the platform of a backend of JAX, by its name."""
    return backend if backend in ("cpu", "tpu") else "gpu"
