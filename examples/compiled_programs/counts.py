"""Counts what one device does in a compiled program: collectives, bytes received, products.

The bytes that a device receives from the others of a group of n, for an operand of b bytes:

- all-to-all: b (n-1)/n
- all-gather: b (n-1)
- reduce-scatter: b (n-1)/n
- all-reduce: 2 b (n-1)/n, in a ring
- collective-permute: b

A collective of several arrays counts once. The bytes that collectives return are counted too; they
include the device's own part.
"""

import collections
import dataclasses
import functools
import math
import re
from fractions import Fraction

from examples.compiled_programs.branches import Frame, UnknownError
from examples.compiled_programs.groups import group_size
from examples.compiled_programs.hlo import Instruction, Program, Shape

# Bytes that a device receives, over those of its operand, in a group of n.
RECEIVED = {
    "all-to-all": lambda n: Fraction(n - 1, n),
    "all-gather": lambda n: Fraction(n - 1),
    "reduce-scatter": lambda n: Fraction(n - 1, n),
    "all-reduce": lambda n: Fraction(2 * (n - 1), n),
    "collective-permute": lambda n: Fraction(1),
}
_LOWERED = re.compile(
    r'"stablehlo\.(all_to_all|all_gather)".*replica_groups = dense<.*> : tensor<\d+x(\d+)xi64>'
    r".* : \(tensor<([\dx]+)x(\w+)>\)"
)
_NOT_COUNTED = re.compile(
    r"convolution|(scaled|ragged)-dot|ragged-all-to-all.*|collective-broadcast.*|send|recv"
)
_PRODUCT_CALL = re.compile(r"matmul|gemm|dot|conv", re.IGNORECASE)


@dataclasses.dataclass
class Counts:
    """What one device does.

    Attributes:
      collectives: how many of each kind run.
      received: bytes received by each kind.
      returned: bytes that the collectives return.
      in_loops: how many of the collectives run inside a loop.
      operations: multiplications and additions of matrix products.
    """

    collectives: collections.Counter[str]
    received: collections.Counter[str]
    returned: int = 0
    in_loops: int = 0
    operations: int = 0

    def add(self, other: "Counts", times: int = 1, loop: bool = False) -> None:
        """Adds the counts of ``other``, which runs ``times`` times; in a loop if ``loop``."""
        for own, more in ((self.collectives, other.collectives), (self.received, other.received)):
            own.update({kind: times * n for kind, n in more.items()})
        self.returned += times * other.returned
        self.in_loops += times * (other.collectives.total() if loop else other.in_loops)
        self.operations += times * other.operations


def count(program: Program) -> list[Counts]:
    """The counts of each device; one entry if all devices do the same.

    Where data chooses the branch of a conditional, the branch with the most operations is counted.

    Raises:
      ValueError: if the program has something that cannot be counted: a product or collective in a
        loop of unknown length, products by a library call, a collective of another kind.
    """
    walk = _Walk(program)
    several = any(
        instruction.opcode == "conditional"
        for name in walk.counting
        for instruction in walk.instructions(name)
    )
    devices = range(program.devices if several else 1)
    return [walk.counts(Frame(program, program.entry, device, None)) for device in devices]


def lowered_bytes(text: str) -> int:
    """Bytes received by the collectives of a lowered program, in the dtypes that it asks for.

    The compiled program may use wider ones: XLA's CPU backend transfers bfloat16 as float32.

    Args:
      text: the lowered program (StableHLO), whose collectives must not be in loops.
    """
    total = Fraction(0)
    for kind, n, dimensions, dtype in _LOWERED.findall(text):
        shape = tuple(int(size) for size in dimensions.split("x"))
        total += RECEIVED[kind.replace("_", "-")](int(n)) * size_in_bytes(((dtype, shape),))
    return int(total)


class _Walk:
    """Walks through the computations of a program that have something to count."""

    def __init__(self, program: Program):
        self.program = program
        self.counting: set[str] = set()
        self._seen: dict[str, list[Instruction]] = {}
        self._find(program.entry)

    def instructions(self, name: str) -> list[Instruction]:
        """The instructions of a computation that count, or that run a computation that counts."""
        return self._seen[name]

    def _find(self, name: str) -> bool:
        if name not in self._seen:
            self._seen[name] = [
                instruction
                for instruction in self.program.computations[name].instructions.values()
                if self._counts(instruction)
            ]
            if self._seen[name]:
                self.counting.add(name)
        return name in self.counting

    def _counts(self, instruction: Instruction) -> bool:
        opcode = instruction.opcode
        if _NOT_COUNTED.fullmatch(opcode) or (
            opcode == "custom-call" and _PRODUCT_CALL.search(instruction.attributes)
        ):
            raise ValueError(f"{instruction.name} is a {opcode}, which cannot be counted")
        inner = [self._find(name) for name in instruction.called]
        return any(inner) or opcode == "dot" or opcode.removesuffix("-start") in RECEIVED

    def counts(self, frame: Frame) -> Counts:
        """The counts of one device in one computation."""
        total = Counts(collections.Counter(), collections.Counter())
        for instruction in self._seen[frame.name]:
            match instruction.opcode:
                case "dot":
                    total.operations += _operations(instruction, self._operands(frame, instruction))
                case "while":
                    inner = Frame(self.program, instruction.called[0], frame.device, None)
                    total.add(self.counts(inner), _trips(self.program, instruction), loop=True)
                case "conditional":
                    total.add(self._conditional(frame, instruction))
                case "fusion" | "call" | "async-start":
                    inner = frame.called(instruction.called[0], instruction.operands)
                    total.add(self.counts(inner))
                case _:
                    total.add(self._collective(frame, instruction))
        return total

    def _collective(self, frame: Frame, collective: Instruction) -> Counts:
        kind = collective.opcode.removesuffix("-start")
        operand = sum(size_in_bytes(shapes) for shapes in self._operands(frame, collective))
        n = group_size(collective, self.program.devices)
        received = collections.Counter({kind: int(RECEIVED[kind](n) * operand)})
        returned = {"all-gather": n * operand, "reduce-scatter": operand / n}.get(kind, operand)
        return Counts(collections.Counter({kind: 1}), received, int(returned))

    def _conditional(self, frame: Frame, conditional: Instruction) -> Counts:
        try:
            return self.counts(frame.branch(conditional))
        except UnknownError:
            counts = [
                self.counts(frame.called(name, [operand])) for name, operand in conditional.branches
            ]
            return max(counts, key=lambda branch: (branch.operations, branch.received.total()))

    def _operands(self, frame: Frame, instruction: Instruction) -> list[tuple[Shape, ...]]:
        instructions = self.program.computations[frame.name].instructions
        return [instructions[operand].shapes for operand in instruction.operands]


def _operations(dot: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    ((_, out),) = dot.shapes
    ((_, left),) = operands[0]
    inner = math.prod(left[axis] for axis in dot.integers("lhs_contracting_dims"))
    return 2 * math.prod(out) * inner


def size_in_bytes(shapes: tuple[Shape, ...]) -> Fraction:
    """Bytes of arrays."""
    return Fraction(sum(bits(dtype) * math.prod(shape) for dtype, shape in shapes), 8)


@functools.cache
def bits(dtype: str) -> int:
    """Bits of one element, for a dtype as programs name it."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else {"pred": 8, "token": 0, "opaque": 0}[dtype]


def _trips(program: Program, loop: Instruction) -> int:
    trips = program.trips(loop)
    if trips is None:
        raise ValueError(
            f"{loop.name} has products or collectives, but its number of iterations is unknown"
        )
    return trips
