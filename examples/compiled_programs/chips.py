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
      tf32: operations a second in products of float32 that are rounded to TF32, of a GPU.
      float32: the same, not rounded.
      between_hosts: bytes a second of one GPU's port to other hosts.
    """

    name: str
    memory: int
    peak: float
    bandwidth: float
    link: float
    clock: float = 0.0
    tf32: float = 0.0
    float32: float = 0.0
    between_hosts: float = 0.0


# Memory of GPUs is what XLA's files of these devices have (`compiled_programs/targets.py`). A DGX
# has a port for each of its GPUs: of 200 Gb/s with A100, of 400 Gb/s with the others.
CHIPS = {
    "h100": Chip(
        "NVIDIA H100 80GB HBM3", 84929347584, 989e12, 3.35e12, 450e9, 0.0, 495e12, 67e12, 50e9
    ),
    "a100": Chip(
        "NVIDIA A100-SXM4-80GB", 85100068864, 312e12, 2.04e12, 300e9, 0.0, 156e12, 19.5e12, 25e9
    ),
    "h200": Chip(
        "NVIDIA H200 141GB HBM3e", 151397597184, 989e12, 4.8e12, 450e9, 0.0, 495e12, 67e12, 50e9
    ),
    "b200": Chip("NVIDIA B200", 191514411008, 2250e12, 7.7e12, 900e9, 0.0, 1125e12, 75e12, 50e9),
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
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
)


def peak(device_kind: str) -> float | None:
    """Operations a second of one device in products of bfloat16; None for one not known here."""
    return next((rate for kind, rate in PEAKS if device_kind.startswith(kind)), None)
