"""A table of what each parameter gets."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from optax_muonplus.frame import (
    ADAM,
    MUON,
    UNKNOWN,
    DimensionNumbersTree,
    LeafInfo,
    LeafSharding,
    Program,
    ResolvedTree,
)
from optax_muonplus.messages import fold, fold_all, without_numbers
from optax_muonplus.method import (
    MatrixFunction,
    Orthogonalize,
    ScaleByShape,
    accumulation_dtype,
    normalized_sides,
)
from optax_muonplus.muonplus import muonplus
from optax_muonplus.report.models import check_no_state, without_static
from optax_muonplus.report.remarks import remarks
from optax_muonplus.report.state_bytes import line_of_bytes
from optax_muonplus.report.without_effect import all_arguments, without_effect
from optax_muonplus.run import ShardedLeaf, for_platform
from optax_muonplus.run.plan import plan
from optax_muonplus.trees import reader_of, resolve, shardings_of

T = TypeVar("T")
# A line names ratios to Muon's RMS beyond these: sides of 1 : 16 normalized, or 1 : 8 scaled.
_FAR, _SHORT = 4, 0.3536
_HEADER = ("parameter", "shape", "group", "out x in x batch", "scale", "rms", "count", "rule")


def describe(
    params: Any, muon_weight_dimension_numbers: DimensionNumbersTree = None, **arguments: Any
) -> str:
    """Shows what :func:`optax_muonplus.muonplus` with the same arguments does with each parameter.

    The table has one line for each parameter, or for several whose paths differ in numbers only
    (their count is in the line). It has the path, shape, group, the matrices as out x in x batch,
    the factor that multiplies their updates, the root mean square of an update at learning rate 1
    (of an exact polar factor, without ``adaptive``), and the rule by which the parameter was read.
    Batch is how many matrices of this size it holds: layers, experts, heads or equal fused blocks;
    fused blocks of another size follow behind a +. Group ``?`` is for parameters that no rule can
    read, which ``muonplus`` refuses. On a mesh a column has the mesh axes over which each axis is
    sharded, and a line the FLOPs of the busiest device over an even share, and the bytes that each
    one receives at an update. Lines below name arguments that have no effect because of others,
    matrices whose updates are much larger or smaller than Muon's, and what may have been read
    wrongly. The last has the bytes of the state of each group, on a mesh also those on one device.

    Args:
      params: parameters, or their shapes from ``jax.eval_shape``; also a whole Equinox model, of
        which only the arrays are read.
      muon_weight_dimension_numbers: as in ``muonplus``.
      **arguments: all others of ``muonplus``: ``norm``, ``rules``, ``sharding``, ... A
        ``learning_rate`` may be left out, and without ``sharding`` the arrays say where they lie.

    Returns:
      The table as text.

    Raises:
      TypeError: for arguments that ``muonplus`` does not have.
      ValueError: as ``muonplus``, when it is built and at init, but for parameters that no rule can
        read.
    """
    check_no_state(params)
    given = all_arguments(arguments)
    dims = reader_of(muon_weight_dimension_numbers, given["rules"], given["layer_axes"])
    tree = resolve(without_static(params), dims, given["sharding"], strict=False)
    shardings = shardings_of(tree, tree.leaves)
    scale, polar_factor = _made(ScaleByShape, given), _made(Orthogonalize, given)
    lines = [*_table(tree, shardings, scale), _totals(tree), *_work_per_device(tree, polar_factor)]
    if given["state_sharding"] is not None and not any(shardings):
        lines.append("without effect: state_sharding, since no parameter is known to be on a mesh")
    lines += [*without_effect(given), *_unlike_muon(tree, scale), *_signs(tree, scale)]
    lines += remarks(tree.leaves, dims)
    lines += [line_of_bytes(tree, shardings, given)] if tree.leaves else []
    return "\n".join(lines)


# help() shows each argument of Muon+ by its name; the learning rate may be left out.
_params, _dims, _ = inspect.signature(describe).parameters.values()
_rate, *_others = inspect.signature(muonplus).parameters.values()
_named = [x.replace(kind=x.KEYWORD_ONLY) for x in _others if x.name != _dims.name]
_named.append(_rate.replace(kind=_rate.KEYWORD_ONLY, default=None))
describe.__signature__ = inspect.Signature([_params, _dims, *_named])  # ty: ignore[missing-attribute]


def _made(part: type[T], given: dict[str, Any]) -> T:
    """Makes a part of the chain of those arguments that are its fields."""
    names = [field.name for field in dataclasses.fields(part)]  # ty: ignore[invalid-argument-type]
    return part(**{name: given[name] for name in names if name in given})


def _table(
    tree: ResolvedTree, shardings: list[LeafSharding | None], scale: ScaleByShape
) -> list[str]:
    """Returns the lines of the table; shardings are shown if there are any."""
    on_mesh = any(shardings)
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
    header = (*_HEADER[:2], "sharding", *_HEADER[2:]) if on_mesh else _HEADER
    return aligned([header, *lines])


def _spec(sharding: LeafSharding | None) -> str:
    """Shows over which mesh axes each axis is sharded, as ``(data, -)``."""
    if sharding is None:
        return "?"
    return f"({', '.join('.'.join(names) or '-' for names in sharding.spec)})"


def _sizes_and_factors(leaf: LeafInfo, scale: ScaleByShape) -> Iterator[str]:
    """Yields the three cells for the matrices of a leaf."""
    blocks = [] if leaf.layout is None else leaf.layout.block_shapes()
    yield " + ".join(f"{m}x{n}x{batch}" for batch, m, n in blocks)
    yield " + ".join(f"{scale.factor(m, n):.4g}" for _, m, n in blocks)
    yield " + ".join(f"{scale.update_rms(m, n):.3g}" for _, m, n in blocks)


def _totals(tree: ResolvedTree) -> str:
    """Returns a line with the numbers of parameters, matrices and elements."""
    matrices = sum(batch for leaf in tree.matrices for batch, _, _ in leaf.matrix.block_shapes())
    parts = []
    for group, more in ((MUON, f" {matrices} matrices,"), (ADAM, "")):
        sizes = [math.prod(leaf.shape) for leaf in tree.leaves if leaf.label == group]
        parts.append(f"{group}: {len(sizes)} parameters,{more} {sum(sizes):,} elements")
    unknown = sum(not leaf.known for leaf in tree.leaves)
    return "; ".join([*parts, *([f"{UNKNOWN}: {unknown} parameters"] if unknown else [])])


def _work_per_device(tree: ResolvedTree, polar_factor: MatrixFunction) -> Iterator[str]:
    """Yields a line about the devices that work on the matrices, if there are several."""
    members = [
        ShardedLeaf.of(leaf, accumulation_dtype(leaf.dtype))  # the momentum is in float32 at least
        for leaf in tree.matrices
        if leaf.sharding is not None
    ]
    if not members:
        return
    polar_factor = for_platform(polar_factor)
    exchanges, loads = plan(members, Program.of([polar_factor]))
    blocks = [block for member in members for block in member.layout.block_shapes()]
    flops = sum(batch * polar_factor.flops((m, n)) for batch, m, n in blocks)
    received = sum(exchange.bytes_received for exchange in exchanges)
    yield (
        f"{sum(batch for batch, _, _ in blocks)} matrices shared out among {loads.size}"
        f" devices: the busiest has {loads.max() / (flops / loads.size):.2f} x an even share; each"
        f" receives {received / 1e6:.1f} MB at an update"
    )


def _unlike_muon(tree: ResolvedTree, scale: ScaleByShape) -> Iterator[str]:
    """Yields lines about matrices with much longer steps than Muon's, or shorter ones."""
    if scale.consistent_rms is not None:
        return
    muon = dataclasses.replace(scale, norm="none")
    if longer := _ratios(tree, scale, muon, lambda ratio: ratio >= _FAR):
        yield f"times the RMS of Muon's: {longer}; match_frobenius=True makes them equal"
    optax = dataclasses.replace(muon, shape_scale="max")
    if shorter := _ratios(tree, scale, optax, lambda ratio: ratio <= _SHORT):
        yield f"times the RMS of Optax's Muon: {shorter}; shape_scale='max' has its factor"


