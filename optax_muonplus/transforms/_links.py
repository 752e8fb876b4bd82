"""The links of Muon+ as Optax transformations, and the chain of them that an optimizer uses.

Each link works in float32 at least. :func:`momentum` hands on what it accumulated unrounded; the
others keep the dtype that they are given.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.sharding import ShardingTree, check_sharding, settle
from optax_muonplus.matrices._matrix_function import MatrixFunction
from optax_muonplus.matrices._normalization import Norm
from optax_muonplus.matrices._precision import as_real, upcast_for_sum
from optax_muonplus.matrices._shape_factor import ShapeScale
from optax_muonplus.polar._methods import DEFAULT_EPS, Polar, PolarFunction, Preconditioning
from optax_muonplus.transforms._apply import apply_to_matrices, check_function, check_inexact
from optax_muonplus.transforms._steps import (
    dual_norm_step,
    normalize_step,
    orthogonalize_step,
    rounded_on_arrival,
    scale_step,
)


class MomentumState(NamedTuple):
    """State of :func:`momentum`.

    Attributes:
      mu: one buffer for each parameter, of its shape.
      count: number of updates so far, for bias correction; None without it.
    """

    mu: optax.Updates
    count: Any


def find_momentum(state: Any) -> MomentumState:
    """The momentum in an optimizer's state, wherever it is.

    Args:
      state: of any transformation that :func:`momentum` is a part of, such as
        ``optax_muonplus.muonplus``, alone or in a chain.

    Returns:
      The one :class:`MomentumState` in it. Its ``mu`` has ``optax.MaskedNode`` where a parameter is
      not a matrix.

    Raises:
      ValueError: unless there is exactly one.
    """

    def is_momentum(x: Any) -> bool:
        return isinstance(x, MomentumState)

    found = [x for x in jax.tree.leaves(state, is_leaf=is_momentum) if is_momentum(x)]
    if len(found) != 1:
        raise ValueError(
            f"Got a state with {len(found)} momentum states, but one is looked for. Pass the state"
            " of an optimizer made by optax_muonplus, or the part of the state that holds the one"
            " you mean."
        )
    return found[0]


def momentum(
    beta: Any = 0.95,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    r"""Exponential moving average of the gradients.

    .. math::
      M_t = \beta M_{t-1} + (1 - \beta) G_t

    and hands on :math:`M_t`, or :math:`\beta M_t + (1 - \beta) G_t` with ``nesterov``.

    Args:
      beta: decay, in [0, 1).
      nesterov: whether to look one step ahead. Off in the paper, on in its published code.
      bias_correction: divides by what the zero start left out: :math:`M_t` by
        :math:`1-\beta^t`; with ``nesterov`` :math:`M_t` by :math:`1-\beta^{t+1}` and :math:`G_t` by
        :math:`1-\beta^t` (Dozat 2016), as ``optax.contrib.muon`` does. A polar factor sees it with
        ``nesterov`` only, where it changes the mixture.
      mu_dtype: dtype of the buffer; None means the parameter's. Sums are in float32 at least.

    Returns:
      A transformation with :class:`MomentumState`. Updates leave in the dtype of the sums, at least
      float32.

    Raises:
      ValueError: if ``beta`` is a Python number outside [0, 1), or at init for integer parameters.

    Source: Zhang et al., arXiv:2602.21545, equation 1.
    """
    check_decay("beta", beta)
    mu_dtype = None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype)

    def init_fn(params: optax.Params) -> Any:
        check_inexact(params)
        _check_mu_dtype(params, mu_dtype)
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MomentumState(mu, jnp.zeros([], jnp.int32) if bias_correction else None)

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        grads = jax.tree.map(upcast_for_sum, updates)
        mu = jax.tree.map(lambda m, g: _mix(m, g, beta), state.mu, grads)
        count = None if state.count is None else optax.safe_increment(state.count)
        ahead, now = mu, grads
        if count is not None:
            ahead = optax.tree.bias_correction(mu, beta, count + 1 if nesterov else count)
            now = optax.tree.bias_correction(grads, beta, count)
        direction = jax.tree.map(lambda m, g: _mix(m, g, beta), ahead, now) if nesterov else ahead
        stored = jax.tree.map(lambda m, old: m.astype(old.dtype), mu, state.mu)
        return direction, MomentumState(stored, count)

    return optax.GradientTransformation(init_fn, update_fn)


def check_decay(name: str, beta: Any) -> None:
    """Raises ValueError unless ``beta`` can be the decay of a running mean."""
    if callable(beta):
        raise ValueError(
            f"{name} must be a number, got the function {beta!r}. Only learning rates take"
            " schedules directly; optax.inject_hyperparams makes one of any other number."
        )
    if isinstance(beta, int | float) and not 0 <= beta < 1:
        raise ValueError(f"{name} must be in [0, 1), got {beta}.")


def _check_mu_dtype(params: optax.Params, mu_dtype: Any) -> None:
    """A real buffer would drop the imaginary parts of a complex parameter's momentum."""
    if mu_dtype is None or jnp.issubdtype(mu_dtype, jnp.complexfloating):
        return
    if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"mu_dtype={mu_dtype} cannot hold the momentum of complex parameters. Leave it None, or"
            " treat them in a group of their own."
        )


