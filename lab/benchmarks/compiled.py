"""Updates that are compiled, to be run or to be read."""

import time
from typing import Any, NamedTuple

import jax
import optax

from lab.benchmarks import meshes


class Compiled(NamedTuple):
    """A compiled program, the seconds that tracing, lowering and compiling took, and its state."""

    program: Any
    seconds: float
    state: Any

    def figures(self) -> dict[str, Any]:
        """Returns figures of the compilation: seconds, bytes of one device, bytes of all state."""
        memory = self.program.memory_analysis()
        return {
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "compile_s": self.seconds,
            "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state)),
        }


def compile_program(function: Any, *args: Any, state: Any = (), options: Any = None) -> Compiled:
    """Compiles a jitted function for arguments, of which shapes suffice."""
    begin = time.perf_counter()
    program = function.lower(*args).compile(compiler_options=options)
    return Compiled(program, time.perf_counter() - begin, state)


def compile_update(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    donated: bool = False,
    options: Any = None,
    state_like: Any = None,
) -> Compiled:
    """Compiles an update of parameters, of which shapes suffice.

    Args:
      tx: the optimizer.
      params: arrays or shapes; gradients are sharded like them.
      donated: whether the state's memory is reused, as in a training loop.
      options: of the compiler.
      state_like: the state is sharded like these shapes; None means like the parameters.
    """
    like = params if state_like is None else state_like
    state = meshes.placed_state(jax.eval_shape(tx.init, params), like)
    update = jax.jit(tx.update, donate_argnums=1 if donated else ())
    return compile_program(update, params, state, params, state=state, options=options)


class Update:
    """An update ready to run: each call continues from the state of the call before."""

    def __init__(self, tx: optax.GradientTransformation, params: Any, grads: Any):
        compiled = compile_update(tx, params, donated=True)
        self.program, self.params, self.grads = compiled.program, params, grads
        self.state = jax.jit(tx.init)(params)
        self.figures = compiled.figures()

    def __call__(self) -> Any:
        """Makes the next updates."""
        updates, self.state = self.program(self.grads, self.state, self.params)
        return updates
