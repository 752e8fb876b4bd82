r"""Products whose result is symmetric, of which a Hopper GPU computes one triangle.

:math:`X X^T`, :math:`R^2` and each product of commuting symmetric matrices need half of the work of
other products. cuBLAS has no such product in half precision; the kernel is in
:mod:`benchmarks.symmetric_kernel.kernel`.

It is used where JAX has one device, a GPU of compute capability 9.0: XLA cannot partition it. On
all other machines the plain product stands in its place.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

DTYPES = ("bfloat16", "float16")
CAPABILITY = "9.0"
FIRST_JAX = (0, 11)  # whose Mosaic GPU the kernel is written in
# Others measured that such kernels are slower than cuBLAS on sides up to 512
# (NVIDIA Emerging-Optimizers), and 0.9 to 1.6 times as fast from 1024 to 4096 (flash-muon, H800).
SMALLEST_SIDE = 512


class Tiling(NamedTuple):
    """How the kernel of :func:`benchmarks.symmetric_kernel.symmetric_product` cuts its work.

    The defaults are by arithmetic; others were not measured. In each step a cluster multiplies
    256 x 256 x 64, for which it fetches 64 KB; without a cluster that is 96 KB, for which the L2
    cache of an H100 would have to give 7.6 TB/s at 650 TFLOP/s. Four slots of 48 KB and the buffers
    for results take 224 of the 227 KB of shared memory.

    Attributes:
      rows: sides of the parts in which a result is stored; a block has four times as many rows. 64
        on a GPU, which multiplies so many rows in one instruction.
      depth: columns of the operands that are multiplied in one step, 64 at least on a GPU.
      steps: how many steps are in shared memory at once.
      cluster: how many thread blocks share what they fetch, 1 or 2.
    """

    rows: int = 64
    depth: int = 64
    steps: int = 4
    cluster: int = 2

    @property
    def block(self) -> int:
        """Rows and columns of the blocks that a result is cut into."""
        return 4 * self.rows


def symmetric_product(
    a: jax.Array,
    b: jax.Array,
    addend: jax.Array | None = None,
    coefficients: jax.Array | None = None,
    *,
    tiling: Tiling = Tiling(),  # noqa: B008, it is immutable
) -> jax.Array:
    r"""Computes the symmetric matrix :math:`\alpha A B^T + \beta C + \gamma I`, or :math:`A B^T`.

    The caller promises that :math:`A B^T` is symmetric: B is A, or both are symmetric and commute.
    On a Hopper GPU with JAX 0.11 one triangle is then computed and mirrored, and the result is
    symmetric in every bit. Elsewhere, and for sides that are no multiple of the tiling's, it is the
    plain product. Sums and the combination are in float32; the kernel rounds once, the plain path
    the product too.

    The kernel was interpreted on a CPU, and ran on one H200 for one shape (benchmarks/README.md).

    Args:
      a: ``(*batch, n, k)``, bfloat16 or float16.
      b: of the same shape and dtype.
      addend: C, ``(*batch, n, n)`` of the same dtype, symmetric.
      coefficients: :math:`(\alpha, \beta, \gamma)` for each matrix, ``(*batch, 3)`` in float32.
      tiling: how the kernel cuts its work.

    Returns:
      ``(*batch, n, n)`` in the dtype of the operands.

    Raises:
      ValueError: for other dtypes, for shapes that do not fit, and for C without coefficients or
        coefficients without C.
    """
    combination: tuple[jax.Array, ...] = ()
    if addend is not None and coefficients is not None:
        combination = (addend, coefficients.astype(jnp.float32))
    elif addend is not None or coefficients is not None:
        raise ValueError("symmetric_product needs both addend and coefficients, or neither.")
    *batch, n, _ = a.shape
    wanted = (a.shape, a.shape, (*batch, n, n), (*batch, 3))
    shapes = tuple(x.shape for x in (a, b, *combination))
    if shapes != wanted[: len(shapes)]:
        raise ValueError(f"symmetric_product needs shapes {wanted}, got {shapes}.")
    dtypes = {x.dtype.name for x in (a, b, *combination[:1])}
    if len(dtypes) != 1 or not dtypes <= {*DTYPES}:
        raise ValueError(
            f"symmetric_product needs operands of one dtype, {' or '.join(DTYPES)}; got"
            f" {', '.join(sorted(dtypes))}."
        )
    return _once(tiling, multiprocessors(), a, b, *combination)


def multiprocessors() -> int | None:
    """Counts the multiprocessors of the only device; None if it cannot run the kernel."""
    device, *others = jax.devices()
    capable = getattr(device, "compute_capability", None) == CAPABILITY
    if others or not capable or jax.__version_info__ < FIRST_JAX:
        return None
    return device.core_count


def _plain(a: jax.Array, b: jax.Array, *combination: jax.Array) -> jax.Array:
    # A CPU would sum products of bfloat16 in bfloat16 in places: it multiplies in float32.
    b = jnp.swapaxes(b, -1, -2)
    result = jax.lax.platform_dependent(a, b, cpu=_in_float32, default=jnp.matmul)
    if not combination:
        return result
    addend, coefficients = combination
    alpha, beta, gamma = (coefficients[..., k, None, None] for k in range(3))
    identity = jnp.broadcast_to(jnp.eye(a.shape[-2], dtype=jnp.float32), result.shape)
    rest = gamma * identity + beta * addend.astype(jnp.float32)
    return _rounded(rest + alpha * result.astype(jnp.float32), a.dtype)


def _in_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    return _rounded(jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)), a.dtype)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds in a way that XLA does not undo."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))  # lowered once for all products of one shape
def _once(tiling: Tiling, multiprocessors: int | None, *operands: jax.Array) -> jax.Array:
    if not multiprocessors or not fits(operands[0].shape, tiling):
        return _plain(*operands)
    # Not imported with this module: older JAX lacks what it is written in.
    from benchmarks.symmetric_kernel import kernel

    batch = operands[0].shape[:-2]
    stacks = [x.reshape(-1, *x.shape[len(batch) :]) for x in operands]
    result = kernel.run(*stacks, tiling=tiling, multiprocessors=multiprocessors)
    return result.reshape(*batch, *result.shape[1:])


def fits(shape: Sequence[int], tiling: Tiling = Tiling()) -> bool:  # noqa: B008
    """Tells whether the kernel takes operands of that shape."""
    *batch, n, k = shape
    return bool(math.prod(batch) and n and k and n % tiling.block == 0 and k % tiling.depth == 0)


def padded_sides(height: int, width: int) -> tuple[int, int] | None:
    """Finds the sides that matrices are padded to for the kernel; None if it does not pay.

    It does not for a shorter side below 512, nor if padding it to a multiple of 256 adds more
    operations to a step of the iteration than the kernel saves.
    """
    tiling = Tiling()
    n, m = sorted((height, width))
    short, long = n + -n % tiling.block, m + -m % tiling.depth

    def operations(n: int, m: int, share: float) -> float:
        """Counts those of X X^T, R^2 and P X, over 2."""
        return share * (n * n * m + n**3) + n * n * m

    blocks = short // tiling.block
    share = (blocks + 1) / (2 * blocks)
    if n < SMALLEST_SIDE or operations(short, long, share) >= operations(n, m, 1):
        return None
    return (short, long) if height <= width else (long, short)
