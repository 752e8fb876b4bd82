"""The method of the paper on arrays ``(*batch, out, in)``. It imports no other folder.

``newton_schulz`` defines the polar factor, and ``momentum`` has the whole update of a matrix. Its
functions are values with options, in ``orthogonalize``, ``normalize`` and ``scale``. Tables of the
iteration are in ``coefficients``; ``function``, ``precision`` and ``arguments`` serve all of them.
"""

from .momentum import muon_plus as muon_plus
