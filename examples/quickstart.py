"""Muon+ in a plain JAX training loop: change one name from ``optax.adamw``.

Trains a small network, whose parameters are a dict, to imitate a random one. Prints what each
parameter gets (matrices Muon+, biases and the head AdamW) and the falling loss.

Run: ``python examples/quickstart.py`` or ``python -m examples.quickstart``.
"""

import jax
import jax.numpy as jnp
import optax

import optax_muonplus as omp

INPUTS, HIDDEN, OUTPUTS = 32, 64, 8


def init(key):
    """Parameters of a network with two hidden layers; kernels are stored as (in, out)."""
    sizes = {"up": (INPUTS, HIDDEN), "mix": (HIDDEN, HIDDEN), "head": (HIDDEN, OUTPUTS)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: {
            "kernel": jax.random.normal(k, shape) / shape[0] ** 0.5,
            "bias": jnp.zeros(shape[1]),
        }
        for k, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def forward(params, x):
    """The output of the network."""
    for name in ("up", "mix"):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def loss_fn(params, x, y):
    """Mean squared error."""
    return jnp.mean((forward(params, x) - y) ** 2)


student_key, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(data_key, (512, INPUTS))
y = forward(init(teacher_key), x)

params = init(student_key)
print(omp.describe(params))

# Before: tx = optax.adamw(3e-3)
tx = omp.muonplus(0.02, adam_learning_rate=3e-3)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y):
    """One step of training: new parameters and state, and the loss before it."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for i in range(101):
    params, opt_state, loss = step(params, opt_state, x, y)
    if i % 20 == 0:
        print(f"step {i:3d}  loss {loss:.4f}")
