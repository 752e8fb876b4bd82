"""The figures of one compiled program: memory, products, collectives and time by roofline."""

import functools
import re
import time
from typing import Any

import jax

from examples.compiled_programs import gpu, hlo, products, tpu, walk
from examples.compiled_programs.targets import Target
from examples.trainer.system.chips import CHIPS

_TOO_LARGE = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
OPTIMIZER = "optimizer"  # the name of the scope of the update, in `examples.trainer.training.step`


def compiled_figures(traced: Any, target: Target) -> dict[str, Any]:
    """Compiles a traced function for `target` and reads its program.

    Where the compiler refuses a program that is too large for the memory, the figures are what it
    says it would need.
    """
    begin = time.perf_counter()
    try:
        compiled = traced.lower().compile(compiler_options=target.compiler_options)
    except jax.errors.JaxRuntimeError as error:
        needed = too_large(str(error))
        if needed is None:
            raise
        return {"peak_bytes": needed, "refused": str(error).splitlines()[0][:300]}
    seconds = time.perf_counter() - begin
    return {
        **memory(compiled),
        **work(hlo.read_program(compiled, scopes=True), target),
        "compile_s": seconds,
    }


def too_large(message: str) -> int | None:
    """Bytes that a program would need, from the message of a compiler that refuses it."""
    found = _TOO_LARGE.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of one device. Results that take the place of arguments do not count again."""
    stats = compiled.memory_analysis()
    beside = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "peak_bytes": stats.argument_size_in_bytes + stats.temp_size_in_bytes + beside,
    }


def work(program: hlo.Program, target: Target) -> dict[str, Any]:
    """Products, collectives and, but on a CPU, seconds of the device with the most work."""
    if target.is_gpu:
        done = gpu.most_work(program, target.rates)
        sent = walk.of_kinds(done, "seconds").get("collectives", 0.0)
        seconds = {"compute": walk.total(done, "seconds") - sent, "collectives": sent}
    elif target.is_tpu:
        chip = CHIPS[target.kind]
        done = tpu.most_work(program)
        seconds = {
            "compute": walk.total(done, "cycles") / chip.clock,
            "collectives": walk.total(done, "received") / chip.link,
        }
    else:
        cost = functools.partial(products.cost, program)
        done, seconds = walk.most_work(program, cost, "operations"), {}
    parts = walk.of_kinds(done, "parts")
    return {
        "flops": walk.total(done, "operations"),
        "collectives": collectives(done),
        "seconds": seconds,
        "optimizer_share": parts.get(OPTIMIZER, 0.0) / (sum(parts.values()) or 1.0),
    }


def collectives(done: walk.Work) -> dict[str, dict[str, float]]:
    """Kind to how many run in a step, and bytes that a device receives."""
    received = walk.of_kinds(done, "received")
    return {
        kind: {"count": n, "received_bytes": received.get(kind, 0)}
        for kind, n in walk.of_kinds(done, "collectives").items()
    }
