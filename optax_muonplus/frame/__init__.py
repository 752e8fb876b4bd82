"""How a parameter is a batch of matrices, and chains of links on trees of them.

Read ``plain`` first: it says what a program does to the matrices of a tree. An update descends from
``chain.TreeTransformation`` to ``chain.Chain``, ``fused.FusedLink`` and ``momentum``, and on to the
function that runs the program: ``plain.plainly``, or ``run.apply.apply``. ``program`` decides what
runs of a chain's parts, and ``operand`` is an array that is computed where it is read. ``layout``
says which axes of a parameter make matrices, and ``record`` has a record of each parameter.
"""
