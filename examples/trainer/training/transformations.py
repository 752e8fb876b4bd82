"""Transformations of gradients that the optimizer of a run is wrapped in.

An average of the weights is a part of the optimizer's state: exponential, or of the run's tail.
After update t, with the weights w_t, the average is a_t = a_{t-1} + c_t (w_t - a_{t-1}), a_0 = w_0.

- `--ema d`: c_t = (1 - d) / (1 - d^t). The mean of w_1 ... w_t with weights that fall by d an
  update: Adam's mean with its bias corrected (arXiv:1412.6980, section 3).
- `--tail N` of T steps: c_t = 1 / max(1, t - (T - N)). The plain mean of the last N weights
  (Polyak and Juditsky, 1992; the tail alone: arXiv:1610.03774), and w_t before.

It is kept in float32, 4 bytes for each parameter, with the shardings of the parameters.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError


def global_norm(tree: optax.Updates) -> jax.Array:
    """sqrt(sum of x^2) over all elements of all arrays, a float32 scalar.

    Squares and sums are in float32 also for arrays in 16 bits, where `optax.tree.norm` rounds the
    sum of each array, their sum and its root to 8 bits. The compiler converts elements where it
    sums them, so that no array in float32 is stored.
    """
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scales a gradient g with a norm of at least `largest` to g / norm x `largest`.

    As `optax.clip_by_global_norm`, bit for bit in float32. Gradients in 16 bits are divided by the
    norm in float32, and rounded once, at the end. (Pascanu et al., arXiv:1211.5063, section 3.2.)
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        norm = global_norm(updates)

        def scaled(x: jax.Array) -> jax.Array:
            if x.dtype != jnp.float32:  # else its copy in float32 may be stored, to serve twice
                x = jax.lax.optimization_barrier(x)
            smaller = x.astype(jnp.float32) / norm * largest
            return jnp.where(norm < largest, x, smaller.astype(x.dtype))

        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def leave_out_above(
    largest: ArrayLike, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer, but a gradient with a norm above `largest` changes neither state nor params.

    The norm is that of the whole gradient. The state is that of `optimizer`.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        spike = global_norm(updates) > largest
        updates, after = inner.update(updates, state, params, **extra)
        updates = jax.tree.map(lambda x: jnp.where(spike, jnp.zeros_like(x), x), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(spike, old, new), after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


ADAM_EPSILON = 1e-8  # Optax's, and that of the paper's code


class Counted(NamedTuple):
    """The state of a rule that is built anew for each step."""

    count: jax.Array
    """Steps that were made."""
    inner: optax.OptState


def epsilon_before_correction(
    rule: Callable[[ArrayLike], optax.GradientTransformation], b2: float
) -> optax.GradientTransformation:
    """The rule of an epsilon, with AdamW's update m sqrt(1 - b2^t) / ((1 - b1^t) (sqrt(v) + eps)).

    Optax divides the moments by 1 - b^t first and then adds its epsilon. Both are the same for an
    epsilon of eps / sqrt(1 - b2^t), which is larger in the first steps.
    """

    def init(params: optax.Params) -> Counted:
        return Counted(jnp.zeros((), jnp.int32), rule(ADAM_EPSILON).init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Counted]:
        count = state.count + 1
        eps = ADAM_EPSILON / jnp.sqrt(1 - b2**count)
        updates, inner = rule(eps).update(updates, state.inner, params)
        return updates, Counted(count, inner)

    return optax.GradientTransformation(init, update)


Rule = Callable[..., optax.GradientTransformation]
INTO_MLP = re.compile("(^|/)mlp/(up|gate)/kernel$")


def normalized(rule: Rule, which: Literal["attention", "mlp"]) -> Rule:
    """Returns muonplus on some matrices, and Muon on the others; `rule` is muonplus."""
    names = {"attention": "/attn/", "mlp": "/mlp/"}

    def labels(params: optax.Params) -> Any:
        return by_path(lambda path: names[which] in f"/{path}", params)

    def made(*args: Any, **options: Any) -> optax.GradientTransformation:
        muon = functools.partial(rule, norm="none", match_frobenius=False)
        return optax.partition(
            {True: rule(*args, **options), False: muon(*args, **options)}, labels
        )

    return made


def into_mlp(updates: optax.Updates) -> Any:
    """Returns whether each leaf is the kernel of a layer into an MLP."""
    return by_path(lambda path: bool(INTO_MLP.search(path)), updates)


def by_path(function: Callable[[str], bool], tree: Any) -> Any:
    """Returns the tree with the function of its paths."""

    def of(path: Any, _: Any) -> bool:
        return function(jax.tree_util.keystr(path, simple=True, separator="/"))

    return jax.tree_util.tree_map_with_path(of, tree)


class AveragedState(NamedTuple):
    """The state of a rule, and the average of the weights that it made."""

    rule: optax.OptState
    count: jax.Array
    """Updates so far."""
    average: optax.Params
    """In float32."""


def first_update(config: OptimizerConfig, steps: int) -> int:
    """How many updates come before those of the average."""
    if not config.tail:
        return 0
    return steps - (max(1, round(config.tail * steps)) if config.tail < 1 else int(config.tail))


def with_average(
    rule: optax.GradientTransformation, config: OptimizerConfig, steps: int
) -> optax.GradientTransformation:
    """The rule, which also keeps the average that a run of `steps` steps asks for, if any."""
    if not (config.ema or config.tail):
        return rule
    inner, before = optax.with_extra_args_support(rule), first_update(config, steps)

    def share_of(count: jax.Array) -> jax.Array:
        """The share c_t of the weights of an update, counted from 1."""
        if config.ema:
            return (1 - config.ema) / (1 - config.ema ** count.astype(jnp.float32))
        return 1 / jnp.maximum(count - before, 1).astype(jnp.float32)

    def init(params: optax.Params) -> AveragedState:
        average = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
        return AveragedState(inner.init(params), jnp.zeros((), jnp.int32), average)

    def update(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, AveragedState]:
        updates, after = inner.update(updates, state.rule, params, **extra)
        count = state.count + 1
        share = share_of(count)
        weights = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda mean, x: mean + share * (x.astype(jnp.float32) - mean), state.average, weights
        )
        return updates, AveragedState(after, count, average)

    return optax.GradientTransformationExtraArgs(init, update)


def with_averages(params: optax.Params, average: Any) -> optax.Params:
    """The averages of the parameters, in their types."""
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), average, params)


def check_average(
    kind: Literal["ema", "tail"], config: OptimizerConfig, steps: int, step: int
) -> None:
    """Refuses a checkpoint, of that step, that has no such average."""
    if not getattr(config, kind):
        raise UserError(
            f"--weights {kind}: this run has no such averages; they are kept by a run that has"
            f" --{kind} from its start."
        )
    first = first_update(config, steps)
    if step <= first:
        raise UserError(
            f"--weights {kind}: the average of this run is that of its steps after {first}, and"
            f" the checkpoint is of step {step}: take a later one."
        )
