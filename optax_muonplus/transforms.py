"""For variants of your own and for tools: what chains are made of, and what their states hold.

Links and ``matrix_chain`` are at the top: ``optax_muonplus.momentum``.
"""

from optax_muonplus._chain.chain import MatrixTransformation as MatrixTransformation
from optax_muonplus._chain.chain import Part as Part
from optax_muonplus._chain.fused import FusedLink as FusedLink
from optax_muonplus._chain.link import Link as Link
from optax_muonplus._chain.momentum import MomentumState as MomentumState
from optax_muonplus._chain.plain import Run as Run
from optax_muonplus._chain.plain import run_plain as run_plain
from optax_muonplus._chain.program import DualNorm as DualNorm
from optax_muonplus._leaves.layout import MatrixLayout as MatrixLayout
from optax_muonplus._leaves.paths import flatten_tree as flatten_tree
from optax_muonplus._leaves.record import LeafInfo as LeafInfo
from optax_muonplus._links.blocks import map_blocks as map_blocks
from optax_muonplus._links.decay import check_rate as check_rate
from optax_muonplus._links.links import Momentum as Momentum
from optax_muonplus._links.partition import nadamw as nadamw
from optax_muonplus._params.attention import attention_layer as attention_layer
from optax_muonplus.bfloat16 import param_remainders as param_remainders
from optax_muonplus.int8 import Int8MomentumState as Int8MomentumState
from optax_muonplus.int8 import find_momentum as find_momentum
from optax_muonplus.zero1 import shard_state as shard_state
from optax_muonplus.zero1 import state_layout as state_layout

__all__ = sorted(name for name in dir() if not name.startswith("_"))
