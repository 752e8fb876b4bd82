"""How functions are run on the matrices of a tree: on one device in batches, on a mesh by a plan.

``batches``, ``stacks`` and ``local`` are for one device. On a mesh ``schedule``, ``routes`` and
``planning`` decide what travels where, before anything is traced. ``exchange`` and ``sharded`` then
move the shards and do the work.
"""

from optax_muonplus.run.batches import READ_ONE as READ_ONE
from optax_muonplus.run.batches import Read as Read
from optax_muonplus.run.batches import dtypes_of as dtypes_of
from optax_muonplus.run.local import apply_local as apply_local
from optax_muonplus.run.loops import Sources as Sources
from optax_muonplus.run.loops import pick as pick
from optax_muonplus.run.planning import Member as Member
from optax_muonplus.run.planning import plan as plan
from optax_muonplus.run.replicas import gather as gather
from optax_muonplus.run.replicas import moved_to as moved_to
from optax_muonplus.run.sharded import apply_sharded as apply_sharded
