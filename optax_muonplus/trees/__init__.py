"""Facts about a tree of parameters: paths, which leaves are matrices and how, where they lie.

``leaves`` makes the records. ``reader`` decides what each leaf is: by the user's rules, by
``own_words`` of its layer, or by the table in ``rules``, which ``rule_words`` and ``neighbours``
explain. ``layer_axes`` knows axes of layers, and ``suggestions`` writes the lines that are missing.
"""

from optax_muonplus.trees.flat import FlatTree as FlatTree
from optax_muonplus.trees.flat import broadcast_prefix as broadcast_prefix
from optax_muonplus.trees.flat import names_to_read as names_to_read
from optax_muonplus.trees.leaves import TreeResolver as TreeResolver
from optax_muonplus.trees.leaves import resolve as resolve
from optax_muonplus.trees.reader import RuleReader as RuleReader
from optax_muonplus.trees.reader import muon_dimension_numbers as muon_dimension_numbers
from optax_muonplus.trees.reader import reader_of as reader_of
from optax_muonplus.trees.sharding import ShardingTree as ShardingTree
from optax_muonplus.trees.sharding import checked_sharding as checked_sharding
from optax_muonplus.trees.sharding import given_shardings as given_shardings
from optax_muonplus.trees.sharding import leaf_sharding as leaf_sharding
from optax_muonplus.trees.sharding import mirrored as mirrored
from optax_muonplus.trees.sharding import shardings_of as shardings_of
from optax_muonplus.trees.suggestions import to_adamw as to_adamw
from optax_muonplus.trees.suggestions import what_to_write as what_to_write
from optax_muonplus.trees.user_rules import LayerAxes as LayerAxes
from optax_muonplus.trees.user_rules import Rules as Rules
from optax_muonplus.trees.user_rules import check_pattern as check_pattern
from optax_muonplus.trees.user_rules import checked_layer_axes as checked_layer_axes
from optax_muonplus.trees.user_rules import checked_rules as checked_rules
from optax_muonplus.trees.user_rules import refuse_keystr as refuse_keystr
