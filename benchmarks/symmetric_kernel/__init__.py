"""An experiment: symmetric products on a Hopper GPU as one triangle, half of the work.

:class:`OneTriangle` runs ``omp.polar.Orthogonalize`` with such products. It is a function on
matrices like any other::

  polar_factor = OneTriangle(omp.polar.Orthogonalize(compute_dtype="bfloat16"))
  steps = [polar_factor, omp.matrices.Normalize(), omp.matrices.ScaleByShape()]
  tx = optax.chain(omp.momentum(), omp.matrix_chain(steps))

The kernel was interpreted on a CPU, and ran on one H200, where 50 polar factors of a matrix (2048,
4096) were equal in every bit and took 0.94 of the plain one's time (benchmarks/README.md).
"""

from benchmarks.symmetric_kernel.orthogonalize import OneTriangle as OneTriangle
from benchmarks.symmetric_kernel.product import Tiling as Tiling
from benchmarks.symmetric_kernel.product import symmetric_product as symmetric_product
