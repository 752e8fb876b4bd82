"""Adds up what one device does in a compiled program, instruction by instruction.

What an instruction costs is for the caller to say: `products.py` counts products and collectives,
`gpu.py` kernels and bytes, `tpu.py` the compiler's own estimates. Here loops multiply, and the
branch of a conditional is chosen.
"""

from collections.abc import Callable

from examples.compiled_programs.branches import Frame, UnknownError
from examples.compiled_programs.hlo import Computation, Instruction, Program

# What is counted, such as ("kernels", "products"), and how much of it.
Work = dict[tuple[str, str], float]

# Runs one instruction of a computation, apart from loops, conditionals and calls.
Cost = Callable[[Computation, Instruction], Work]

_CALLS = ("call", "async-start")

# What begins here and ends elsewhere, and is counted where it begins.
_STARTS = {
    "async-start", "copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start",
    "all-gather-start", "all-reduce-start", "collective-permute-start", "all-to-all-start",
    "reduce-scatter-start",
}  # fmt: skip


def total(work: Work, what: str) -> float:
    """The sum over all kinds of ``what``."""
    return sum(amount for (name, _), amount in work.items() if name == what)


def of_kinds(work: Work, what: str) -> dict[str, float]:
    """How much there is of each kind of ``what``."""
    return {kind: amount for (name, kind), amount in work.items() if name == what}


def most_work(program: Program, cost: Cost, measure: str) -> Work:
    """The work of the device that has the most of ``measure``, such as ``"seconds"``."""
    return max(of_devices(program, cost, measure), key=lambda work: total(work, measure))


def of_devices(program: Program, cost: Cost, measure: str) -> list[Work]:
    """The work of each device; one entry if all devices do the same.

    A loop's body counts as often as it runs, and its collectives as ``"in_loops"`` too. A branch
    that is chosen by the device's id is followed; where data chooses, the branch with most of
    ``measure`` counts.

    Raises:
      ValueError: if a loop that does something runs for an unknown number of iterations, or for
        an unknown operation that runs beside others.
    """
    walk = _Walk(program, cost, measure)
    devices = range(program.devices if walk.chooses(program.entry) else 1)
    return [walk.work(Frame(program, program.entry, device, None)) for device in devices]


class _Walk:
    def __init__(self, program: Program, cost: Cost, measure: str):
        self.program, self.cost, self.measure = program, cost, measure
        # Computations without a choice are the same on every device, and so is each instruction.
        self._same: dict[str, Work] = {}
        self._single: dict[tuple[str, str], Work] = {}
        self._chooses: dict[str, bool] = {}

    def measured(self, work: Work) -> float:
        return total(work, self.measure)

    def chooses(self, name: str) -> bool:
        """Whether a computation, or one that it runs, has a conditional."""
        if name not in self._chooses:
            self._chooses[name] = any(
                x.opcode == "conditional"
                or (x.opcode in ("while", *_CALLS) and any(map(self.chooses, x.called)))
                for x in self.program.computations[name].instructions.values()
            )
        return self._chooses[name]

    def work(self, frame: Frame) -> Work:
        if frame.name in self._same:
            return self._same[frame.name]
        done: Work = {}
        for instruction in self.program.computations[frame.name].instructions.values():
            for key, amount in self._instruction(frame, instruction).items():
                done[key] = done.get(key, 0) + amount
        if not self.chooses(frame.name):
            self._same[frame.name] = done
        return done

    def _instruction(self, frame: Frame, instruction: Instruction) -> Work:
        if instruction.opcode.endswith("-start") and instruction.opcode not in _STARTS:
            raise ValueError(
                f"{instruction.name} is a {instruction.opcode}, which is not known here"
            )
        if instruction.opcode == "while":
            return self._loop(frame, instruction)
        if instruction.opcode == "conditional":
            return self._conditional(frame, instruction)
        if instruction.opcode in _CALLS:
            return self.work(frame.called(instruction.called[0], instruction.operands))
        key = (frame.name, instruction.name)
        if key not in self._single:
            self._single[key] = self.cost(self.program.computations[frame.name], instruction)
        return self._single[key]

    def _loop(self, frame: Frame, loop: Instruction) -> Work:
        once = self.work(Frame(self.program, loop.called[0], frame.device, None))
        trips = self.program.trips(loop)
        if trips is None and once:
            try:
                trips = frame.trips(loop)
            except UnknownError as error:
                raise ValueError(
                    f"{loop.name} does something, but its number of iterations is unknown: {error}"
                ) from None
        once = once | {("in_loops", kind): n for kind, n in of_kinds(once, "collectives").items()}
        return {key: (trips or 0) * amount for key, amount in once.items()}

    def _conditional(self, frame: Frame, conditional: Instruction) -> Work:
        try:
            return self.work(frame.branch(conditional))
        except UnknownError:
            works = [
                self.work(frame.called(name, [operand])) for name, operand in conditional.branches
            ]
            return max(works, key=self.measured)
