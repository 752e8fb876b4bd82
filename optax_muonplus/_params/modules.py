"""Readings of arrays by the class of their module, whatever their names are.

Trees of Equinox and of other dataclasses contain the modules. The state of an NNX model has none.
Classes are recognized by name: no library is imported.
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

# Dimension numbers, or None for AdamW, and the reading in words.
Annotation = tuple[DimensionNumbers | None, str]

# Embeddings of patches and times are layers, and rotary embeddings have no table.
_TABLE = re.compile(r"(?i)(?!.*(patch|time|rotary|proj|linear|mlp)).*embed")
_IN_TABLE = re.compile(r"(?i)(?!.*(proj|linear|dense|kernel|bias))")
_NORM = re.compile(r".*Norm(\d[dD])?$")
_IN_NORM = re.compile("weight|g$")  # g has the row norms in Equinox's WeightNorm


def read_annotations(tree: FlatTree) -> dict[Path, Annotation]:
    """Returns the annotation of each array whose module's class is known, by path."""
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
        elif names and jax.tree_util.all_leaves([child]) and names.match("".join(below[-1:])):
            yield below, (None, reading)
        else:
            yield from _walk(child, below)
