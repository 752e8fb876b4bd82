"""What one device does in a program that XLA compiled for a GPU: kernels, bytes, products.

Arrays that stay in a cache count in full.
"""

import collections
import functools

from lab.compiled_programs import collectives, products, walk
from lab.compiled_programs.collectives import size_in_bytes
from lab.compiled_programs.hlo import Computation, Instruction, Program, Shape
from lab.compiled_programs.products import LIBRARY_PRODUCT
from lab.compiled_programs.walk import Work

# Instructions that launch nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency", "domain",
}  # fmt: skip
# A kernel of these only moves numbers to other places.
_MOVES = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "broadcast",
    "copy", "transpose", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad",
    "reverse", "gather",
}  # fmt: skip
# Those that write a part of an array in place, and which operand that is.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SLICES = ("slice", "dynamic-slice", "gather")


def most_work(program: Program) -> Work:
    """The work of a device, with the branch of a conditional that moves most bytes.

    The keys are ``("kernels", kind)``, ``("bytes", kind)`` and ``("operations", "products")``,
    where the kind is ``products``, ``reductions``, ``moves`` or ``arithmetic``; and those of
    :func:`collectives.cost`.

    Raises:
      ValueError: if a loop runs for an unknown number of iterations.
    """
    return walk.most_work(program, functools.partial(_cost, program), "bytes")


def _cost(program: Program, computation: Computation, x: Instruction) -> Work:
    if x.opcode in _FREE or x.opcode.endswith(("-done", "-update")):
        return {}
    if sent := collectives.cost(program, computation, x):
        return sent
    shapes = [computation.instructions[name].shapes for name in x.operands]
    operations = products.operations(program, computation, x)
    kind = "products" if operations else _kind(program, x)
    work: Work = {("kernels", kind): 1, ("bytes", kind): _bytes(program, x, shapes)}
    return work | ({("operations", kind): operations} if operations else {})


def _kind(program: Program, x: Instruction) -> str:
    inner = [
        i.opcode for name in x.called for i in program.computations[name].instructions.values()
    ]
    opcodes = set(inner) or {x.opcode.removesuffix("-start")}
    if "reduce" in opcodes:
        return "reductions"
    return "moves" if opcodes <= _MOVES else "arithmetic"


def _bytes(program: Program, x: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    """Bytes that one kernel reads and writes. An array that it cuts counts with that part."""
    if x.opcode == "fusion":
        return _Fused(program.computations[x.called[0]]).bytes()
    opcode = x.opcode.removesuffix("-start")
    if opcode in _SLICES or opcode == "copy":
        # An instruction that ends elsewhere returns its operands too, and then the result.
        place = len(operands) if opcode != x.opcode else 0
        return 2 * int(size_in_bytes(x.shapes[place : place + 1]))
    if opcode == "dynamic-update-slice":
        return 2 * int(size_in_bytes(operands[1]))
    library = x.opcode == "custom-call" and LIBRARY_PRODUCT.search(x.attributes)
    written = x.shapes[:1] if library else x.shapes
    return int(size_in_bytes(written)) + sum(int(size_in_bytes(shapes)) for shapes in operands)


class _Fused:
    """What the computation inside a fusion reads of its parameters, and writes."""

    def __init__(self, computation: Computation):
        self.instructions, self.root = computation
        self.users = collections.defaultdict(list)
        for instruction in self.instructions.values():
            for name in set(instruction.operands):
                self.users[name].append(instruction)

    def bytes(self) -> int:
        parameters = [x for x in self.instructions.values() if x.opcode == "parameter"]
        read = sum(self._read(x.name, int(size_in_bytes(x.shapes))) for x in parameters)
        return read + self._written(self.root)

    def _read(self, name: str, size: int) -> int:
        read = 0
        for user in self.users[name]:
            cut = user.operands[0] == name and name not in user.operands[1:]
            if user.opcode == "bitcast":
                read += self._read(user.name, size)
            elif user.opcode in _SLICES and cut:
                read += int(size_in_bytes(user.shapes))
            elif user.opcode == "scatter" and cut:  # done in place; it may add to what it reads
                read += int(size_in_bytes(self.instructions[user.operands[-1]].shapes))
            elif not (user.opcode == "dynamic-update-slice" and cut):  # that one is done in place
                return size
        return min(read, size)

    def _written(self, name: str) -> int:
        x = self.instructions[name]
        if x.opcode == "tuple":
            return sum(self._written(operand) for operand in x.operands)
        if x.opcode == "bitcast":
            return self._written(x.operands[0])
        if x.opcode in _UPDATES and self._is_parameter(x.operands[0]):
            return int(size_in_bytes(self.instructions[x.operands[_UPDATES[x.opcode]]].shapes))
        return int(size_in_bytes(x.shapes))

    def _is_parameter(self, name: str) -> bool:
        x = self.instructions[name]
        return x.opcode == "parameter" or (
            x.opcode == "bitcast" and self._is_parameter(x.operands[0])
        )
