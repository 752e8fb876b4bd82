"""The same numbers as ``_chain.plain``, fast.

Read ``apply`` first: it chooses. One device: ``local``, ``stacks``, ``batches``, ``loops``. The
polar factor: ``polar``, ``iteration``, ``products``. A mesh: ``plan``, ``mesh``, ``replicas``.
"""
