"""What one device does in a compiled program: collectives, bytes that it receives, products.

Bytes are those that a device receives from others, in groups of n devices: all-to-all (n-1)/n of
what it gives, all-gather n-1 times what it gives, reduce-scatter (n-1)/n of what it gives,
all-reduce twice that (a ring), permute what it gives. A collective of several arrays is one. The
size of what collectives return is counted beside: it has the device's own part too.
"""

import collections
import dataclasses
import functools
import math
import re
from fractions import Fraction

from benchmarks.choices import Frame, UnknownError
from benchmarks.hlo import Instruction, Program, Shape

_RECEIVED = {
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
    """Of one device.

    Attributes:
      collectives: how many of each kind.
      received: bytes through each kind.
      returned: bytes of what the collectives return.
      in_loops: how many of the collectives run inside a loop.
      operations: multiplications and additions of matrix products.
    """

    collectives: collections.Counter[str]
    received: collections.Counter[str]
    returned: int = 0
    in_loops: int = 0
    operations: int = 0

    def add(self, other: "Counts", times: int = 1, loop: bool = False) -> None:
        """Adds what ``other`` does ``times`` times."""
        for own, more in ((self.collectives, other.collectives), (self.received, other.received)):
            own.update({kind: times * n for kind, n in more.items()})
        self.returned += times * other.returned
        self.in_loops += times * (other.collectives.total() if loop else other.in_loops)
        self.operations += times * other.operations


def counted(program: Program) -> list[Counts]:
    """The counts of each device; one entry if all devices do the same.

    Of a conditional whose branch depends on data, the branch with most operations is counted.

    Raises:
      ValueError: if something is there that would be missed: a product or collective in a loop of
        unknown length, products by a library call, a collective of another kind.
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
    """Bytes received through the moves that a program asks for by name, in the dtypes it asks for.

    Those of compiled programs may be wider: XLA's CPU backend moves bfloat16 as float32.

    Args:
      text: of the lowered program (StableHLO), in which moves are in no loop.
    """
    total = Fraction(0)
    for kind, n, dimensions, dtype in _LOWERED.findall(text):
        shape = tuple(int(size) for size in dimensions.split("x"))
        total += _RECEIVED[kind.replace("_", "-")](int(n)) * _bytes(((dtype, shape),))
    return int(total)


class _Walk:
    """Goes through the parts of a program in which something is counted."""

    def __init__(self, program: Program):
        self.program = program
        self.counting: set[str] = set()
        self._seen: dict[str, list[Instruction]] = {}
        self._find(program.entry)

    def instructions(self, name: str) -> list[Instruction]:
        """Those of a computation that count, or run what counts."""
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
            raise ValueError(f"{instruction.name} is a {opcode}, which is not counted here")
        inner = [self._find(name) for name in instruction.called]
        return any(inner) or opcode == "dot" or opcode.removesuffix("-start") in _RECEIVED

    def counts(self, frame: Frame) -> Counts:
        """What one device does in one computation."""
        total = Counts(collections.Counter(), collections.Counter())
        for instruction in self._seen[frame.name]:
            match instruction.opcode:
                case "dot":
                    total.operations += _operations(instruction, self._operands(frame, instruction))
                case "while":
                    inner = Frame(self.program, instruction.called[0], frame.device, None)
                    total.add(self.counts(inner), _trips(instruction), loop=True)
                case "conditional":
                    total.add(self._chosen(frame, instruction))
                case "fusion" | "call" | "async-start":
                    inner = frame.called(instruction.called[0], instruction.operands)
                    total.add(self.counts(inner))
                case _:
                    total.add(self._moved(frame, instruction))
        return total

    def _moved(self, frame: Frame, collective: Instruction) -> Counts:
        kind = collective.opcode.removesuffix("-start")
        given = sum(_bytes(shapes) for shapes in self._operands(frame, collective))
        n = group_size(collective, self.program.devices)
        received = collections.Counter({kind: int(_RECEIVED[kind](n) * given)})
        returned = {"all-gather": n * given, "reduce-scatter": given / n}.get(kind, given)
        return Counts(collections.Counter({kind: 1}), received, int(returned))

    def _chosen(self, frame: Frame, conditional: Instruction) -> Counts:
        try:
            return self.counts(frame.branch(conditional))
        except UnknownError:
            branches = zip(conditional.called, conditional.operands[1:], strict=True)
            every = [self.counts(frame.called(name, [operand])) for name, operand in branches]
            return max(every, key=lambda counts: (counts.operations, counts.received.total()))

    def _operands(self, frame: Frame, instruction: Instruction) -> list[tuple[Shape, ...]]:
        instructions = self.program.computations[frame.name].instructions
        return [instructions[operand].shapes for operand in instruction.operands]


def _operations(dot: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    ((_, out),) = dot.shapes
    ((_, left),) = operands[0]
    inner = math.prod(left[axis] for axis in dot.numbers("lhs_contracting_dims"))
    return 2 * math.prod(out) * inner


def _bytes(shapes: tuple[Shape, ...]) -> Fraction:
    return Fraction(sum(bits(dtype) * math.prod(shape) for dtype, shape in shapes), 8)


@functools.cache
def bits(dtype: str) -> int:
    """Of one number of a dtype as programs name it."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else {"pred": 8}[dtype]


def _trips(loop: Instruction) -> int:
    if loop.trips is None:
        raise ValueError(
            f"{loop.name} has products or collectives, and runs nobody knows how often"
        )
    return loop.trips


def group_size(collective: Instruction, devices: int) -> int:
    """How many devices take part in one group of a collective."""
    text = collective.attributes
    if collective.opcode.startswith("collective-permute"):
        return 2  # a sender and a receiver
    if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})?\}", text):
        sizes = {len(group.split(",")) for group in re.findall(r"\{([\d,]+)\}", found[1] or "")}
        if len(sizes) <= 1:
            return sizes.pop() if sizes else devices
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        mesh = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        if axes:
            return math.prod(int(part or mesh[name]) for name, part in axes)
    raise ValueError(f"{collective.name} has groups that are not understood: {text}")
