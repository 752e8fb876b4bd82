"""A table of what an optimizer does with each parameter, with questions about doubtful ones."""

import collections
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from optax_muonplus._chain.chain import ChainTransformation
from optax_muonplus._chain.program import DualNorm
from optax_muonplus._core.function import MatrixFunction
from optax_muonplus._core.normalize import Normalize
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._core.precision import accumulation_dtype
from optax_muonplus._core.scale import ScaleByShape
from optax_muonplus._execution.lower import lower
from optax_muonplus._execution.mesh.plan import plan
from optax_muonplus._execution.mesh.shards import ShardedLeaf
from optax_muonplus._execution.platforms import platform_of
from optax_muonplus._execution.polar.fast import FastPolar
from optax_muonplus._leaves.layout import DimensionNumbersTree
from optax_muonplus._leaves.paths import fold, list_paths, without_numbers
from optax_muonplus._leaves.placement import LeafSharding, axes_of_type
from optax_muonplus._leaves.record import ADAM, GIVEN, MUON, UNKNOWN, LeafInfo, ResolvedTree
from optax_muonplus._params.attention import INNER
from optax_muonplus._params.neighbours import RATIO, SHORT, is_plausible
from optax_muonplus._params.reader import PER_HEAD, reader_of
from optax_muonplus._params.resolve import resolve
from optax_muonplus._params.sharding import ShardingTree, shardings_of
from optax_muonplus._params.suggestions import suggest_rules
from optax_muonplus.muonplus import muonplus

_HEADER = ("parameter", "shape", "group", "out x in x batch", "scale", "rms", "count", "rule")
_USERS = ("your rule", GIVEN)
_NOMINAL = "rms: as in Optax, of exact polar factors; five Jordan steps give 0.7 to 1.1 of it"
# Rows of these embeddings are not tokens: no head has as many outputs.
_NO_TOKENS = re.compile(r"(?i)pos|wpe|type|time|seg")
# Layers within attention, gated or recurrent layers, and first layers.
_WITHIN = re.compile(
    rf"(?i)(^|/)({INNER}|value|recurrent\w*|weight_[ih]h\w*|\w*modulation|(\w+_)?in(_\w+)?)(_?\d+)?(/|$)"
)


def describe(
    params: Any, muon_weight_dimension_numbers: DimensionNumbersTree = None, **arguments: Any
) -> str:
    """Shows what :func:`optax_muonplus.muonplus` with the same arguments does with each parameter.

    Each line of the table is a parameter, or several whose paths differ only in numbers, with

    - path, shape, and on a mesh the mesh axes that shard each axis;
    - group: ``muon``, ``adam``, or ``?`` if no rule fits, which is an error in ``muonplus``;
    - matrices as out x in x batch. The batch counts layers, experts, heads or equal fused blocks;
      fused blocks of another size follow after a +;
    - the shape factor, and the root mean square of an update at learning rate 1, for an exact
      polar factor and without ``adaptive``;
    - the number of parameters, and the rule by which they were read.

    Lines below the table have, on a mesh, the load of the busiest device and the bytes received per
    update; the dtype of products, if bfloat16 by default; and possible heads, matrices of unusual
    shapes and suggested rules.

    Args:
      params: parameters, or their shapes from ``jax.eval_shape``.
      muon_weight_dimension_numbers: as in ``muonplus``.
      **arguments: all other arguments of ``muonplus``; ``learning_rate`` is optional. Without
        ``sharding`` the arrays' own shardings are used.

    Returns:
      The table as text.

    Raises:
      TypeError: for arguments that ``muonplus`` does not have.
      ValueError: as ``muonplus`` when built and at init, except for parameters that no rule fits.
    """
    arguments = {"learning_rate": 0.0, **arguments}
    optimizer = muonplus(**arguments)  # raises what muonplus raises
    assert isinstance(optimizer, ChainTransformation)
    parts = {type(part): part for part in optimizer.chain.parts}
    norm, scale = parts[Normalize], parts[ScaleByShape]
    is_matched = norm.match_frobenius and (scale.consistent_rms is None or DualNorm in parts)
    scale = scale.replace(norm=norm.norm, match_frobenius=is_matched)
    rules, layer_axes = arguments.get("rules", ()), arguments.get("layer_axes")
    dims = reader_of(muon_weight_dimension_numbers, rules, layer_axes)
    sharding = arguments.get("sharding")
    tree = resolve(params, dims, sharding, strict=False)
    lines = [*_table(tree, shardings_of(tree, tree.leaves), scale), _totals(tree)]
    if scale.consistent_rms is not None and (is_matched or norm.norm in ("none", "long")):
        lines.append(_NOMINAL)
    lines += _work_per_device(tree.matrices, parts[Orthogonalize], sharding)
    lines += _precision_of_products(tree.matrices, parts[Orthogonalize])
    lines += _doubts(tree.leaves)
    if not all(leaf.known for leaf in tree.leaves):
        lines.append(f"?: no rule can read these.\n{suggest_rules(tree.leaves)}")
    return "\n".join(lines)


