"""What libtpu estimates for a program that it compiled: cycles of each fusion, and collectives.

It estimates nothing for a kernel. Those of attention take the cycles that `attention.py` says.

The compiler writes `"estimated_cycles"` into the configuration of an instruction. Its estimate of a
fusion includes the fusion's products. Collectives are counted on their own. One that runs beside
other work is written several times: in the fusion that starts it, in that work, and where it ends.
"""

import functools
import re

from examples.compiled_programs import collectives, products, walk
from examples.compiled_programs.chips import Chip
from examples.compiled_programs.hlo import Computation, Instruction, Program
from examples.compiled_programs.walk import Work

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


def most_work(program: Program, chip: Chip | None = None) -> Work:
    """The work of the device with the most estimated cycles.

    The keys are ``("operations", "products")``, ``("cycles", opcode)`` and ``("kernels", opcode)``
    for instructions that have an estimate, and those of :func:`collectives.cost`. For a ``chip``
    that is given, kernels of attention count as ``("cycles", "attention")``.

    Raises:
      ValueError: if no instruction has an estimate, or a loop runs for an unknown number of
        iterations.
    """
    work = walk.most_work(program, functools.partial(_cost, program, chip), "cycles")
    if not walk.total(work, "cycles"):
        raise ValueError("The program has no estimated_cycles; libtpu writes them, others do not")
    return work


def _cost(program: Program, chip: Chip | None, computation: Computation, x: Instruction) -> Work:
    work = products.cost(program, computation, x)
    found = products.inside(program, computation, x) if chip else []
    if chip and found and found[0].share:
        seconds = found[0].operations / (found[0].share * chip.peak)
        return work | {("cycles", "attention"): seconds * chip.clock, ("kernels", "attention"): 1}
    if x.name.startswith("async-collective-start"):
        computation = program.computations[x.called[0]]
        started = (
            collectives.cost(program, computation, i) for i in computation.instructions.values()
        )
        work |= next(filter(None, started), {})
    if found := _CYCLES.search(x.attributes):
        work = work | {("cycles", x.opcode): int(found[1]), ("kernels", x.opcode): 1}
    return work
