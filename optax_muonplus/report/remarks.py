"""Lines below the table of ``describe``: what may have been read wrongly, and rules to write."""

import collections
import re
from collections.abc import Iterator, Sequence

from optax_muonplus.extras.heads import side_of
from optax_muonplus.frame import GIVEN, DimensionNumbersTree, LeafInfo, MatrixSpec
from optax_muonplus.messages import listed, without_numbers
from optax_muonplus.method import supported
from optax_muonplus.trees import RuleReader, reader_of, to_adamw, what_to_write

_OWN = ("your rule", GIVEN)  # the user's
_ADAPTER = "(?i)lora_[ab]"
_FUSED = re.compile(r"(?i)(^|[/_])(w?qkv|wi_fused|c_attn|query_key_value|gate_up|w13)(_|/|$)")
# A head has no output for a position, a type or a time.
_NO_TOKENS = re.compile(r"(?i)pos|wpe|type|time|seg")


def remarks(leaves: Sequence[LeafInfo], dims: DimensionNumbersTree = None) -> Iterator[str]:
    """Yields a line for each thing that may have been read wrongly, by the rules in ``dims``."""
    refused = [(leaf.name, leaf.dtype) for leaf in leaves if not supported(leaf.dtype)]
    if refused:
        yield f"not floating-point, which optimizers refuse: {listed(refused)}"
    if not all(leaf.known for leaf in leaves):
        yield f"?: no rule can read these.\n{what_to_write(leaves)}"
    nameless = [leaf for leaf in leaves if leaf.layout and all(p.isdigit() for p in leaf.path)]
    if nameless and len(leaves) > 1:
        yield (
            f"no names: {_shown(nameless)} were read by their"
            " shapes alone, as (in, out). Embeddings, heads and (out, in) weights look the same:"
            " pass a dict of named parameters, or a tree of dimension numbers."
        )
    yield from _doubts(leaves)
    fused = [x for x in leaves if x.layout and not isinstance(x.dimension_numbers, MatrixSpec)]
    fused = [x for x in fused if _FUSED.search(x.name) and not x.rule.startswith(_OWN)]
    if fused:
        yield (
            f"fused? {_shown(fused)}: one matrix each. If it holds several side by side, a rule"
            " with omp.MatrixSpec(..., split_sizes=...) makes each a matrix of its own."
        )
    adapters = [leaf for leaf in leaves if re.search(_ADAPTER, leaf.name)]
    matrices = [leaf for leaf in adapters if leaf.layout]
    if matrices and not any(leaf.rule.startswith(_OWN) for leaf in adapters):
        yield (
            f"LoRA: {_shown(matrices)} are matrices. Published recipes train adapters by AdamW:"
            f" rules=[({_ADAPTER!r}, None)]."
        )
    yield from _nothing_left(leaves)
    yield from _shadowed(leaves, dims)


def _shown(leaves: Sequence[LeafInfo]) -> str:
    return listed((leaf.name, leaf.shape) for leaf in leaves)


def _doubts(leaves: Sequence[LeafInfo]) -> Iterator[str]:
    """Yields a line about all matrices that may be heads, and one about those like tables."""
    times = collections.Counter((without_numbers(x.name), x.shape) for x in leaves)
    # Matrices of one shape whose paths differ in numbers only are repeated layers, and no heads.
    alone = [
        leaf
        for leaf in leaves
        if leaf.layout
        and not leaf.rule.startswith(_OWN)
        and len(leaf.layout.block_shapes()) == 1
        and times[without_numbers(leaf.name), leaf.shape] == 1
        and not re.search(_ADAPTER, leaf.name)
    ]
    found = _like_heads(leaves, alone)
    heads = [leaf for matrices in found.values() for leaf in matrices]
    if found:
        why = "; ".join(
            f"{_shown(matrices)} has as many outputs as {table} has rows"
            for table, matrices in found.items()
        )
        rules = to_adamw(leaves, heads)
        yield f"a head? {why}. If it gives logits, send it to AdamW by rules={rules}."
    elif heads := _last_layers(leaves, alone):
        yield (
            f"a head? {_shown(heads)}: no other layer takes its outputs. If it gives logits or"
            f" predictions, send it to AdamW by rules={to_adamw(leaves, heads)}."
        )
    if unsaid := [x for x in _of_own_length(leaves, alone) if x not in heads]:
        yield (
            f"a table? {_shown(unsaid)}: no rule knows the name, and no other parameter has its"
            f" first axis. If it is one of vectors, rules={to_adamw(leaves, unsaid)}."
        )
    if tables := [x for x in _like_tables(leaves, alone) if x not in heads]:
        yield (
            f"an embedding? {_shown(tables)} has a side as long as the outputs of a head. If it"
            f" is a table of vectors, send it to AdamW by rules={to_adamw(leaves, tables)}."
        )


