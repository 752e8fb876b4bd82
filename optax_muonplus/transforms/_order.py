"""Parts of a chain: what they may be, and their order."""

import itertools
from collections.abc import Sequence
from typing import Any

import optax

from optax_muonplus.frame import (
    ChainTransformation,
    DecayedWeights,
    DualNorm,
    LearningRate,
    MatrixTransformation,
    Momentum,
    MomentumTransformation,
    comes_before_rates,
    has_rate,
    named,
)
from optax_muonplus.method import ArrayFunction, MatrixFunction, Orthogonalize, ScaleByShape
from optax_muonplus.transforms._decay import check_decay


def parts_of(link: Any) -> tuple[Any, ...]:
    """Returns the parts of a link: one, or those of a chain."""
    if isinstance(link, MatrixTransformation):
        if link.weight_dimension_numbers is not None or link.sharding is not None:
            raise ValueError(
                "A link of a chain has weight_dimension_numbers or a sharding of its own. Give them"
                " to matrix_chain, or to the optimizer that the chain is for: all links get them."
            )
        return link.parts
    if isinstance(link, ChainTransformation):
        raise ValueError(
            "A chain got a whole optimizer, such as omp.muonplus(0.02), in the place of a link: it"
            " has a learning rate and AdamW of its own. Pass the rule for matrices alone, such as"
            " omp.scale_by_muonplus()."
        )
    if isinstance(link, MomentumTransformation):
        return (link.momentum,)
    if isinstance(link, optax.GradientTransformation | MatrixFunction | Momentum | DualNorm):
        return (link,)
    if hasattr(link, "init") and hasattr(link, "update"):
        return (link,)
    if callable(link):
        return (ArrayFunction(link),)
    if isinstance(link, list | tuple):
        raise TypeError("matrix_chain got a list. Pass its links one by one: matrix_chain(*links).")
    raise TypeError(
        f"matrix_chain got {type(link).__name__}, which is no link: pass transformations, functions"
        " on arrays (*batch, out, in), or objects with init(params, leaves) and update(updates,"
        " state, params, leaves)."
    )


def check_order(parts: Sequence[Any]) -> None:
    """Raises ValueError for parts of a chain that undo each other.

    These are a second momentum, what follows the learning rate, a polar factor of what another one
    or a factor by shape has made, and a decay that turns parameters round.
    """
    momenta = [part for part in parts if has_momentum(part)]
    if len(momenta) > 1:
        raise ValueError(
            f"The chain has two momenta, in {named(momenta[0])} and {named(momenta[1])}: a rule"
            " has its own, as in NorMuon(momentum=Momentum(...)), and a chain begins with one."
            " Leave one of them out; optax.trace may stand beside the other."
        )
    for part, after in itertools.pairwise(parts):
        if isinstance(after, Orthogonalize) and isinstance(part, Orthogonalize | ScaleByShape):
            raise ValueError(
                f"The chain has a polar factor right after {named(part)}, of which it leaves"
                " nothing. Leave one of them out; scale_by_shape belongs behind the polar factor."
            )
        if isinstance(part, DecayedWeights) and isinstance(after, LearningRate):
            check_decay(part.name, part.weight_decay, after.learning_rate)
    for i, part in enumerate(parts):
        after = next((x for x in parts[i + 1 :] if comes_before_rates(x)), None)
        if has_rate(part) and after is not None:
            raise ValueError(
                f"{named(after)} comes after {named(part)}, which has a learning rate already: its"
                " updates go downhill, and what follows would turn them uphill or change their"
                " length. A chain ends with its rate. An optimizer that takes a learning_rate adds"
                " that, so that its link has none."
            )


def has_momentum(part: Any) -> bool:
    """Tells whether a part is a momentum of this library, or a rule with one."""
    return isinstance(part, Momentum) or isinstance(getattr(part, "momentum", None), Momentum)
