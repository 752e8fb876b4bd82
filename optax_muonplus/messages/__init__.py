"""What messages say of trees: the paths of leaves, and states that do not fit."""

from optax_muonplus.messages.paths import VALUE as VALUE
from optax_muonplus.messages.paths import Path as Path
from optax_muonplus.messages.paths import flatten_tree as flatten_tree
from optax_muonplus.messages.paths import flatten_with_names as flatten_with_names
from optax_muonplus.messages.paths import fold as fold
from optax_muonplus.messages.paths import fold_all as fold_all
from optax_muonplus.messages.paths import is_hole as is_hole
from optax_muonplus.messages.paths import listed as listed
from optax_muonplus.messages.paths import path_name as path_name
from optax_muonplus.messages.paths import path_of_keys as path_of_keys
from optax_muonplus.messages.paths import without_numbers as without_numbers
from optax_muonplus.messages.states import check_leaves as check_leaves
from optax_muonplus.messages.states import check_state as check_state
from optax_muonplus.messages.states import wrong_state as wrong_state
