"""Polar factors of matrices: functions on arrays ``(*batch, out, in)``.

For ``M = U S V^H`` the polar factor is ``U V^H``, the semi-orthogonal matrix closest to ``M``. The
result is the same for ``c * M`` with any positive number ``c``, and a zero matrix gives zeros. Each
matrix is first divided by a power of two near its largest entry, which keeps it in range.

:class:`Orthogonalize` holds all choices. Called, it computes the definition; :func:`polar_factor`
and optimizers compute it by :class:`FastPolar`.
"""

from optax_muonplus._core.newton_schulz import svd as svd
from optax_muonplus._core.orthogonalize import Orthogonalize as Orthogonalize
from optax_muonplus._core.orthogonalize import Polar as Polar
from optax_muonplus._execution.polar.fast import FastPolar as FastPolar
from optax_muonplus._execution.polar.fast import polar_factor as polar_factor

__all__ = sorted(name for name in dir() if not name.startswith("_"))
