"""A trial, at init, of Optax's transformations in a rule: whether they go downhill, or decay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

MAX_STEPS = 32  # a warmup or optax.MultiSteps begins with zero updates


def with_trial(link: optax.GradientTransformation, decays: bool) -> optax.GradientTransformation:
    """Makes init raise ValueError if ``link`` goes downhill, or decays a second time."""
    link = optax.with_extra_args_support(link)

    def init(params: Any) -> Any:
        try:
            with jax.ensure_compile_time_eval():
                goes_down, decays_too = _try(link, params)
        except Exception:  # it needs other arguments or shapes: nothing is known
            goes_down = decays_too = False
        if goes_down or (decays and decays_too):
            what = "goes downhill, as the learning rate does" if goes_down else "has a decay too"
            raise ValueError(
                f"A transformation of Optax in the rule {what}. Leave out a second decay,"
                " optax.scale_by_learning_rate, optax.scale(-1) and whole optimizers:"
                " optax.adam(0.1) is optax.scale_by_adam() here."
            )
        return link.init(params)

    return optax.GradientTransformationExtraArgs(init, link.update)


def _try(link: optax.GradientTransformationExtraArgs, params: Any) -> tuple[bool, bool]:
    """Returns whether a leaf goes downhill in two nonzero steps, and whether one decays."""

    def small(x: Any) -> jax.Array:  # masks may read the number of axes
        return jnp.linspace(1.0, 2.0, 4 ** np.ndim(x)).reshape((4,) * np.ndim(x))

    grads = jax.tree.map(small, params)
    zeros, state = optax.tree.zeros_like(grads), link.init(grads)
    one, two = (link.update(zeros, state, optax.tree.scale(n, grads))[0] for n in (1, 2))
    # With zero gradients, only a decay makes updates depend on the parameters.
    decays = any(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != y).any()), one, two)))
    total, moved = 0.0, 0
    for _ in range(MAX_STEPS):
        updates, state = link.update(grads, state, grads)
        products = jax.tree.leaves(jax.tree.map(lambda u, g: float(jnp.vdot(u, g)), updates, grads))
        total, moved = total + np.array(products), moved + any(products)
        if moved == 2:
            break
    return bool(np.any(total < 0)), decays
