"""A table that says what each parameter will get."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from optax_muonplus.frame import (
    ADAM,
    MUON,
    UNKNOWN,
    DimensionNumbersTree,
    LeafInfo,
    LeafSharding,
    ResolvedTree,
)
from optax_muonplus.method import (
    MatrixFunction,
    Norm,
    Orthogonalize,
    ScaleByShape,
    ShapeScale,
    accumulation_dtype,
    normalized_sides,
)
from optax_muonplus.report.remarks import remarks
from optax_muonplus.report.state_bytes import line_of_bytes
from optax_muonplus.report.without_effect import without_effect
from optax_muonplus.run import Member, for_platform, plan
from optax_muonplus.trees import (
    LayerAxes,
    Rules,
    ShardingTree,
    aligned,
    all_shardings,
    check_no_state,
    fold,
    fold_all,
    reader_of,
    resolve,
    without_numbers,
    without_static,
)

_POLAR = tuple(field.name for field in dataclasses.fields(Orthogonalize))
# From sides of 1 : 16 on, normalizing makes the update's RMS this many times Muon's.
_FAR = 4
_HEADER = ("parameter", "shape", "group", "out x in x batch", "scale", "rms", "count", "rule")


def describe(
    params: Any,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    norm: Norm = "col_row",
    match_frobenius: bool = False,
    shape_scale: ShapeScale = "spectral",
    consistent_rms: float | None = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
    **others: Any,
) -> str:
    """What :func:`optax_muonplus.muonplus` with the same arguments does with each parameter.

    The table has one line for each parameter: path, shape, group, the matrices in it as out x in x
    batch, the factor that multiplies their updates, the root mean square of an update at learning
    rate 1 (of an exact polar factor, without ``adaptive``), how many parameters share the line, and
    the rule by which they were read, with the libraries whose convention it is. Batch is how many
    matrices of this size one parameter holds: layers, experts, heads or equal fused blocks. Fused
    blocks of another size follow behind a +. Parameters share a line if their paths differ in
    numbers only. Group ``?`` is for parameters that no rule can read, which ``muonplus`` refuses.
    On a mesh a column says over which mesh axes each axis of a parameter is sharded, and a line is
    about the devices: the FLOPs of the busiest over an even share, and the bytes that each receives
    at an update. Lines below name arguments that have no effect because of others, matrices whose
    updates are much larger than Muon's, and what may have been read wrongly. The last is the bytes
    of the state of each group, on a mesh also those on one device.

    Args:
      params: parameters, or their shapes from ``jax.eval_shape``; also a whole Equinox model, of
        which only the arrays are read.
      muon_weight_dimension_numbers: as in ``muonplus``, like the following.
      norm: the normalization.
      match_frobenius: whether the Frobenius norm is restored after it.
      shape_scale: the factor by shape.
      consistent_rms: the root mean square of updates, in place of ``shape_scale``.
      sharding: shardings of the parameters. None takes those of the arrays themselves.
      rules: in place of dimension numbers.
      layer_axes: the axes along which layers are stacked.
      **others: any other arguments of ``muonplus``.

    Returns:
      The table as text.

    Raises:
      ValueError: as ``muonplus``, when it is built and at init, but for parameters that no rule can
        read.
    """
    scaling: dict[str, Any] = {
        "norm": norm,
        "match_frobenius": match_frobenius,
        "shape_scale": shape_scale,
        "consistent_rms": consistent_rms,
    }
    check_no_state(params)
    idle = without_effect({**scaling, **others})
    dims = reader_of(muon_weight_dimension_numbers, rules, layer_axes)
    tree = resolve(without_static(params), dims, sharding, strict=False)
    shardings = all_shardings(tree)
    on_mesh = any(shardings)
    scale = ScaleByShape(**scaling)
    rows: dict[tuple[str, ...], list[str]] = {}
    for leaf, known in zip(tree.leaves, shardings, strict=True):
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        where = (_spec(known),) if on_mesh else ()
        cells = (shape, *where, leaf.label, *_sizes_and_factors(leaf, scale), leaf.rule)
        rows.setdefault((without_numbers(leaf.name), *cells), []).append(leaf.name)
    lines = [
        (name, *cells, str(count), rule)
        for (_, *cells, rule), names in rows.items()
        for name, count in fold(names)
    ]
    header = _HEADER if not on_mesh else (*_HEADER[:2], "sharding", *_HEADER[2:])
    polar_factor = Orthogonalize(**{k: others[k] for k in _POLAR if k in others})
    last = [_totals(tree), *_work_per_device(tree, polar_factor), *idle]
    last += [*_further_than_muon(tree, scale), *_signs(tree, norm), *remarks(tree.leaves, dims)]
    of_state = {k: others[k] for k in ("mu_dtype", "state_sharding") if k in others}
    last += [line_of_bytes(tree, shardings, sharding, **of_state)] if tree.leaves else []
    return "\n".join([*aligned([header, *lines]), *last])


def _sizes_and_factors(leaf: LeafInfo, scale: ScaleByShape) -> tuple[str, str, str]:
    """The cells for the matrices of a leaf."""
    if leaf.layout is None:
        return "", "", ""
    blocks = [(m, n, batch) for batch, m, n in leaf.layout.block_shapes()]
    cells = (
        (f"{m}x{n}x{batch}" for m, n, batch in blocks),
        (f"{scale.factor(m, n):.4g}" for m, n, _ in blocks),
        (f"{scale.update_rms(m, n):.3g}" for m, n, _ in blocks),
    )
    sizes, factors, rms = (" + ".join(cell) for cell in cells)
    return sizes, factors, rms


def _further_than_muon(tree: ResolvedTree, scale: ScaleByShape) -> Iterator[str]:
    """A line about matrices so far from square that normalizing them makes much longer steps."""
    if scale.consistent_rms is not None:
        return
    plain = dataclasses.replace(scale, norm="none")
    ratios = {
        leaf.name: max(scale.update_rms(m, n) / plain.update_rms(m, n) for _, m, n in blocks)
        for leaf in tree.matrices
        if (blocks := leaf.matrix.block_shapes())
    }
    far = [(name, round(float(r), 1)) for name, r in ratios.items() if r >= _FAR]
    if far:
        shown = ", ".join(f"{name} {ratio:g}" for name, ratio in fold_all(far))
        yield f"times the RMS of Muon's: {shown}; match_frobenius=True makes them equal"


def _signs(tree: ResolvedTree, norm: Norm) -> Iterator[str]:
    """A line about matrices with sides of length 1 that ``norm`` normalizes: signs are left."""
    alone = {"row": 1, "col": 0}  # the axis along which a row, or a column, has its entries
    found = {
        (leaf.name, None): None
        for leaf in tree.matrices
        for _, *fans in leaf.matrix.block_shapes()
        if any(fans[alone[side]] == 1 for side in normalized_sides(norm, *fans))
    }
    if found:
        shown = ", ".join(name for name, _ in fold_all(found))
        yield (
            f"of one row or column, of which norm={norm!r} leaves the signs: {shown};"
            " AdamW may suit them better (None as their dimension numbers)"
        )


def _spec(sharding: LeafSharding | None) -> str:
    """``(data, -)``: over which mesh axes each axis is sharded."""
    if sharding is None:
        return "?"
    return f"({', '.join('.'.join(names) or '-' for names in sharding.spec)})"


def _work_per_device(tree: ResolvedTree, polar_factor: MatrixFunction) -> Iterator[str]:
    """A line about the devices that work on the matrices."""
    members = [
        Member.of(leaf, accumulation_dtype(leaf.dtype))  # the momentum is in float32 at least
        for leaf in tree.matrices
        if leaf.sharding is not None
    ]
    if not members:
        return
    polar_factor = for_platform(polar_factor)
    groups, loads = plan(members, [polar_factor])
    blocks = [block for member in members for block in member.layout.block_shapes()]
    flops = sum(batch * polar_factor.flops((m, n)) for batch, m, n in blocks)
    received = sum(group.bytes_received for group in groups)
    yield (
        f"{sum(batch for batch, _, _ in blocks)} matrices shared out among {loads.size}"
        f" devices: the busiest has {loads.max() / (flops / loads.size):.2f} x an even share; each"
        f" receives {received / 1e6:.1f} MB at an update"
    )


def _totals(tree: ResolvedTree) -> str:
    def elements(group: Sequence[LeafInfo]) -> int:
        return sum(math.prod(leaf.shape) for leaf in group)

    muon = tree.matrices
    adam = [leaf for leaf in tree.leaves if leaf.label == ADAM]
    unknown = [leaf for leaf in tree.leaves if not leaf.known]
    matrices = sum(batch for leaf in muon for batch, _, _ in leaf.matrix.block_shapes())
    return (
        f"{MUON}: {len(muon)} parameters, {matrices} matrices, {elements(muon):,} elements;"
        f" {ADAM}: {len(adam)} parameters, {elements(adam):,} elements"
        + (f"; {UNKNOWN}: {len(unknown)} parameters" if unknown else "")
    )
