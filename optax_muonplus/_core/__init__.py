"""The paper's method on arrays ``(*batch, out, in)``. It imports no other folder.

``newton_schulz`` defines the polar factor; ``momentum`` has the whole update. Its three functions
are values with options, in ``orthogonalize``, ``normalize`` and ``scale``.
"""

from .momentum import muon_plus as muon_plus