def _table(
    tree: ResolvedTree, shardings: Sequence[LeafSharding | None], scale: ScaleByShape
) -> list[str]:
    on_mesh = any(shardings)
    rows: dict[tuple[str, ...], list[str]] = {}
    for leaf, sharding in zip(tree.leaves, shardings, strict=True):
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        where = (_spec(sharding),) if on_mesh else ()
        cells = (shape, *where, leaf.label, *_sizes_and_factors(leaf, scale), leaf.rule)
        rows.setdefault((without_numbers(leaf.name), *cells), []).append(leaf.name)
    lines = [
        (name, *cells, str(count), rule)
        for (_, *cells, rule), names in rows.items()
        for name, count in fold(names)
    ]
    header = (*_HEADER[:2], "sharding", *_HEADER[2:]) if on_mesh else _HEADER
    return _aligned([header, *lines])


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _spec(sharding: LeafSharding | None) -> str:
    """Returns the mesh axes of each axis as ``(data, -)``."""
    if sharding is None:
        return "?"
    return f"({', '.join('.'.join(names) or '-' for names in sharding.spec)})"


def _sizes_and_factors(leaf: LeafInfo, scale: ScaleByShape) -> Iterator[str]:
    blocks = [] if leaf.layout is None else leaf.layout.block_shapes()
    yield " + ".join(f"{m}x{n}x{batch}" for batch, m, n in blocks)
    yield " + ".join(f"{scale.factor(m, n):.4g}" for _, m, n in blocks)
    yield " + ".join(f"{scale.update_rms(m, n):.3g}" for _, m, n in blocks)


def _totals(tree: ResolvedTree) -> str:
    matrices = sum(batch for leaf in tree.matrices for batch, _, _ in leaf.matrix.block_shapes())
    parts = []
    for group, more in ((MUON, f" {matrices} matrices,"), (ADAM, "")):
        sizes = [math.prod(leaf.shape) for leaf in tree.leaves if leaf.label == group]
        parts.append(f"{group}: {len(sizes)} parameters,{more} {sum(sizes):,} elements")
    unknown = sum(not leaf.known for leaf in tree.leaves)
    return "; ".join([*parts, *([f"{UNKNOWN}: {unknown} parameters"] if unknown else [])])


def _work_per_device(
    matrices: Sequence[LeafInfo], polar_factor: MatrixFunction, sharding: ShardingTree
) -> Iterator[str]:
    matrices = [leaf for leaf in matrices if leaf.sharding is not None]
    meshes = [leaf.sharding.mesh for leaf in matrices if leaf.sharding is not None]
    if not matrices:
        return
    if sharding is None and any(axes_of_type(mesh, AxisType.Auto) for mesh in meshes):
        yield (
            f"on Auto mesh axes without sharding=: {list_paths((x.name, None) for x in matrices)}."
            " Under jax.jit the sharding of an array is not known, and XLA gathers matrices in each"
            " iteration. Pass sharding= to the optimizer."
        )
        return
    # The momentum is in float32 at least.
    members = [ShardedLeaf.of(x, accumulation_dtype(x.dtype)) for x in matrices]
    program = lower([polar_factor], platform_of(jax.default_backend()))
    exchanges, loads = plan(members, program)
    blocks = [block for member in members for block in member.layout.block_shapes()]
    flops = sum(batch * program.flops((m, n)) for batch, m, n in blocks)
    received = sum(exchange.bytes_received for exchange in exchanges)
    yield (
        f"{sum(batch for batch, _, _ in blocks)} matrices shared out among {loads.size}"
        f" devices: the busiest has {loads.max() / (flops / loads.size):.2f} x an even share; each"
        f" receives {received / 1e6:.1f} MB at an update"
    )


