"""Muon+ and Muon: a chain of links for matrices, and AdamW for all other parameters."""

from __future__ import annotations  # help() prints types as they are written here

import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._chain.program import DualNorm
from optax_muonplus._core.arguments import check_flag
from optax_muonplus._core.coefficients import CoefficientsLike
from optax_muonplus._core.newton_schulz import Preconditioning
from optax_muonplus._core.normalize import Norm, Normalize
from optax_muonplus._core.orthogonalize import DEFAULT_EPS, Orthogonalize, Polar, PolarFunction
from optax_muonplus._core.scale import ScaleByShape, ShapeScale
from optax_muonplus._leaves.layout import DimensionNumbers, DimensionNumbersTree
from optax_muonplus._links.decay import check_rate, decay_weights, scale_by_rate
from optax_muonplus._links.links import Momentum
from optax_muonplus._links.matrix_chain import matrix_chain
from optax_muonplus._links.partition import nadamw, partition
from optax_muonplus._links.where import Matrices
from optax_muonplus._params.patterns import LayerAxes, Rules
from optax_muonplus._params.sharding import ShardingTree

# The default of the paper and its code, K1seki221/MuonPlus @8a9ace1. Weight decays and AdamW's
# moment decays are the code's.
PAPER: Mapping[str, Any] = types.MappingProxyType(
    {
        "norm": "col_row",
        "shape_scale": "spectral",
        "match_frobenius": False,
        "weight_decay": 0.1,
        "adam_nesterov": False,
        "adam_b1": 0.95,
        "adam_b2": 0.95,
        "adam_weight_decay": 0.1,
    }
)

# AdamW's arguments by default and in PAPER, which are allowed beside ``others``.
_ADAM = (0.9, 0.999, 0.0, True, 0.0, None), (0.95, 0.95, 0.0, False, 0.1, None)


