"""How a parameter is a batch of matrices, and chains of links on trees of them.

Read ``plainly`` first: it says what a chain does to the matrices of a tree. ``layout`` says which
axes of a parameter make them, and ``chain`` joins links. ``momentum`` and ``fused`` are links,
and ``leaves`` has a record of each parameter.
``checks`` refuses gradients that do not fit.
"""

from optax_muonplus.frame.chain import Chain as Chain
from optax_muonplus.frame.chain import ChainTransformation as ChainTransformation
from optax_muonplus.frame.chain import Link as Link
from optax_muonplus.frame.chain import MatrixTransformation as MatrixTransformation
from optax_muonplus.frame.chain import Part as Part
from optax_muonplus.frame.chain import Resolver as Resolver
from optax_muonplus.frame.chain import Scaling as Scaling
from optax_muonplus.frame.chain import TreeTransformation as TreeTransformation
from optax_muonplus.frame.chain import links_of as links_of
from optax_muonplus.frame.chain import matrix_chain as matrix_chain
from optax_muonplus.frame.checks import beside_updates as beside_updates
from optax_muonplus.frame.checks import check_gradients as check_gradients
from optax_muonplus.frame.fused import FusedLink as FusedLink
from optax_muonplus.frame.layout import AxisNumbers as AxisNumbers
from optax_muonplus.frame.layout import DimensionNumbers as DimensionNumbers
from optax_muonplus.frame.layout import DimensionNumbersTree as DimensionNumbersTree
from optax_muonplus.frame.layout import MatrixLayout as MatrixLayout
from optax_muonplus.frame.layout import MatrixSpec as MatrixSpec
from optax_muonplus.frame.layout import MuonDimensionNumbers as MuonDimensionNumbers
from optax_muonplus.frame.layout import Shape as Shape
from optax_muonplus.frame.leaves import ADAM as ADAM
from optax_muonplus.frame.leaves import GIVEN as GIVEN
from optax_muonplus.frame.leaves import MUON as MUON
from optax_muonplus.frame.leaves import UNKNOWN as UNKNOWN
from optax_muonplus.frame.leaves import LeafInfo as LeafInfo
from optax_muonplus.frame.leaves import LeafSharding as LeafSharding
from optax_muonplus.frame.leaves import ResolvedTree as ResolvedTree
from optax_muonplus.frame.leaves import as_named as as_named
from optax_muonplus.frame.leaves import axes_of_type as axes_of_type
from optax_muonplus.frame.leaves import usable_axes as usable_axes
from optax_muonplus.frame.leaves import varying_axes as varying_axes
from optax_muonplus.frame.momentum import Buffer as Buffer
from optax_muonplus.frame.momentum import Momentum as Momentum
from optax_muonplus.frame.momentum import MomentumState as MomentumState
from optax_muonplus.frame.momentum import MomentumTransformation as MomentumTransformation
from optax_muonplus.frame.momentum import Storage as Storage
from optax_muonplus.frame.momentum import buffers_of as buffers_of
from optax_muonplus.frame.momentum import state_of as state_of
from optax_muonplus.frame.operand import Operand as Operand
from optax_muonplus.frame.plainly import Run as Run
from optax_muonplus.frame.plainly import plainly as plainly
from optax_muonplus.frame.program import DualNorm as DualNorm
from optax_muonplus.frame.program import Program as Program
