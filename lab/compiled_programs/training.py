"""Memory, products and collectives of a training; `lab.compile` runs this in its own process."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from examples.trainer.data import tokenizer
from examples.trainer.models import blocks, sharding
from examples.trainer.runs.loop import check_rows
from examples.trainer.settings import command_line
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError, run_command
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_functions
from lab.compiled_programs import hlo, products, targets, walk
from lab.compiled_programs.targets import Target

USABLE_OF_GPU = 0.92  # the rest is for cuBLAS, NCCL and fragments: a guess
VOCABULARIES = {"gpt2": 50_257, "llama2": 32_000}  # tokens


def report(machine: str, *words: str) -> int:
    """Compiles the programs of a command line, and prints what they need."""
    asked: Any = command_line.parse(words)[0]
    config, target = asked.config, targets.parse(machine)
    if target.is_gpu:
        targets.assume_cudnn()
    mesh = sharding.make_mesh(asked.machine.mesh, list(targets.devices(target)))
    check_rows(config, mesh)
    # Compiled, which types do not show.
    program: Any = make_functions(config, vocabulary(config), mesh)
    rows, fewer = (rows_of(config, parts, mesh) for parts in (1, config.accumulate))
    rates = optimizers.Rates(0.0, 0.0)
    traced = {
        "training step": program.train_step.trace(program.abstract, rates, rows, rows),
        "evaluation": program.loss.trace(program.abstract.params, fewer, fewer),
        "initial state": program.init.trace(0),
    }
    print(f"{machine}, {sharding.describe(mesh)}")
    print(f"{blocks.choose(config.model, mesh.devices.flat[0].platform)} attention")
    usable = target.memory * (USABLE_OF_GPU if target.is_gpu else 1)
    programs = {name: compiled(one, target) for name, one in traced.items()}
    for name, program in programs.items():
        print(memory(name, program, target.memory))
    print("\n".join(work(programs["training step"])))
    fits = max(map(peak, programs.values())) <= usable
    print(f"fits        {'yes' if fits else 'no'}, {size(target.memory)} a device")
    return 0 if fits else 1


def vocabulary(config: RunConfig) -> int:
    """The tokens of the vocabulary; the most it can have if it is still to be trained."""
    name = config.data.tokenizer or (
        "" if config.data.source in ("files", "documentation") else "gpt2"
    )
    if name in VOCABULARIES:
        return VOCABULARIES[name]
    return tokenizer.named(name).get_vocab_size() if name else config.data.vocab_size


def rows_of(config: RunConfig, parts: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The rows of a step, cut into parts."""
    shape = (config.batch_size // parts, config.model.context)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.of_batch(mesh))


def compiled(traced: Any, target: Target) -> Any:
    try:
        return traced.lower().compile(compiler_options=target.compiler_options)
    except jax.errors.JaxRuntimeError as error:  # TPUs' compiler refuses what is too large
        raise UserError(f"XLA refuses a program: {str(error).splitlines()[0][:300]}") from None


def peak(program: Any) -> int:
    """Bytes on a device; results that take the place of arguments do not count again."""
    stats = program.memory_analysis()
    given, results = stats.argument_size_in_bytes, stats.output_size_in_bytes
    return given + stats.temp_size_in_bytes + results - stats.alias_size_in_bytes


def memory(name: str, program: Any, available: float) -> str:
    stats = program.memory_analysis()
    return (
        f"{name:13}  arguments {size(stats.argument_size_in_bytes)}, temporaries "
        f"{size(stats.temp_size_in_bytes)}, peak {size(peak(program))}, "
        f"{peak(program) / available:.0%} of the memory"
    )


def work(step: Any) -> list[str]:
    """Operations and collectives of the device that has the most."""
    program = hlo.read_program(step)
    done = walk.most_work(program, partial(products.cost, program), "operations")
    received = walk.of_kinds(done, "received")
    lines = [f"products    {walk.total(done, 'operations') / 1e9:,.3f} GFLOP a device and step"]
    for kind, count in walk.of_kinds(done, "collectives").items():
        lines.append(f"collectives {count:,.0f} {kind}, {size(received[kind])} received")
    return lines


def size(n: float) -> str:
    """Bytes as GB, or MB where that would be all zeros."""
    return f"{n / 1e9:,.2f} GB" if n >= 1e8 else f"{n / 1e6:,.2f} MB"


if __name__ == "__main__":
    sys.exit(run_command(lambda: report(*sys.argv[1:])))
