"""Optimizers whose arguments are those of another function, written once."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

from optax_muonplus._optimizers.muonplus import muonplus
from optax_muonplus._optimizers.partition import AdamWArgs, Descent, partition_with_adamw
from optax_muonplus.transforms._apply import MatrixTransformation

Optimizer = Callable[..., optax.GradientTransformationExtraArgs]


def variant(base: Optimizer, **arguments: Any) -> Callable[[Callable[[], None]], Optimizer]:
    """Decorates an empty, documented function: it becomes ``base`` with some arguments fixed.

    Args:
      base: an optimizer.
      **arguments: fixed ones, which the variant does not take; or, as :class:`Default`, those that
        only have another default.
    """
    defaults = {k: v.value for k, v in arguments.items() if isinstance(v, Default)}
    fixed = {k: v for k, v in arguments.items() if k not in defaults}
    parameters = [
        p.replace(default=defaults.get(p.name, p.default))
        for p in inspect.signature(base).parameters.values()
        if p.name not in fixed
    ]
    return _with_signature(parameters, lambda given: base(**fixed, **given))


class Default(NamedTuple):
    """Another default for an argument, see :func:`variant`."""

    value: Any


def optimizer_of(
    scale_by: Callable[..., MatrixTransformation],
) -> Callable[[Callable[[], None]], Optimizer]:
    """Decorates an empty, documented function: it becomes the optimizer with ``scale_by`` in it.

    Its arguments are the learning rate, those of ``scale_by``, weight decay, and those of
    :func:`muonplus` for AdamW, dimension numbers and sharding, in the order that they have there.
    """
    ours = dict(inspect.signature(scale_by).parameters)
    for name in ("weight_dimension_numbers", "sharding"):
        ours.pop(name)
    common = inspect.signature(muonplus).parameters
    mu_dtype = ours.pop("mu_dtype")
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p for p in ours.values() if p.kind is p.KEYWORD_ONLY]
    decay = [common["weight_decay"], common["weight_decay_mask"]]
    last = list(common)[list(common).index("adam_b1") :]
    parameters = [common["learning_rate"], *positional, *decay, mu_dtype, *keyword]

    def make(given: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
        learning_rate, adam_rate = given["learning_rate"], given["adam_learning_rate"]
        adamw = {name: given[f"adam_{name}"] for name in AdamWArgs._fields[1:]}
        return partition_with_adamw(
            scale_by(mu_dtype=given["mu_dtype"], **{name: given[name] for name in ours}),
            Descent(learning_rate, given["weight_decay"], given["weight_decay_mask"]),
            AdamWArgs(learning_rate if adam_rate is None else adam_rate, **adamw),
            given["muon_weight_dimension_numbers"],
            given["sharding"],
        )

    return _with_signature([*parameters, *(common[name] for name in last)], make)


def _with_signature(
    parameters: Sequence[inspect.Parameter],
    make: Callable[[dict[str, Any]], optax.GradientTransformationExtraArgs],
) -> Callable[[Callable[[], None]], Optimizer]:
    """Gives a documented function these parameters, and ``make`` of its arguments as its body."""
    signature = inspect.Signature(
        parameters, return_annotation=optax.GradientTransformationExtraArgs
    )

    def decorate(documented: Callable[[], None]) -> Optimizer:
        @functools.wraps(documented)
        def optimizer(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return make(bound.arguments)

        # For help() and optax.inject_hyperparams, which read the arguments and defaults off it.
        optimizer.__signature__ = signature  # ty: ignore[missing-attribute]
        del optimizer.__wrapped__
        return optimizer

    return decorate
