"""Transformations that also keep measures of the matrices they work on in their state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.core
import jax.numpy as jnp
import optax

from optax_muonplus.diagnostics._measures import AT_EVERY_STAGE, MEASURES, Measure, measure
from optax_muonplus.diagnostics._record import RecordState, empty_state
from optax_muonplus.diagnostics._stages import polar_link, stages_of
from optax_muonplus.frame import DimensionNumbersTree
from optax_muonplus.matrices import Normalize
from optax_muonplus.transforms import Steps
from optax_muonplus.trees import LayerAxes, Rules, check_patterns, reader_of, select

Factory = Callable[..., optax.GradientTransformation]
# Number of the update, from 1, to whether it is recorded.
Schedule = Callable[[Any], Any]


def recorded(
    factory: Factory,
    *,
    every: int | Schedule | None = 100,
    measures: Sequence[Measure] = MEASURES,
    only: str | Sequence[str] | None = None,
) -> Factory:
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

    The updates are those of ``factory``. What is measured is computed again, in float32 at least:
    for each matrix one polar step (two with ``adaptive``), a singular value decomposition for
    ``distance``, ten passes, and memory for three copies. Other updates pay for a branch, but
    under ``jax.vmap``, which computes both sides of it, all cost as much as a recorded one.

    Args:
      factory: the function, not yet called, or a ``functools.partial`` of it.
      every: N for the updates N, 2 N, ...; or a function from the number of the update, traced and
        from 1 on, to whether to record it. None or 0 returns ``factory`` itself.
      measures: the names above; all but ``distance`` if not given.
      only: regular expressions, searched in paths such as ``blocks/0/attn/query/kernel``.

    Returns:
      A function with the arguments of ``factory``, which ``optax.inject_hyperparams`` may wrap. Its
      state is a :class:`RecordState`: one number for each stage, measure and matrix.

    Raises:
      ValueError: for unknown names, another factory, a negative ``every``; at init, for patterns
        that match no matrix.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.diagnostics.recorded(omp.muonplus, every=1)(0.02)
      >>> params = {"dense": {"kernel": jnp.eye(4, 8)}}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> values = omp.diagnostics.read(state).values["dense/kernel"]
      >>> round(values["update/rms"], 3)
      0.5
    """
    due, patterns = _checked(every, measures, only)
    if not callable(factory):
        raise ValueError(
            f"recorded wants the function that makes the optimizer, got {type(factory).__name__}."
            " Write recorded(omp.muonplus, every=...)(learning_rate, ...), not"
            " recorded(omp.muonplus(learning_rate, ...)); for any other optimizer there is watched."
        )
    if due is None:
        return factory

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> optax.GradientTransformation:
        inner: Any = factory(*args, **kwargs)
        link = polar_link(inner)
        where = patterns, inner.weight_dimension_numbers, inner.sharding
        return _recorder(inner, link, where, due, measures)

    return made


def watched(
    inner: optax.GradientTransformation,
    *,
    every: int | Schedule | None = 100,
    measures: Sequence[Measure] = MEASURES,
    only: str | Sequence[str] | None = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
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
    due, patterns = _checked(every, measures, only)
    dims = reader_of(weight_dimension_numbers, rules, layer_axes)
    if due is None:
        return inner
    return _recorder(inner, None, (patterns, dims), due, measures)


def _checked(every: Any, measures: Sequence[str], only: Any) -> tuple[Schedule | None, Any]:
    """Returns whether an update is recorded, None for never, and patterns; raises ValueError."""
    names = get_args(Measure)
    if isinstance(measures, str) or any(name not in names for name in measures):
        raise ValueError(f"measures={measures!r} must be a sequence of names, of {names}.")
    patterns = check_patterns(only)
    if every is None or callable(every):
        return every, patterns
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(
            f"every={every!r} must be a number of updates, None or 0 for never, or a function from"
            " the number of an update to whether to record it."
        )
    return (lambda count: count % every == 0) if every else None, patterns


def _recorder(
    inner: optax.GradientTransformation,
    link: Steps | None,
    where: Sequence[Any],
    due: Schedule,
    measures: Sequence[Measure],
) -> optax.GradientTransformationExtraArgs:
    """Makes ``inner`` keep measures of the matrices that ``select(tree, *where)`` finds.

    The stages are those inside of ``link``, a part of ``inner``; if it is None, what ``inner`` is
    given and what it returns.
    """
    inner = optax.with_extra_args_support(inner)
    names = ("before", "after") if link is None else ("momentum", "polar", "update")
    at_every_stage = [name for name in measures if name in AT_EVERY_STAGE]
    taken = {stage: measures if stage == names[1] else at_every_stage for stage in names}
    norms = [x for x in link.functions if isinstance(x, Normalize)] if link else []
    normalization = (*norms, Normalize("none"))[0]

    def init_fn(params: optax.Params) -> Any:
        return empty_state(inner.init(params), select(params, *where), taken)

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
        leaves, values = select(updates, *where), state.values
        count = optax.safe_increment(state.count)
        is_due = jnp.asarray(due(count), bool)
        if leaves:
            stages = stages_of(link, leaves, updates, state.inner, results)

            def new_values() -> Any:
                return measure(taken, leaves, stages(), normalization)

            if isinstance(is_due, jax.core.Tracer):
                values = jax.lax.cond(is_due, new_values, lambda: state.values)
            elif is_due:  # a branch outside of jit would be compiled each time
                values = new_values()
        step = jnp.where(is_due, count, state.step)
        return results, RecordState(inner_state, count, step, values, state.names)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
