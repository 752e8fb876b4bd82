"""Adds up what one device does in a compiled program, instruction by instruction.

The caller gives the cost of an instruction: `products.py` counts products and collectives, `gpu.py`
kernels and bytes, `tpu.py` the compiler's own estimates. Work in a loop counts once per iteration.
A conditional counts with its most expensive branch, an upper bound for a device that takes another.
"""

from collections.abc import Callable

from lab.compiled_programs.hlo import Computation, Instruction, Program

# What is counted, such as ("kernels", "products"), and how much of it.
Work = dict[tuple[str, str], float]

# Runs one instruction of a computation, apart from loops, conditionals and calls.
Cost = Callable[[Computation, Instruction], Work]

_CALLS = ("call", "async-start")

# Instructions that end in another one, and are counted where they begin.
_STARTS = {
    "async-start", "copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start",
    "all-gather-start", "all-reduce-start", "collective-permute-start", "all-to-all-start",
    "reduce-scatter-start",
}  # fmt: skip


def total(work: Work, what: str) -> float:
    """The sum over all kinds of ``what``."""
    return sum(amount for (name, _), amount in work.items() if name == what)


def of_kinds(work: Work, what: str) -> dict[str, float]:
    """The amount of each kind of ``what``."""
    return {kind: amount for (name, kind), amount in work.items() if name == what}


def most_work(program: Program, cost: Cost, measure: str) -> Work:
    """The most that a device does; a conditional takes the branch with most of ``measure``.

    Raises:
      ValueError: if a loop that does something runs for an unknown number of iterations, or for
        an unknown operation that runs beside others.
    """
    known: dict[str, Work] = {}

    def of_computation(name: str) -> Work:
        if name not in known:
            done: Work = {}
            for x in program.computations[name].instructions.values():
                for key, amount in of_instruction(program.computations[name], x).items():
                    done[key] = done.get(key, 0) + amount
            known[name] = done
        return known[name]

    def of_instruction(computation: Computation, x: Instruction) -> Work:
        if x.opcode.endswith("-start") and x.opcode not in _STARTS:
            raise ValueError(f"{x.name} is a {x.opcode}, which is not known here")
        if x.opcode == "while":
            once = of_computation(x.called[0])
            return {key: _trips(program, x) * amount for key, amount in once.items()}
        if x.opcode == "conditional":
            works = [of_computation(name) for name in x.called]
            return max(works, key=lambda work: total(work, measure))
        if x.opcode in _CALLS:
            return of_computation(x.called[0])
        return cost(computation, x)

    return of_computation(program.entry)


def _trips(program: Program, loop: Instruction) -> int:
    trips = program.trips(loop)
    if trips is None:
        raise ValueError(f"{loop.name} does something, but its number of iterations is unknown")
    return trips
