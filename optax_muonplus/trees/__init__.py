"""Facts about a tree of parameters: paths, which leaves are matrices and how, where they lie.

``resolve`` makes the records. ``reader`` decides what each leaf is: by the user's rules, by the
class of its module (``modules``), or by the ``table``, which ``language`` and ``neighbours``
explain. ``stacks`` finds axes of layers, and ``suggestions`` writes the lines that are missing.
"""

from optax_muonplus.trees.flatten import FlatTree as FlatTree
from optax_muonplus.trees.flatten import broadcast_prefix as broadcast_prefix
from optax_muonplus.trees.flatten import normalize_paths as normalize_paths
from optax_muonplus.trees.given import LayerAxes as LayerAxes
from optax_muonplus.trees.given import Rules as Rules
from optax_muonplus.trees.given import check_pattern as check_pattern
from optax_muonplus.trees.given import checked_layer_axes as checked_layer_axes
from optax_muonplus.trees.given import checked_rules as checked_rules
from optax_muonplus.trees.given import refuse_keystr as refuse_keystr
from optax_muonplus.trees.reader import RuleReader as RuleReader
from optax_muonplus.trees.reader import muon_dimension_numbers as muon_dimension_numbers
from optax_muonplus.trees.reader import reader_of as reader_of
from optax_muonplus.trees.resolve import TreeResolver as TreeResolver
from optax_muonplus.trees.resolve import resolve as resolve
from optax_muonplus.trees.sharding import ShardingTree as ShardingTree
from optax_muonplus.trees.sharding import checked_sharding as checked_sharding
from optax_muonplus.trees.sharding import given_shardings as given_shardings
from optax_muonplus.trees.sharding import leaf_sharding as leaf_sharding
from optax_muonplus.trees.sharding import mirrored as mirrored
from optax_muonplus.trees.sharding import shardings_of as shardings_of
from optax_muonplus.trees.suggestions import rules_for_adamw as rules_for_adamw
from optax_muonplus.trees.suggestions import suggest_rules as suggest_rules
