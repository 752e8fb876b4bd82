"""The method of the paper on arrays ``(*batch, out, in)``. It imports no other room.

``newton_schulz`` defines the polar factor, and ``momentum`` has the whole update of a matrix. Its
functions are values with options, in ``orthogonalize``, ``normalize`` and ``scale``. Rows of the
iteration are in ``coefficients``; ``restarts`` is for its Gram form. ``function``, ``precision``
and ``arguments`` serve all of them.
"""

from .arguments import DECAY as DECAY
from .arguments import NOT_NEGATIVE as NOT_NEGATIVE
from .arguments import POSITIVE as POSITIVE
from .arguments import Kind as Kind
from .arguments import check_flag as check_flag
from .arguments import check_floating as check_floating
from .arguments import check_number as check_number
from .arguments import check_word as check_word
from .arguments import floating_dtype as floating_dtype
from .arguments import known_count as known_count
from .arguments import supported as supported
from .coefficients import TABLES as TABLES
from .coefficients import Coefficients as Coefficients
from .coefficients import CoefficientsLike as CoefficientsLike
from .coefficients import Row as Row
from .coefficients import Table as Table
from .coefficients import for_steps as for_steps
from .coefficients import scaled as scaled
from .function import ArrayFunction as ArrayFunction
from .function import Composition as Composition
from .function import Elementwise as Elementwise
from .function import Matrices as Matrices
from .function import MatrixFunction as MatrixFunction
from .function import ViaTranspose as ViaTranspose
from .function import adjoint as adjoint
from .function import compose as compose
from .function import matrix_function as matrix_function
from .function import static as static
from .momentum import look_ahead as look_ahead
from .momentum import moving_average as moving_average
from .momentum import muon_plus as muon_plus
from .newton_schulz import Preconditioning as Preconditioning
from .newton_schulz import newton_schulz as newton_schulz
from .newton_schulz import svd as svd
from .normalize import SUMMED_AXIS as SUMMED_AXIS
from .normalize import Norm as Norm
from .normalize import Normalize as Normalize
from .normalize import Side as Side
from .normalize import match_frobenius_norm as match_frobenius_norm
from .normalize import normalize_matrix as normalize_matrix
from .normalize import normalized_sides as normalized_sides
from .orthogonalize import DEFAULT_EPS as DEFAULT_EPS
from .orthogonalize import Orthogonalize as Orthogonalize
from .orthogonalize import Polar as Polar
from .orthogonalize import PolarFunction as PolarFunction
from .precision import accumulation_dtype as accumulation_dtype
from .precision import as_real as as_real
from .precision import divide_by_pow2 as divide_by_pow2
from .precision import holds_float32 as holds_float32
from .precision import narrowed as narrowed
from .precision import narrower as narrower
from .precision import product_dtype as product_dtype
from .precision import root as root
from .precision import scale_by_pow2 as scale_by_pow2
from .precision import sum_of_squares as sum_of_squares
from .precision import times_pow2 as times_pow2
from .precision import upcast_for_sum as upcast_for_sum
from .restarts import Restarts as Restarts
from .restarts import every_step as every_step
from .restarts import restarts_for as restarts_for
from .scale import ScaleByShape as ScaleByShape
from .scale import ShapeScale as ShapeScale
from .scale import check_shape_scale as check_shape_scale
from .scale import shape_factor as shape_factor
