r"""Polar factors of matrices: plain functions on arrays ``(*batch, out, in)``.

For ``M = U S V^H`` the polar factor is ``U V^H``, the semi-orthogonal matrix closest to ``M``. The
result is the same for ``c * M`` with any positive number ``c``. A zero matrix gives zeros.
"""

from optax_muonplus.polar._choice import matmul_shapes as matmul_shapes
from optax_muonplus.polar._methods import gram_newton_schulz as gram_newton_schulz
from optax_muonplus.polar._methods import newton_schulz as newton_schulz
from optax_muonplus.polar._methods import polar_function as polar_function
from optax_muonplus.polar._methods import svd as svd
from optax_muonplus.polar._orthogonalize import Orthogonalize as Orthogonalize
from optax_muonplus.polar._symmetric_product import symmetric_product as symmetric_product
from optax_muonplus.polar._tiling import Tiling as Tiling
