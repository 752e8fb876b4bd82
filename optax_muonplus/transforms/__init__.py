"""The links of Muon+ as Optax transformations, and chains of them."""

from optax_muonplus.extras.bfloat16 import RemaindersState as RemaindersState
from optax_muonplus.extras.bfloat16 import param_remainders as param_remainders
from optax_muonplus.extras.int8 import Int8MomentumState as Int8MomentumState
from optax_muonplus.extras.int8 import find_momentum as find_momentum
from optax_muonplus.extras.int8 import stored_like as stored_like
from optax_muonplus.extras.int8 import widened as widened
from optax_muonplus.extras.qk_clip import qk_clip as qk_clip
from optax_muonplus.extras.zero1 import shard_state as shard_state
from optax_muonplus.extras.zero1 import state_layout as state_layout
from optax_muonplus.frame import DualNorm as DualNorm
from optax_muonplus.frame import FusedLink as FusedLink
from optax_muonplus.frame import LeafInfo as LeafInfo
from optax_muonplus.frame import Link as Link
from optax_muonplus.frame import MatrixLayout as MatrixLayout
from optax_muonplus.frame import MatrixTransformation as MatrixTransformation
from optax_muonplus.frame import Momentum as Momentum
from optax_muonplus.frame import MomentumState as MomentumState
from optax_muonplus.frame import Run as Run
from optax_muonplus.frame import links_of as links_of
from optax_muonplus.frame import plainly as plainly
from optax_muonplus.messages import flatten_tree as flatten_tree
from optax_muonplus.transforms._adamw import AdamW as AdamW
from optax_muonplus.transforms._blocks import map_blocks as map_blocks
from optax_muonplus.transforms._chains import matrix_chain as matrix_chain
from optax_muonplus.transforms._chains import partition_with_adamw as partition_with_adamw
from optax_muonplus.transforms._decay import add_decayed_weights as add_decayed_weights
from optax_muonplus.transforms._decay import scale_by_learning_rate as scale_by_learning_rate
from optax_muonplus.transforms._find import find_matrices as find_matrices
from optax_muonplus.transforms._links import apply_to_matrices as apply_to_matrices
from optax_muonplus.transforms._links import momentum as momentum
from optax_muonplus.transforms._links import normalize as normalize
from optax_muonplus.transforms._links import orthogonalize as orthogonalize
from optax_muonplus.transforms._links import scale_by_muonplus as scale_by_muonplus
from optax_muonplus.transforms._links import scale_by_shape as scale_by_shape
from optax_muonplus.transforms._optimizer import Rule as Rule
from optax_muonplus.transforms._optimizer import former_optimizer_of as _optimizer_of
from optax_muonplus.transforms._optimizer import optimizer as optimizer
from optax_muonplus.transforms._optimizer import takes_options as takes_options
from optax_muonplus.transforms._rules import check_rule as check_rule

# Names until version 0.2, kept in 0.3.
optimizer_of = _optimizer_of
MatrixView = MatrixLayout
Steps = FusedLink
