"""What users compose: the four links (``links``), ``matrix_chain`` and ``optimizer``.

``where`` decides which parameters are matrices.
"""
