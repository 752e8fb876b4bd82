"""Transformations that also keep measures of the matrices they work on in their state."""

import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.core
import jax.numpy as jnp
import optax

from optax_muonplus.diagnostics._measures import AT_EVERY_STAGE, MEASURES, Measure, measure
from optax_muonplus.diagnostics._record import RecordState, empty_state
from optax_muonplus.diagnostics._stages import arrays_of, polar_link, stages_of
from optax_muonplus.matrices import Normalize
from optax_muonplus.transforms import find_matrices

# Number of the update, from 1, to whether it is recorded.
Schedule = Callable[[Any], Any]


def recorded(
    optimizer: Callable[..., optax.GradientTransformation] | optax.GradientTransformation,
    *,
    every: int | Schedule | None = 100,
    measures: Sequence[Measure] = MEASURES,
    only: str | Sequence[str] | None = None,
) -> Any:
    """Makes ``omp.muonplus``, ``omp.muon`` or ``omp.scale_by_muonplus`` record what it does.

    Every matrix is measured at the stages ``momentum`` (what goes into the polar step), ``polar``
    (what comes out of it) and ``update`` (normalized and scaled, without decay and rate):

    - ``row_variance``, ``col_variance``: see :func:`norm_variance`;
    - ``row_ratio``, ``col_ratio``: see :func:`norm_ratio`;
    - ``rms``: see :func:`rms`;

    and at ``polar`` only:

    - ``row_spearman``, ``col_spearman``: rank correlation with ``momentum``, see :func:`spearman`;
    - ``row_floor_share``, ``col_floor_share``: see :func:`floor_share`; NaN where ``norm`` does not
      name the side;
    - ``distance``: from the exact polar factor of ``momentum``, see :func:`polar_distance`.

    The updates are those of ``optimizer``. What is measured is computed again, in float32 at least:
    for each matrix one polar step (two with ``adaptive``), a singular value decomposition for
    ``distance``, ten passes, and memory for three copies. Other updates pay for a branch, but
    under ``jax.vmap``, which computes both sides of it, all cost as much as a recorded one.

    Args:
      optimizer: the function that makes one, a ``functools.partial`` of it, or what it made.
      every: N for the updates N, 2 N, ...; or a function from the number of the update, traced and
        from 1 on, to whether to record it. None or 0 returns ``optimizer`` itself.
      measures: the names above; all but ``distance`` if not given.
      only: regular expressions, searched in paths such as ``blocks/0/attn/query/kernel``.

    Returns:
      A function with the same arguments, which ``optax.inject_hyperparams`` may wrap, or a
      transformation. Its state is a :class:`RecordState`: one number for each stage, measure and
      matrix.

    Raises:
      ValueError: for unknown names, an optimizer of another kind, a negative ``every``; at init,
        for patterns that match no matrix.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.diagnostics.recorded(omp.muonplus, every=1)(0.02)
      >>> params = {"dense": {"kernel": jnp.eye(4, 8)}}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> values = omp.diagnostics.read(state).values["dense/kernel"]
      >>> round(values["update/rms"], 3)
      0.5
    """
    due = _checked(every, measures, only)
    if isinstance(optimizer, optax.GradientTransformation):
        return _of_chain(optimizer, due, measures, only)
    if not callable(optimizer):
        raise ValueError(
            f"recorded wants an optimizer, or the function that makes one, got {optimizer!r}."
        )

    @functools.wraps(optimizer)
    def factory(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        return _of_chain(optimizer(*args, **kwargs), due, measures, only)

    return optimizer if due is None else factory


def _of_chain(tx: Any, due: Schedule | None, measures: Sequence[Measure], only: Any) -> Any:
    """Returns a recorder of the stages inside of a chain with a polar factor."""
    link = polar_link(tx)
    norms = [x for x in link.functions if isinstance(x, Normalize)]
    where = {"weight_dimension_numbers": tx.resolve.reader, "sharding": tx.resolve.sharding}
    where |= {"only": only}
    stages = functools.partial(stages_of, link)
    names = ("momentum", "polar", "update")
    return _recorder(tx, names, stages, (*norms, Normalize("none"))[0], where, due, measures)


def watched(
    inner: optax.GradientTransformation,
    *,
    every: int | Schedule | None = 100,
    measures: Sequence[Measure] = MEASURES,
    only: str | Sequence[str] | None = None,
    weight_dimension_numbers: Any = None,
    rules: Any = (),
    layer_axes: Any = None,
) -> optax.GradientTransformation:
    """Makes any transformation record what it is given and what it returns.

    It serves other optimizers, with updates that contain learning rate and weight decay, and links
    of chains. The measures are those of :func:`recorded`, at the stages ``before`` and ``after``;
    what compares two is kept with ``after``, floor shares are NaN, and nothing is computed twice.

    Args:
      inner: transformation of updates; returned as it is if recording is off.
      every: as in :func:`recorded`, as are the next two.
      measures: names.
      only: regular expressions.
      weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`. Leaves that are not matrices
        are not recorded.
      rules: in place of dimension numbers.
      layer_axes: with ``rules`` or without.
    """
    due = _checked(every, measures, only)
    where = {"weight_dimension_numbers": weight_dimension_numbers, "rules": rules}
    where |= {"only": only, "layer_axes": layer_axes}
    find_matrices({}, **where)  # refuses what it would refuse

    def stages(leaves: Any, updates: Any, state: Any, results: Any) -> Callable[[], Any]:
        del state
        around = arrays_of(leaves, updates), arrays_of(leaves, results)
        return lambda: around

    names = ("before", "after")
    return _recorder(inner, names, stages, Normalize("none"), where, due, measures)


def _checked(every: Any, measures: Sequence[str], only: Any) -> Schedule | None:
    """Returns whether an update is recorded, or None for never; raises ValueError."""
    names = get_args(Measure)
    if isinstance(measures, str) or any(name not in names for name in measures):
        raise ValueError(f"measures={measures!r} must be a sequence of names, of {names}.")
    find_matrices({}, only)  # refuses what are no patterns
    if every is None or callable(every):
        return every
    if isinstance(every, bool) or not isinstance(every, numbers.Integral) or every < 0:
        raise ValueError(
            f"every={every!r} must be a number of updates, None or 0 for never, or a function from"
            " the number of an update to whether to record it."
        )
    return (lambda count: count % every == 0) if every else None


def _recorder(
    inner: optax.GradientTransformation,
    names: Sequence[str],
    stages_of: Callable[..., Callable[[], Any]],
    normalization: Normalize,
    where: Mapping[str, Any],
    due: Schedule | None,
    measures: Sequence[Measure],
) -> optax.GradientTransformation:
    """Makes ``inner`` keep measures of the matrices that ``find_matrices(tree, **where)`` finds.

    ``names`` are those of the stages, and ``stages_of`` gets the records of matrices, the updates,
    the state before them and the results, and returns the function that makes the arrays.
    """
    if due is None:
        return inner
    inner = optax.with_extra_args_support(inner)
    at_every_stage = [name for name in measures if name in AT_EVERY_STAGE]
    taken = {stage: measures if stage == names[1] else at_every_stage for stage in names}

    def init_fn(params: optax.Params) -> Any:
        return empty_state(inner.init(params), find_matrices(params, **where), taken)

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if not isinstance(state, RecordState):
            raise ValueError(
                f"Got a {type(state).__name__}, the state of an optimizer that does not record. To"
                " record from here on pass tx.init(params)._replace(inner=state); to stop, go on"
                " with state.inner."
            )
        results, inner_state = inner.update(updates, state.inner, params, **extra_args)
        leaves, values = find_matrices(updates, **where), state.values
        count = optax.safe_increment(state.count)
        is_due = jnp.asarray(due(count), bool)
        if leaves:
            stages = stages_of(leaves, updates, state.inner, results)

            def new_values() -> Any:
                return measure(taken, leaves, stages(), normalization)

            if isinstance(is_due, jax.core.Tracer):
                values = jax.lax.cond(is_due, new_values, lambda: state.values)
            elif is_due:  # a branch outside of jit would be compiled each time
                values = new_values()
        step = jnp.where(is_due, count, state.step)
        return results, RecordState(inner_state, count, step, values, state.names)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
