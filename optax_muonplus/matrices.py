"""Functions on arrays of matrices ``(*batch, out, in)``: what Muon+ adds to a polar factor.

A row holds the weights of one output unit, a column those of one input feature.
"""

from optax_muonplus._core.arguments import DECAY as DECAY
from optax_muonplus._core.arguments import NOT_NEGATIVE as NOT_NEGATIVE
from optax_muonplus._core.arguments import POSITIVE as POSITIVE
from optax_muonplus._core.arguments import Kind as Kind
from optax_muonplus._core.arguments import check_flag as check_flag
from optax_muonplus._core.arguments import check_number as check_number
from optax_muonplus._core.arguments import check_word as check_word
from optax_muonplus._core.arguments import known_count as known_count
from optax_muonplus._core.function import Elementwise as Elementwise
from optax_muonplus._core.function import MatrixFunction as MatrixFunction
from optax_muonplus._core.function import matrix_function as matrix_function
from optax_muonplus._core.function import static as static
from optax_muonplus._core.normalize import Norm as Norm
from optax_muonplus._core.normalize import Normalize as Normalize
from optax_muonplus._core.precision import as_real as as_real
from optax_muonplus._core.precision import divide_by_pow2 as divide_by_pow2
from optax_muonplus._core.precision import root as root
from optax_muonplus._core.precision import scale_by_pow2 as scale_by_pow2
from optax_muonplus._core.precision import sum_of_squares as sum_of_squares
from optax_muonplus._core.precision import upcast_for_sum as upcast_for_sum
from optax_muonplus._core.scale import ScaleByShape as ScaleByShape
from optax_muonplus._core.scale import ShapeScale as ShapeScale

__all__ = sorted(name for name in dir() if not name.startswith("_"))