def _ratios(
    tree: ResolvedTree, scale: ScaleByShape, other: ScaleByShape, wanted: Callable[[float], bool]
) -> str:
    """Lists how many times as large updates are as with another scale, where that is wanted."""
    found = []
    for leaf in tree.matrices:
        sizes = [(m, n) for _, m, n in leaf.matrix.block_shapes()]
        ratio = max((float(scale.update_rms(*x) / other.update_rms(*x)) for x in sizes), default=1)
        found += [(leaf.name, round(ratio, 1 + (ratio < 1)))] if wanted(ratio) else []
    return ", ".join(f"{name} {ratio:g}" for name, ratio in fold_all(found))


def _signs(tree: ResolvedTree, scale: ScaleByShape) -> Iterator[str]:
    """Yields a line about matrices with sides of length 1, of which a norm leaves the signs."""
    alone = {"row": 1, "col": 0}  # the axis along which a row, or a column, has its entries
    found = {
        (leaf.name, None): None
        for leaf in tree.matrices
        for _, *fans in leaf.matrix.block_shapes()
        if any(fans[alone[side]] == 1 for side in normalized_sides(scale.norm, *fans))
    }
    if found:
        shown = ", ".join(name for name, _ in fold_all(found))
        yield (
            f"of one row or column, of which norm={scale.norm!r} leaves the signs: {shown};"
            " AdamW may suit them better (None as their dimension numbers)"
        )


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Makes the lines of a table; the first of ``rows`` is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]
