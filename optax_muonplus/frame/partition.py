"""A chain for the matrices of a tree, and AdamW for everything else."""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from optax_muonplus.frame.chain import Chain, ChainTransformation, Resolved, Resolver
from optax_muonplus.frame.leaves import ADAM, MUON, ResolvedTree
from optax_muonplus.frame.plainly import Run, plainly
from optax_muonplus.method import narrowed


class Rest(Protocol):
    """What updates the parameters that are not matrices: a dataclass, such as AdamW's.

    Attributes:
      learning_rate: number or schedule; None means that of the matrices.
    """

    @property
    def learning_rate(self) -> optax.ScalarOrSchedule | None: ...

    def transformation(self) -> optax.GradientTransformation:
        """Returns the transformation, for a learning rate that is given."""
        ...


def partition(
    *parts: Any, adamw: Rest, resolve: Resolver, run: Run = plainly
) -> ChainTransformation:
    """Gives the matrices of a tree to a chain of parts, and everything else to AdamW."""
    matrices = Chain.of(parts, run)
    others = optax.with_extra_args_support(_with_rate(adamw, parts).transformation())

    def init(params: optax.Params, tree: ResolvedTree) -> optax.OptState:
        labels = tree.labels
        of_matrices = matrices.init(_only(MUON, labels, params), tree.matrices)
        of_others = others.init(_only(ADAM, labels, params))
        return _partition_state(of_matrices, of_others)

    def update(updates: Any, state: Any, params: Any, tree: ResolvedTree, extra: Any) -> Any:
        labels = tree.labels
        old = {label: masked.inner_state for label, masked in state.inner_states.items()}
        grads, own = _only(MUON, labels, updates), _only(MUON, labels, params)
        new, of_matrices = matrices.update(grads, old[MUON], own, tree.matrices, extra)
        grads, own = _only(ADAM, labels, updates), _only(ADAM, labels, params)
        rest, of_others = _update_of_rest(others, promoted(grads, own), old[ADAM], own, extra)
        merged = jax.tree.map(lambda x, m, r: m if x == MUON else r, labels, new, rest)
        return merged, _partition_state(of_matrices, of_others)

    return Resolved(init, update, resolve, run).transformation(ChainTransformation, parts)


def _update_of_rest(
    others: Any, updates: Any, state: Any, params: Any, extra: Any
) -> tuple[Any, Any]:
    """Returns the update of ``others``, in which nothing is computed in float16.

    Squares would overflow there from a gradient of 256 on; the result has the largest number of
    float16 where its own is larger. The state keeps its dtypes: decays that
    ``optax.inject_hyperparams`` traces in float32 would make moments of bfloat16 wider.
    """

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32) if jnp.result_type(x) == jnp.float16 else x

    def as_before(kind: Any, x: Any, before: Any) -> Any:
        now, then = jnp.result_type(x), jnp.result_type(before)
        return narrowed(x, then) if now != then and jnp.issubdtype(then, kind) else x

    made, new = others.update(*jax.tree.map(wide, (updates, state, params)), **extra)
    made = jax.tree.map(functools.partial(as_before, jnp.float16), made, updates)
    return made, jax.tree.map(functools.partial(as_before, jnp.inexact), new, state)


def promoted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Returns updates in the dtype that they and their parameters promote to.

    A float16 update of a float32 parameter would underflow when multiplied by the learning rate.
    """
    if params is None:
        return updates

    def promote(update: Any, parameter: Any) -> jax.Array:
        update = jnp.asarray(update)
        return update.astype(jnp.promote_types(update.dtype, jnp.result_type(parameter)))

    return jax.tree.map(promote, updates, params)


def _with_rate(adamw: Any, parts: tuple[Any, ...]) -> Rest:
    if adamw.learning_rate is not None:
        return adamw
    # A link may have the rate inside, where its step is no multiple of it.
    rates = [part.learning_rate for part in parts if hasattr(part, "learning_rate")]
    if not rates:
        raise ValueError(
            "AdamW has no learning rate: pass AdamW(learning_rate=...), or end the chain with"
            " scale_by_learning_rate(...) of optax_muonplus.transforms, which AdamW then has too."
        )
    return dataclasses.replace(adamw, learning_rate=rates[-1])


def _partition_state(of_matrices: Any, of_others: Any) -> optax.PartitionState:
    """Returns the state as ``optax.partition`` has it, which other tools know."""
    return optax.PartitionState(
        {ADAM: optax.MaskedState(of_others), MUON: optax.MaskedState(of_matrices)}
    )


def _only(label: str, labels: Any, values: Any) -> Any:
    """Returns ``values``, if any, with ``optax.MaskedNode`` where parameters have another label."""
    if values is None:
        return None
    return jax.tree.map(lambda x, y: y if x == label else optax.MaskedNode(), labels, values)
