"""Reads collectives: which devices take part together, in every way that XLA writes it, and bytes.

The bytes that a device receives from the others of a group of n, for an operand of b bytes:

- all-to-all: b (n-1)/n
- all-gather: b (n-1)
- reduce-scatter: b (n-1)/n
- all-reduce: 2 b (n-1)/n, in a ring
- collective-permute: b
"""

import functools
import math
import re
from fractions import Fraction

import numpy as np

from lab.compiled_programs.hlo import Computation, Instruction, Program, Shape
from lab.compiled_programs.walk import Work

# Bytes that a device receives, over those of its operand, in a group of n.
RECEIVED = {
    "all-to-all": lambda n: Fraction(n - 1, n),
    "all-gather": lambda n: Fraction(n - 1),
    "reduce-scatter": lambda n: Fraction(n - 1, n),
    "all-reduce": lambda n: Fraction(2 * (n - 1), n),
    "collective-permute": lambda n: Fraction(1),
}


# Kinds without a formula here.
_OTHERS = re.compile(r"ragged-all-to-all.*|collective-broadcast.*|send|recv")


def cost(program: Program, computation: Computation, x: Instruction) -> Work:
    """Counts a collective by dtypes, with its bytes; empty for another instruction.

    Raises:
      ValueError: for a collective of another kind, or groups that are not understood.
    """
    if _OTHERS.fullmatch(x.opcode):
        raise ValueError(f"{x.name} is a {x.opcode}, which cannot be counted")
    kind = x.opcode.removesuffix("-start")
    if kind not in RECEIVED:
        return {}
    shapes = computation.operands(x)
    name = f"{kind} {'+'.join(sorted({dtype for dtype, _ in shapes}))}"
    # A permutation has pairs of a sender and a receiver.
    n = 2 if kind == "collective-permute" else len(groups(x, program.devices)[0])
    received = int(RECEIVED[kind](n) * size_in_bytes(shapes))
    return {("collectives", name): 1, ("received", name): received}


def size_in_bytes(shapes: tuple[Shape, ...]) -> Fraction:
    return Fraction(sum(bits(dtype) * math.prod(shape) for dtype, shape in shapes), 8)


@functools.cache
def bits(dtype: str) -> int:
    """Bits of one element, for a dtype as programs name it."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else {"pred": 8, "token": 0, "opaque": 0}[dtype]


def groups(collective: Instruction, devices: int) -> list[list[int]]:
    """Ids of the devices of each group; of a permutation, pairs of a sender and a receiver.

    Raises:
      ValueError: for groups of different sizes, or in an unknown format.
    """
    text = collective.attributes
    found = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", text)
    if found:
        listed = [numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]
        listed = listed or [list(range(devices))]
        if len({len(group) for group in listed}) == 1:
            return listed
    elif found := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", text):
        return _iota(found[3], found[4]).reshape(int(found[1]), int(found[2])).tolist()
    elif found := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", text):
        rows = _of_mesh(*found.groups())
        if rows:
            return rows
    raise ValueError(f"{collective.name} has groups in an unknown format: {text}")


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(dims: str, order: str | None) -> np.ndarray:
    sizes = numbers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(numbers(order)) if order else ids


def _of_mesh(mesh: str, order: str, axes: str) -> list[list[int]]:
    """Groups along axes, as in ``'a','b':(2)4``: all of `a`, and 4 of `b` inside each of 2.

    Empty if there are no axes, or the devices are in an order that is not understood.
    """
    chosen = _AXES.findall(axes)
    shape: list[int] = []
    along: list[int] = []
    for name, size in ((name, int(size)) for name, size in _SIZES.findall(mesh)):
        parts = [(int(n or 1), int(of or size)) for other, n, of in chosen if other == name]
        done = 1  # steps of this axis that are in the shape
        for outside, inside in sorted(parts):
            shape += [outside // done, inside]
            along.append(len(shape) - 1)
            done = outside * inside
        shape.append(size // done)
    listed = re.search(rf"device_ids=\({_IOTA}\)", order)
    if not along or ("device_ids" in order and not listed):
        return []
    ids = _iota(listed[1], listed[2]) if listed else np.arange(math.prod(shape))
    rows = np.moveaxis(ids.reshape(shape), along, range(-len(along), 0))
    return rows.reshape(-1, math.prod(shape[axis] for axis in along)).tolist()


_SIZES = re.compile(r"'([^']+)'=(\d+)")
_AXES = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
