"""What the checksums of a checkpoint cost: `python -m benchmarks.checkpoints --gigabytes 2`.

Saves and restores the same arrays with and without them, in turn, in a temporary folder. Processor
time is of all threads, and is what a loaded machine changes least.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro

from examples.trainer.runs import checkpoint, integrity

ARRAYS = 16


@dataclass(frozen=True)
class Config:
    """What is saved, how often, and where."""

    gigabytes: float = 1.0
    """Size of the arrays, float32."""
    rounds: int = 3
    """How often each way is timed."""
    folder: Path | None = None
    """Where the checkpoints are written; None: where temporary files are."""


def main(config: Config) -> dict[str, Any]:
    """Times all, prints the medians as JSON and returns them."""
    count = int(config.gigabytes * 1e9 / 4 / ARRAYS)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = {str(i): jax.random.normal(key, (count,), jnp.float32) for i, key in enumerate(keys)}
    jax.block_until_ready(state)
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for number in range(config.rounds):
        for name in found:
            with tempfile.TemporaryDirectory(dir=config.folder) as folder:
                figures = measure(Path(folder) / "c", state, name == "with")
            found[name].append(figures)
            print(number, name, figures, file=sys.stderr)
    medians = {
        name: {key: round(float(np.median([f[key] for f in rounds])), 3) for key in rounds[0]}
        for name, rounds in found.items()
    }
    print(json.dumps(medians, indent=1))
    return medians


def measure(folder: Path, state: Any, verified: bool) -> dict[str, float]:
    """Seconds of a save as training sees it, until it is on disk, and of a restore."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
    figures: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        begun, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(work())
        figures[f"{name}_s"] = time.perf_counter() - begun
        figures[f"{name}_processor_s"] = time.process_time() - used

    registry = checkpoint.handlers(folder) if verified else None
    with ocp.CheckpointManager(folder, options=options, handler_registry=registry) as manager:

        def save() -> None:
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave({"step": 1})
            )
            timed("blocked", lambda: manager.save(1, args=items))
            manager.wait_until_finished()

        timed("save", save)
        if verified:
            timed("verify", lambda: integrity.verify(folder / "1"))
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        timed("restore", lambda: manager.restore(1, args=items)["state"])
    return figures


if __name__ == "__main__":
    main(tyro.cli(Config))
