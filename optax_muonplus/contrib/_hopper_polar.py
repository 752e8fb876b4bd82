r"""A polar function for Hopper GPUs, whose symmetric products compute one triangle.

A step of the iteration is three products, and two of them are symmetric:

.. math::
  R = X X^T, \qquad P = c_1 R + c_2 R^2, \qquad X \leftarrow c_0 X + P X

One kernel computes all three, written in Pallas for Mosaic GPU. Pipeline, clusters and order of
tiles are those of JAX's matrix product for Hopper
(``jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu``). Pallas is imported where it is used: not
every platform has it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from optax_muonplus import matrices
from optax_muonplus.polar import Orthogonalize, polar_factor

SHORTEST = 2048  # of short sides: below, kernels of others gain nothing or little
TILE = 128  # side of the block of a result that a warpgroup computes
DEPTH = 64  # of the tiles that a step of the pipeline loads: 128 bytes
STAGES = 3  # of 48 KiB each; the blocks of results take 64 of the 227 KiB
SNAKE = 4  # squares across a strip of the order of tiles


def hopper_polar(
    options: Orthogonalize = Orthogonalize(compute_dtype=jnp.bfloat16),
) -> Callable[[jax.Array], jax.Array]:
    r"""Returns a polar function for Hopper GPUs, whose symmetric products compute one triangle.

    It is for the ``polar`` of an optimizer or of :class:`~optax_muonplus.polar.Orthogonalize`::

      tx = omp.muonplus(0.02, polar=omp.contrib.hopper_polar())

    It maps matrices ``(*batch, out, in)`` to an array of the same shape and dtype: the polynomial
    of ``options`` in the plain iteration, up to rounding errors. Products have operands and results
    in bfloat16. Sums and linear combinations are in float32, and rounded once. Symmetric products
    are symmetric bit for bit. Sides are padded to multiples of 256.

    **Compiled and simulated, not timed:** JAX's interpreter finds the right numbers and no race,
    the compiler for an H100 spills no registers, and no GPU has run it. Compare time and loss of
    your own run with the plain iteration.

    It is :func:`~optax_muonplus.polar.polar_factor` with ``options`` in these cases:

    - devices other than Hopper GPUs, such as H100, H200 and GH200; JAX before 0.10.2;
    - short sides below 2,048, and matrices that are neither float32 nor bfloat16;
    - ``options`` other than ``compute_dtype="bfloat16"``, ``preconditioning="frobenius"``,
      ``polar`` ``"auto"`` or ``"newton_schulz"``, rows of three numbers and nothing traced;
    - derivatives.

    Under ``jax.vmap`` matrices make a stack. Inside ``jax.shard_map``, where optimizers with
    ``sharding=`` call it, the kernel works on local matrices. Elsewhere XLA gathers whole arrays
    on every device.

    Args:
      options: the polynomial. The optimizer's own ``ns_coeffs``, ``ns_steps``, ``eps``,
        ``preconditioning`` and ``compute_dtype`` have no effect.

    Raises:
      ValueError: if ``options.polar`` is a function.
    """
    if callable(options.polar):
        raise ValueError(
            f"options.polar is the function {options.polar!r}, but hopper_polar runs the"
            ' Newton-Schulz iteration. Pass "auto" or "newton_schulz".'
        )
    plain = functools.partial(polar_factor, options=options)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(options)):
        return plain

    @jax.custom_batching.custom_vmap
    def of_stack(x: jax.Array) -> jax.Array:  # (batch, out, in)
        cores = cores_of_hopper()
        if cores is None or not is_eligible(x, options):
            return plain(x)
        kernel = functools.partial(iterate, options=options, cores=cores)
        return on_its_platform(kernel, plain, x)

    @of_stack.def_vmap
    def _(_size: int, _batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        return as_stack(of_stack, x), True

    @jax.custom_jvp
    def polar(x: jax.Array) -> jax.Array:
        return as_stack(of_stack, x)

    @polar.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(plain, primals, tangents)

    return polar


def as_stack(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Computes a function of ``(batch, out, in)`` on matrices ``(*batch, out, in)``."""
    return function(x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])).reshape(x.shape)


def is_eligible(x: jax.Array, options: Orthogonalize) -> bool:
    return (
        x.size > 0
        and min(x.shape[-2:]) >= SHORTEST
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and options.polar in ("auto", "newton_schulz")
        and options.compute_dtype == jnp.bfloat16
        and options.preconditioning == "frobenius"
        and all(len(row) == 3 for row in options.coefficients.rows)
    )


def cores_of_hopper() -> int | None:
    """Returns the number of multiprocessors of the device; None if it is not a Hopper GPU."""
    if jax.__version_info__ < (0, 10, 2):
        return None
    device: Any = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    if not re.search(r"\bG?H\d", device.device_kind):
        return None
    return device.num_cores if hasattr(device, "num_cores") else device.core_count


