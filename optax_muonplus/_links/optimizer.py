"""``optimizer`` makes a whole optimizer of a rule for matrices."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus._chain.chain import ChainTransformation, MatrixTransformation, Part
from optax_muonplus._chain.link import makes_whole_steps
from optax_muonplus._chain.momentum import PlainMomentum
from optax_muonplus._core.function import ArrayFunction, MatrixFunction
from optax_muonplus._execution.apply import apply
from optax_muonplus._links.decay import check_rate, decay_weights, is_zero, scale_by_rate
from optax_muonplus._links.matrix_chain import matrix_chain, parts_of
from optax_muonplus._links.partition import nadamw, partition
from optax_muonplus._links.where import Matrices, MatricesFields

_TRIAL_STEPS = 32  # a warmup or optax.MultiSteps begins with zero updates


def optimizer(
    rule: Part,
    learning_rate: optax.ScalarOrSchedule | None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    cautious_weight_decay: bool = False,
    others: optax.GradientTransformation | None = None,
    where: Matrices | None = None,
    **fields: Unpack[MatricesFields],
) -> ChainTransformation:
    r"""A rule for the matrices with weight decay and learning rate, and Optax for everything else.

    For each matrix W, the update U of the rule and decay :math:`\lambda`:

    .. math::
      W_t = W_{t-1} - \eta \left( U_t + \lambda W_{t-1} \right)

    Args:
      rule: a chain such as ``omp.scale_by_muonplus()`` or ``omp.matrix_chain(...)``, or any link
        that :func:`optax_muonplus.matrix_chain` takes, such as ``omp.contrib.NorMuon()``. Its
        updates point uphill, as gradients do: ``optax.scale_by_learning_rate`` or a whole optimizer
        of Optax in it would raise the loss.
      learning_rate: number or schedule. None for a rule whose updates are whole steps downhill,
        such as one that ends with ``omp.contrib.Hyperball(0.02)``; ``others`` is then required.
      weight_decay: number or schedule, of the matrices only.
      weight_decay_mask: tree or function of the parameters, as in ``optax.add_decayed_weights``.
      cautious_weight_decay: decays only what the update moves towards zero (arXiv:2510.12402).
      others: any transformation of Optax for the other parameters, such as ``optax.lion(1e-4)``;
        None means NAdamW at ``learning_rate``, without decay.
      where: which parameters are matrices, and their shardings; None means those of the rule.
      **fields: as in :func:`optax_muonplus.matrix_chain`.

    Returns:
      A transformation for the whole tree of parameters. Its state is that of ``optax.partition``
      with the labels ``"muon"`` and ``"adam"``.

    Raises:
      TypeError: for a rule that is not a link.
      ValueError: for links that :func:`optax_muonplus.matrix_chain` refuses, a whole optimizer as
        the rule, a second learning rate or decay, and numbers out of range. At init, for a
        transformation of Optax in the rule that goes downhill or decays a second time. A trial on
        a small tree finds this.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> signs = omp.matrix_chain(omp.momentum(0.9), omp.orthogonalize(), jnp.sign)
      >>> tx = omp.optimizer(signs, 1e-3, weight_decay=0.1, others=optax.nadamw(1e-3))
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> updates, state = tx.update(params, tx.init(params), params)
    """
    check_rate(0.0 if learning_rate is None else learning_rate, weight_decay)
    parts = parts_of(rule)
    if makes_whole_steps(parts[-1]) and learning_rate is not None:
        raise ValueError(
            f"The rule ends with {type(parts[-1]).__name__}, which has a learning rate and makes"
            " whole steps downhill. Pass learning_rate=None, and others= for other parameters."
        )
    if learning_rate is None and (not is_zero(weight_decay) or all(map(_is_uphill, parts))):
        user = "The rule" if is_zero(weight_decay) else "weight_decay"
        raise ValueError(f"{user} is multiplied by the learning rate, which is None: pass one.")
    if others is None:
        if learning_rate is None:
            raise ValueError("learning_rate is None, and other parameters need one: pass others=.")
        others = nadamw(learning_rate)
    matrices = matrix_chain(
        rule,
        decay_weights(weight_decay, weight_decay_mask, cautious_weight_decay),
        scale_by_rate(learning_rate),
        where=where,
        **fields,
        run=rule.chain.run if isinstance(rule, MatrixTransformation) else apply,
    )
    whole = partition(matrices, others)

    def init(params: Any) -> Any:
        _check_direction(parts, weight_decay, params)
        return whole.init(params)

    has_rate = learning_rate is not None or makes_whole_steps(parts[-1])
    return ChainTransformation(init, whole.update, whole.chain, whole.where) if has_rate else whole


def _check_direction(parts: Sequence[Any], weight_decay: Any, params: Any) -> None:
    """Raises ValueError for transformations of Optax that go downhill, or decay a second time."""
    is_known = not isinstance(weight_decay, jax.core.Tracer)
    decays = is_known and (callable(weight_decay) or bool(weight_decay))
    for part in reversed(parts):
        if not isinstance(part, optax.GradientTransformation):
            decays = False  # before a link for matrices, a decay is a part of the gradient
            continue
        goes_down, decays_too = _try(optax.with_extra_args_support(part), params)
        if goes_down or (decays and decays_too):
            what = "goes downhill, as the learning rate does" if goes_down else "has a decay too"
            raise ValueError(
                f"A transformation of Optax in the rule {what}. Leave out a second decay,"
                " optax.scale_by_learning_rate, optax.scale(-1) and whole optimizers:"
                " in place of optax.adam(0.1) pass optax.scale_by_adam()."
            )


def _try(link: optax.GradientTransformationExtraArgs, params: Any) -> tuple[bool, bool]:
    """Returns whether a leaf goes downhill in two nonzero steps, and whether one decays."""

    def small(x: Any) -> jax.Array:  # masks may read the number of axes
        return jnp.linspace(1.0, 2.0, 4 ** np.ndim(x)).reshape((4,) * np.ndim(x))

    try:
        with jax.ensure_compile_time_eval():
            grads = jax.tree.map(small, params)
            zeros, state = optax.tree.zeros_like(grads), link.init(grads)
            one, two = (link.update(zeros, state, optax.tree.scale(n, grads))[0] for n in (1, 2))
            # With zero gradients, only a decay makes updates depend on the parameters.
            decays = jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != y).any()), one, two))
            total, moved = 0.0, 0
            for _ in range(_TRIAL_STEPS):
                updates, state = link.update(grads, state, grads)
                products = jax.tree.map(lambda u, g: float(jnp.vdot(u, g)), updates, grads)
                total = total + np.array(jax.tree.leaves(products))
                moved += any(jax.tree.leaves(products))
                if moved == 2:
                    break
            return bool(np.any(total < 0)), any(decays)
    except Exception:  # it needs other arguments or shapes: nothing is known
        return False, False


def _is_uphill(part: Any) -> bool:
    """Whether updates keep the direction of gradients; a user's function may turn them."""
    return isinstance(part, PlainMomentum | MatrixFunction) and not isinstance(part, ArrayFunction)
