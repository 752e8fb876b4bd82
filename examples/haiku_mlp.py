"""Muon+ with Haiku: the parameters of ``hk.transform`` go to ``tx.init`` as they are.

A network learns to classify points. Kernels are named ``w`` and biases ``b``; the layer named
``head`` gets AdamW like the biases, the two of ``hk.nets.MLP`` get Muon+.

Run: ``python examples/haiku_mlp.py`` or ``python -m examples.haiku_mlp``.
"""

import haiku as hk
import jax
import optax

import optax_muonplus as omp

INPUTS, WIDTH, CLASSES = 16, 64, 8


@hk.without_apply_rng
@hk.transform
def network(x):
    """Logits of the classes."""
    x = hk.nets.MLP([WIDTH, WIDTH], activate_final=True)(x)
    return hk.Linear(CLASSES, name="head")(x)


def loss_fn(params, x, y):
    """Mean cross entropy."""
    logits = network.apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


model_key, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(data_key, (512, INPUTS))
y = (x @ jax.random.normal(teacher_key, (INPUTS, CLASSES))).argmax(-1)

params = network.init(model_key, x)
print(omp.describe(params))

tx = omp.muonplus(0.02, adam_learning_rate=1e-2)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, y):
    """One step of training: new parameters and state, and the loss before it."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for i in range(51):
    params, opt_state, loss = step(params, opt_state, x, y)
    if i % 10 == 0:
        print(f"step {i:3d}  loss {loss:.4f}")
