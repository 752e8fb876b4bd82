r"""AdamH: Adam with the norms of parameters and of their updates held fixed, for heads.

Source: marin-community/marin @0084342, ``adamh.py``, and @05422e2, ``muonh.py``, where the head of
a MuonH has it; Wen et al., arXiv:2606.16899.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._hyperball import check_not_zero, step_on_sphere
from optax_muonplus.baselines._sizes import norm_over
from optax_muonplus.matrices import DECAY, NOT_NEGATIVE


@dataclasses.dataclass(frozen=True, eq=False)
class AdamH:
    r"""Adam's direction U, and a step on the sphere of parameters of one norm.

    .. math::
      V = W - \eta R\, U / \|U\|_F, \qquad W \leftarrow R\, V / \|V\|_F, \qquad R = \|W\|_F

    as :class:`Hyperball` has it for matrices. It has the place of AdamW, for heads:
    ``hyperball(0.02, adamw=ByPath({"head": AdamH()}, AdamW(6e-4)))`` is marin's MuonH, whose head
    has the rate of the matrices. A leaf of three or more axes is a stack along the first one. There
    is no weight decay. An update needs the parameters.

    Attributes:
      learning_rate: number or schedule, in units of R; None means that of the matrices.
      b1: first decay.
      b2: second decay.
      eps: epsilon.
    """

    learning_rate: optax.ScalarOrSchedule | None = None
    b1: ArrayLike = 0.9
    b2: ArrayLike = 0.95
    eps: ArrayLike = 1e-8

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.learning_rate is not None:
            transforms.scale_by_learning_rate(self.learning_rate)
        matrices.check_number("b1", self.b1, DECAY)
        matrices.check_number("b2", self.b2, DECAY)
        matrices.check_number("eps", self.eps, NOT_NEGATIVE)

    def transformation(self) -> optax.GradientTransformation:
        """Returns the chain, for a learning rate that is given."""
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        return optax.chain(adam, _on_sphere(self.learning_rate))


def _on_sphere(learning_rate: Any) -> optax.GradientTransformation:
    """Returns the step of a given direction that keeps norms."""
    rate = transforms.scale_by_learning_rate(learning_rate)

    def init(params: optax.Params) -> optax.OptState:
        paths, leaves, _ = transforms.flatten_tree(params)
        for path, w in zip(paths, leaves, strict=True):
            check_not_zero("/".join(path), norm_over(w, _axes(w)), "or leave it to AdamW")
        return rate.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("AdamH needs the parameters: call update(grads, state, params).")
        downhill, state = rate.update(jnp.ones([]), state)

        def stepped(u: jax.Array, w: jax.Array) -> jax.Array:
            return step_on_sphere(downhill, _axes(w), u, w).astype(jnp.result_type(u, w))

        return jax.tree.map(stepped, updates, params), state

    return optax.GradientTransformation(init, update)


def _axes(w: jax.Array) -> tuple[int, ...]:
    """Returns the axes of a matrix; the first of three or more numbers matrices."""
    return tuple(range(1 if w.ndim > 2 else 0, w.ndim))
