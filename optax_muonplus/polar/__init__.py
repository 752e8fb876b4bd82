r"""Polar factors of matrices: functions on arrays ``(*batch, out, in)``.

For ``M = U S V^H`` the polar factor is ``U V^H``, the semi-orthogonal matrix closest to ``M``. The
result is the same for ``c * M`` with any positive number ``c``. A zero matrix gives zeros: each
matrix is divided by a power of two near its largest entry first, so that neither large nor small
matrices leave the range of their dtype.

:class:`Orthogonalize` is the one value that holds all choices, and is itself a function.
"""

from optax_muonplus.polar._methods import gram_newton_schulz as gram_newton_schulz
from optax_muonplus.polar._methods import newton_schulz as newton_schulz
from optax_muonplus.polar._newton_schulz import Preconditioning as Preconditioning
from optax_muonplus.polar._orthogonalize import DEFAULT_EPS as DEFAULT_EPS
from optax_muonplus.polar._orthogonalize import Orthogonalize as Orthogonalize
from optax_muonplus.polar._orthogonalize import Polar as Polar
from optax_muonplus.polar._orthogonalize import PolarFunction as PolarFunction
from optax_muonplus.polar._orthogonalize import matmul_shapes as matmul_shapes
from optax_muonplus.polar._products import Products as Products
from optax_muonplus.polar._svd import svd as svd
