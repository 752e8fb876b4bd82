"""A batch on the devices, of which each process reads its own rows only."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.data.loader import Loader

Index = tuple[slice, ...] | None


def place_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Rows that every process has, cut as `sharding` says."""
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def place_batch(loader: Loader, step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, cut as `sharding` says; only rows of this process are read."""
    shape = (loader.batch_size, loader.context)

    def rows(index: Index) -> range:
        return range(*(index[0] if index else slice(None)).indices(loader.batch_size))

    # Devices that hold the same rows, as those on `tensor` do, share one reading of them.
    own = set(map(rows, sharding.addressable_devices_indices_map(shape).values()))
    read = {part: loader.batch(step, part) for part in own}

    def place(which: int) -> jax.Array:
        def part(index: Index) -> np.ndarray:
            return read[rows(index)][which]

        return jax.make_array_from_callback(shape, sharding, part)

    return place(0), place(1)
