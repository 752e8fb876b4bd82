r"""AdamH: Adam for heads, with fixed norms of parameters and updates.

Source: marin-community/marin @0084342, ``adamh.py``, and @05422e2, ``muonh.py``, which uses it
for the head; Wen et al., arXiv:2606.16899.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.contrib._hyperball import check_not_zero, step_on_sphere
from optax_muonplus.contrib._sizes import norm_over
from optax_muonplus.matrices import DECAY, NOT_NEGATIVE


def adamh(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
) -> optax.GradientTransformation:
    r"""Adam's direction U, and a step on the sphere of parameters with the same norm.

    .. math::
      V = W - \eta R\, U / \|U\|_F, \qquad W \leftarrow R\, V / \|V\|_F, \qquad R = \|W\|_F

    This is the step of :class:`Hyperball`, for heads: marin's MuonH is ``hyperball(0.02,
    others=optax.partition({"head": adamh(0.02), "rest": optax.adamw(6e-4)}, labels))``. A leaf of
    three or more axes is a stack along the first one. There is no weight decay. An update needs the
    parameters. The state is that of ``optax.scale_by_adam``, in the dtypes of the parameters.

    Args:
      learning_rate: number or schedule, in units of R.
      b1: first decay, in [0, 1).
      b2: second decay, in [0, 1).
      eps: epsilon.
      eps_root: epsilon inside the root. Make it positive to differentiate updates with gradients
        of zero, where the derivative of the root is infinite.

    Raises:
      ValueError: for numbers out of range; at init, for a parameter of zeros, which would stay
        zero. A traced parameter is not checked.
    """
    transforms.check_rate(learning_rate)
    matrices.check_number("b1", b1, DECAY)
    matrices.check_number("b2", b2, DECAY)
    matrices.check_number("eps", eps, NOT_NEGATIVE)
    matrices.check_number("eps_root", eps_root, NOT_NEGATIVE)
    return optax.chain(optax.scale_by_adam(b1, b2, eps, eps_root), _on_sphere(learning_rate))


def _on_sphere(learning_rate: Any) -> optax.GradientTransformation:
    """Returns the transformation of directions into steps that keep the norm."""
    rate = optax.scale_by_learning_rate(learning_rate)

    def init(params: optax.Params) -> optax.OptState:
        paths, leaves, _ = transforms.flatten_tree(params)
        for path, w in zip(paths, leaves, strict=True):
            check_not_zero("/".join(path), norm_over(w, _axes(w)), "or leave it to AdamW")
        return rate.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("adamh needs the parameters: call update(grads, state, params).")
        downhill, state = rate.update(jnp.ones([]), state)

        def stepped(u: jax.Array, w: jax.Array) -> jax.Array:
            return step_on_sphere(downhill, _axes(w), u, w).astype(jnp.result_type(u, w))

        return jax.tree.map(stepped, updates, params), state

    return optax.GradientTransformation(init, update)


def _axes(w: jax.Array) -> tuple[int, ...]:
    """Returns the axes of a matrix; the first of three or more axes is a batch axis."""
    return tuple(range(1 if w.ndim > 2 else 0, w.ndim))
