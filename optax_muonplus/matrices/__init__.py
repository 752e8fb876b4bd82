"""Functions on arrays of matrices ``(*batch, out, in)``: what Muon+ adds to a polar factor.

A row holds the weights of one output unit, a column those of one input feature.
"""

from optax_muonplus.matrices._batching import STACK_BYTES as STACK_BYTES
from optax_muonplus.matrices._normalization import Norm as Norm
from optax_muonplus.matrices._normalization import Side as Side
from optax_muonplus.matrices._normalization import match_frobenius_norm as match_frobenius_norm
from optax_muonplus.matrices._normalization import normalize_matrix as normalize_matrix
from optax_muonplus.matrices._shape_factor import ShapeScale as ShapeScale
from optax_muonplus.matrices._shape_factor import shape_factor as shape_factor
