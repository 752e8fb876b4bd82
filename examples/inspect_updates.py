"""A look inside: imbalance of every matrix during training, the momentum, and one update.

``recorded`` makes the optimizer keep measures in its state, ``read`` takes them out by parameter
path. The ratio of the largest row norm to the smallest is far from 1 in the momentum, nearer after
the orthogonalization, and 1 in the update: every output unit moves by the same distance.

Run: ``python examples/inspect_updates.py`` or ``python -m examples.inspect_updates``.
"""

import jax
import jax.numpy as jnp
import optax

import optax_muonplus as omp

INPUTS, HIDDEN, OUTPUTS = 32, 64, 8


def init(key):
    """Parameters; kernels are stored as (in, out)."""
    keys = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(keys[0], (INPUTS, HIDDEN)) / INPUTS**0.5,
        "mix": jax.random.normal(keys[1], (HIDDEN, HIDDEN)) / HIDDEN**0.5,
        "head": jax.random.normal(keys[2], (HIDDEN, OUTPUTS)) / HIDDEN**0.5,
    }


def forward(params, x):
    """The output of the network."""
    return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["mix"]) @ params["head"]


def loss_fn(params, x, y):
    """Mean squared error."""
    return jnp.mean((forward(params, x) - y) ** 2)


student_key, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(data_key, (512, INPUTS))
y = forward(init(teacher_key), x)
params = init(student_key)
print(omp.describe(params))

# The same updates as omp.muonplus(0.02, ...), bit for bit.
make = omp.diagnostics.recorded(omp.muonplus, every=20, measures=["row_ratio"])
tx = make(0.02, adam_learning_rate=3e-3)
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state):
    """One step of training: new parameters and state, the loss before it, and the updates."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, updates


for i in range(1, 61):
    params, opt_state, loss, updates = step(params, opt_state)
    record = omp.diagnostics.read(opt_state)
    if record.step == i:  # recorded just now
        print(f"step {i:3d}  loss {loss:.4f}  largest over smallest row norm:")
        for path, values in record.values.items():
            stages = ("momentum", "polar", "update")
            print(f"  {path:4}", *(f"{s} {values[f'{s}/row_ratio']:.3f}" for s in stages))

# The momentum of the matrices. Kernels are stored as (in, out): a row is a column of the array.
for path, momentum in jax.tree.leaves_with_path(omp.transforms.find_momentum(opt_state).mu):
    name = jax.tree_util.keystr(path, simple=True)
    for what, array in [("momentum", momentum), ("update", updates[name])]:
        rows = jnp.linalg.norm(array, axis=0)
        print(f"row norms of {name}, {what}: {rows.min():.5f} to {rows.max():.5f}")
