"""Chains of links, which apply functions to the matrices of a pytree. Read ``plain`` first.

``chain`` calls the links, ``fused`` is the link of a ``momentum`` and its functions, and
``program`` adapts the functions to those before them.
"""
