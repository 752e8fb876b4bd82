"""Muon+ for JAX: Muon with one normalization step after the orthogonalization, for Optax."""

from optax_muonplus import baselines as baselines
from optax_muonplus import coefficients as coefficients
from optax_muonplus import diagnostics as diagnostics
from optax_muonplus import integrations as integrations
from optax_muonplus import matrices as matrices
from optax_muonplus import polar as polar
from optax_muonplus import transforms as transforms
from optax_muonplus._optimizers import TakenOver as TakenOver
from optax_muonplus._optimizers import describe as describe
from optax_muonplus._optimizers import muon as muon
from optax_muonplus._optimizers import muonplus as muonplus
from optax_muonplus._optimizers import take_over as take_over
from optax_muonplus._parameters import MatrixSpec as MatrixSpec
from optax_muonplus._parameters import MuonDimensionNumbers as MuonDimensionNumbers
from optax_muonplus._parameters import muon_dimension_numbers as muon_dimension_numbers
from optax_muonplus._parameters import partition_labels as partition_labels
from optax_muonplus._parameters import per_head as per_head
from optax_muonplus.transforms import matrix_chain as matrix_chain
from optax_muonplus.transforms import momentum as momentum
from optax_muonplus.transforms import normalize as normalize
from optax_muonplus.transforms import orthogonalize as orthogonalize
from optax_muonplus.transforms import scale_by_muonplus as scale_by_muonplus
from optax_muonplus.transforms import scale_by_shape as scale_by_shape

__version__ = "0.2.0"
__all__ = [name for name in dir() if not name.startswith("_")]


def __dir__() -> list[str]:
    return __all__
