"""The links of Muon+ as Optax transformations, and chains of them."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from optax_muonplus._chain.chain import MatrixTransformation as MatrixTransformation
from optax_muonplus._chain.chain import Part as Part
from optax_muonplus._chain.chain import links_of as links_of
from optax_muonplus._chain.fused import FusedLink as FusedLink
from optax_muonplus._chain.layout import MatrixLayout as MatrixLayout
from optax_muonplus._chain.momentum import Momentum as Momentum
from optax_muonplus._chain.momentum import MomentumState as MomentumState
from optax_muonplus._chain.paths import flatten_tree as flatten_tree
from optax_muonplus._chain.plain import Run as Run
from optax_muonplus._chain.plain import run_plain as run_plain
from optax_muonplus._chain.program import DualNorm as DualNorm
from optax_muonplus._chain.record import LeafInfo as LeafInfo
from optax_muonplus.transforms._blocks import map_blocks as map_blocks
from optax_muonplus.transforms._decay import check_rate as check_rate
from optax_muonplus.transforms._links import momentum as momentum
from optax_muonplus.transforms._links import normalize as normalize
from optax_muonplus.transforms._links import orthogonalize as orthogonalize
from optax_muonplus.transforms._links import scale_by_muonplus as scale_by_muonplus
from optax_muonplus.transforms._links import scale_by_shape as scale_by_shape
from optax_muonplus.transforms._matrix_chain import matrix_chain as matrix_chain
from optax_muonplus.transforms._optimizer import optimizer as optimizer
from optax_muonplus.transforms._partition import nadamw as nadamw
from optax_muonplus.transforms._where import Matrices as Matrices
from optax_muonplus.transforms._where import partition_labels as partition_labels

# Files of rare use, which their first use imports.
_LATER = {
    "param_remainders": "bfloat16",
    "Int8MomentumState": "int8",
    "find_momentum": "int8",
    "shard_state": "zero1",
    "state_layout": "zero1",
}

if _TYPE_CHECKING:
    from optax_muonplus.bfloat16 import param_remainders as param_remainders
    from optax_muonplus.int8 import Int8MomentumState as Int8MomentumState
    from optax_muonplus.int8 import find_momentum as find_momentum
    from optax_muonplus.zero1 import shard_state as shard_state
    from optax_muonplus.zero1 import state_layout as state_layout
else:  # a type checker would take every name for one of the module's

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f"optax_muonplus.{_LATER[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*_LATER, *globals()})
