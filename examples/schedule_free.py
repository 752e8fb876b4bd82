"""Schedule-free around Muon+, with decay of the fast iterate: `python -m examples.schedule_free`.

Schedule-free training has three iterates: z moves by the optimizer's steps, x is its average, which
is evaluated, and y lies between them, where gradients are taken. The optimizer in
`optax.contrib.schedule_free` gets y as the parameters, so that weight decay subtracts a share of y
from z. As y lags behind z, z then swings through zero. In `schedule_free` below the optimizer gets
z, which arXiv:2605.23061 decays too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_muonplus as omp


def schedule_free(optimizer, learning_rate, **options):
    """`optax.contrib.schedule_free`, whose optimizer decays the iterate that it moves."""

    def moved(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        z = extra.pop("z")
        return optimizer.update(updates, state, z, **extra)

    fast = optax.GradientTransformationExtraArgs(optimizer.init, moved)
    averaged: Any = optax.contrib.schedule_free(fast, learning_rate, **options)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return averaged.update(updates, state, params, z=state.z, **extra)

    return optax.GradientTransformationExtraArgs(averaged.init, update)


def decayed(wrapper, steps=1001, rate=0.02, decay=0.5):
    """Yields z and y of a parameter of ones, which has no gradient, at some of the steps."""
    params: Any = {"dense": {"kernel": jnp.ones((4, 6))}}
    grads = jax.tree.map(jnp.zeros_like, params)
    # The average takes the place of both momenta.
    optimizer = omp.muonplus(rate, beta=0.0, adam_b1=0.0, weight_decay=decay)
    tx = wrapper(optimizer, rate, b1=0.9)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(steps):
        if step % 200 == 0:
            yield step, *(x[0, 0] for x in jax.tree.leaves((state.z, params)))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)


def main():
    """Prints z and y under both wrappers."""
    print("step  decay of y: z, y    decay of z: z, y")
    rows = zip(decayed(optax.contrib.schedule_free), decayed(schedule_free), strict=True)
    for (step, *slow), (_, *fast) in rows:
        print(f"{step:4}  {slow[0]:7.3f} {slow[1]:7.3f}     {fast[0]:7.3f} {fast[1]:7.3f}")


if __name__ == "__main__":
    main()
