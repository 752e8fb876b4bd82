"""Muon+ on a mesh of all devices, with Auto axes and with Explicit ones.

On Auto axes ``sharding=`` says where parameters lie; on Explicit axes arrays say it themselves.
Prints the table with its column ``sharding``, how the matrices are shared out among the devices,
the collectives of a compiled update, and the loss. On a CPU it simulates 8 devices.

Run: ``python examples/sharded.py`` or ``python -m examples.sharded``.
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_muonplus as omp

if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs and TPUs are not affected

LAYERS, WIDTH, HIDDEN, BATCH = 4, 64, 256, 32 * jax.device_count()
COLLECTIVE = r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("

rng = np.random.default_rng(0)
data = rng.normal(size=(2, BATCH, WIDTH)).astype(np.float32)
initial = {
    f"layer_{i}": {
        "up": rng.normal(size=(WIDTH, HIDDEN)).astype(np.float32) / WIDTH**0.5,
        "down": rng.normal(size=(HIDDEN, WIDTH)).astype(np.float32) / HIDDEN**0.5,
        "bias": np.zeros(HIDDEN, np.float32),
    }
    for i in range(LAYERS)
}


def loss_fn(params, x, y):
    """Mean squared error."""
    for p in params.values():
        x = x + jax.nn.relu(x @ p["up"] + p["bias"]) @ p["down"]
    return jnp.mean((x - y) ** 2)


def train(axis_type):
    """The batch is cut along both axes of the mesh, kernels along "fsdp", and biases not at all."""
    fsdp = 2 if jax.device_count() % 2 == 0 else 1
    sizes, names = (jax.device_count() // fsdp, fsdp), ("replica", "fsdp")
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type, axis_type))
    whole, kernel, rows = (NamedSharding(mesh, PartitionSpec(a)) for a in (None, "fsdp", names))
    shardings = {layer: {"up": kernel, "down": kernel, "bias": whole} for layer in initial}
    params = jax.device_put(initial, shardings)
    x, y = jax.device_put(tuple(data), rows)

    known = shardings if axis_type == AxisType.Auto else None  # None: what the arrays say
    print(f"\n{axis_type.name} axes\n{omp.describe(params, sharding=known)}")
    tx = omp.muonplus(0.005, sharding=known)

    with jax.set_mesh(mesh):
        opt_state = jax.jit(tx.init)(params)
        program = jax.jit(tx.update).lower(params, opt_state, params).compile().as_text() or ""
        print("collectives of an update:", ", ".join(re.findall(COLLECTIVE, program)) or "none")
        # On Auto axes XLA would otherwise choose where the results lie.
        kept = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))

        @jax.jit(out_shardings=(*kept, None), donate_argnums=(0, 1))
        def step(params, opt_state):
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for i in range(21):
            params, opt_state, loss = step(params, opt_state)
            if i % 5 == 0:
                print(f"step {i:3d}  loss {loss:.4f}")


for axis_type in (AxisType.Auto, AxisType.Explicit):
    train(axis_type)
