"""A table that says what each parameter will get."""

import math
import re
from typing import Any

import numpy as np

from optax_muonplus.dimension_numbers import DimensionNumbersTree
from optax_muonplus.normalization import Norm
from optax_muonplus.partition import ADAM, MUON, LeafPlan, plan
from optax_muonplus.shape_factor import ShapeScale, shape_factor

_HEADER = ("parameter", "shape", "group", "out x in x batch", "scale", "count")


def describe(
    params: Any,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    norm: Norm = "col_row",
    match_frobenius: bool = False,
    shape_scale: ShapeScale = "spectral",
    consistent_rms: float | None = None,
) -> str:
    """What :func:`optax_muonplus.muonplus` with the same arguments does with each parameter.

    One line for each parameter: path, shape, group, the matrices in it as out x in x batch (a fused
    parameter has several, joined by +), and the factor that multiplies their updates. Parameters
    that differ in the numbers on their path only share a line, and ``count`` says how many they
    are.

    Args:
      params: parameters, or their shapes from ``jax.eval_shape``.
      muon_weight_dimension_numbers: as in ``muonplus``, like the others.
      norm: see above.
      match_frobenius: see above.
      shape_scale: see above.
      consistent_rms: see above.

    Returns:
      The table as text.
    """
    plans = plan(params, muon_weight_dimension_numbers)

    def cells(leaf_plan: LeafPlan) -> tuple[str, str, str, str]:
        shape = "x".join(map(str, np.shape(leaf_plan.leaf))) or "scalar"
        if leaf_plan.view is None:
            return shape, ADAM, "", ""
        blocks = leaf_plan.view.block_shapes()
        factors = [
            shape_factor(m, n, shape_scale, consistent_rms, norm, match_frobenius)
            for _, m, n in blocks
        ]
        matrices = " + ".join(f"{m}x{n}x{batch}" for batch, m, n in blocks)
        return shape, MUON, matrices, " + ".join(f"{factor:.4g}" for factor in factors)

    rows: dict[tuple[str, ...], list[str]] = {}
    for leaf_plan in plans:
        pattern = re.sub(r"\d+", "*", leaf_plan.path)
        rows.setdefault((pattern, *cells(leaf_plan)), []).append(leaf_plan.path)
    lines = [(_merged(paths), *rest, str(len(paths))) for (_, *rest), paths in rows.items()]
    return "\n".join([*_align([_HEADER, *lines]), _totals(plans)])


def _merged(paths: list[str]) -> str:
    """One name for paths that differ in numbers only: ``blocks/{0..11}/attn/qkv/kernel``."""
    parts = [re.split(r"(\d+)", path) for path in paths]
    merged = ""
    for column in zip(*parts, strict=True):
        values = sorted(set(column), key=lambda text: (len(text), text))
        merged += values[0] if len(values) == 1 else f"{{{values[0]}..{values[-1]}}}"
    return merged


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _totals(plans: list[LeafPlan]) -> str:
    def numbers(group: list[LeafPlan]) -> int:
        return sum(math.prod(np.shape(p.leaf)) for p in group)

    muon = [p for p in plans if p.view is not None]
    adam = [p for p in plans if p.view is None]
    matrices = sum(batch for p in muon if p.view for batch, _, _ in p.view.block_shapes())
    return (
        f"{MUON}: {len(muon)} parameters, {matrices} matrices, {numbers(muon):,} numbers;"
        f" {ADAM}: {len(adam)} parameters, {numbers(adam):,} numbers"
    )
