"""A chain for the matrices of a tree, and any transformation of Optax for everything else."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus._chain.chain import ChainTransformation, MatrixTransformation, promote
from optax_muonplus._chain.link import AnyLink
from optax_muonplus._core.arguments import DECAY, NOT_NEGATIVE, check_flag, check_number
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._leaves.record import ADAM, MUON, ResolvedTree
from optax_muonplus._links.decay import check_rate, decay_weights, real, scale_by_rate


def partition(
    matrices: MatrixTransformation, others: optax.GradientTransformation
) -> ChainTransformation:
    """Returns ``optax.partition`` of a chain for matrices and a transformation of all others."""
    if not isinstance(others, AnyLink):
        raise TypeError(f"others must be a transformation like optax.lion(1e-3), got {others!r}.")
    others = keep_dtypes(others)

    # The chain reads the tree once for both, checks gradients, and shards the first state.
    def over(tree: ResolvedTree) -> optax.GradientTransformationExtraArgs:
        return _partition({ADAM: others, MUON: matrices.chain.over(tree.matrices)}, tree.labels)

    return ChainTransformation.of(over, matrices.chain, matrices.where)


def _partition(
    transforms: Mapping[str, optax.GradientTransformation], labels: Any
) -> optax.GradientTransformationExtraArgs:
    """Works like ``optax.partition``, which would call ``labels`` if they are an Equinox model."""

    def flags(group: str) -> Any:
        return jax.tree.map(lambda label: label == group, labels)

    masked = {k: optax.masked(x, lambda _, k=k: flags(k)) for k, x in transforms.items()}

    def init(params: Any) -> Any:
        return optax.transforms.PartitionState({k: x.init(params) for k, x in masked.items()})

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        states = {}
        for group, transform in masked.items():
            inner = state.inner_states[group]
            updates, states[group] = transform.update(updates, inner, params, **extra)
        return updates, optax.transforms.PartitionState(states)

    return optax.GradientTransformationExtraArgs(init, update)


def keep_dtypes(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the dtypes of a state of Optax, and widens updates of wider parameters."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # Multiplied by the learning rate, a float16 update of a float32 parameter would underflow.
        updates = promote(updates, params)
        updates, new = inner.update(updates, state, params, **extra)
        # Decays that optax.inject_hyperparams traces in float32 would widen bfloat16 moments.
        return updates, jax.tree.map(_cast_back, new, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def nadamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps_root: ArrayLike = 0.0,
    nesterov: bool = True,
    weight_decay: optax.ScalarOrSchedule = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.nadamw``, or ``optax.adamw`` with ``nesterov=False``, without a zero decay.

    Raises ValueError for numbers out of range, named as in ``optax.contrib.muon``.
    """
    check_rate(learning_rate, weight_decay, "adam_")
    check_number("adam_b1", b1, DECAY)
    check_number("adam_b2", b2, DECAY)
    check_number("adam_eps_root", eps_root, NOT_NEGATIVE)
    check_flag("adam_nesterov", nesterov)
    b1, b2, eps_root = map(real, (b1, b2, eps_root))
    return optax.chain(
        optax.scale_by_adam(b1, b2, eps_root=eps_root, nesterov=nesterov),
        decay_weights(weight_decay),
        scale_by_rate(learning_rate),
    )


def _cast_back(x: Any, before: Any) -> Any:
    now, then = jnp.result_type(x), jnp.result_type(before)
    return saturating_cast(x, then) if now != then and jnp.issubdtype(then, jnp.inexact) else x
