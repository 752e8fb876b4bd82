"""Transformations that also keep measures of the matrices they work on in their state."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.core
import jax.numpy as jnp
import optax

from optax_muonplus._parameters import (
    DimensionNumbersTree,
    check_patterns,
    flatten_with_names,
    path_name,
    select,
)
from optax_muonplus.diagnostics._measures import AT_EVERY_STAGE, MEASURES, Measure, measure
from optax_muonplus.diagnostics._record import RecordState, empty_state
from optax_muonplus.matrices import Normalize
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import LeafInfo, MomentumState, Steps, find_momentum, links_of

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
        link = _polar_link(inner)
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
    """
    due, patterns = _checked(every, measures, only)
    if due is None:
        return inner
    return _recorder(inner, None, (patterns, weight_dimension_numbers), due, measures)


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


def _polar_link(transformation: Any) -> Steps:
    """Finds the link of a chain that begins with a momentum, and checks that it orthogonalizes."""
    steps = [x for x in links_of(transformation) if isinstance(x, Steps) and x.average is not None]
    if not steps or not isinstance(steps[0].functions[0], Orthogonalize):
        raise ValueError(
            "recorded knows the inside of chains with a momentum and its polar factor, as those of"
            " omp.muonplus, omp.muon and omp.scale_by_muonplus are. For any other optimizer, or a"
            " link of a chain, there is watched."
        )
    return steps[0]


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
            stages = _stages(link, leaves, updates, state.inner, results)

            def new_values() -> Any:
                return measure(taken, leaves, stages(), normalization)

            if isinstance(is_due, jax.core.Tracer):
                values = jax.lax.cond(is_due, new_values, lambda: state.values)
            elif is_due:  # a branch outside of jit would be compiled each time
                values = new_values()
        step = jnp.where(is_due, count, state.step)
        return results, RecordState(inner_state, count, step, values, state.names)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _stages(
    link: Steps | None, leaves: Sequence[LeafInfo], updates: Any, state: Any, results: Any
) -> Callable[[], Any]:
    """Returns a function that makes the arrays of ``leaves`` at each stage.

    The function runs at recorded updates only. What it reads is in memory anyway: it gets the new
    momentum, since the old one, which the update overwrites, would be kept and copied every time.
    """
    gradients = _arrays(leaves, updates)
    if link is None:
        outputs = _arrays(leaves, results)
        return lambda: (gradients, outputs)
    assert link.average is not None
    average = dataclasses.replace(link.average, divisor=1.0)
    old = find_momentum(state)
    mu = MomentumState(_arrays(leaves, old.mu), old.count)
    _, read, sources = average.advance(gradients, mu, link.steps[0].input_dtype)
    # Measures are of what the steps compute, not of what the updates are rounded to.
    whole = Steps.of(None, link.functions, rounds=False)

    def after(steps: Sequence[Any], arrays: Any) -> Any:
        part = dataclasses.replace(whole, steps=tuple(steps))
        return part.update(arrays, None, None, leaves)[0] if steps else arrays

    def stages() -> Any:
        momenta = [read(*x) for x in sources]
        factors = after(whole.functions[:1], momenta)
        if isinstance(whole.steps[0], Orthogonalize):
            return momenta, factors, after(whole.steps[1:], factors)
        # The dual norm is an inner product with the momentum: one step makes all of it.
        return momenta, factors, after(whole.steps, momenta)

    return stages


def _arrays(leaves: Sequence[LeafInfo], tree: Any) -> list[jax.Array]:
    """Returns the arrays of ``tree`` at the paths of ``leaves``."""
    paths, arrays = flatten_with_names(tree)
    by_name = {path_name(path): x for path, x in zip(paths, arrays, strict=True)}
    return [by_name[leaf.name] for leaf in leaves]
