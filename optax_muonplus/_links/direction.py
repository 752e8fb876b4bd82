"""Transformations of Optax inside a rule, tried at init: whether they go downhill, or decay."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus._chain.paths import flatten_with_names, list_paths, path_name

MAX_STEPS = 32  # until updates are not zero, as in a warmup or under optax.MultiSteps


def try_at_init(parts: Sequence[Any], decays: bool) -> list[Any]:
    """Returns the parts of a rule; init raises ValueError for a transformation that goes downhill.

    If the optimizer ``decays``, also for one that decays behind the last link on matrices.
    """
    links = [i for i, x in enumerate(parts) if not isinstance(x, optax.GradientTransformation)]
    last = max(links, default=-1)
    return [x if i in links else _tried(x, decays and i > last) for i, x in enumerate(parts)]


def _tried(link: optax.GradientTransformation, decays: bool) -> optax.GradientTransformation:
    link = optax.with_extra_args_support(link)

    def init(params: Any) -> Any:
        def small(x: Any) -> jax.Array:  # masks may ask for the axes
            return jnp.linspace(1.0, 2.0, 4 ** np.ndim(x)).reshape((4,) * np.ndim(x))

        try:
            with jax.ensure_compile_time_eval():
                turned, again = _try(link, jax.tree.map(small, params))
        except Exception:  # it needs other arguments or shapes, and nothing is known of it
            turned, again = [], False
        names = map(path_name, flatten_with_names(params)[0])
        wrong = [(name, None) for name, is_turned in zip(names, turned, strict=False) if is_turned]
        if wrong or (again and decays):
            what = f"turns the updates of {list_paths(wrong)} downhill, as the learning rate does"
            raise ValueError(
                f"A transformation of Optax in the rule {what if wrong else 'has a decay too'}."
                " Leave out optax.scale_by_learning_rate, optax.scale(-1), a second decay, and"
                " whole optimizers: optax.adam(0.1) is optax.scale_by_adam() here."
            )
        return link.init(params)

    return optax.GradientTransformationExtraArgs(init, link.update)


def _try(link: optax.GradientTransformationExtraArgs, grads: Any) -> tuple[Any, bool]:
    """Returns which leaves go downhill in two steps that are not zero, and whether any decays."""
    state = link.init(grads)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    one, two = (
        jax.tree.leaves(link.update(zeros, state, jax.tree.map(lambda x, n=n: n * x, grads))[0])
        for n in (1, 2)
    )
    decays = any(bool(np.any(x != y)) for x, y in zip(one, two, strict=True))
    total: Any = 0.0
    moved = 0
    for _ in range(MAX_STEPS):
        updates, state = link.update(grads, state, grads)
        pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True)
        products = np.array([np.vdot(u, g).real for u, g in pairs])
        total, moved = total + products, moved + bool(products.any())
        if moved == 2:
            break
    return total < 0, decays
