"""Which leaves hold the queries and keys of attention, module by module."""

import collections
import math
import re
from typing import NamedTuple

from optax_muonplus.extras.heads import FUSED, KEY, QUERY, side_of
from optax_muonplus.frame import LeafInfo, ResolvedTree, listed
from optax_muonplus.trees import names_to_read

_NORM = r"((q|k|qk|query|key)_?(ln|((layer|rms)_?)?norm)|norm_?(q|k|query|key))(/|$)"
# Up-projections of latent attention, whose heads also have parts that all of them share.
_LATENT = r"(wq_b|q_b_proj|[qk]_up(_proj)?|w_?u[qk])/?(kernel|w|weight)?$"


class QueryKeyLayer(NamedTuple):
    """A kernel or bias of queries, keys or both, and the axes that are not outputs or layers."""

    side: str
    leaf: LeafInfo
    inputs: tuple[int, ...]

    def outputs(self, layers: tuple[int, ...]) -> int:
        """How many outputs one layer has; ``layers`` are the sizes of stacked ones."""
        free = tuple(n for axis, n in enumerate(self.leaf.shape) if axis not in self.inputs)
        if free[: len(layers)] != layers:
            raise ValueError(
                f"{self.leaf.name} has the shape {self.leaf.shape}, and its max_logits say"
                f" {layers} layers. Give an array (*layers, heads), one layer after the other."
            )
        return math.prod(free[len(layers) :])


def query_key_modules(tree: ResolvedTree) -> dict[str, list[QueryKeyLayer]]:
    """The layers with queries and keys, by the path of their module.

    Raises ValueError if there are none, and for modules whose logits do not follow from the sizes
    of these layers alone.
    """
    names = names_to_read([leaf.path for leaf in tree.leaves])
    found: dict[str, list[QueryKeyLayer]] = collections.defaultdict(list)
    for name, leaf in zip(names, tree.leaves, strict=True):
        kernel = re.sub(r"/(bias|b)$", "", re.sub(r"_bias$", "_weight", name))
        side, module = side_of(kernel)
        if side not in (QUERY, KEY, FUSED):
            continue
        if kernel == name and leaf.layout is None:
            raise ValueError(f"{leaf.name} is no matrix ({leaf.rule}). Say by a rule how it is.")
        inputs = leaf.matrix.reduction_axes if kernel == name else ()
        found[module.rstrip("/")].append(QueryKeyLayer(side, leaf, inputs))
    modules = {m: x for m, x in found.items() if {layer.side for layer in x} != {KEY}}
    _check(modules, names)
    return modules


def _check(modules: dict[str, list[QueryKeyLayer]], names: list[str]) -> None:
    """Raises ValueError for modules that the link has no rule for, and if there are none."""
    shown = listed((name, None) for name in names)
    if not modules:
        raise ValueError(
            "No module has layers with the names of queries and keys (query and key, q_proj and"
            f" k_proj, wq and wk, qkv, c_attn, ...). The paths are: {shown}."
        )
    sides = {module: {layer.side for layer in layers} for module, layers in modules.items()}
    alone = [
        module
        for module, layers in modules.items()
        if sides[module] == {QUERY} or any(re.search(_LATENT, x.leaf.name) for x in layers)
    ]
    if alone:
        raise ValueError(
            f"{listed((module, None) for module in alone)}: queries without a layer that has the"
            " name of keys alone. There is no rule for keys and values in one kernel, or for latent"
            f" attention. The paths are: {shown}."
        )
    prefixes = tuple(f"{module}/" if module else "" for module in modules)
    norms = [x for x in names if x.startswith(prefixes) and re.search(f"(^|/){_NORM}", x)]
    if norms:
        raise ValueError(
            f"{listed((name, None) for name in norms)}: norms of queries and keys undo a scale of"
            " their weights, and bound logits by themselves. Leave qk_clip out."
        )
