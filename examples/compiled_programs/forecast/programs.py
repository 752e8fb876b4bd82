"""The programs of a run, from shapes alone, and the figures of each: no data, no arrays."""

import functools
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from examples.compiled_programs import gpu, hlo, products, tpu, walk
from examples.compiled_programs.targets import Target
from examples.trainer.data import tokenizer
from examples.trainer.settings.presets import VOCABULARIES
from examples.trainer.settings.run import RunConfig, with_document_token
from examples.trainer.system.chips import CHIPS
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.program import Program, check_rows, program_of

PROGRAMS = ("train_step", "evaluation", "init")
OPTIMIZER = "optimizer"  # the name of the scope of the update, in `examples.trainer.training.step`
LAUNCH_S = 0.5e-6
"""Seconds from one kernel to the next of a graph: NVIDIA measured 3.4 us a kernel where the kernels
took 2.9 (A. Gray, "Getting Started with CUDA Graphs", 2019, on a V100). XLA makes such graphs."""
_TOO_LARGE = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def make(config: RunConfig, mesh: Mesh) -> Program:
    """Makes the functions of a run; raises `UserError` if rows do not divide."""
    check_rows(config, mesh)
    config = with_document_token(config, 0 if config.data.document_mask else None)  # any token
    return program_of(config, vocabulary(config), mesh)


def vocabulary(config: RunConfig) -> int:
    """Counts tokens of the vocabulary; the most it can have if it is still to be trained."""
    name = config.data.tokenizer or ("" if config.data.trains_tokenizer else "gpt2")
    if name in VOCABULARIES:
        return VOCABULARIES[name]
    return tokenizer.named(name, Path()).get_vocab_size() if name else config.data.vocab_size


def traced(name: str, program: Program, config: RunConfig, mesh: Mesh) -> Any:
    """Traces one of `PROGRAMS`: `jaxpr` is what it does, and `lower().compile()` compiles it."""
    # jax.jit's functions are typed by what they compute.
    step: Any = program.train_step
    loss: Any = program.loss
    init: Any = program.init
    if name == "init":
        return init.trace(0)
    rows = config.batch_size // (1 if name == "train_step" else config.accumulate)
    row = jax.ShapeDtypeStruct(
        (rows, config.model.context), jnp.int32, sharding=sharding.of_batch(mesh)
    )
    if name == "train_step":
        return step.trace(program.abstract, optimizers.Rates(0.0, 0.0), row, row)
    return loss.trace(program.abstract.params, row, row)


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
    """Reads bytes that a program would need from the message of a compiler that refuses it."""
    found = _TOO_LARGE.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def memory(compiled: Any) -> dict[str, int]:
    """Counts bytes of one device. Results that take the place of arguments do not count again."""
    stats = compiled.memory_analysis()
    beside = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "peak_bytes": stats.argument_size_in_bytes + stats.temp_size_in_bytes + beside,
    }


def work(program: hlo.Program, target: Target) -> dict[str, Any]:
    """Counts work of the device with the most: products, collectives, and on a chip seconds."""
    kernels, waited = 0.0, None
    if target.is_gpu:
        done = gpu.most_work(program, target.rates)
        sent = walk.of_kinds(done, "seconds").get("collectives", 0.0)
        kernels = walk.total(done, "kernels")
        busy = walk.total(done, "seconds") - sent
        seconds = {"compute": busy + kernels * LAUNCH_S, "collectives": sent}
        waited = walk.of_kinds(done, "waits").get("collectives", 0.0)
        attention = walk.of_kinds(done, "seconds").get("attention", 0.0)
    elif target.is_tpu:
        chip = CHIPS[target.kind]
        done = tpu.most_work(program, chip)
        attention = walk.of_kinds(done, "cycles").get("attention", 0.0) / chip.clock
        seconds = {
            "compute": walk.total(done, "cycles") / chip.clock,
            "collectives": walk.total(done, "received") / chip.link,
        }
    else:
        cost = functools.partial(products.cost, program)
        done, seconds, attention = walk.most_work(program, cost, "operations"), {}, 0.0
    parts = walk.of_kinds(done, "parts")
    return {
        "flops": walk.total(done, "operations"),
        "collectives": collectives(done),
        "seconds": seconds,
        "waited_s": waited,
        "attention_s": attention,
        "kernels": kernels,
        "optimizer_share": parts.get(OPTIMIZER, 0.0) / (sum(parts.values()) or 1.0),
    }


def collectives(done: walk.Work) -> dict[str, dict[str, float]]:
    """Counts how many of each kind run, and bytes that a device receives."""
    received = walk.of_kinds(done, "received")
    return {
        kind: {"count": n, "received_bytes": received.get(kind, 0)}
        for kind, n in walk.of_kinds(done, "collectives").items()
    }
