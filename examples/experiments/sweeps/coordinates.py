"""A coordinate check: how activations and updates grow with the width of a model.

A rate transfers from narrow models to wide ones if a few steps change activations by as much at
each width (Yang et al., Tensor Programs V, arXiv:2203.03466, appendix D.1). Heads keep their size,
so that wider models have more of them.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.experiments.sweeps import grid
from examples.experiments.sweeps.grid import Grid
from examples.trainer.data.placement import place_batch
from examples.trainer.data.prepare import prepare
from examples.trainer.data.token_folder import Dataset
from examples.trainer.runs.compilation import keep_compiled_programs
from examples.trainer.settings.command_line import Unprefixed, choose_preset
from examples.trainer.settings.presets import PRESETS
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files
from examples.trainer.training import sharding
from examples.trainer.training.program import TrainingSetup, assemble, check_settings
from examples.trainer.training.step import make_model

FILE = "coordinates.jsonl"
ONE = Grid(("muon", "muonplus"), ("col_row", "long"), rates=(0.02,), adam_rates=(0.002,))


@dataclass(frozen=True)
class NewCheck:
    """Models that differ in width, each trained for a few steps by each method of a grid."""

    config: Annotated[RunConfig, Unprefixed]
    grid: Grid = ONE
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Widths of the residual stream; those inside MLPs follow."""
    head: int = 32
    """Width of a head."""
    updates: int = 5
    """Steps before activations are compared with those of the initial parameters."""
    out: Path = Path("results/experiments/widths")
    """Where coordinates.jsonl is; what it has is not measured again."""


class Watched(nnx.Module):
    """A block that also returns its output, in the place of a cache."""

    def __init__(self, block: Any):
        self.block = block

    def __call__(self, x: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the output twice."""
        y, _ = self.block(x, *rest)
        return y, y


def parse(argv: Sequence[str]) -> NewCheck:
    """Returns what the flags ask for; the rate is constant, as that of a long run's first steps."""
    presets: dict[str, tuple[str, NewCheck]] = {}
    for name, (text, config) in PRESETS.items():
        flat = dataclasses.replace(config.optimizer, schedule="constant_linear")
        presets[name] = text, NewCheck(dataclasses.replace(config, optimizer=flat))
    return choose_preset(presets, argv, "python -m examples.widths check", __doc__ or "")[0]


def run(asked: NewCheck, say: Callable[[str], None] = print) -> Path:
    """Measures what is not in the file yet; returns its path."""
    check_settings(asked.config)
    grid.check(asked.grid)
    keep_compiled_programs()
    dataset, path = prepare(asked.config.data, say), asked.out / FILE
    asked.out.mkdir(parents=True, exist_ok=True)
    done = [identity(record) for record in read(path)]
    for width in asked.widths:
        for method in grid.methods(asked.grid):
            for rate in grid.rates(asked.grid, method):
                trial = grid.Trial(method, rate, asked.config.seed)
                config = at_width(grid.configure(asked.config, asked.grid, trial, ""), asked, width)
                record = settings(config, method.name, asked.updates)
                if identity(record) in done:
                    continue
                record |= measured(config, dataset, asked.updates)
                with files.explained(path, "write"), path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                say(f"{width} {method.name} {rate:g}: loss {record['loss']:.4f}")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Reads all measurements."""
    return files.read_json_lines(path, "Remove the line to have it measured again.").records


def identity(record: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what tells measurements apart."""
    names = ("family", "method", "shape", "rate", "other_rate", "updates", "width")
    return tuple(record[name] for name in names)


def at_width(config: RunConfig, asked: NewCheck, width: int) -> RunConfig:
    """Returns the run at a width."""
    model = dataclasses.replace(config.model, d_model=width, n_head=max(1, width // asked.head))
    config = dataclasses.replace(config, model=model)
    check_settings(config)
    return config


def settings(config: RunConfig, method: str, updates: int) -> dict[str, Any]:
    """Returns the settings that differ between measurements."""
    return {
        "family": config.model.family,
        "method": method,
        "shape": config.optimizer.shape_scale,
        "rate": config.optimizer.learning_rate,
        "other_rate": config.optimizer.adam_learning_rate,
        "updates": updates,
        "width": config.model.d_model,
    }


def measured(config: RunConfig, dataset: Dataset, updates: int) -> dict[str, Any]:
    """Returns root mean squares after some steps, by layer.

    Of the activations of the first batch, of their change since the start, and of the last update
    of each matrix.
    """
    setup = assemble(config, dataset, sharding.make_mesh("", jax.devices()[:1]))
    state, rows = setup.init(), sharding.of_batch(setup.mesh)
    watch = watcher(setup)
    inputs, _ = place_batch(setup.loader, 0, rows)
    first, old, loss = watch(state.params, inputs), state.params, jnp.nan
    for step in range(updates):
        old = jax.tree.map(jnp.copy, state.params)  # a step takes the memory of its state
        state, found = setup.train_step(state, *place_batch(setup.loader, step, rows))
        loss = found.loss
    last = watch(state.params, inputs)
    moved = jax.tree.map(jnp.subtract, state.params, old)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(moved)
        if x.ndim == 2
    }
    return {
        "loss": float(loss),
        "activations": {name: rms(x) for name, x in last.items()},
        "changes": {name: rms(x - first[name]) for name, x in last.items()},
        "last_update": {name: rms(x) for name, x in names.items()},
    }


def watcher(setup: TrainingSetup) -> Callable[[optax.Params, ArrayLike], dict[str, jax.Array]]:
    """Returns a compiled function from parameters and tokens to activations."""
    words = setup.dataset.tokenizer.get_vocab_size()
    model_of = make_model(setup.config.model, words, setup.mesh)

    def watch(params: optax.Params, inputs: ArrayLike) -> dict[str, jax.Array]:
        model = model_of(params)
        model.blocks = nnx.List([Watched(block) for block in model.blocks])
        x, outputs = model.hidden(jnp.asarray(inputs), None, 0)
        named = {f"block {i}": y for i, y in enumerate(outputs, 1)}
        return {**named, "logits": x @ model.head()}

    return jax.jit(watch)


def rms(x: jax.Array) -> float:
    """Returns the root mean square."""
    return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))
