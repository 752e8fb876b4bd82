"""Counts what each device does in a compiled program, and refuses what it cannot count."""

import collections
import re
from typing import NamedTuple

from examples.compiled_programs import products, walk
from examples.compiled_programs.hlo import Computation, Instruction, Program
from examples.compiled_programs.walk import Work

_NOT_COUNTED = re.compile(
    r"(scaled|ragged)-dot|ragged-all-to-all.*|collective-broadcast.*|send|recv"
)
_PRODUCT_CALL = re.compile(r"matmul|gemm|dot|conv", re.IGNORECASE)


class Counts(NamedTuple):
    """What one device does."""

    collectives: collections.Counter[str]
    """How many of each kind run; one of several arrays counts once."""
    received: collections.Counter[str]
    """Bytes received by each kind."""
    returned: int
    """Bytes that the collectives return, the device's own part included."""
    in_loops: int
    """How many of the collectives run inside a loop."""
    operations: int
    """Multiplications and additions of matrix products."""


def count(program: Program) -> list[Counts]:
    """Counts what each device does; one entry if all devices do the same.

    Where data chooses the branch of a conditional, the branch with the most operations is counted.

    Raises:
      ValueError: if the program has something that cannot be counted: a product or collective in a
        loop of unknown length, products by an unknown library call, a collective of another kind.
    """

    def cost(computation: Computation, x: Instruction) -> Work:
        _check(program, x)
        return products.cost(program, computation, x)

    return [_counts(work) for work in walk.of_devices(program, cost, "operations")]


def _counts(work: Work) -> Counts:
    ran, received = collections.Counter[str](), collections.Counter[str]()
    for counter, what in ((ran, "collectives"), (received, "received")):
        for name, amount in walk.of_kinds(work, what).items():
            counter[name.split()[0]] += int(amount)  # the name ends in the dtypes
    sums = (int(walk.total(work, what)) for what in ("returned", "in_loops", "operations"))
    return Counts(ran, received, *sums)


def _check(program: Program, x: Instruction) -> None:
    """Refuses an instruction, or one in a fusion, that does what is not counted here."""
    if x.opcode == "fusion":
        for inner in program.computations[x.called[0]].instructions.values():
            _check(program, inner)
    call = x.opcode == "custom-call" and _PRODUCT_CALL.search(x.attributes)
    if _NOT_COUNTED.fullmatch(x.opcode) or (
        call and not products.LIBRARY_PRODUCT.search(x.attributes)
    ):
        raise ValueError(f"{x.name} is a {x.opcode}, which cannot be counted")
