"""What `describe` says about parameters that may have been read wrongly."""

import collections
import re
from collections.abc import Iterator, Sequence

from optax_muonplus._parameters.folding import fold_all, without_numbers
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.suggestion import line_to_write

# Tables whose rows are not what a head has an output for.
_NOT_OUTPUTS = re.compile(r"(?i)pos|wpe|type|time|seg")


def remarks(leaves: Sequence[LeafInfo]) -> Iterator[str]:
    """One line for each thing to look at."""
    unknown = [(leaf.name, leaf.shape) for leaf in leaves if not leaf.known]
    if unknown:
        yield f"?: no rule can read these. {line_to_write(unknown)}"
    nameless = [leaf for leaf in leaves if leaf.view and all(p.isdigit() for p in leaf.path)]
    if nameless and len(leaves) > 1:
        yield (
            f"no names: {_shown(nameless)} were read by their shapes alone, as (in, out)."
            " Embeddings, heads and (out, in) weights look the same: pass a dict of named"
            " parameters, or a tree of dimension numbers."
        )
    for table, matrices in _like_heads(leaves):
        yield (
            f"a head? {_shown(matrices)} has as many outputs as {table.name} has rows. If it gives"
            f" logits, send it to AdamW by rules=[({re.escape(matrices[0].name)!r}, None)]."
        )


def _like_heads(leaves: Sequence[LeafInfo]) -> Iterator[tuple[LeafInfo, list[LeafInfo]]]:
    """Embeddings, and matrices with as many outputs as they have rows.

    Matrices of one shape whose paths differ in numbers only are repeated layers, and no heads.
    """
    kinds = [(without_numbers(leaf.name), leaf.shape) for leaf in leaves]
    times = collections.Counter(kinds)
    single = [x for x, kind in zip(leaves, kinds, strict=True) if x.view and times[kind] == 1]
    seen = set()
    for table in leaves:
        is_table = table.rule.startswith("embedding") and len(table.shape) == 2
        if not is_table or _NOT_OUTPUTS.search(table.name) or table.shape[0] in seen:
            continue
        rows, width = table.shape
        seen.add(rows)
        sizes = {leaf.name: leaf.matrix.block_shapes() for leaf in single}
        found = [x for x in single if [m for _, m, _ in sizes[x.name]] == [rows]]
        if found and rows != width:
            yield table, found


def _shown(leaves: Sequence[LeafInfo]) -> str:
    return ", ".join(
        f"{name} {shape}" for name, shape in fold_all((x.name, x.shape) for x in leaves)
    )
