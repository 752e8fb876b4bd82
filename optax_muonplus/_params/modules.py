"""What the classes of modules say of their arrays, whatever a model calls them.

Equinox keeps its modules in the tree, filtered or not, and so do other dataclasses. No library is
imported: classes are known by their names. The state of an NNX model has no classes.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from optax_muonplus._leaves.layout import DimensionNumbers, MuonDimensionNumbers
from optax_muonplus._leaves.paths import Path, path_of_keys
from optax_muonplus._params.flatten import FlatTree

# Dimension numbers, None for AdamW, and what they rest on, in words.
Annotation = tuple[DimensionNumbers | None, str]

# Patches and times are embedded by layers, and rotary embeddings have no table.
_TABLE = re.compile(r"(?i)(?!.*(patch|time|rotary|proj|linear|mlp)).*embed")
_IN_TABLE = re.compile(r"(?i)(?!.*(proj|linear|dense|kernel|bias))")
# Equinox calls the lengths of rows g under weight normalization.
_NORM = re.compile(r".*Norm(\d[dD])?$")
_IN_NORM = re.compile("weight|g$")


def read_annotations(tree: FlatTree) -> dict[Path, Annotation]:
    """Reads what arrays are by the classes of their modules, by their paths."""
    return dict(_walk(tree.tree, ()))


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> str | None:
    names = {base.__name__ for base in cls.__mro__}
    homes = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if "equinox" in homes and names & {"Conv", "ConvTranspose"}:
        return "convolution"
    kinds = (("embedding", _TABLE), ("norm", _NORM))
    found = (kind for kind, pattern in kinds if any(map(pattern.match, names)))
    return None if "flax" in homes else next(found, None)


def _walk(node: Any, path: Path) -> Iterator[tuple[Path, Annotation]]:
    """Yields what is known of arrays below ``node``."""
    level = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    if level is None:
        return
    children = {(*path, *path_of_keys((key,))): child for key, child in level[0]}
    kind = _kind(type(node))
    has_bias = children.get((*path, "bias")) is not None
    names = {"embedding": None if has_bias else _IN_TABLE, "norm": _IN_NORM}.get(kind or "")
    reading = f"{kind} (class {type(node).__name__})"
    for below, child in children.items():
        if kind == "convolution" and below[-1:] == ("weight",):
            ndim = node.num_spatial_dims + 2
            if np.ndim(child) == ndim:  # otherwise layers are stacked
                numbers = MuonDimensionNumbers(tuple(range(1, ndim)), 0)  # (out, in, *window)
                yield below, (numbers if node.groups == 1 else None, reading)
        elif names and hasattr(child, "shape") and names.match(below[-1] if below else ""):
            yield below, (None, reading)
        else:
            yield from _walk(child, below)
