"""Functions on arrays of matrices ``(*batch, out, in)``: what Muon+ adds to a polar factor.

A row holds the weights of one output unit, a column those of one input feature.
"""

from optax_muonplus.matrices._dataclass import matrix_function as matrix_function
from optax_muonplus.matrices._dataclass import static as static
from optax_muonplus.matrices._machine import MACHINES as MACHINES
from optax_muonplus.matrices._machine import Machine as Machine
from optax_muonplus.matrices._machine import machine_of as machine_of
from optax_muonplus.matrices._machine import on_its_machine as on_its_machine
from optax_muonplus.matrices._matrix_function import ArrayFunction as ArrayFunction
from optax_muonplus.matrices._matrix_function import Composition as Composition
from optax_muonplus.matrices._matrix_function import Elementwise as Elementwise
from optax_muonplus.matrices._matrix_function import MatrixFunction as MatrixFunction
from optax_muonplus.matrices._matrix_function import compose as compose
from optax_muonplus.matrices._matrix_function import for_layout as for_layout
from optax_muonplus.matrices._matrix_function import part as part
from optax_muonplus.matrices._matrix_function import with_zeros as with_zeros
from optax_muonplus.matrices._normalization import SUMMED_AXIS as SUMMED_AXIS
from optax_muonplus.matrices._normalization import Norm as Norm
from optax_muonplus.matrices._normalization import Normalize as Normalize
from optax_muonplus.matrices._normalization import Side as Side
from optax_muonplus.matrices._normalization import match_frobenius_norm as match_frobenius_norm
from optax_muonplus.matrices._normalization import normalize_matrix as normalize_matrix
from optax_muonplus.matrices._normalization import normalized_sides as normalized_sides
from optax_muonplus.matrices._normalization import rows_vary_more as rows_vary_more
from optax_muonplus.matrices._precision import accumulation_dtype as accumulation_dtype
from optax_muonplus.matrices._precision import as_real as as_real
from optax_muonplus.matrices._precision import divide_by_pow2 as divide_by_pow2
from optax_muonplus.matrices._precision import narrowed as narrowed
from optax_muonplus.matrices._precision import narrower as narrower
from optax_muonplus.matrices._precision import root as root
from optax_muonplus.matrices._precision import scale_by_pow2 as scale_by_pow2
from optax_muonplus.matrices._precision import sum_of_squares as sum_of_squares
from optax_muonplus.matrices._precision import times_pow2 as times_pow2
from optax_muonplus.matrices._precision import upcast_for_sum as upcast_for_sum
from optax_muonplus.matrices._shape_factor import ScaleByShape as ScaleByShape
from optax_muonplus.matrices._shape_factor import ShapeScale as ShapeScale
from optax_muonplus.matrices._shape_factor import check_shape_scale as check_shape_scale
from optax_muonplus.matrices._shape_factor import shape_factor as shape_factor