def _mix(m: jax.Array, g: jax.Array, beta: Any) -> jax.Array:
    """``beta m + (1 - beta) g`` in the wider of their dtypes, whatever that of ``beta``."""
    dtype = jnp.promote_types(m.dtype, g.dtype)
    weight = as_real(beta, jnp.finfo(dtype).dtype)
    return weight * m.astype(dtype) + (1 - weight) * g.astype(dtype)


def orthogonalize(
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    eps: Any = DEFAULT_EPS,
    *,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: Any = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformation:
    """Replaces every matrix by its polar factor, exact or approximate.

    Args:
      ns_coeffs: see :func:`optax_muonplus.polar.newton_schulz`, as for the next four.
      ns_steps: number of Newton-Schulz steps.
      eps: added to the norm that divides.
      polar: ``"auto"``, ``"newton_schulz"``, ``"gram"``, ``"svd"``, or a function
        ``(*batch, out, in) -> (*batch, out, in)``.
      preconditioning: ``"frobenius"``, ``"spectral"``, ``"aol"``, ``"aol_out"`` or ``"schatten"``.
      compute_dtype: dtype of the operands of matrix products.
      weight_dimension_numbers: tree, prefix tree or function of the updates; None means the default
        rules by path. Every leaf must be a matrix.
      sharding: as in :func:`optax_muonplus.muonplus`.

    Raises:
      ValueError: for unknown words and too few rows when built, for leaves that are not matrices at
        init.
    """
    function = orthogonalize_step(polar, ns_coeffs, ns_steps, eps, preconditioning, compute_dtype)
    moved_as = rounded_on_arrival(polar, compute_dtype)
    return lift([function], weight_dimension_numbers, sharding, moved_as=moved_as)


def normalize(
    norm: Norm = "col_row",
    norm_eps: Any = 1e-8,
    *,
    match_frobenius: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformation:
    """Divides the rows, the columns, or one after the other, of every matrix by their norms.

    Args:
      norm: ``"none"``, ``"col"``, ``"row"``, ``"col_row"`` (columns first) or ``"row_col"``.
      norm_eps: inside the root, see :func:`optax_muonplus.normalization.normalize_matrix`.
      match_frobenius: whether to restore each matrix's Frobenius norm afterwards.
      weight_dimension_numbers: as in :func:`orthogonalize`.
      sharding: as in :func:`orthogonalize`.
    """
    function = normalize_step(norm, norm_eps, match_frobenius)
    return lift([function], weight_dimension_numbers, sharding)


def scale_by_shape(
    shape_scale: ShapeScale = "spectral",
    consistent_rms: Any = None,
    *,
    norm: Norm = "none",
    match_frobenius: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformation:
    """Multiplies every matrix by a factor of its shape.

    Args:
      shape_scale: ``"spectral"`` sqrt(out/in), ``"max"`` sqrt(max(1, out/in)) or ``"none"``.
      consistent_rms: if given, the factor instead gives updates this root mean square.
      norm: the normalization that came before, which ``consistent_rms`` has to know.
      match_frobenius: whether that restored the Frobenius norm, likewise.
      weight_dimension_numbers: as in :func:`orthogonalize`.
      sharding: as in :func:`orthogonalize`.

    See :func:`optax_muonplus.shape_factor.shape_factor` for the equations.
    """
    function = scale_step(shape_scale, consistent_rms, norm, match_frobenius)
    return lift([function], weight_dimension_numbers, sharding)


def scale_by_muonplus(
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    beta: Any = 0.95,
    eps: Any = DEFAULT_EPS,
    mu_dtype: Any = None,
    *,
    norm: Norm = "col_row",
    norm_eps: Any = 1e-8,
    match_frobenius: bool = False,
    shape_scale: ShapeScale = "spectral",
    consistent_rms: Any = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    adaptive: bool = False,
    compute_dtype: Any = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformation:
    r"""The matrix part of Muon+: no learning rate, no weight decay, no partition.

    .. math::
      M_t = \beta M_{t-1} + (1-\beta) G_t, \qquad
      O_t = \mathrm{Norm}(\mathrm{Ortho}(M_t)), \qquad \text{update} = \sqrt{m/n}\, O_t

    The same as ``optax.chain(momentum(...), orthogonalize(...), normalize(...),
    scale_by_shape(...))``, with the last three done in one visit to each matrix, and one move there
    and back where it lies in shards. Arguments are those of the links and of
    :func:`optax_muonplus.muonplus`. Updates leave in the gradients' dtype.

    Source: Zhang et al., arXiv:2602.21545, equation 2 and Algorithm 1.
    """
    polar_step = orthogonalize_step(polar, ns_coeffs, ns_steps, eps, preconditioning, compute_dtype)
    norm_step = normalize_step(norm, norm_eps, match_frobenius)
    shape_step = scale_step(shape_scale, consistent_rms, norm, match_frobenius)
    steps = [polar_step, norm_step, shape_step]
    if adaptive:
        steps = [dual_norm_step(polar_step, norm_step), shape_step]
    first = momentum(beta, nesterov=nesterov, bias_correction=bias_correction, mu_dtype=mu_dtype)
    moved_as = rounded_on_arrival(polar, compute_dtype)
    then = lift(steps, weight_dimension_numbers, sharding, moved_as=moved_as)

    def init_fn(params: optax.Params) -> Any:
        first_state, then_state = first.init(params), then.init(params)
        return settle(first_state, params, sharding), then_state

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        moments, first_state = first.update(updates, state[0], params)
        done, then_state = then.update(moments, state[1], params, like=updates)
        return done, (first_state, then_state)

    return optax.GradientTransformation(init_fn, update_fn)


def lift(
    functions: Sequence[MatrixFunction],
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    *,
    moved_as: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """A stateless transformation that applies functions to every matrix of the updates.

    Args:
      functions: shape-preserving, applied one after the other in one visit to each matrix.
      weight_dimension_numbers: as in :func:`orthogonalize`.
      sharding: as in :func:`optax_muonplus.muonplus`.
      moved_as: dtype in which sharded matrices travel to the device that works on them, if it is
        narrower than theirs and has its exponents.

    Its ``update`` takes an extra argument ``like``, updates whose dtypes its results shall have.
    """

    def init_fn(params: optax.Params) -> Any:
        check_function(functions, params, weight_dimension_numbers)
        check_sharding(params, sharding)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        like: optax.Updates | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        done = apply_to_matrices(
            functions,
            updates,
            weight_dimension_numbers,
            sharding=sharding,
            moved_as=moved_as,
            like=like,
        )
        return done, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def settled(
    inner: optax.GradientTransformation, sharding: ShardingTree
) -> optax.GradientTransformation:
    """``inner``, with the state that it makes for each parameter sharded as ``sharding`` says."""

    def init_fn(params: optax.Params) -> Any:
        check_sharding(params, sharding)
        return settle(inner.init(params), params, sharding)

    return optax.GradientTransformation(init_fn, inner.update)
