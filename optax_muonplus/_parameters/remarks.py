"""What `describe` says about parameters that may have been read wrongly."""

import re
from collections.abc import Iterator, Sequence

from optax_muonplus._parameters.folding import fold_all
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
            f"a head? {_shown(matrices)} has the sizes of {table.name}. If it gives logits, send it"
            f" to AdamW by rules=[({re.escape(matrices[0].name)!r}, None)]."
        )


def _like_heads(leaves: Sequence[LeafInfo]) -> Iterator[tuple[LeafInfo, list[LeafInfo]]]:
    """Embeddings, and matrices between as many units as they have rows and columns."""
    seen = set()
    for table in leaves:
        is_table = table.rule.startswith("embedding") and len(table.shape) == 2
        if not is_table or table.shape in seen or _NOT_OUTPUTS.search(table.name):
            continue
        seen.add(table.shape)
        sizes = set(table.shape)
        found = [
            leaf
            for leaf in leaves
            if leaf.view and len(sizes) == 2 and set(leaf.shape) == sizes and len(leaf.shape) == 2
        ]
        if found:
            yield table, found


def _shown(leaves: Sequence[LeafInfo]) -> str:
    return ", ".join(
        f"{name} {shape}" for name, shape in fold_all((x.name, x.shape) for x in leaves)
    )
