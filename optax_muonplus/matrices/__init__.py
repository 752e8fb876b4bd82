"""Functions on arrays of matrices ``(*batch, out, in)``: what Muon+ adds to a polar factor.

A row holds the weights of one output unit, a column those of one input feature.
"""

from optax_muonplus.method import DECAY as DECAY
from optax_muonplus.method import NOT_NEGATIVE as NOT_NEGATIVE
from optax_muonplus.method import POSITIVE as POSITIVE
from optax_muonplus.method import SUMMED_AXIS as SUMMED_AXIS
from optax_muonplus.method import Elementwise as Elementwise
from optax_muonplus.method import Kind as Kind
from optax_muonplus.method import MatrixFunction as MatrixFunction
from optax_muonplus.method import Norm as Norm
from optax_muonplus.method import Normalize as Normalize
from optax_muonplus.method import ScaleByShape as ScaleByShape
from optax_muonplus.method import ShapeScale as ShapeScale
from optax_muonplus.method import Side as Side
from optax_muonplus.method import as_real as as_real
from optax_muonplus.method import check_flag as check_flag
from optax_muonplus.method import check_floating as check_floating
from optax_muonplus.method import check_number as check_number
from optax_muonplus.method import check_shape_scale as check_shape_scale
from optax_muonplus.method import check_word as check_word
from optax_muonplus.method import divide_by_pow2 as divide_by_pow2
from optax_muonplus.method import known_count as known_count
from optax_muonplus.method import match_frobenius_norm as match_frobenius_norm
from optax_muonplus.method import matrix_function as matrix_function
from optax_muonplus.method import normalize_matrix as normalize_matrix
from optax_muonplus.method import normalized_sides as normalized_sides
from optax_muonplus.method import root as root
from optax_muonplus.method import scale_by_pow2 as scale_by_pow2
from optax_muonplus.method import shape_factor as shape_factor
from optax_muonplus.method import static as static
from optax_muonplus.method import sum_of_squares as sum_of_squares
from optax_muonplus.method import upcast_for_sum as upcast_for_sum
