"""The numbers of ``frame.plain``, fast: on one device in batches, on a mesh by a plan.

``apply`` is the entry. ``products``, ``iteration`` and ``polar`` are the polar factor. ``local``
works on one device, with ``batches`` on a CPU and ``stacks`` on accelerators. On a mesh ``plan``
decides what travels where, before anything is traced; ``mesh`` then packs, works and returns.
"""
