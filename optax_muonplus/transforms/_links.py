"""The links of Muon+ as Optax transformations, and the chain of them that an optimizer uses.

Each link computes in float32 at least. The updates of :func:`momentum` are not rounded to the dtype
of the gradients; those of the other links have the dtype of their input.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.matrices._matrix_function import ArrayFunction, MatrixFunction, compose
from optax_muonplus.matrices._normalization import Norm, Normalize
from optax_muonplus.matrices._shape_factor import ScaleByShape, ShapeScale
from optax_muonplus.polar._newton_schulz import Preconditioning
from optax_muonplus.polar._options import DEFAULT_EPS, Polar, PolarFunction
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import (
    MatrixTransformation,
    apply_to_sources,
    check_function,
    for_matrices,
    matrix_link,
)
from optax_muonplus.transforms._momentum import Momentum
from optax_muonplus.transforms._steps import Times, momentum_divisor, muonplus_steps


def orthogonalize(
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    eps: ArrayLike = DEFAULT_EPS,
    *,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """Replaces every matrix by its polar factor, exact or approximate.

    Args:
      ns_coeffs: see :func:`optax_muonplus.polar.newton_schulz`, as for all up to the kernel.
      ns_steps: number of Newton-Schulz steps.
      eps: added to the norm that divides.
      polar: ``"auto"``, ``"newton_schulz"``, ``"gram"``, ``"svd"``, or a function
        ``(*batch, out, in) -> (*batch, out, in)``.
      preconditioning: ``"frobenius"``, ``"spectral"``, ``"aol"``, ``"aol_out"`` or ``"schatten"``.
      compute_dtype: dtype of the operands of matrix products.
      symmetric_kernel: whether Hopper GPUs compute symmetric products as one triangle.
      weight_dimension_numbers: tree, prefix tree or function of the updates; None means the default
        rules by path. Every leaf must be a matrix.
      sharding: as in :func:`optax_muonplus.muonplus`.

    Raises:
      ValueError: when built, for unknown options and too few rows; at init, for leaves that are not
        matrices.
    """
    polar_factor = Orthogonalize(
        ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype, symmetric_kernel
    )

    link = functools.partial(matrix_link, [polar_factor])
    return for_matrices(link, weight_dimension_numbers, sharding)


def normalize(
    norm: Norm = "col_row",
    norm_eps: ArrayLike = 1e-8,
    *,
    match_frobenius: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """Divides the rows, the columns, or one after the other, of every matrix by their norms.

    Args:
      norm: ``"none"``, ``"col"``, ``"row"``, ``"col_row"`` (columns first) or ``"row_col"``.
      norm_eps: inside the root, see :func:`optax_muonplus.matrices.normalize_matrix`.
      match_frobenius: whether to restore each matrix's Frobenius norm afterwards.
      weight_dimension_numbers: as in :func:`orthogonalize`.
      sharding: as in :func:`orthogonalize`.
    """
    step = Normalize(norm, norm_eps, match_frobenius)
    return for_matrices(functools.partial(matrix_link, [step]), weight_dimension_numbers, sharding)


def scale_by_shape(
    shape_scale: ShapeScale = "spectral",
    consistent_rms: float | jax.Array | None = None,
    *,
    norm: Norm = "none",
    match_frobenius: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """Multiplies every matrix by a factor of its shape.

    Args:
      shape_scale: ``"spectral"`` sqrt(out/in), ``"max"`` sqrt(max(1, out/in)) or ``"none"``.
      consistent_rms: if given, the factor instead gives updates this root mean square.
      norm: the normalization that came before, which ``consistent_rms`` has to know.
      match_frobenius: whether that restored the Frobenius norm, likewise.
      weight_dimension_numbers: as in :func:`orthogonalize`.
      sharding: as in :func:`orthogonalize`.

    See :func:`optax_muonplus.matrices.shape_factor` for the equations.
    """
    step = ScaleByShape(shape_scale, consistent_rms, norm, match_frobenius)
    return for_matrices(functools.partial(matrix_link, [step]), weight_dimension_numbers, sharding)


def apply_to_matrices(
    functions: Sequence[MatrixFunction | Callable[[jax.Array], jax.Array]],
    *,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """Applies functions of your own, one after the other, to every matrix.

    They see whole matrices, grouped by shape and moved where they lie in shards, as those of the
    other links do. A new variant of Muon needs no more than such a function, and a chain.

    Args:
      functions: shape-preserving functions on arrays ``(batch, out, in)``, or
        :class:`optax_muonplus.matrices.MatrixFunction`, which saves the copies of transposing
        matrices that are stored as (in, out).
      weight_dimension_numbers: as in :func:`orthogonalize`.
      sharding: as in :func:`orthogonalize`.

    Raises:
      ValueError: at init, if a function changes the shape.

    Example:
      >>> import jax, jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.transforms.apply_to_matrices([jnp.sign])
      >>> grads = {"dense": {"kernel": jnp.full((2, 3), -0.5)}}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> float(updates["dense"]["kernel"][0, 0])
      -1.0
    """
    steps = [f if isinstance(f, MatrixFunction) else ArrayFunction(f) for f in functions]
    if not steps:
        raise ValueError("apply_to_matrices needs one function at least, got none.")
    return for_matrices(functools.partial(matrix_link, steps), weight_dimension_numbers, sharding)


def scale_by_muonplus(
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = DEFAULT_EPS,
    mu_dtype: DTypeLike | None = None,
    *,
    norm: Norm = "col_row",
    norm_eps: ArrayLike = 1e-8,
    match_frobenius: bool = False,
    shape_scale: ShapeScale = "spectral",
    consistent_rms: float | jax.Array | None = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    adaptive: bool = False,
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    r"""The matrix part of Muon+: no learning rate, no weight decay, no partition.

    .. math::
      M_t = \beta M_{t-1} + (1-\beta) G_t, \qquad
      O_t = \mathrm{Norm}(\mathrm{Ortho}(\beta M_t + (1-\beta) G_t)), \qquad
      \text{update} = \sqrt{m/n}\, O_t

    With ``nesterov=False`` the polar factor is that of :math:`M_t`. The same as
    ``optax.chain(momentum(...), orthogonalize(...), normalize(...), scale_by_shape(...))``, but
    each matrix is read and written once, and a sharded matrix is sent to the device that works on
    it only once. Arguments are those of the links and of :func:`optax_muonplus.muonplus`. Updates
    have the gradients' dtype.

    Source: Zhang et al., arXiv:2602.21545, equation 2 and Algorithm 1.
    """
    polar_factor = Orthogonalize(
        ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype, symmetric_kernel
    )
    divisor = momentum_divisor(polar, bias_correction)
    steps = muonplus_steps(
        polar_factor,
        Normalize(norm, norm_eps, match_frobenius),
        ScaleByShape(shape_scale, consistent_rms, norm, match_frobenius),
        adaptive,
        divisor,
    )
    average = Momentum(beta, nesterov, bias_correction, mu_dtype, divisor)

    def make(leaves: Sequence[LeafInfo], factor: Any = None) -> optax.GradientTransformation:
        return momentum_then(average, steps if factor is None else [*steps, Times(factor)], leaves)

    return for_matrices(make, weight_dimension_numbers, sharding, takes_factor=True)


def momentum_then(
    average: Momentum, steps: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]
) -> optax.GradientTransformation:
    """Momentum, then ``steps`` of each matrix, which is made where it is read.

    The state is that of ``optax.chain(momentum(...), apply_to_matrices(steps))``.
    """

    def init_fn(params: optax.Params) -> Any:
        check_function(steps, leaves)
        return average.init(params), optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        mu, nothing = state
        mu, read, sources = average.advance(updates, mu, compose(steps).input_dtype)
        results = apply_to_sources(steps, read, sources, leaves)
        return jax.tree.structure(updates).unflatten(results), (mu, nothing)

    return optax.GradientTransformation(init_fn, update_fn)
