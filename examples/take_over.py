"""A run of optax.contrib.muon goes on with Muon+, from a checkpoint of Orbax.

The state is read as plain dicts and lists, for which the old optimizer is not needed, and with the
old optimizer's ``init`` as a template. Both give the same; schedules go on where they were.

Run: ``python examples/take_over.py`` or ``python -m examples.take_over``.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import orbax.checkpoint as ocp

import optax_muonplus as omp

STEPS, SWITCH, INPUTS, HIDDEN, OUTPUTS = 100, 50, 32, 64, 8


def init(key):
    """Parameters; kernels are stored as (in, out)."""
    up, out = jax.random.split(key)
    up = jax.random.normal(up, (INPUTS, HIDDEN)) / INPUTS**0.5
    out = jax.random.normal(out, (HIDDEN, OUTPUTS)) / HIDDEN**0.5
    return {"up": up, "bias": jnp.zeros(HIDDEN), "out": out}


def forward(params, x):
    """The output of the network."""
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["out"]


def loss_fn(params, x, y):
    """Mean squared error."""
    return jnp.mean((forward(params, x) - y) ** 2)


def train(tx, params, state, steps):
    """Parameters and state after these steps; every tenth loss is printed."""

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in steps:
        params, state, loss = step(params, state)
        if i % 10 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  loss {loss:.4f}")
    return params, state


student_key, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(data_key, (512, INPUTS))
y = forward(init(teacher_key), x)
rate = optax.linear_schedule(0.02, 0.0, STEPS)

old = optax.contrib.muon(rate)
params = init(student_key)
params, old_state = train(old, params, old.init(params), range(SWITCH))
new = omp.muonplus(rate, match_frobenius=True, shape_scale="max")  # steps as long as before

with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    path = pathlib.Path(folder) / "state"
    checkpointer.save(path, {"params": params, "opt_state": old_state})
    checkpointer.wait_until_finished()
    read = checkpointer.restore(path)  # dicts, lists and arrays
    template = {"params": params, "opt_state": jax.eval_shape(old.init, params)}
    typed = checkpointer.restore(path, template)

params = read["params"]
state, report = omp.take_over(read["opt_state"], new.init(params), params)
same, _ = omp.take_over(typed["opt_state"], new.init(params), params)
print("both checkpoints give the same:", jax.tree.all(jax.tree.map(jnp.array_equal, state, same)))
print(f"{report}\n\n{omp.describe(params, match_frobenius=True, shape_scale='max')}")
train(new, params, state, range(SWITCH, STEPS))
