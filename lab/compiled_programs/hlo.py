"""Reads the text of a compiled program: its computations, and the instructions in each."""

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxlib import _hlo  # ty: ignore[import-not-found]

# Dtype and dimensions of one array.
Shape = tuple[str, tuple[int, ...]]

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{|(?:true|false)_computation=)([^}=]*)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: name of its result.
      opcode: the operation; `fusion` too for one that runs beside others (`fusion-start`).
      shapes: shapes of its result; more than one for a tuple.
      arguments: the text in its brackets: names of operands, or the value of a constant.
      attributes: the text behind the brackets.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it uses."""
        return _names(self.arguments)

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; for a conditional, all of its branches."""
        if self.opcode == "conditional":
            return _names(" ".join(_BRANCHES.findall(self.attributes)))
        if self.opcode in ("while", "fusion", "call", "async-start"):
            return _CALLED.findall(self.attributes)
        return []

    def integers(self, attribute: str) -> list[int]:
        """The list ``[1, 2]`` for ``attribute={1,2}``; empty if there is no such attribute."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return [int(n) for n in found[1].split(",") if n] if found else []


class Computation(NamedTuple):
    """A function of the program: its instructions, and the name of the one that it returns."""

    instructions: dict[str, Instruction]
    root: str

    def operands(self, x: Instruction) -> tuple[Shape, ...]:
        """Shapes of the arrays that an instruction takes."""
        return sum((self.instructions[name].shapes for name in x.operands), ())


class Program(NamedTuple):
    """A compiled program; ``devices`` devices run it."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    def trips(self, loop: Instruction) -> int | None:
        """Number of iterations of a loop, if the compiler writes it or the loop is a plain count.

        libtpu writes none. A loop that counts up while the count is less than a constant is taken
        to begin at 0 and to take steps of 1, as all loops of `jax.lax` do. A loop that runs while a
        flag is true, which its body sets to false, has one iteration at most, which counts.
        """
        if found := _TRIPS.search(loop.attributes):
            return int(found[1])
        condition, body = re.findall(r"(?:condition|body)=%?([\w.\-]+)", loop.attributes)
        (tested, root), (done, result) = self.computations[condition], self.computations[body]

        def following(x: Instruction) -> Instruction:
            (place,) = re.findall(r"index=(\d+)", x.attributes)
            found = done[done[result].operands[int(place)]]
            return done[found.operands[0]] if found.opcode == "copy" else found

        compared = tested[root]
        if compared.opcode == "get-tuple-element":
            flag = following(compared)
            return 1 if (flag.opcode, flag.arguments) == ("constant", "false") else None
        if compared.opcode != "compare" or "direction=LT" not in compared.attributes:
            return None
        count, limit = (tested[name] for name in compared.operands)
        if count.opcode != "get-tuple-element" or limit.opcode != "constant":
            return None
        counted = following(count).opcode == "add" and following(count).shapes == count.shapes
        return int(limit.arguments) if counted else None


def read_program(compiled: Any) -> Program:
    """The program of ``jax.jit(...).lower(...).compile()``.

    ``compiled.as_text()`` does not serve: operands have shapes there, and shapes have layouts.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    options = _hlo.HloPrintOptions()
    options.print_metadata = False
    options.print_operand_shape = False
    options.include_layout_in_shapes = False
    return parse(module.to_string(options))


def parse(text: str) -> Program:
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in _lines(text):
        if found := _LINE.match(line):
            instruction = _instruction(*found.groups()[1:])
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root
        elif found := _HEADER.match(line):
            name, instructions = found[2], {}
            entry = name if found[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(instructions, root)
    devices = re.search(r"num_partitions=(\d+)", text.split("\n", 1)[0])
    return Program(computations, entry, int(devices[1]) if devices else 1)


def _lines(text: str) -> Iterator[str]:
    """The lines, with an instruction in one: attributes of kernels may be written in several.

    Braces in strings do not count: since JAX 0.12 one of them is the kernel itself, as bytes.
    """
    begun = ""
    for line in text.splitlines():
        line = f"{begun} {line.strip()}" if begun else line
        outside = _STRING.sub("", line)
        begun = line if _LINE.match(line) and outside.count("{") > outside.count("}") else ""
        if not begun:
            yield line


def _instruction(name: str, shape: str, opcode: str, rest: str) -> Instruction:
    arguments, _, attributes = rest.partition(")")
    opcode = "fusion" if opcode == "fusion-start" else opcode
    return Instruction(name, opcode, _shapes(shape), arguments, attributes)


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", text)


@functools.cache
def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        (dtype, tuple(int(n.lstrip("<=")) for n in dimensions.split(",") if n))
        for dtype, dimensions in re.findall(r"(\w+)\[([\d,<=]*)\]", text)
    )
