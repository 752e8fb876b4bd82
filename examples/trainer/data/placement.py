"""Batches on devices; each process reads only the rows of its own devices."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.trainer.data.mixture import Batches

Index = tuple[slice, ...] | None


def place_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts rows that every process has on the devices, with the given sharding."""
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def place_batch(loader: Batches, step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, with the given sharding; reads only rows of this process."""
    shape = (loader.batch_size, loader.context)

    def rows(index: Index) -> range:
        return range(*(index[0] if index else slice(None)).indices(loader.batch_size))

    # Devices with the same rows, such as those along `tensor`, share one read.
    needed = set(map(rows, sharding.addressable_devices_indices_map(shape).values()))
    read = {part: loader.batch(step, part) for part in needed}

    def put(which: int) -> jax.Array:
        def part(index: Index) -> np.ndarray:
            return read[rows(index)][which]

        return jax.make_array_from_callback(shape, sharding, part)

    return put(0), put(1)
