"""What accelerators can do, from the data sheets of their makers.

NVIDIA's data sheets of the H100 (SXM), H200, A100, B200 and GB200 have the rates without sparsity,
and the bandwidths. For TPUs: Google Cloud's pages of v4, v5e, v5p and v6e, and the tables of "How
to Scale Your Model" (Austin et al., 2025), which has the rate of one link. The clock of a TPU is
its rate over the operations of its matrix units in one cycle.
"""

from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One device.

    Attributes:
      name: as its maker says it.
      memory: bytes.
      peak: operations a second in products of bfloat16.
      bandwidth: bytes a second, to and from memory.
      link: bytes a second that it receives from devices of its host, or of its TPU slice along one
        axis, in both directions of the ring.
      clock: cycles a second, of a TPU; 0 elsewhere.
    """

    name: str
    memory: int
    peak: float
    bandwidth: float
    link: float
    clock: float = 0.0


CHIPS = {
    "h100": Chip("NVIDIA H100 80GB HBM3", 84929347584, 989e12, 3.35e12, 450e9),
    "v5e": Chip("TPU v5e", 16 * GIB, 197e12, 0.82e12, 2 * 45e9, 1.5e9),
    "v5p": Chip("TPU v5p", 95 * GIB, 459e12, 2.77e12, 2 * 90e9, 1.75e9),
    "v6e": Chip("TPU v6e", 32 * GIB, 918e12, 1.64e12, 2 * 90e9, 1.75e9),
}
"""The kinds that can be compiled for."""

# Beginnings of `device_kind` as JAX has it, with operations a second in products of bfloat16. The
# first that fits is taken: a longer name stands before its beginning.
PEAKS = (
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA GH200", 989e12),
    ("NVIDIA GB200", 2500e12),
    ("NVIDIA B200", 2250e12),
    ("NVIDIA A100", 312e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
)


def peak(device_kind: str) -> float | None:
    """Operations a second of one device in products of bfloat16; None for one not known here."""
    return next((rate for kind, rate in PEAKS if device_kind.startswith(kind)), None)
