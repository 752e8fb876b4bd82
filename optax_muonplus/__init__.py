"""Muon+ for JAX: Muon with one normalization step after the orthogonalization, for Optax."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from optax_muonplus import coefficients as coefficients
from optax_muonplus import matrices as matrices
from optax_muonplus import polar as polar
from optax_muonplus import rules as rules
from optax_muonplus._leaves.layout import MatrixSpec as MatrixSpec
from optax_muonplus._leaves.layout import MuonDimensionNumbers as MuonDimensionNumbers
from optax_muonplus._links.learning_rate import learning_rate as learning_rate
from optax_muonplus._links.links import momentum as momentum
from optax_muonplus._links.links import normalize as normalize
from optax_muonplus._links.links import orthogonalize as orthogonalize
from optax_muonplus._links.links import scale_by_muonplus as scale_by_muonplus
from optax_muonplus._links.links import scale_by_shape as scale_by_shape
from optax_muonplus._links.matrix_chain import matrix_chain as matrix_chain
from optax_muonplus._links.optimizer import optimizer as optimizer
from optax_muonplus._links.where import Matrices as Matrices
from optax_muonplus._links.where import partition_labels as partition_labels
from optax_muonplus._params.reader import muon_dimension_numbers as muon_dimension_numbers
from optax_muonplus.describe import describe as describe
from optax_muonplus.muonplus import PAPER as PAPER
from optax_muonplus.muonplus import muon as muon
from optax_muonplus.muonplus import muonplus as muonplus

__version__ = "0.3.0"
_LATER = ("contrib", "per_head", "take_over", "transforms")  # at first use
__all__ = sorted((*_LATER, *(name for name in dir() if not name.startswith("_"))))

if _TYPE_CHECKING:
    from optax_muonplus import contrib as contrib
    from optax_muonplus import transforms as transforms
    from optax_muonplus.convert import take_over as take_over
    from optax_muonplus.heads import per_head as per_head
else:  # with this function a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name == "contrib":
            import optax_muonplus.contrib as found
        elif name == "transforms":
            import optax_muonplus.transforms as found
        elif name == "per_head":
            from optax_muonplus.heads import per_head as found
        elif name == "take_over":
            from optax_muonplus.convert import take_over as found
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return __all__
