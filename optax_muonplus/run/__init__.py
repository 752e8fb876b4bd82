"""How functions are run on the matrices of a tree: on one device in batches, on a mesh by a plan.

``products``, ``iteration`` and ``polar`` are the fast polar factor.
``local`` works on one device, with ``batches`` on a CPU and ``stacks`` on accelerators. On a mesh
``plan`` decides what travels where, before anything is traced; ``mesh`` then packs, works, returns.
"""
