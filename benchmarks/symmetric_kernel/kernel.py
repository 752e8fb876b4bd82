"""The kernel behind :mod:`benchmarks.symmetric_kernel.product`, for NVIDIA's Hopper.

It is written in JAX's Mosaic GPU, after JAX's own ``hopper_matmul_mgpu.py``. The result is cut into
square blocks of 256 rows, and only those on and below the diagonal are computed. Two thread blocks
form a cluster and take one half of a block each, 128 x 256. In each of them two warpgroups multiply
64 x 256 each, while a third one fetches operands. A result is stored in parts of 64 x 64, and each
part below the diagonal a second time, transposed, above it.

It was interpreted on a CPU, where JAX looks for races, and ran on one H200, where 50 results in
memory full of NaN were equal in every bit. What follows is why it should not race.

Operands. ``emit_pipeline_warp_specialized`` has two barriers for each slot of shared memory. The
first opens when all bytes of a slot have arrived, also those that the other thread block of the
cluster sends; the compute warpgroups wait for it before they multiply. At the second they arrive
when ``wgmma_wait(0)`` says that the tensor cores have read the slot. The fetching warpgroup waits
there before it fills the slot again; within a cluster, for the warpgroups of both thread blocks,
since it fills the slots of both. After each block of the result it waits for all arrivals. So the
next block finds all barriers in their first state, and no thread block ends while the other one
still writes to its memory.

Results. Each compute warpgroup has two buffers of its own, ``upright`` and ``mirrored``, that
nobody else uses. For each part:

1. ``wait_smem_to_gmem(0)`` before the buffers are written: the thread that started the stores of
   the last part waits until they have read the buffers, and the others wait for this thread.
2. Threads write their numbers. Mosaic puts a barrier of the warpgroup before and after each write
   to a buffer. On the diagonal threads then read what others have written to ``mirrored``.
3. ``commit_smem()``: each thread makes its writes visible to the copy engine, then waits for the
   others. Only then one thread starts the stores.

Branches depend on the position of the part alone, so that all threads of a warpgroup take the same
one and meet at the same barriers. Rows r and columns c are counted in parts. A part with r > c
writes (r, c) and (c, r), one with r = c writes (r, r), and one with r < c nothing: each element of
the result is written once. Nothing that the kernel writes is read by it. The stores are complete
when the kernel is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike

from benchmarks.symmetric_kernel.product import Tiling
from benchmarks.symmetric_kernel.store import PARTS, Buffers, Ref, store_parts, strip

_COMPUTE_WARPGROUPS = 2


def run(
    a: jax.Array,
    b: jax.Array,
    *combination: jax.Array,
    tiling: Tiling,
    multiprocessors: int,
    interpret: Any = None,
) -> jax.Array:
    """The lower triangle of ``alpha A B^T + beta C + gamma I``, mirrored.

    Args:
      a: ``(batch, n, k)``, with n a multiple of ``tiling.block`` and k of ``tiling.depth``.
      b: of the same shape.
      *combination: nothing, which means A B^T; or C ``(batch, n, n)`` and the coefficients
        ``(batch, 3)`` in float32.
      tiling: how the work is cut.
      multiprocessors: of the device.
      interpret: parameters of the interpreter, to run on a CPU.
    """
    batch, side, inner = a.shape
    product = _Product(tiling, batch, side // tiling.block, inner // tiling.depth, a.dtype)
    kernel = plgpu.kernel(
        product.kernel,
        out_type=jax.ShapeDtypeStruct((batch, side, side), a.dtype),
        grid=(min(product.items, multiprocessors // tiling.cluster),),
        grid_names=("clusters",),
        cluster=(tiling.cluster,),
        cluster_names=("cluster",),
        num_threads=_COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="symmetric_product",
        interpret=interpret,
    )
    return kernel(a, b, *combination)


class _Product(NamedTuple):
    """The kernel; the attributes are static.

    Attributes:
      tiling: how the work is cut.
      batch: number of matrices.
      blocks: blocks in a row of the result.
      steps: of the sum over the columns of the operands.
      dtype: of operands and result.
    """

    tiling: Tiling
    batch: int
    blocks: int
    steps: int
    dtype: jnp.dtype

    @property
    def tiles(self) -> int:
        """Blocks of one result on and below the diagonal."""
        return self.blocks * (self.blocks + 1) // 2

    @property
    def items(self) -> int:
        """What is shared out among the clusters: blocks, or their halves if there is no cluster."""
        return self.batch * self.tiles * (2 // self.tiling.cluster)

    def kernel(self, a: Ref, b: Ref, *rest: Ref) -> None:
        """What each warpgroup runs."""
        *combination, out = rest
        part = (self.tiling.rows, self.tiling.rows)
        buffer = plgpu.SMEM(
            (_COMPUTE_WARPGROUPS, *part), self.dtype, transforms=self._transforms(part[1])
        )

        def scope(slots: Any, upright: Ref, mirrored: Ref) -> None:
            buffers = Buffers(upright, mirrored)

            @plgpu.nd_loop((self.items,), collective_axes="clusters")
            def _(loop: plgpu.NDLoopInfo) -> None:
                (item,) = loop.index
                block, half = item, jax.lax.axis_index("cluster")
                if self.tiling.cluster == 1:
                    block, half = item // 2, item % 2
                matrix, tile = block // self.tiles, block % self.tiles
                row, column = fold(tile, self.blocks)
                operands = [ref.at[matrix] for ref in (a, b, *combination, out)]
                self._half_block(operands, PARTS * row + 2 * half, PARTS * column, slots, buffers)

        pl.run_scoped(
            scope,
            slots=self._pipeline(_nothing, _nothing).get_allocations(a.at[0], b.at[0]),
            upright=buffer,
            mirrored=buffer,
            collective_axes="warpgroup",
        )
        # Shared memory must not go before the last stores have read it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _half_block(
        self,
        operands: Sequence[Ref],
        row: jax.Array,
        column: jax.Array,
        slots: Any,
        buffers: Buffers,
    ) -> None:
        """Computes and stores 2 x 4 parts of one matrix, from ``(row, column)``, in parts."""
        a, b, *rest = operands
        height = self.tiling.rows
        warpgroup = jax.lax.axis_index("warpgroup")

        def step(_: Any, left: Ref, right: Ref, total: Ref) -> Ref:
            own = left.at[pl.ds(warpgroup * height, height)]
            plgpu.wgmma(total, own, right.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return total

        def compute(sum_up: Callable[[Ref], Any]) -> None:
            def scope(total: Ref) -> None:
                sum_up(total)
                store_parts(total[...], rest, row + warpgroup, column, buffers.of(warpgroup))

            pl.run_scoped(scope, total=plgpu.ACC((height, PARTS * height), jnp.float32))

        rows, columns = strip(row, height, 2), strip(column, height, PARTS)
        self._pipeline(step, compute)(a.at[rows, :], b.at[columns, :], allocations=slots)

    def _pipeline(self, step: Callable[..., Any], compute: Callable[..., Any]) -> Any:
        """The sum over steps: slots are filled ahead of the warpgroups that multiply."""
        t = self.tiling
        block = functools.partial(
            plgpu.BlockSpec,
            index_map=lambda k: (0, k),
            memory_space=plgpu.SMEM,
            transforms=self._transforms(t.depth),
        )
        # Both halves of a block need the same rows of B: each thread block of a cluster fetches
        # half of them for both.
        shared: tuple[str, ...] = ("cluster",) if t.cluster > 1 else ()
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(self.steps,),
            in_specs=[
                block((2 * t.rows, t.depth)),
                block((PARTS * t.rows, t.depth), collective_axes=shared),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=_COMPUTE_WARPGROUPS,
            memory_registers=40,
            max_concurrent_steps=t.steps,
            compute_context=compute,
        )

    def _transforms(self, columns: int) -> tuple[Any, ...]:
        """How the tensor cores want rows of so many columns in shared memory."""
        swizzle = plgpu.find_swizzle(8 * columns * self.dtype.itemsize)
        tile = plgpu.TilingTransform((8, swizzle // self.dtype.itemsize))
        return tile, plgpu.SwizzleTransform(swizzle)


def fold(tile: ArrayLike, blocks: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of block number ``tile`` of those on and below the diagonal.

    The last row and the first have ``blocks + 1`` blocks together, as have the last but one and the
    second: a triangle folded in this way is a rectangle, and needs no square root.
    """
    pair, place = jnp.divmod(jnp.asarray(tile), blocks + 1)
    long = blocks - pair  # length of the longer row of the pair
    first = place < long
    return jnp.where(first, long - 1, pair), jnp.where(first, place, place - long)


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what a pipeline does, to ask what memory it needs."""
