"""The kind of machine that a program is for, which decides how it is written."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

# "gpu" also stands for every backend without a name here.
Machine = Literal["cpu", "tpu", "gpu"]
MACHINES: tuple[Machine, ...] = get_args(Machine)


def on_its_machine(work: Callable[[Machine], Callable[..., Any]], *args: Any) -> Any:
    """Computes ``work(machine)(*args)`` for the machine that the program is lowered for.

    All three are traced, and one is lowered; ``jax.export`` to several platforms keeps several. So
    this question is asked in one place, the outermost, and the answer handed down.
    """
    cpu, tpu, gpu = map(work, MACHINES)
    return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)


def machine_of(backend: str) -> Machine:
    """Returns the machine of a backend of JAX, by its name."""
    return backend if backend in ("cpu", "tpu") else "gpu"
