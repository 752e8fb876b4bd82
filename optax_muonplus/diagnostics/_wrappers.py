"""Optimizers that record measures of imbalance of every matrix in their state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optax

from optax_muonplus._parameters import (
    DimensionNumbersTree,
    LeafInfo,
    by_name,
    check_patterns,
    select,
)
from optax_muonplus.diagnostics._measures import MEASURES, Measure, check_measures
from optax_muonplus.diagnostics._recording import Probe, Schedule, record
from optax_muonplus.diagnostics._stages import inside_of
from optax_muonplus.diagnostics._state import Arrays

Factory = Callable[..., optax.GradientTransformation]


def recorded(
    factory: Factory,
    *,
    every: int | Schedule | None = 100,
    measures: Sequence[Measure] = MEASURES,
    only: str | Sequence[str] | None = None,
) -> Factory:
    """``omp.muonplus``, ``omp.muon`` or ``omp.scale_by_muonplus``, made to record what it does.

    Of every matrix at every recorded update it keeps, for the stages ``momentum`` (what goes into
    the polar step), ``polar`` (what comes out of it) and ``update`` (normalized and scaled, before
    weight decay and learning rate):

    - ``row_variance``, ``col_variance``: see :func:`norm_variance`;
    - ``row_ratio``, ``col_ratio``: see :func:`norm_ratio`;
    - ``rms``: root mean square;

    and for ``polar`` only:

    - ``row_spearman``, ``col_spearman``: rank correlation with the norms in ``momentum``, see
      :func:`spearman`; NaN where one side's norms are all equal;
    - ``row_floor_share``, ``col_floor_share``: see :func:`floor_share`; NaN where ``norm`` does not
      name the side;
    - ``distance``: from the exact polar factor of ``momentum``, see :func:`polar_distance`.

    The updates are those of ``factory``: what is measured is computed a second time, in float32 at
    least. A recorded update costs one more polar step for each recorded matrix (two with
    ``adaptive``), a singular value decomposition of each for ``distance``, and about ten passes
    over them, with memory for three copies of them while it lasts. The other updates pay for a
    counter and a branch; under ``jax.vmap``, which computes both sides of a branch, all cost as
    much as a recorded one.

    Args:
      factory: the function, not yet called. ``functools.partial`` of it will do, and
        ``optax.inject_hyperparams`` can be put around the result.
      every: N for the updates N, 2 N, ...; or a function from the number of the update, a traced
        integer that starts at 1, to whether to record it. None or 0 switches recording off:
        ``factory`` itself is returned.
      measures: the names above; all but ``distance`` if not given.
      only: regular expressions, searched in paths such as ``blocks/0/attn/query/kernel``; None
        means all matrices.

    Returns:
      A function with the arguments of ``factory``. Its transformation has a :class:`RecordState`:
      that of ``factory``, and one number for each stage, measure and matrix.

    Raises:
      ValueError: for unknown names, another factory, and ``every`` that is negative; at init, for
        patterns that match no matrix, with the nearest paths.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> from optax_muonplus import diagnostics
      >>> tx = diagnostics.recorded(omp.muonplus, every=1)(0.02)
      >>> params = {"dense": {"kernel": jnp.eye(4, 8)}}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> values = diagnostics.read(state).values["dense/kernel"]
      >>> round(values["update/rms"], 3)
      0.5
    """
    due, patterns = _check(every, measures, only)
    _check_factory(factory)
    if due is None:
        return factory

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        inner: Any = factory(*args, **kwargs)
        probe = inside_of(inner)
        dims, sharding = inner.weight_dimension_numbers, inner.sharding
        find = functools.partial(select, only=patterns, dimension_numbers=dims, sharding=sharding)
        return record(inner, probe, find, due, measures)

    return made


def watched(
    inner: optax.GradientTransformation,
    *,
    every: int | Schedule | None = 100,
    measures: Sequence[Measure] = MEASURES,
    only: str | Sequence[str] | None = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
) -> optax.GradientTransformation:
    """Any transformation, made to record what it is given and what it returns.

    For links of a chain of one's own, and for other optimizers, whose updates contain learning rate
    and weight decay. The measures are those of :func:`recorded`, of the stages ``before`` and
    ``after``; what compares two is kept with ``after``, and floor shares are NaN.

    Nothing is computed twice: a recorded update costs about ten passes over the matrices, and a
    singular value decomposition of each for ``distance``.

    Args:
      inner: transformation of updates.
      every: as in :func:`recorded`; off, ``inner`` itself is returned.
      measures: likewise.
      only: likewise.
      weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`. Leaves that are not matrices
        are not recorded.
    """
    due, patterns = _check(every, measures, only)
    if due is None:
        return inner

    def capture(
        leaves: Sequence[LeafInfo], updates: Any, state: Any, results: Any
    ) -> dict[str, Arrays]:
        del state
        return {"before": by_name(leaves, updates), "after": by_name(leaves, results)}

    probe = Probe(("before", "after"), capture, lambda leaves, captured: captured)
    find = functools.partial(select, only=patterns, dimension_numbers=weight_dimension_numbers)
    return record(inner, probe, find, due, measures)


def _check(
    every: Any, measures: Sequence[str], only: Any
) -> tuple[Schedule | None, tuple[Any, ...] | None]:
    """Whether an update is recorded, None for never, and patterns."""
    check_measures(measures)
    patterns = check_patterns(only)
    if every is None or callable(every):
        return every, patterns
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(
            f"every={every!r} must be a number of updates, None or 0 for never, or a function from"
            " the number of an update to whether to record it."
        )
    return (lambda count: count % every == 0) if every else None, patterns


def _check_factory(factory: Any) -> None:
    if not callable(factory):
        raise ValueError(
            f"recorded wants the function that makes the optimizer, got {type(factory).__name__}."
            " Write recorded(omp.muonplus, every=...)(learning_rate, ...), not"
            " recorded(omp.muonplus(learning_rate, ...)); for any other optimizer there is watched."
        )
