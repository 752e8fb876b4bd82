"""Muon+ for JAX: Muon with one normalization step after the orthogonalization, for Optax."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from optax_muonplus import coefficients as coefficients
from optax_muonplus import matrices as matrices
from optax_muonplus import polar as polar
from optax_muonplus import rules as rules
from optax_muonplus import transforms as transforms
from optax_muonplus.describe import describe as describe
from optax_muonplus.frame.layout import MatrixSpec as MatrixSpec
from optax_muonplus.frame.layout import MuonDimensionNumbers as MuonDimensionNumbers
from optax_muonplus.muonplus import PAPER as PAPER
from optax_muonplus.muonplus import muon as muon
from optax_muonplus.muonplus import muonplus as muonplus
from optax_muonplus.transforms import Matrices as Matrices
from optax_muonplus.transforms import matrix_chain as matrix_chain
from optax_muonplus.transforms import momentum as momentum
from optax_muonplus.transforms import normalize as normalize
from optax_muonplus.transforms import optimizer as optimizer
from optax_muonplus.transforms import orthogonalize as orthogonalize
from optax_muonplus.transforms import partition_labels as partition_labels
from optax_muonplus.transforms import scale_by_muonplus as scale_by_muonplus
from optax_muonplus.transforms import scale_by_shape as scale_by_shape
from optax_muonplus.trees.reader import muon_dimension_numbers as muon_dimension_numbers

__version__ = "0.3.0.dev0"
# Their first use imports them: a room, or a function of a file.
_LATER = {
    "contrib": "contrib",
    "learning_rate": "extras.rates",
    "per_head": "heads",
    "take_over": "extras.take_over",
}
# To be read, not imported.
_ROOMS = {"extras", "frame", "heads", "messages", "method", "run", "trees"}
__all__ = sorted({*_LATER, *(name for name in dir() if not name.startswith("_"))} - _ROOMS)

if _TYPE_CHECKING:
    from optax_muonplus import contrib as contrib
    from optax_muonplus.extras.rates import learning_rate as learning_rate
    from optax_muonplus.extras.take_over import take_over as take_over
    from optax_muonplus.heads import per_head as per_head
else:  # a type checker would take every name for one of the module's

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f"{__name__}.{_LATER[name]}")
        return module if name == _LATER[name] else globals().setdefault(name, vars(module)[name])


def __dir__() -> list[str]:
    return __all__