def _outputs(leaf: LeafInfo) -> int:
    return leaf.matrix.block_shapes()[0][1]


def _like_heads(leaves: Sequence[LeafInfo], alone: Sequence[LeafInfo]) -> dict[str, list[LeafInfo]]:
    """Finds matrices with as many outputs as an embedding of tokens has rows, by its name."""
    outputs = collections.defaultdict(list)
    for leaf in alone:
        outputs[_outputs(leaf)].append(leaf)
    found = {}
    for table in leaves:
        is_table = table.rule.startswith("embedding") and len(table.shape) == 2
        if is_table and not _NO_TOKENS.search(table.name):
            matrices = outputs.pop(table.shape[0], [])
            if matrices and table.shape[0] != table.shape[1]:
                found[table.name] = matrices
    return found


def _last_layers(leaves: Sequence[LeafInfo], alone: Sequence[LeafInfo]) -> list[LeafInfo]:
    """Finds the matrices at the end of a chain of layers, where nothing is said to be a head."""
    said = [x for x in leaves if x.rule.startswith(_OWN) and len(x.shape) > 1 and not x.layout]
    if said or any(x.rule.startswith("head") for x in leaves):
        return []
    matrices = [leaf for leaf in leaves if leaf.layout]
    taken = {leaf.matrix.shape[axis] for leaf in matrices for axis in leaf.matrix.reduction_axes}
    return [
        leaf
        for leaf in alone
        if len(leaf.shape) == 2
        and not leaf.stack
        and not re.search(r"\d", "/".join(leaf.path[:-2]))  # not one of several blocks
        and not side_of("/".join(leaf.path))[0]
        and _may_take(leaf, matrices)
        and _outputs(leaf) not in taken
        and _outputs(leaf) < leaf.matrix.block_shapes()[0][2]
    ]


def _may_take(leaf: LeafInfo, matrices: Sequence[LeafInfo]) -> bool:
    """Says whether another layer may give its inputs, or all pixels of a convolution."""
    given = {_outputs(x) for x in matrices if x is not leaf} - {1}
    return any(leaf.matrix.block_shapes()[0][2] % outputs == 0 for outputs in given)


def _of_own_length(leaves: Sequence[LeafInfo], alone: Sequence[LeafInfo]) -> list[LeafInfo]:
    """Finds matrices of a name that no rule knows, of whose rows nothing else has as many."""
    sides = collections.Counter(side for leaf in leaves for side in {*leaf.shape})
    return [
        x
        for x in alone
        if x.rule.startswith("by default") and len(x.shape) == 2 and sides[x.shape[0]] == 1
    ]


def _like_tables(leaves: Sequence[LeafInfo], alone: Sequence[LeafInfo]) -> list[LeafInfo]:
    """Finds matrices with a side as long as the vocabulary to which a head gives logits."""
    heads = [x for x in leaves if x.rule.startswith("head") and len(x.shape) == 2]
    words = {x.shape[0 if x.path[-1].endswith("weight") else 1] for x in heads}
    return [x for x in alone if len(x.shape) == 2 and max(x.shape) in words - {min(x.shape)}]


def _nothing_left(leaves: Sequence[LeafInfo]) -> Iterator[str]:
    """Yields a line for a tree, or stacked layers, without a matrix."""
    if leaves and not any(leaf.layout or not leaf.known for leaf in leaves):
        arrays = [leaf for leaf in leaves if len(leaf.shape) > 1]
        why = ", ".join(dict.fromkeys(leaf.rule for leaf in arrays))
        yield "no matrix: AdamW gets every parameter, " + (
            f"also those of two axes and more, as: {why}" if arrays else "since none has two axes"
        )
    stacked = [leaf for leaf in leaves if leaf.stack]
    if stacked and not any(leaf.layout for leaf in stacked):
        yield (
            f"layer_axes: one layer of {_shown(stacked)} has no matrix. If these are not stacked,"
            " give patterns that leave them out."
        )


def _shadowed(leaves: Sequence[LeafInfo], dims: DimensionNumbersTree) -> Iterator[str]:
    """Yields a line for each of the user's patterns whose finds are all taken by those before."""
    reader = reader_of(dims)
    if not isinstance(reader, RuleReader):
        return
    fitting, finding = [], []
    for leaf in leaves:
        name = "/".join(leaf.path)
        layer = leaf.layer_shape
        fitting.append([i for i, rule in enumerate(reader.rules) if rule.fits(name, layer)])
        finding.append([pattern for pattern in reader.layer_axes if re.search(pattern, name)])
    for what, all_found in (("rule", fitting), ("layer_axes", finding)):
        first = {found[0] for found in all_found if found}
        for late in sorted({x for found in all_found for x in found} - first):
            name = reader.rules[late].pattern if isinstance(late, int) else late
            yield f"without effect: {what} {name!r}, since others before it take all that it finds"
