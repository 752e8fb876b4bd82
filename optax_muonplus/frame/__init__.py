"""How a parameter is a batch of matrices, and chains of links on trees of them.

Read ``plainly`` first: it says what a chain does to the matrices of a tree. ``layout`` says which
axes of a parameter make them, and ``chain`` joins links. ``momentum`` and ``fused`` are links,
and ``leaves`` has a record of each parameter.
``checks`` refuses gradients that do not fit.
"""
