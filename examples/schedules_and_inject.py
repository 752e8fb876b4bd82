"""Schedules for both groups, and hyperparameters that change while training runs.

Both learning rates warm up and fall along a cosine, and beta has a schedule of its own. The weight
decay is switched off halfway, by setting it in ``opt_state``: nothing is compiled again.

Run: ``python examples/schedules_and_inject.py`` or ``python -m examples.schedules_and_inject``.
"""

import jax
import jax.numpy as jnp
import optax

import optax_muonplus as omp

STEPS, INPUTS, HIDDEN, OUTPUTS = 100, 32, 64, 8


def init(key):
    """Parameters; kernels are stored as (in, out)."""
    up, head = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (INPUTS, HIDDEN)) / INPUTS**0.5,
        "bias": jnp.zeros(HIDDEN),
        "head": jax.random.normal(head, (HIDDEN, OUTPUTS)) / HIDDEN**0.5,
    }


def forward(params, x):
    """The output of the network."""
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["head"]


def loss_fn(params, x, y):
    """Mean squared error."""
    return jnp.mean((forward(params, x) - y) ** 2)


def warmup_cosine(peak):
    """From zero to ``peak`` in 10 steps, and back along a cosine."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps=10, decay_steps=STEPS)


tx = optax.chain(
    optax.clip_by_global_norm(1.0),  # clips all gradients, before they reach both groups
    optax.inject_hyperparams(omp.muonplus)(
        learning_rate=warmup_cosine(0.02),
        adam_learning_rate=warmup_cosine(5e-3),
        beta=optax.linear_schedule(0.85, 0.95, transition_steps=50),
        weight_decay=0.1,
    ),
)

student_key, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(data_key, (512, INPUTS))
y = forward(init(teacher_key), x)
params = init(student_key)
print(omp.describe(params))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state):
    """One step of training: new parameters and state, and the loss before it."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


shown = ("learning_rate", "adam_learning_rate", "beta", "weight_decay")
for i in range(STEPS):
    if i == STEPS // 2:
        opt_state = optax.tree.set(opt_state, weight_decay=jnp.asarray(0.0))
    params, opt_state, loss = step(params, opt_state)
    if i % 10 == 0 or i == STEPS - 1:
        now = optax.tree.get(opt_state, "hyperparams")
        values = "  ".join(f"{name} {now[name]:.4f}" for name in shown)
        print(f"step {i:3d}  loss {loss:.4f}  {values}")
