"""What users compose: the links of Muon+ as Optax transformations, and what is made of them.

``links`` has the four links, ``matrix_chain`` joins them, and ``optimizer`` makes a whole optimizer
of a chain. ``where`` says which parameters are matrices.
"""
