"""MaxText's Muon, from a checkout of https://github.com/AI-Hypercomputer/maxtext or installed.

Its update differs from `optax.contrib.muon` where leaves have an axis of layers: with
`use_all_to_all`, its default, layers are spread over the devices by all-to-all. Leaves of one
layer stay cut as they are, and every product needs collectives.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import optax

NAME = "maxtext.muon"


def optimizer(tree: Any, dimension_numbers: Any, checkout: Path | None) -> Any:
    """MaxText's Muon for parameters like ``tree``.

    Args:
      tree: shapes of the parameters, with their shardings.
      dimension_numbers: of the matrices, and None for other leaves.
      checkout: folder of MaxText's repository; None for the installed package.

    Raises:
      SystemExit: if MaxText is not there.
    """
    muon = _load(checkout)

    def with_sharding(numbers: optax.contrib.MuonDimensionNumbers | None, leaf: Any) -> Any:
        if numbers is None:
            return None
        return muon.MuonDimensionNumbers(*numbers, sharding=leaf.sharding)

    numbers = jax.tree.map(with_sharding, dimension_numbers, tree, is_leaf=_is_entry)
    return muon.muon(0.02, muon_weight_dimension_numbers=numbers, use_all_to_all=True)


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)


def _load(checkout: Path | None) -> Any:
    """MaxText's module; it imports nothing beside JAX and Optax."""
    if checkout is not None:
        sys.path.insert(0, str(checkout / "src"))
    try:
        return importlib.import_module("maxtext.optimizers.muon")
    except ModuleNotFoundError as error:
        where = "is not installed" if checkout is None else f"is not in {checkout}/src"
        raise SystemExit(
            f"MaxText {where} ({error}): clone https://github.com/AI-Hypercomputer/maxtext and"
            " pass its folder as --maxtext."
        ) from None
