"""How functions are run on the matrices of a tree: on one device in batches, on a mesh by a plan.

``products``, ``iteration`` and ``polar`` are the fast polar factor.
``local`` works on one device, with ``batches`` on a CPU and ``stacks`` on accelerators. On a mesh
``plan`` decides what travels where, before anything is traced; ``mesh`` then packs, works, returns.
"""

from optax_muonplus.run.leaves import efficiently as efficiently
from optax_muonplus.run.loops import PLATFORMS as PLATFORMS
from optax_muonplus.run.loops import Platform as Platform
from optax_muonplus.run.loops import on_its_platform as on_its_platform
from optax_muonplus.run.loops import platform_of as platform_of
from optax_muonplus.run.polar import FastPolar as FastPolar
from optax_muonplus.run.polar import for_platform as for_platform
from optax_muonplus.run.polar import matmul_shapes as matmul_shapes
from optax_muonplus.run.polar import polar_factor as polar_factor
from optax_muonplus.run.products import Products as Products
from optax_muonplus.run.products import part as part
from optax_muonplus.run.products import with_zeros as with_zeros
from optax_muonplus.run.replicas import added_axes as added_axes
from optax_muonplus.run.replicas import gather as gather
from optax_muonplus.run.replicas import moved_to as moved_to
from optax_muonplus.run.sharded_leaf import ShardedLeaf as ShardedLeaf
