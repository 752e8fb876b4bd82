"""Muon+ with Equinox: ``tx.init(eqx.filter(model, eqx.is_inexact_array))``.

An ``eqx.nn.MLP`` learns to classify points. Weights are stored as (out, in), which the name
``weight`` tells. An MLP has no layer named ``head``: the first table has its last layer under
Muon+, the second, with a rule of our own for it, under AdamW.

Run: ``python examples/equinox_mlp.py`` or ``python -m examples.equinox_mlp``.
"""

import equinox as eqx
import jax
import optax

import optax_muonplus as omp

INPUTS, WIDTH, CLASSES = 16, 64, 8

model_key, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
model = eqx.nn.MLP(INPUTS, CLASSES, WIDTH, depth=2, key=model_key)
teacher = eqx.nn.Linear(INPUTS, CLASSES, key=teacher_key)
x = jax.random.normal(data_key, (512, INPUTS))
y = jax.vmap(teacher)(x).argmax(-1)

params = eqx.filter(model, eqx.is_inexact_array)
print("Default rules:")
print(omp.describe(params))

rules = [("layers/2/", None)]
print("\nWith a rule that sends the last layer to AdamW:")
print(omp.describe(params, rules=rules))

tx = omp.muonplus(0.02, rules=rules)
opt_state = tx.init(params)


def loss_fn(model, x, y):
    """Mean cross entropy."""
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def step(model, opt_state, x, y):
    """One step of training: new model and state, and the loss before it."""
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


for i in range(51):
    model, opt_state, loss = step(model, opt_state, x, y)
    if i % 10 == 0:
        print(f"step {i:3d}  loss {loss:.4f}")
