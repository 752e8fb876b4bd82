"""Which branch of a conditional a device takes, and how often a loop runs, if data do not decide.

Devices that run one program differ in their id only (``partition-id``). A branch that is chosen by
the id, such as "do I have a matrix of this shape", follows from the program without running it: the
few instructions that lead from the id to the choice are evaluated here, all on integers.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from examples.compiled_programs.hlo import Instruction, Program


class UnknownError(Exception):
    """The value depends on data, or on an instruction that is not evaluated here."""


@dataclasses.dataclass(eq=False)
class Frame:
    """A computation as one device runs it.

    Attributes:
      program: the program that the computation is part of.
      name: name of the computation.
      device: id of the device.
      arguments: for each parameter, the frame and name of its value; None if the parameters are
        data, or change in a loop.
    """

    program: Program
    name: str
    device: int
    arguments: list[tuple["Frame", str]] | None
    _values: dict[str, Any] = dataclasses.field(default_factory=dict)

    def called(self, name: str, operands: list[str]) -> "Frame":
        """The frame of the computation ``name``, called from this one with ``operands``."""
        return Frame(self.program, name, self.device, [(self, operand) for operand in operands])

    def value(self, name: str) -> Any:
        """The integers that an instruction returns; for a tuple, frame and name of each element.

        Raises:
          UnknownError: if the value is not known before the program runs.
        """
        if name not in self._values:
            instruction = self.program.computations[self.name].instructions[name]
            self._values[name] = _value(self, instruction)
        return self._values[name]

    def result(self) -> Any:
        return self.value(self.program.computations[self.name].root)

    def branch(self, conditional: Instruction) -> "Frame":
        """The frame of the branch that ``conditional`` takes here."""
        branches = conditional.branches
        chosen = int(self.value(conditional.operands[0]))
        name, argument = branches[chosen if 0 <= chosen < len(branches) else -1]
        return self.called(name, [argument])

    def trips(self, loop: Instruction) -> int:
        """How often a loop runs whose end does not depend on data: its counter is run here."""
        condition, body = re.findall(r"(?:condition|body)=%?([\w.\-]+)", loop.attributes)
        state, trips = (self, loop.operands[0]), 0
        while Frame(self.program, condition, self.device, [state]).result():
            following = Frame(self.program, body, self.device, [state])
            state, trips = (following, self.program.computations[body].root), trips + 1
        return trips


def _value(frame: Frame, instruction: Instruction) -> Any:
    match instruction.opcode:
        case "parameter":
            if frame.arguments is None:
                raise UnknownError(instruction.name)
            source, name = frame.arguments[int(instruction.arguments)]
            return source.value(name)
        case "tuple":
            return [(frame, name) for name in instruction.operands]
        case "get-tuple-element":
            (whole,) = instruction.operands
            index = re.search(r"index=(\d+)", instruction.attributes)
            assert index is not None
            source, name = frame.value(whole)[int(index[1])]
            return source.value(name)
        case "fusion" | "call":
            return frame.called(instruction.called[0], instruction.operands).result()
        case "conditional":
            return frame.branch(instruction).result()
        case _:
            return _integers(frame, instruction)


def _integers(frame: Frame, instruction: Instruction) -> np.ndarray:
    if len(instruction.shapes) != 1:
        raise UnknownError(f"{instruction.name} returns several arrays")
    ((kind, shape),) = instruction.shapes
    if kind not in _DTYPES:
        raise UnknownError(f"{instruction.name} is not an integer")
    if instruction.opcode == "partition-id":
        return np.asarray(frame.device, _DTYPES[kind])
    if instruction.opcode == "constant":
        # Comments such as /*i0=0*/ say where a row of a table begins.
        literals = re.findall(r"true|false|-?\d+", _COMMENT.sub("", instruction.arguments))
        values = [int(_TRUTH.get(literal, literal)) for literal in literals]
        return np.array(values, _DTYPES[kind]).reshape(shape)
    values = [frame.value(name) for name in instruction.operands]
    if instruction.opcode == "dynamic-slice":
        result = _dynamic_slice(values[0], values[1:], shape)
    elif instruction.opcode == "slice":
        ranges = re.findall(r"\[(\d+):(\d+)\]", instruction.attributes)
        result = values[0][tuple(slice(int(start), int(stop)) for start, stop in ranges)]
    elif instruction.opcode == "compare":
        direction = re.search(r"direction=(\w+)", instruction.attributes)
        assert direction is not None
        result = _COMPARED[direction[1]](*values)
    elif instruction.opcode == "bitcast" and np.size(values[0]) != math.prod(shape):
        if sum(n > 1 for n in values[0].shape) > 1:
            raise UnknownError(f"{instruction.name} may take any of the elements")
        result = values[0].ravel()[: math.prod(shape)]  # libtpu takes the first ones so
    elif instruction.opcode == "bitcast" and sum(n > 1 for n in shape) > 1:
        raise UnknownError(f"{instruction.name} may change the order of elements")
    elif instruction.opcode in _ELEMENTWISE:
        result = _ELEMENTWISE[instruction.opcode](*values)
    else:
        raise UnknownError(f"{instruction.name} is computed by {instruction.opcode}")
    return np.asarray(result, _DTYPES[kind]).reshape(shape)


def _dynamic_slice(x: np.ndarray, starts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    ranges = []
    for start, size, length in zip(starts, x.shape, shape, strict=True):
        first = min(max(int(start), 0), size - length)  # XLA clamps in the same way
        ranges.append(slice(first, first + length))
    return x[tuple(ranges)]


def _same(x: np.ndarray) -> np.ndarray:
    return x


_COMMENT = re.compile(r"/\*.*?\*/")
_TRUTH = {"true": "1", "false": "0"}
_DTYPES = {"pred": bool, "s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}
_COMPARED: dict[str, Callable[..., Any]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.floordiv,  # of operands that are not negative, where XLA rounds alike
    "remainder": operator.mod,
    "and": operator.and_,
    "or": operator.or_,
    "shift-right-logical": operator.rshift,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "select": np.where,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    **dict.fromkeys(("convert", "bitcast", "reshape", "copy"), _same),
}
