"""Trees of small matrices, and the ways of other devices to work on them, on this one."""

import jax
import jax.numpy as jnp

from optax_muonplus._execution import apply
from optax_muonplus._execution.device import gpu, tpu
from optax_muonplus._execution.polar import products

D = 16


def layers(count, dtype=jnp.float32):
    """A transformer of ``count`` layers as Flax names it, in three shapes of matrices."""
    shapes = {"q": (D, D), "k": (D, D), "o": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    return {
        f"block_{i}": {
            name: {"kernel": jax.ShapeDtypeStruct(shape, dtype)} for name, shape in shapes.items()
        }
        for i in range(count)
    }


def traced_update(tx, params, donated=()):
    update = jax.jit(tx.update, donate_argnums=donated)
    return update.trace(params, jax.eval_shape(tx.init, params), params)


def play(monkeypatch, machine):
    """Programs for this device become those for another machine, as far as the library asks."""

    def lowered_for_it(*args, default, **others):
        return others.get(machine, default)(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", lowered_for_it)
    monkeypatch.setattr(apply, "platform_of", lambda backend: machine)


def everywhere_stacked(monkeypatch, stack_bytes=gpu.STACK_BYTES):
    """What GPUs do, on this device."""
    monkeypatch.setattr(gpu, "STACK_BYTES", stack_bytes)
    play(monkeypatch, "gpu")


def everywhere_mapped(monkeypatch, stack_bytes=tpu.TPU_STACK_BYTES, block=products.TPU_BLOCK):
    """What TPUs do, on this device."""
    monkeypatch.setattr(tpu, "TPU_STACK_BYTES", stack_bytes)
    monkeypatch.setattr(products, "TPU_BLOCK", block)
    play(monkeypatch, "tpu")


def temporary_bytes(tx, params, donated=()):
    compiled = traced_update(tx, params, donated).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes
