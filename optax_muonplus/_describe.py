"""A table that says what each parameter will get."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_muonplus._mesh.sharded import Layout, convoys
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.partition import ADAM, MUON, LeafPlan, plan
from optax_muonplus._parameters.sharding import Home, ShardingTree, homes
from optax_muonplus.matrices._matrix_function import either_way
from optax_muonplus.matrices._normalization import Norm
from optax_muonplus.matrices._precision import accumulation_dtype
from optax_muonplus.matrices._shape_factor import ShapeScale, shape_factor
from optax_muonplus.polar._methods import polar_flops

_HEADER = ("parameter", "shape", "group", "out x in x batch", "scale", "count")


def describe(
    params: Any,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    norm: Norm = "col_row",
    match_frobenius: bool = False,
    shape_scale: ShapeScale = "spectral",
    consistent_rms: float | None = None,
    sharding: ShardingTree = None,
) -> str:
    """What :func:`optax_muonplus.muonplus` with the same arguments does with each parameter.

    One line for each parameter: path, shape, group, the matrices in it as out x in x batch (a fused
    parameter has several, joined by +), and the factor that multiplies their updates. Parameters
    that differ in the numbers on their path only share a line, and ``count`` says how many they
    are. On a mesh there is a column that says along which of its axes a parameter is cut, and a
    last line about the devices: the operations of the busiest against an even share, for the
    default ``polar``, and what each receives at an update.

    Args:
      params: parameters, or their shapes from ``jax.eval_shape``.
      muon_weight_dimension_numbers: as in ``muonplus``, like the others.
      norm: see above.
      match_frobenius: see above.
      shape_scale: see above.
      consistent_rms: see above.
      sharding: see above; None takes what the parameters themselves tell.

    Returns:
      The table as text.
    """
    plans = plan(params, muon_weight_dimension_numbers)
    known = homes(params, sharding)
    on_mesh = any(known)

    def cells(leaf_plan: LeafPlan, home: Home | None) -> tuple[str, ...]:
        shape = "x".join(map(str, np.shape(leaf_plan.leaf))) or "scalar"
        where = (_spec(home),) if on_mesh else ()
        if leaf_plan.view is None:
            return shape, *where, ADAM, "", ""
        blocks = leaf_plan.view.block_shapes()
        factors = [
            shape_factor(m, n, shape_scale, consistent_rms, norm, match_frobenius)
            for _, m, n in blocks
        ]
        matrices = " + ".join(f"{m}x{n}x{batch}" for batch, m, n in blocks)
        return shape, *where, MUON, matrices, " + ".join(f"{factor:.4g}" for factor in factors)

    rows: dict[tuple[str, ...], list[str]] = {}
    for leaf_plan, home in zip(plans, known, strict=True):
        pattern = re.sub(r"\d+", "*", leaf_plan.path)
        rows.setdefault((pattern, *cells(leaf_plan, home)), []).append(leaf_plan.path)
    lines = [(_merged(paths), *rest, str(len(paths))) for (_, *rest), paths in rows.items()]
    header = _HEADER if not on_mesh else (*_HEADER[:2], "sharding", *_HEADER[2:])
    return "\n".join([*_align([header, *lines]), _totals(plans), *_travel(plans, known)])


def _spec(home: Home | None) -> str:
    """``(data, -)``: along which mesh axes each axis is cut."""
    if home is None:
        return "?"
    return f"({', '.join('.'.join(names) or '-' for names in home.spec)})"


def _travel(plans: list[LeafPlan], known: list[Home | None]) -> Iterator[str]:
    """A line about the devices that work on the matrices."""
    layouts = [
        # Momentum is summed in float32 at least; results go home as updates.
        Layout(p.view, home, accumulation_dtype(dtype := jnp.result_type(p.leaf)), dtype)
        for p, home in zip(plans, known, strict=True)
        if p.view is not None and home is not None
    ]
    if not layouts:
        return
    planned = convoys([either_way(lambda x: x, polar_flops)], layouts)
    loads = planned[-1].route.loads
    blocks = [block for layout in layouts for block in layout.view.block_shapes()]
    share = sum(batch * polar_flops((m, n)) for batch, m, n in blocks) / loads.size
    received = sum(
        n * dtype.itemsize
        for convoy in planned
        for n, dtype in zip(convoy.route.numbers, convoy.dtypes[::2], strict=True)
    )
    yield (
        f"{sum(batch for batch, _, _ in blocks)} matrices shared out among {loads.size} devices:"
        f" the busiest has {loads.max() / share:.2f} x an even share; each receives"
        f" {received / 1e6:.1f} MB at an update"
    )


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