def muonplus(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array | None = None,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = DEFAULT_EPS,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    norm: Norm = "row_col",
    norm_eps: ArrayLike = 1e-8,
    match_frobenius: bool = True,
    shape_scale: ShapeScale = "max",
    consistent_rms: float | jax.Array | None = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    adaptive: bool = False,
    cautious_weight_decay: bool = False,
    compute_dtype: DTypeLike | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_nesterov: bool = True,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
    muon_weight_dimension_numbers: DimensionNumbersTree = (),
    sharding: ShardingTree = (),
    state_sharding: str | Sequence[str] | None = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon+: Muon with one normalization step after the orthogonalization.

    For each matrix W of shape (m, n) = (out, in), with gradient G, learning rate :math:`\eta` and
    decay :math:`\lambda`:

    .. math::
      M_t = \beta M_{t-1} + (1 - \beta) G_t, \qquad
      O_t = \mathrm{Norm}(\mathrm{Ortho}(\beta M_t + (1 - \beta) G_t)), \qquad
      W_t = W_{t-1} - \eta \left( \sqrt{\max(1, m/n)}\; O_t + \lambda W_{t-1} \right)

    All other parameters (embeddings, heads, norms, biases) get AdamW with Nesterov's step, or
    ``others``. ``describe(params)`` shows which group each parameter is in. The update of a matrix
    has the Frobenius norm of Optax's Muon: keep its learning rates. ``**optax_muonplus.PAPER`` is
    the paper's form. Numbers may be Python, NumPy or JAX scalars; traced ones are not checked.

    Args:
      learning_rate: of all parameters; not negative, number or schedule, of the order of 0.01.

        **Matrices**
      ns_coeffs: ``"jordan"``, ``"you"``, ``"polar_express"``, ``"dion"``, ``"cubic"`` (fewer
        products), one row of coefficients, or several.
      ns_steps: Newton-Schulz steps, from 1 to 100; for several rows their number. None means 5.
      beta: momentum decay, in [0, 1).
      eps: not negative; added to the norm that divides the momentum before the iteration.
      weight_decay: decoupled, not negative, number or schedule; multiplied by the learning rate,
        not by the shape factor.
      weight_decay_mask: as in ``optax.add_decayed_weights``; no effect without a decay.
      mu_dtype: dtype of the momentum; None means the parameter's. ``"int8"`` takes 1.02 bytes per
        element. If it is given, a state of another dtype is an error.
      norm: ``"none"`` (Muon), ``"col"``, ``"row"`` (a row has the weights of one output unit),
        ``"col_row"`` (columns, then rows), ``"row_col"`` or ``"long"`` (the longer side). The side
        named last ends with equal norms.
      norm_eps: not negative; inside the root of row and column norms.
      match_frobenius: restores the Frobenius norm from before the normalization.
      shape_scale: ``"spectral"`` sqrt(m/n), ``"max"`` sqrt(max(1, m/n)) or ``"none"``.
      consistent_rms: positive; the root mean square (RMS) of an update at learning rate 1. It
        replaces ``shape_scale`` and ``match_frobenius``. 0.2 is the RMS of AdamW, so both groups
        can have one learning rate of AdamW's size. With a ``norm`` it is exact, unless rows or
        columns are zero. Without one (``"none"``, or ``"long"`` of a square matrix), and with
        ``adaptive``, it holds for an exact polar factor, as in Optax; five Jordan steps have 0.7
        to 1.1 of it.
      nesterov: whether the momentum looks one step ahead, see :func:`optax_muonplus.momentum`.
      bias_correction: whether the momentum is corrected for its start at zero, see there.
      polar: ``"newton_schulz"``, ``"gram"`` (the same polynomial on the Gram matrix), ``"svd"``, a
        function of one matrix ``(m, n) -> (m, n)``, or ``"auto"``: the cheaper of the first two
        where both are exact enough.
      preconditioning: the norm that divides the momentum before the iteration: ``"frobenius"``,
        ``"spectral"``, ``"aol"`` or ``"schatten"``.
      adaptive: multiplies each update by its inner product with the momentum, the dual norm.
      cautious_weight_decay: decays only entries that the update moves towards zero.
      compute_dtype: dtype of the matrix products; sums are in float32 at least. None is bfloat16 on
        GPUs and TPUs, for parameters of float32 and bfloat16 and unless
        ``jax_default_matmul_precision`` is set; otherwise the momentum's, float32 at least.

        **Other parameters**
      adam_b1: decay of AdamW's first moment, in [0, 1).
      adam_b2: decay of AdamW's second moment, in [0, 1).
      adam_eps_root: not negative; AdamW's epsilon inside the root.
      adam_nesterov: whether AdamW looks one step ahead (NAdamW), as in Optax's Muon.
      adam_weight_decay: number or schedule; ``optax.adamw`` has 1e-4 by default.
      adam_learning_rate: number or schedule; None means ``learning_rate``. A number stays constant
        even if ``learning_rate`` is a schedule.
      others: any Optax transformation in place of AdamW, such as ``optax.lion(1e-3)``. Arguments of
        AdamW are then an error, except for those in ``PAPER``, which have no effect.

        **Layout**
      muon_weight_dimension_numbers: which parameters are matrices, and their axes: a tree or prefix
        tree of ``optax.contrib.MuonDimensionNumbers``, ``MatrixSpec`` and None (``others``), or a
        function from the parameters to one, such as :func:`optax_muonplus.per_head`. None means
        the default rules, :func:`optax_muonplus.muon_dimension_numbers`.
      rules: ``[(pattern, dimension numbers or None), ...]``, before the default rules. A pattern is
        a regular expression, searched in paths such as ``blocks/0/attn/query/kernel``. The first
        one found decides, and one that matches nothing is an error.
      layer_axes: ``{pattern: axis}`` for stacked layers: ``{"layers": 0}`` under ``nn.scan``, 1 in
        MaxText. Rules see the shape of one layer.

        **Mesh**
      sharding: shardings of the parameters: a tree or prefix tree of ``jax.sharding.NamedSharding``
        on one mesh (None where it is not known), or a function from the parameters to one. Each
        matrix then moves once to a device that works on it whole, and once back. Without it the
        compiler moves matrices at every iteration, except on Explicit axes.
      state_sharding: mesh axis, or several, over which the state is sharded too (ZeRO-1).

    Returns:
      A transformation for the whole parameter tree. Its state has one momentum buffer for each
      matrix, and the state of ``others``. An update has the dtype that its gradient and parameter
      promote to. Without decay ``update`` needs no parameters, except under
      ``optax.inject_hyperparams``, where a decay of 0 is an array.

    Raises:
      ValueError: when built, for unknown options, too few or divergent coefficients, dtypes that
        are not floating-point of at least 16 bits, numbers out of range or not finite, and AdamW's
        arguments beside ``others``. At init, for dimension numbers that do not fit, leaves of three
        or more axes that no rule fits, and integer parameters. At an update, for gradients with
        another shape than their parameter, integer gradients, complex ones of a real parameter,
        and the state of another optimizer. At both, for an array that may be one shard of a matrix
        inside ``jax.shard_map``. The message has paths and remedies.

    Under ``optax.inject_hyperparams`` put functions, ``ns_steps``, and dtypes that are not strings
    into ``static_args``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = omp.muonplus(0.02)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)

    Source: Zhang et al., *Muon+: Towards More Effective Muon via One Additional Normalization Step
    for LLM Pre-training*, arXiv:2602.21545.
    """
    check_flag("adaptive", adaptive)
    check_rate(learning_rate, weight_decay)
    if isinstance(eps, jax.Array):  # by optax.inject_hyperparams, which also calls functions
        _check_not_called("muon_weight_dimension_numbers", muon_weight_dimension_numbers)
        _check_not_called("sharding", sharding)
    placed = sharding = sharding or None
    if state_sharding is not None:
        from optax_muonplus import zero1  # imported only when used

        placed = zero1.state_layout(sharding, state_sharding)
    adam = adam_b1, adam_b2, adam_eps_root, adam_nesterov, adam_weight_decay
    if others is None:
        others = nadamw(learning_rate if adam_learning_rate is None else adam_learning_rate, *adam)
    elif not any(all(map(_is_default, (*adam, adam_learning_rate), x)) for x in _ADAM):
        raise ValueError("Arguments of AdamW would change nothing beside others=. Give them there.")
    matrices = matrix_chain(
        Momentum(beta, nesterov, bias_correction, mu_dtype),
        Orthogonalize(ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype),
        Normalize(norm, norm_eps, match_frobenius),
        *([DualNorm()] if adaptive else []),
        ScaleByShape(shape_scale, consistent_rms),
        decay_weights(weight_decay, weight_decay_mask, cautious_weight_decay),
        scale_by_rate(learning_rate),
        where=Matrices(rules, layer_axes, muon_weight_dimension_numbers or None, placed),
    )
    made = partition(matrices, others)
    return made if state_sharding is None else zero1.shard_state(made, sharding, state_sharding)


def _check_not_called(name: str, tree: Any) -> None:
    """Raises ValueError if ``tree`` seems to be the result of a function called with a count."""
    # None is an error too: the default is ().
    if isinstance(tree, DimensionNumbers | SingleDeviceSharding | None):
        raise ValueError(
            f"{name} is {tree}. If you gave a function, optax.inject_hyperparams called it with the"
            f" step count: add static_args=({name!r},). Otherwise give an entry for each parameter,"
            " or leave it out."
        )


def _is_default(value: Any, default: Any) -> bool:
    return isinstance(value, jax.Array) or value == default  # injected numbers are arrays


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array | None = None,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = DEFAULT_EPS,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    shape_scale: ShapeScale = "max",
    consistent_rms: float | jax.Array | None = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    adaptive: bool = False,
    cautious_weight_decay: bool = False,
    compute_dtype: DTypeLike | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_nesterov: bool = True,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    others: optax.GradientTransformation | None = None,
    muon_weight_dimension_numbers: DimensionNumbersTree = (),
    sharding: ShardingTree = (),
    state_sharding: str | Sequence[str] | None = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon: :func:`muonplus` without normalization; all other arguments are the same.

    With ``bias_correction=True`` the update is equal to that of ``optax.contrib.muon``. The Muon+
    paper's baseline has ``shape_scale="spectral", adam_nesterov=False``.

    Source: Jordan et al., *Muon*, https://kellerjordan.github.io/posts/muon/ (2024).
    """
    return muonplus(norm="none", **locals())
