"""Batches of tokens as a function of seed and step, and on devices before they are needed.

Each process reads only the rows of its own devices.

Windows are read in the order of permutations of [0, size) that hold nothing in memory.

It is that of a Feistel network on pairs (l, r) with x = l + a r, 0 <= l < a and 0 <= r < b, where a
is the smallest even number whose square is at least size, and b = ceil(size / a). Round t of 16:

    l <- (l + h(k_t xor r)) mod a  for even t,    r <- (r + h(k_t xor l)) mod b  for odd t.

What ends at `size` or above goes through the network again until it does not (cycle walking). Black
and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, describe both. An odd a and b
would give even permutations alone; with 16 rounds those of 7 elements are equally frequent.

h is the function of SplitMix64 from a state to a number (Steele, Lea and Flood, OOPSLA 2014), and
k_t = h(k xor t) with k = h(h(h(seed) xor epoch) xor stream). All of this is integers modulo 2^64,
so that no version of a package changes it.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.trainer.data.token_files import Dataset, Slices
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError

ROUNDS = 16
STREAM = 0  # tells permutations of one seed apart, where there are several
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


def feistel(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Images of indices (n,) in [0, size), under the permutation of each of their epochs (n,)."""
    key = chained(chained(mixed(np.full(len(index), seed, np.uint64)), epoch), STREAM)
    keys = [chained(key, t) for t in range(ROUNDS)]
    found = network(index.astype(np.uint64), size, keys)
    while (outside := found >= size).any():
        found[outside] = network(found[outside], size, [key[outside] for key in keys])
    return found.astype(np.int64)


def network(x: np.ndarray, size: int, keys: list[np.ndarray]) -> np.ndarray:
    """A permutation of [0, a b), which has at most a - 1 numbers more than [0, size)."""
    a = np.uint64(2 * (math.isqrt(size - 1) // 2 + 1))
    b = (np.uint64(size) + a - np.uint64(1)) // a
    left, right = x % a, x // a
    for t, key in enumerate(keys):
        if t % 2 == 0:
            left = (left + mixed(key ^ right) % a) % a
        else:
            right = (right + mixed(key ^ left) % b) % b
    return left + a * right


def chained(key: np.ndarray, part: np.ndarray | int) -> np.ndarray:
    return mixed(key ^ np.asarray(part).astype(np.uint64))


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's function from a state to its number, for each state."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Loader:
    """Batches of windows of a text. It has no state: a batch is a function of the step.

    The text is cut into windows of `context` tokens plus the last target. An epoch is a random
    order of all windows, different each time; a batch may span two epochs.
    """

    ids: Slices
    context: int
    batch_size: int
    seed: int

    @property
    def n_windows(self) -> int:
        return max(0, (len(self.ids) - 1) // self.context)

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (rows, context) of a step counted from 0.

        `rows` are the rows of the batch that this process needs; None for all of them.
        """
        epochs, indices = np.divmod(positions(step, self.batch_size, rows), self.n_windows)
        starts = feistel(indices, self.n_windows, self.seed, epochs) * self.context
        found = np.stack([self.ids[start : start + self.context + 1] for start in starts.tolist()])
        return found[:, :-1].astype(np.int32), found[:, 1:].astype(np.int32)


def positions(step: int, batch_size: int, rows: range | None) -> np.ndarray:
    """The places of rows of a step among the rows of all steps."""
    return step * batch_size + np.arange(batch_size)[slice(None) if rows is None else rows]


def loader_of(config: RunConfig, dataset: Dataset) -> Loader:
    """The batches of a run; raises `UserError` if there is too little text for one."""
    rows = (config.model.context, config.batch_size, config.seed)
    return enough(Loader(dataset.train.ids, *rows), "training")


def enough(loader: Loader, split: str) -> Loader:
    """The loader, if its text has a batch."""
    if loader.n_windows < loader.batch_size:
        raise UserError(
            f"too little {split} text: {len(loader.ids)} tokens, and it needs"
            f" {loader.batch_size} x {loader.context}. Give more text, or a smaller"
            " --batch-size or --model.context; --data.val-fraction is the share for validation."
        )
    return loader


def place_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts rows that every process has on the devices, with the given sharding."""
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def place_batch(loader: Loader, step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, with the given sharding; reads only rows of this process."""
    shape = (loader.batch_size, loader.context)

    def rows(index: tuple[slice, ...] | None) -> range:
        return range(*(index[0] if index else slice(None)).indices(loader.batch_size))

    # Devices with the same rows, such as those along `tensor`, share one read.
    needed = set(map(rows, sharding.addressable_devices_indices_map(shape).values()))
    read = {part: loader.batch(step, part) for part in needed}
    inputs, targets = (
        jax.make_array_from_callback(shape, sharding, lambda index, i=i: read[rows(index)][i])
        for i in (0, 1)
    )
    return inputs, targets


Batch = TypeVar("Batch")
AHEAD = 2  # batches that wait on the devices; a second one covers a read that takes long


@contextlib.contextmanager
def prefetch(read: Callable[[int], Batch], steps: range) -> Generator[Iterator[Batch]]:
    """Gives `read(step)` for each step, read ahead in a thread.

    A batch is a function of its step, so that which thread reads it changes nothing. What reading
    raises is raised where the batch is needed.
    """
    pool = ThreadPoolExecutor(1, "batches")

    def batches() -> Iterator[Batch]:
        reading = deque(pool.submit(read, step) for step in steps[:AHEAD])
        for step in range(len(steps)):
            reading.extend(pool.submit(read, later) for later in steps[step + AHEAD :][:1])
            yield reading.popleft().result()

    try:
        yield batches()
    finally:  # without waiting for a disk, since someone may have pressed Ctrl-C
        pool.shutdown(wait=False, cancel_futures=True)
