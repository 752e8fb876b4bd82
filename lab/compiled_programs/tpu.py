"""What libtpu estimates for a program that it compiled: cycles of each fusion, and collectives.

The compiler writes `"estimated_cycles"` into the configuration of an instruction. Its estimate of a
fusion includes the fusion's products. Collectives are counted on their own. One that runs beside
other work is written several times: in the fusion that starts it, in that work, and where it ends.
"""

import functools
import re

from lab.compiled_programs import collectives, products, walk
from lab.compiled_programs.hlo import Computation, Instruction, Program
from lab.compiled_programs.walk import Work

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


def most_work(program: Program) -> Work:
    """The work of a device, with the branch of a conditional that takes most cycles.

    The keys are ``("operations", "products")``, ``("cycles", opcode)`` and ``("kernels", opcode)``
    for instructions that have an estimate, and those of :func:`collectives.cost`.

    Raises:
      ValueError: if no instruction has an estimate, or a loop runs for an unknown number of
        iterations.
    """
    work = walk.most_work(program, functools.partial(_cost, program), "cycles")
    if not walk.total(work, "cycles"):
        raise ValueError("The program has no estimated_cycles; libtpu writes them, others do not")
    return work


def _cost(program: Program, computation: Computation, x: Instruction) -> Work:
    work = products.cost(program, computation, x)
    if x.name.startswith("async-collective-start"):
        computation = program.computations[x.called[0]]
        started = (
            collectives.cost(program, computation, i) for i in computation.instructions.values()
        )
        work |= next(filter(None, started), {})
    if found := _CYCLES.search(x.attributes):
        work = work | {("cycles", x.opcode): int(found[1]), ("kernels", x.opcode): 1}
    return work