def _precision_of_products(
    matrices: Sequence[LeafInfo], orthogonalize: Orthogonalize
) -> Iterator[str]:
    """Yields the precision of products on an accelerator, unless it was chosen."""
    backend, own = jax.default_backend(), orthogonalize.compute_dtype
    dtypes = {accumulation_dtype(leaf.dtype) for leaf in matrices}  # of the momentum's directions
    fast = [FastPolar.of(orthogonalize, platform_of(backend), dtype) for dtype in dtypes]
    if orthogonalize.is_iteration and any(x.options.compute_dtype != own for x in fast):
        yield (
            f"products: in bfloat16 on this {backend}, summed in float32;"
            ' compute_dtype="float32" keeps them in float32'
        )


def _doubts(leaves: Sequence[LeafInfo]) -> Iterator[str]:
    """Yields questions about matrices by default rules: is it a head? Is it a matrix at all?"""
    cut = [x for x in leaves if x.rule.endswith(PER_HEAD)]
    guessed = [x for x in leaves if x.layout and not x.rule.startswith(_USERS) and x not in cut]
    to = " It is an argument of omp.per_head." if cut else ""
    heads, why = _possible_heads(leaves, guessed)
    if heads:
        rules = [(f"^{re.escape('/'.join(x.path))}$", None) for x in heads]
        yield (
            f"a head? {list_paths((x.name, x.shape) for x in heads)} {why}. If it gives logits or"
            f" predictions, send it to AdamW by rules={rules}.{to}"
        )
    blocks = [(x, *block) for x in leaves if x.layout for block in x.layout.block_shapes()]
    # If all matrices are small, a short side is no reason to doubt.
    short = SHORT if any(min(m, n) > SHORT for *_, m, n in blocks) else 0
    layers = {x.index: math.prod(x.shape[axis] for axis in x.stack) or 1 for x in leaves}
    plausible = [x for x, k, m, n in blocks if is_plausible(k // layers[x.index], m, n, short)]
    if odd := [(x.name, x.shape) for x in guessed if x not in (*plausible, *heads)]:
        yield (
            f"a matrix? {list_paths(odd)} has a side of at most {SHORT}, sides in a ratio of"
            f" {RATIO} or more, or more matrices than twice its longer side. If layers are stacked"
            " along an axis, pass layer_axes={pattern: axis}. If it is a vector or a table, send it"
            f" to AdamW by rules=[(pattern, None)].{to}"
        )


def _possible_heads(
    leaves: Sequence[LeafInfo], guessed: Sequence[LeafInfo]
) -> tuple[list[LeafInfo], str]:
    whole = [leaf for leaf in guessed if len(leaf.matrix.block_shapes()) == 1]
    rows = {
        x.shape[0]
        for x in leaves
        if x.rule.startswith("embedding") and len({*x.shape}) == len(x.shape) == 2
        if not _NO_TOKENS.search(x.name)
    }
    times = collections.Counter((without_numbers(x.name), x.shape) for x in leaves)
    # Matrices of one shape whose paths differ only in numbers are repeated layers, not heads.
    alone = [leaf for leaf in whole if times[without_numbers(leaf.name), leaf.shape] == 1]
    if heads := [leaf for leaf in alone if _outputs(leaf) in rows]:
        return heads, "has as many outputs as an embedding has rows"
    return _last_layers(leaves, whole), "has outputs that no other layer takes"


def _outputs(leaf: LeafInfo) -> int:
    return leaf.matrix.block_shapes()[0][1]


def _last_layers(leaves: Sequence[LeafInfo], whole: Sequence[LeafInfo]) -> list[LeafInfo]:
    """Returns matrices whose outputs no layer takes, unless a head is known."""
    known = (x.rule for x in leaves if not x.layout and len(x.shape) > 1)
    if any(rule.startswith(("head", *_USERS)) for rule in known):
        return []
    inputs = [[x.shape[axis] for axis in x.matrix.reduction_axes] for x in leaves if x.layout]
    taken = {size for sizes in inputs for size in (max(sizes), math.prod(sizes))}
    return [
        leaf
        for leaf in whole
        if len(leaf.shape) == 2
        and not leaf.stack
        and not re.search(r"\d", "/".join(leaf.path[:-2]))  # not one of several blocks
        and not _WITHIN.search("/".join(leaf.path))
        and len(inputs) > 1
        and _outputs(leaf) not in taken
    ]
