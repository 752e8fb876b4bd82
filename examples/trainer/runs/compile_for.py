"""`--compile-for`: what XLA says of a run on a machine that is not there.

The programs of the run are compiled for the machine, from shapes alone, by its own compiler. That
is done in a process of its own: its environment differs, and a compiler may die.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from examples.compiled_programs import hlo, products, targets, walk
from examples.compiled_programs.targets import Target
from examples.trainer.data import tokenizer
from examples.trainer.models import attention
from examples.trainer.models.layers import Layout
from examples.trainer.settings import command_line
from examples.trainer.settings.command_line import NewRun
from examples.trainer.settings.presets import VOCABULARIES
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import tables
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import run_command
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.program import Program, check_rows, check_settings, program_of

USABLE_OF_GPU = 0.92  # the rest is for cuBLAS, NCCL and fragments: a guess
HEAD = ("program", "arguments", "temporaries", "peak", "of memory")


def compile_for(asked: NewRun, words: Sequence[str]) -> int:
    """Compiles in another process; 0 if the run fits, 1 if it does not, 2 after an error."""
    check_settings(asked.config)
    target = target_of(asked.compile_for)
    command = [sys.executable, "-m", "examples.trainer.runs.compile_for", *words]
    status = subprocess.run(command, env=targets.environment(target), check=False).returncode
    if status < 0:
        raise UserError(f"the compiler for {asked.compile_for} died of signal {-status}.")
    return status


def main(words: Sequence[str]) -> int:
    """Compiles the programs of a command line, and prints what they need."""
    return run_command(lambda: report(words))


def report(words: Sequence[str]) -> int:
    asked, preset = command_line.parse(words)
    assert isinstance(asked, NewRun)
    config, target = asked.config, target_of(asked.compile_for)
    if target.is_gpu:
        targets.assume_cudnn()
    mesh = sharding.make_mesh(asked.machine.mesh, list(targets.devices(target)))
    check_rows(config, mesh)
    program = program_of(config, vocabulary(config), mesh)
    step = compiled(train_step(program, config, mesh), target)
    others = {
        "evaluation": compiled(evaluation(program, config, mesh), target),
        "initial state": compiled(program.init.trace(0), target),  # ty: ignore
    }
    lines = [memory(name, one, target) for name, one in {"training step": step, **others}.items()]
    print(f"{preset} on {asked.compile_for}, {sharding.describe(mesh)}")
    print(f"attention by {attention.describe(config.model, Layout(mesh))}\n")
    print(tables.plain(HEAD, [line[:-1] for line in lines]) + "\n")
    print("\n".join(work(step)))
    fits = all(share <= (USABLE_OF_GPU if target.is_gpu else 1.0) for *_, share in lines)
    print(f"fits        {'yes' if fits else 'no'}, {size(target.memory)} a device")
    return 0 if fits else 1


def target_of(text: str) -> Target:
    """The machine, if its compiler is installed."""
    try:
        target = targets.parse(text)
    except ValueError as error:
        raise UserError(f"--compile-for {text}: {error}.") from None
    if sentence := targets.missing(target):
        raise UserError(sentence)
    return target


def vocabulary(config: RunConfig) -> int:
    """The tokens of the vocabulary; the most it can have if it is still to be trained."""
    name = config.data.tokenizer or (
        "" if config.data.source in ("files", "documentation") else "gpt2"
    )
    if name in VOCABULARIES:
        return VOCABULARIES[name]
    return tokenizer.named(name).get_vocab_size() if name else config.data.vocab_size


def train_step(program: Program, config: RunConfig, mesh: Mesh) -> Any:
    step: Any = program.train_step  # its type says what it computes, not that it is compiled
    rows = rows_of(config, config.batch_size, mesh)
    return step.trace(program.abstract, optimizers.Rates(0.0, 0.0), rows, rows)


def evaluation(program: Program, config: RunConfig, mesh: Mesh) -> Any:
    loss: Any = program.loss
    rows = rows_of(config, config.batch_size // config.accumulate, mesh)
    return loss.trace(program.abstract.params, rows, rows)


def rows_of(config: RunConfig, rows: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    shape = (rows, config.model.context)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.of_batch(mesh))


def compiled(traced: Any, target: Target) -> Any:
    try:
        return traced.lower().compile(compiler_options=target.compiler_options)
    except jax.errors.JaxRuntimeError as error:  # TPUs' compiler refuses what is too large
        raise UserError(f"XLA refuses a program: {str(error).splitlines()[0][:300]}") from None


def memory(name: str, program: Any, target: Target) -> tuple[Any, ...]:
    """A line of the table, and the share of a device's memory.

    Results that take the place of arguments do not count again.
    """
    stats = program.memory_analysis()
    given, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    peak = given + temporary + stats.output_size_in_bytes - stats.alias_size_in_bytes
    share = peak / target.memory
    return name, size(given), size(temporary), size(peak), f"{share:.0%}", share


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
    sys.exit(main(sys.argv[1:]))
