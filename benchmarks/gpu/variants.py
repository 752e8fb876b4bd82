"""Optimizers by name: the method, its products' dtype, and the precision of float32 products."""

import contextlib
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import optax

import optax_muonplus as omp
from benchmarks import accelerator_row, parity
from benchmarks.gpu.steps import Unavailable

# The argument that turns the symmetric product on, of optimizers and of polar functions.
KERNEL = "symmetric_kernel"

PRECISIONS = {"TF32": None, "X3": "BF16_BF16_F32_X3", "float32": "highest"}
"""Names of the precision of float32 products, for ``jax.default_matmul_precision``.

XLA's default on a GPU is TF32. X3 is ``jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3``: three
products of bfloat16.
"""


class Variant(NamedTuple):
    """An optimizer.

    Attributes:
      kind: ``"optax"``, ``"muon"``, ``"muonplus"``, or ``"default"``, which is ``"muonplus"``
        without the options that make momentum, shape factor and AdamW Optax's.
      options: arguments of ``optax_muonplus.muon`` or ``muonplus``.
      precision: of float32 products, for ``jax.default_matmul_precision``.
    """

    kind: str
    options: dict[str, Any] = {}  # noqa: RUF012 (no one changes it)
    precision: str | None = None


REFERENCE = "optax.contrib.muon"
OURS = "omp.muonplus:bfloat16"
KERNEL_ON: dict[str, Any] = {KERNEL: True}
VARIANTS = {
    REFERENCE: Variant("optax"),
    "omp.muon:bfloat16": Variant("muon", {"compute_dtype": "bfloat16"}),
    OURS: Variant("muonplus", {"compute_dtype": "bfloat16"}),
    f"{OURS}, default": Variant("default", {"compute_dtype": "bfloat16"}),
    "omp.muonplus:float16": Variant("muonplus", {"compute_dtype": "float16"}),
    **{
        f"omp.muonplus:{dtype}, {polar}": Variant(
            "muonplus", {"compute_dtype": dtype, "polar": polar}
        )
        for dtype in ("bfloat16", "float16")
        for polar in ("newton_schulz", "gram")
    },
    **{
        f"omp.muonplus:{name}": Variant("muonplus", {}, precision)
        for name, precision in PRECISIONS.items()
    },
    "omp.muonplus:bfloat16, kernel": Variant("muonplus", {"compute_dtype": "bfloat16"} | KERNEL_ON),
    "omp.muonplus:float16, kernel": Variant("muonplus", {"compute_dtype": "float16"} | KERNEL_ON),
    **{
        f"omp.muonplus:bfloat16, {norm}": Variant(
            "muonplus", {"compute_dtype": "bfloat16", "norm": norm}
        )
        for norm in ("col", "row", "row_col")
    },
}


def optimizer(variant: Variant, tree: Any, sharding: Any = None) -> optax.GradientTransformation:
    """The optimizer for parameters like ``tree``; all treat the same ones as matrices."""
    given: dict[str, Any] = {
        "muon_weight_dimension_numbers": accelerator_row.dimension_numbers(tree)
    }
    if variant.kind == "optax":
        return optax.contrib.muon(0.02, **given)
    if KERNEL in variant.options:
        check_kernel()
    make = omp.muon if variant.kind == "muon" else omp.muonplus
    given |= {} if variant.kind == "default" else parity.AS_OPTAX
    return make(0.02, sharding=sharding, **given, **variant.options)


def check_kernel() -> None:
    """Raises Unavailable if this version of JAX is too old for the symmetric kernel."""
    try:
        omp.orthogonalize(compute_dtype="bfloat16", **KERNEL_ON)
    except ValueError as error:
        raise Unavailable(str(error)) from error


@contextlib.contextmanager
def products_in(precision: str | None) -> Generator[None]:
    """Float32 products in that precision; None leaves it to XLA."""
    if precision is None:
        yield
    else:
        with jax.default_matmul_precision(precision):
            yield
