"""Rules for layouts that the defaults cannot know: convolution, experts, fused QKV, a router.

A rule is a pattern, searched in a parameter's path, and what such a parameter is: the axes of its
matrices (``MuonDimensionNumbers``), also its blocks (``MatrixSpec``), or None for AdamW. Without
rules a leaf of three or more axes is an error, which is printed first.

Run: ``python examples/moe_and_conv_rules.py`` or ``python -m examples.moe_and_conv_rules``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp

WIDTH, HIDDEN, EXPERTS, CLASSES = 16, 32, 4, 2
SHAPES = {
    "conv": (3, 3, 1, WIDTH),  # height, width, in, out
    "attention/qkv": (WIDTH, 3 * WIDTH),
    "attention/out": (WIDTH, WIDTH),
    "experts/up": (EXPERTS, WIDTH, HIDDEN),
    "experts/down": (EXPERTS, HIDDEN, WIDTH),
    "router": (WIDTH, EXPERTS),
    "classifier": (WIDTH, CLASSES),  # a head by its name, which needs no rule
}
RULES = [
    ("conv", omp.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)),
    # The axis of experts is in neither: each expert has a matrix of its own.
    ("experts/", omp.MuonDimensionNumbers(reduction_axis=1, output_axis=2)),
    ("attention/qkv", omp.MatrixSpec(0, 1, split_sizes=(WIDTH, WIDTH, WIDTH))),
    ("router", None),
]


def loss_fn(params, images, labels):
    """Cross entropy of a convolution, an attention layer and a layer of softly mixed experts."""
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, params["conv"], (2, 2), "SAME", None, None, layout)
    x = jax.nn.relu(x).reshape(len(images), -1, WIDTH)
    q, k, v = jnp.split(x @ params["attention/qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.mT / WIDTH**0.5) @ v @ params["attention/out"]
    gates = jax.nn.softmax(x @ params["router"])
    hidden = jax.nn.relu(jnp.einsum("btd,edh->beth", x, params["experts/up"]))
    x = x + jnp.einsum("beth,ehd,bte->btd", hidden, params["experts/down"], gates)
    logits = x.mean(axis=1) @ params["classifier"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


rng = np.random.default_rng(0)
labels = rng.integers(CLASSES, size=96)
stripes = 2.0 * (np.indices((8, 8)) % 2) - 1  # horizontal ones and vertical ones
images = jnp.asarray(stripes[labels] + rng.normal(size=(96, 8, 8)), jnp.float32)[..., None]
params = {k: jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32) for k, shape in SHAPES.items()}

try:
    omp.muonplus(0.01).init(params)
except ValueError as error:
    print(f"Without rules: {error}\n")
print(omp.describe(params, rules=RULES))
tx = omp.muonplus(0.01, rules=RULES)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state):
    """One step of training: new parameters and state, and the loss before it."""
    loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for i in range(41):
    params, opt_state, loss = step(params, opt_state)
    if i % 10 == 0:
        print(f"step {i:3d}  loss {loss:.4f}")
