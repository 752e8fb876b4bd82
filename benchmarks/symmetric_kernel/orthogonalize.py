"""The polar factor with the kernel for symmetric products."""

import jax
import jax.numpy as jnp

import optax_muonplus as omp
from benchmarks.symmetric_kernel.product import (
    DTYPES,
    FIRST_JAX,
    SMALLEST_SIDE,
    padded_sides,
    symmetric_product,
)


class TriangleProducts(omp.polar.Products):
    """Products of which the symmetric ones are computed as one triangle, where that pays."""

    def padded(self, y: jax.Array) -> jax.Array:
        """Adds zeros up to sides that the kernel takes."""
        sides = padded_sides(*y.shape[-2:])
        if sides is None:
            return super().padded(y)
        widths = [(0, n - side) for n, side in zip(sides, y.shape[-2:], strict=True)]
        return jnp.pad(y, [(0, 0)] * (y.ndim - 2) + widths)

    def gram(self, y: jax.Array) -> jax.Array:
        """Returns the Gram matrix of ``y``."""
        if not self._pays(min(y.shape[-2:])):
            return super().gram(y)
        rows = y if self.left else jnp.swapaxes(y, -1, -2)
        return symmetric_product(rows, rows)

    def commuting(self, a: jax.Array, b: jax.Array, exact: bool = False) -> jax.Array:
        """Multiplies two symmetric matrices that commute."""
        pays = self._pays(a.shape[-1]) and not exact
        return symmetric_product(a, b) if pays else super().commuting(a, b, exact)

    def polynomial(
        self, gram: jax.Array, row: tuple[float, ...] | jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """Combines three terms within the product, and rounds there."""
        one_number = scale is None or scale.shape[-2] == 1
        if not (self._pays(gram.shape[-1]) and len(row) == 3 and one_number):
            return super().polynomial(gram, row, scale)
        c = [row[2] / self.factor**4, row[1] / self.factor**2, row[0]]
        c = jnp.broadcast_to(jnp.asarray(c, self.dtype), (*gram.shape[:-2], 3))
        return symmetric_product(gram, gram, gram, c if scale is None else c * scale[..., 0])

    def _pays(self, side: int) -> bool:
        """Whether the kernel takes matrices of that side: it sums in float32."""
        return self.dtype == jnp.float32 and side >= SMALLEST_SIDE


@omp.matrices.matrix_function
class OneTriangle(omp.polar.FastPolar):
    """The polar factor, with :func:`symmetric_product` for two of three products."""

    products = TriangleProducts

    def __post_init__(self) -> None:
        """Raises ValueError where the kernel can have no effect."""
        options = self.options
        if not options.is_iteration:
            raise ValueError(
                "OneTriangle is for the products of Newton-Schulz iterations, which"
                f" polar={options.polar!r} does not have. Take Orthogonalize."
            )
        if options.output_dtype is None or options.output_dtype.name not in DTYPES:
            raise ValueError(
                f"OneTriangle needs products of half precision, got compute_dtype="
                f"{options.compute_dtype}. Pass compute_dtype={' or '.join(map(repr, DTYPES))}."
            )
        if jax.__version_info__ < FIRST_JAX:
            needed = ".".join(map(str, FIRST_JAX))
            raise ValueError(
                f"OneTriangle needs jax {needed} or newer, whose Mosaic GPU the kernel is written"
                f" in; this is {jax.__version__}. Take Orthogonalize."
            )
