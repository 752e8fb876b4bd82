"""Functions on arrays of matrices ``(*batch, out, in)``: what Muon+ adds to a polar factor.

A row holds the weights of one output unit, a column those of one input feature.
"""

from optax_muonplus.matrices._matrix_function import MatrixFunction as MatrixFunction
from optax_muonplus.matrices._matrix_function import matrix_function as matrix_function
from optax_muonplus.matrices._matrix_function import static as static
from optax_muonplus.matrices._normalization import Norm as Norm
from optax_muonplus.matrices._normalization import Normalize as Normalize
from optax_muonplus.matrices._normalization import Side as Side
from optax_muonplus.matrices._normalization import match_frobenius_norm as match_frobenius_norm
from optax_muonplus.matrices._normalization import normalize_matrix as normalize_matrix
from optax_muonplus.matrices._shape_factor import ScaleByShape as ScaleByShape
from optax_muonplus.matrices._shape_factor import ShapeScale as ShapeScale
from optax_muonplus.matrices._shape_factor import shape_factor as shape_factor
