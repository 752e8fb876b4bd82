"""Rates of accelerators, from the data sheets of their makers.

NVIDIA's have them without sparsity. Those of TPUs are on Google Cloud's pages of v4, v5e, v5p and
v6e.
"""

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
