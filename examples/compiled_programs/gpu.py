"""What one device does in a program that XLA compiled for a GPU: kernels, bytes, products, time.

The time is a roofline: kernels run one after the other, and each takes the longer of two times:
that of the bytes which it reads and writes, and that of its products. Nothing is added for
launching a kernel, and nothing is taken off where arrays stay in a cache. A collective takes the
time of the bytes that it receives.
"""

import collections
import functools
from typing import NamedTuple

from examples.compiled_programs import collectives, products, walk
from examples.compiled_programs.collectives import leaves_host, size_in_bytes
from examples.compiled_programs.hlo import Computation, Instruction, Program, Shape
from examples.compiled_programs.products import LIBRARY_PRODUCT, Product
from examples.compiled_programs.walk import Work


class Rates(NamedTuple):
    """What a device can do in a second.

    Attributes:
      memory: bytes read and written.
      half: operations of products of float16 or bfloat16 operands.
      tf32: of float32 operands that are rounded to TF32, the default.
      float32: of float32 operands that are not rounded.
      link: bytes received from other devices.
      between_hosts: the same, where a collective has devices of several hosts; None if that makes
        no difference.
      host: devices of a host.
    """

    memory: float
    half: float
    tf32: float
    float32: float
    link: float
    between_hosts: float | None = None
    host: int = 1


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
_SLICES = ("slice", "dynamic-slice", "gather")


def most_work(program: Program, rates: Rates) -> Work:
    """The work of the device whose roofline time is the longest.

    The keys are ``("kernels", kind)``, ``("bytes", kind)``, ``("seconds", kind)`` and
    ``("operations", "products")``, where the kind is ``products``, ``reductions``, ``moves`` or
    ``arithmetic``; and those of :func:`collectives.cost`, whose seconds are
    ``("seconds", "collectives")``.

    Raises:
      ValueError: if a loop runs for an unknown number of iterations.
    """
    return walk.most_work(program, functools.partial(_cost, program, rates), "seconds")


def _cost(program: Program, rates: Rates, computation: Computation, x: Instruction) -> Work:
    opcode = x.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return {}
    if sent := collectives.cost(program, computation, x):
        far = rates.between_hosts and leaves_host(x, program.devices, rates.host)
        link = rates.between_hosts if far else rates.link
        return sent | {("seconds", "collectives"): walk.total(sent, "received") / link}
    shapes = [computation.instructions[name].shapes for name in x.operands]
    found = products.inside(program, computation, x)
    operations = sum(product.operations for product in found)
    rate = min((_rate(product, rates) for product in found), default=rates.half)
    kind = "products" if operations else _kind(program, x)
    size = _bytes(program, x, shapes)
    seconds = max(size / rates.memory, operations / rate)
    work = {("kernels", kind): 1, ("bytes", kind): size, ("seconds", kind): seconds}
    return work | ({("operations", kind): operations} if operations else {})


def _kind(program: Program, x: Instruction) -> str:
    inner = [
        i.opcode for name in x.called for i in program.computations[name].instructions.values()
    ]
    opcodes = set(inner) or {x.opcode.removesuffix("-start")}
    if "reduce" in opcodes:
        return "reductions"
    return "moves" if opcodes <= _MOVES else "arithmetic"


def _rate(product: Product, rates: Rates) -> float:
    if product.dtype in ("f16", "bf16"):
        return rates.half
    return rates.float32 if product.highest else rates.tf32


def _bytes(program: Program, x: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    """Bytes that one kernel reads and writes; of an array that it only cuts, the part it cuts."""
    if x.opcode == "fusion":
        return _Fused(program.computations[x.called[0]]).bytes()
    opcode = x.opcode.removesuffix("-start")
    if opcode in _SLICES or opcode == "copy":
        # What begins here and ends elsewhere returns its operands too, and then the result.
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
            elif not (user.opcode == "dynamic-update-slice" and cut):  # that one is done in place
                return size
        return min(read, size)

    def _written(self, name: str) -> int:
        x = self.instructions[name]
        if x.opcode == "tuple":
            return sum(self._written(operand) for operand in x.operands)
        if x.opcode == "bitcast":
            return self._written(x.operands[0])
        if x.opcode == "dynamic-update-slice" and self._is_parameter(x.operands[0]):
            return int(size_in_bytes(self.instructions[x.operands[1]].shapes))
        return int(size_in_bytes(x.shapes))

    def _is_parameter(self, name: str) -> bool:
        x = self.instructions[name]
        return x.opcode == "parameter" or (
            x.opcode == "bitcast" and self._is_parameter(x.operands[0])
        )
