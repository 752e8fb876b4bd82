"""Links on trees: functions on matrices, applied to the matrices of a pytree.

Read ``plain`` first: what a chain means. ``record`` and ``layout`` say what a leaf is, ``chain``
calls the links, ``fused`` is the link of ``momentum`` and functions, and ``program`` compiles them.
"""