def on_its_platform(kernel: Any, plain: Any, x: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, cuda=kernel, default=plain)


@functools.partial(jax.jit, static_argnames=("options", "cores"))
def iterate(x: jax.Array, options: Orthogonalize, cores: int) -> jax.Array:
    """Runs the iteration on matrices ``(batch, out, in)``."""
    chosen = options.coefficients
    is_tall = x.shape[-2] > x.shape[-1]
    y, power = matrices.scale_by_pow2(matrices.upcast_for_sum(x))
    norm = matrices.root(matrices.sum_of_squares(y, (-2, -1)))
    eps = matrices.as_real(options.eps, norm.dtype) / power
    y = y / jnp.where(norm > 0, chosen.safety_factor * norm + eps, 1)
    y = (jnp.swapaxes(y, -1, -2) if is_tall else y).astype(jnp.bfloat16)
    n, m = y.shape[-2:]
    y = jnp.pad(y, ((0, 0), *((0, -side % (2 * TILE)) for side in (n, m))))
    for first, second, third in chosen.rows:
        gram = product(y, y, symmetric=True, cores=cores)
        p = product(gram, gram, gram, alpha=third, beta=second, symmetric=True, cores=cores)
        y = product(p, y, y, beta=first, cores=cores)
    # Zeros stay zeros anyway. Under jax.shard_map the results of a kernel lose the axes along which
    # they vary, and get them back from the norm.
    y = jnp.where(norm == 0, 0, y[:, :n, :m])
    return (jnp.swapaxes(y, -1, -2) if is_tall else y).astype(x.dtype)


# Equal products are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("alpha", "beta", "symmetric", "cores"))
def product(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    symmetric: bool = False,
    cores: int,
) -> jax.Array:
    r"""Returns :math:`\alpha A B + \beta C`, or :math:`\alpha A B^T + \beta C` if ``symmetric``.

    Of a symmetric result only the lower triangle is computed. Sides are multiples of two tiles.
    """
    columns = b.shape[-2] if symmetric else b.shape[-1]
    kernel = Product(*a.shape, columns, alpha, beta, symmetric)
    return kernel.launch(cores, a, b, *(() if c is None else (c,)))


