"""The momentum that users write: in numbers of any floating-point dtype, or in eight bits."""

import numpy as np

from optax_muonplus._chain.momentum import NUMBERS, PlainMomentum, Storage


class Momentum(PlainMomentum):
    """A part of a chain; its attributes are the arguments of :func:`optax_muonplus.momentum`."""

    other_dtype = "int8"

    @property
    def storage(self) -> Storage:
        if self.dtype != np.int8:
            return NUMBERS
        from optax_muonplus.int8 import STORAGE  # imported only when used

        return STORAGE
