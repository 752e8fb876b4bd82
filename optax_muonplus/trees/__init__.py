"""Facts about a tree of parameters: paths, which leaves are matrices and how, where they lie.

``resolve`` makes the records. ``reader`` decides what each leaf is: by the user's rules, by the
class of its module (``modules``), or by the ``table``, which ``language`` and ``neighbours``
explain. ``stacks`` finds axes of layers, and ``suggestions`` writes the lines that are missing.
"""
