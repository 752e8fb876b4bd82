"""The links of Muon+ as Optax transformations."""

from optax_muonplus._execution.stacks import STACK_BYTES as STACK_BYTES
from optax_muonplus.transforms._links import apply_to_matrices as apply_to_matrices
from optax_muonplus.transforms._links import normalize as normalize
from optax_muonplus.transforms._links import orthogonalize as orthogonalize
from optax_muonplus.transforms._links import scale_by_muonplus as scale_by_muonplus
from optax_muonplus.transforms._links import scale_by_shape as scale_by_shape
from optax_muonplus.transforms._momentum import MomentumState as MomentumState
from optax_muonplus.transforms._momentum import find_momentum as find_momentum
from optax_muonplus.transforms._momentum import momentum as momentum
