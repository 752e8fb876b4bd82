"""How the kernel for symmetric products cuts its work."""

from typing import NamedTuple


class Tiling(NamedTuple):
    """How the kernel of :func:`benchmarks.symmetric_kernel.symmetric_product` cuts its work.

    The defaults are by arithmetic, and were not measured. In each step a cluster multiplies 256 x
    256 x 64, for which it fetches 64 KB; without a cluster that is 96 KB, for which the L2 cache of
    an H100 would have to give 7.6 TB/s at 650 TFLOP/s. Four slots of 48 KB and the buffers for
    results take 224 of the 227 KB of shared memory.

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