@dataclasses.dataclass(frozen=True)
class Product:
    """The kernel: a pair of blocks in a cluster computes a square of two by two tiles.

    A block has one warpgroup for memory, and two that compute a tile each. Mirrored tiles are equal
    by construction. A tile on the diagonal of a symmetric result is symmetric because all of its
    entries are summed in one order.
    """

    batch: int
    rows: int
    depth: int
    columns: int
    alpha: float
    beta: float
    symmetric: bool

    def launch(self, cores: int, *operands: jax.Array) -> jax.Array:
        from jax.experimental.pallas import mosaic_gpu as gpu

        kernel = gpu.kernel(
            self.run,
            out_type=jax.ShapeDtypeStruct((self.batch, self.rows, self.columns), operands[0].dtype),
            grid=(min(cores // 2, self.batch * self.squares),),
            grid_names=("cluster",),
            cluster=(2,),
            cluster_names=("half",),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        )
        return kernel(*operands)

    @property
    def squares(self) -> int:
        """Counts the squares of a matrix, or those of its lower triangle."""
        rows, columns = self.rows // (2 * TILE), self.columns // (2 * TILE)
        return rows * (rows + 1) // 2 if self.symmetric else rows * columns

    def square(self, index: Any) -> tuple[Any, Any]:
        """Returns the row and the column of a square, in an order that reuses the L2 cache."""
        from jax.experimental.pallas import mosaic_gpu as gpu

        rows, columns = self.rows // (2 * TILE), self.columns // (2 * TILE)
        if not self.symmetric:
            return gpu.planar_snake(index, (rows, columns), 1, SNAKE)
        # The triangle is cut in two, and the part on the right turned by 180 degrees: it fills up
        # the other to a rectangle.
        even = 1 - rows % 2
        i, j = gpu.planar_snake(index, (rows + even, (rows + 1) // 2), 1, SNAKE)
        stays = i - even >= j
        return jnp.where(stays, i - even, rows - 1 - i), jnp.where(stays, j, rows - even - j)

    def run(self, a: Any, b: Any, *others: Any) -> None:
        """Computes the squares of one cluster, on references to global memory."""
        import jax.experimental.pallas as pl
        from jax.experimental.pallas import mosaic_gpu as gpu

        none: Any = lambda *_, **__: None  # noqa: E731

        @functools.partial(
            pl.run_scoped,
            tiles=self.pipeline(none, none).get_allocations(a.at[0], b.at[0]),
            blocks=gpu.SMEM((2, TILE, TILE), a.dtype, transforms=self.transforms),
            loaded=gpu.Barrier(num_barriers=2),
            collective_axes="warpgroup",
        )
        def _(tiles: Any, blocks: Any, loaded: Any) -> None:
            warpgroup = jax.lax.axis_index("warpgroup")

            @gpu.nd_loop((self.batch * self.squares,), collective_axes="cluster")
            def _(info: Any) -> None:
                (index,) = info.index
                matrix = jax.lax.div(index, self.squares)
                i, j = self.square(jax.lax.rem(index, self.squares))
                row, column = 2 * i + jax.lax.axis_index("half"), 2 * j + warpgroup
                local = blocks.at[warpgroup], loaded.at[warpgroup]
                result = functools.partial(
                    self.finish, row, column, [x.at[matrix] for x in others], *local
                )
                wide = pl.ds(pl.multiple_of(j * 2 * TILE, 2 * TILE), 2 * TILE)
                self.pipeline(self.multiply, result)(
                    a.at[matrix, at(row)],
                    b.at[matrix, wide] if self.symmetric else b.at[matrix, :, wide],
                    allocations=tiles,
                )

        gpu.wait_smem_to_gmem(0)

    @property
    def transforms(self) -> tuple[Any, Any]:
        from jax.experimental.pallas import mosaic_gpu as gpu

        return gpu.TilingTransform((8, DEPTH)), gpu.SwizzleTransform(2 * DEPTH)

    def pipeline(self, body: Any, context: Any) -> Any:
        """Loads the tiles of ``body``, a step of a sum, inside of ``context``."""
        from jax.experimental.pallas import mosaic_gpu as gpu

        spec = functools.partial(gpu.BlockSpec, transforms=self.transforms, memory_space=gpu.SMEM)
        # Both blocks of a cluster read the same columns: each loads a half, for both.
        shared = functools.partial(spec, collective_axes=("half",))
        return gpu.emit_pipeline_warp_specialized(
            body,
            grid=(self.depth // DEPTH,),
            in_specs=[
                spec((TILE, DEPTH), lambda k: (0, k)),
                shared((2 * TILE, DEPTH), lambda k: (0, k))
                if self.symmetric
                else shared((DEPTH, 2 * TILE), lambda k: (k, 0)),
            ],
            compute_context=context,
            max_concurrent_steps=STAGES,
            memory_registers=40,
            num_compute_wgs=2,
            wg_axis="warpgroup",
        )

    def multiply(self, _: Any, a: Any, b: Any, sums: Any) -> Any:
        """Adds the product of two tiles in shared memory."""
        from jax.experimental.pallas import mosaic_gpu as gpu

        half = at(jax.lax.axis_index("warpgroup"))
        gpu.wgmma(sums, a, b.at[half].transpose((1, 0)) if self.symmetric else b.at[:, half])
        gpu.wgmma_wait(0)
        return sums

    def finish(
        self, row: Any, column: Any, refs: Any, block: Any, loaded: Any, sum_up: Any
    ) -> None:
        """Sums a tile of the result, adds to it, and stores it and its mirror image."""
        import jax.experimental.pallas as pl
        from jax.experimental.pallas import mosaic_gpu as gpu

        *addend, out = refs

        def store(i: Any, j: Any) -> None:
            gpu.copy_smem_to_gmem(block, out.at[at(i), at(j)])

        gpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left the block
        for ref in addend:  # arrives while products are summed
            gpu.copy_gmem_to_smem(ref.at[at(row), at(column)], block, loaded)

        @functools.partial(pl.run_scoped, sums=gpu.ACC((TILE, TILE), jnp.float32))
        def _(sums: Any) -> None:
            sum_up(sums)
            total = self.alpha * sums[...]
            if addend:
                gpu.barrier_wait(loaded)
                total += self.beta * block[...].astype(jnp.float32)
            result = total.astype(block.dtype)
            block[...] = result
            gpu.commit_smem()
            if not self.symmetric:
                return store(row, column)
            # Tiles above the diagonal are mirror images of those below.
            pl.when(row >= column)(lambda: store(row, column))

            @pl.when(row > column)
            def _() -> None:
                gpu.wait_smem_to_gmem(0, wait_read_only=True)
                turned = gpu.layout_cast(result, gpu.Layout.WGMMA_TRANSPOSED)
                block.transpose((1, 0))[...] = turned
                gpu.commit_smem()
                store(column, row)


def at(index: Any) -> Any:
    """Returns the elements of a tile, by its number."""
    import jax.experimental.pallas as pl

    return pl.ds(pl.multiple_of(index * TILE, TILE), TILE)
