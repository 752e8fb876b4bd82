"""What the runs of a recorded sweep wrote down of their matrices, and the momenta they saved.

The records come from `--optimizer.record-every`, the momenta from checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.experiments.sweeps import results
from examples.experiments.sweeps.grid import Method, Trial
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.metrics import MATRICES, read_metrics
from examples.trainer.settings.rules import RULES
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import make_init_params
from optax_muonplus.diagnostics import Side

SIDES: tuple[Side, ...] = ("row", "col")
KINDS = ("qkv", "query", "key", "value", "out", "gate", "up", "down")
"""The kinds of matrices in a block, named by their layer."""


@dataclass(frozen=True)
class Recorded:
    """The records of the matrices of one run."""

    method: Method
    folder: Path
    steps: list[int]
    values: dict[str, np.ndarray]
    """`kind/stage/measure` to values (records, matrices); kinds are query, up, ..."""
    shapes: dict[str, tuple[int, int]]
    """Kind to (out, in)."""

    def stage(self) -> str:
        """The name of the update's stage; baselines are recorded only as a whole."""
        return "update" if RULES[self.method.optimizer].records_inside else "after"

    def relative_variance(self, kind: str, side: str) -> np.ndarray:
        """Variance of the update's squared norms over their squared mean; (records, matrices).

        It does not depend on the size of the update, and so not on a learning rate in it.
        """
        out, in_ = self.shapes[kind]
        prefix = f"{kind}/{self.stage()}"
        mean = (in_ if side == "row" else out) * self.values[f"{prefix}/rms"] ** 2
        return self.values[f"{prefix}/{side}_variance"] / mean**2


def kinds(data: Mapping[str, Any]) -> list[str]:
    """The kinds of matrices in `data`, in the order of KINDS."""
    return [kind for kind in KINDS if kind in data]


def kind_of(path: str) -> str:
    """The kind of a kernel: `query` for blocks/0/attn/query/kernel."""
    return path.split("/")[-2]


def read(folder: Path) -> list[Recorded]:
    """The records of each method of a sweep, at its best rate and with the first seed."""
    sweep = results.read(folder)
    best = [Trial(method, sweep.best_rate(method), 0) for method in sweep.methods()]
    return [read_run(folder / "runs" / trial.name, trial.method) for trial in best]


def read_run(folder: Path, method: Method) -> Recorded:
    """The records of one run."""
    records = read_metrics(folder / MATRICES)
    if not records:
        raise UserError(f"{folder} has no records: train with --optimizer.record-every.")
    found: dict[str, list[list[float]]] = {}
    for i, record in enumerate(records):
        for path, measures in record["values"].items():
            for name, value in measures.items():
                rows = found.setdefault(f"{kind_of(path)}/{name}", [[] for _ in records])
                rows[i] += np.ravel(np.asarray(value, float)).tolist()  # None becomes nan
    return Recorded(
        method,
        folder,
        [record["step"] for record in records],
        {name: np.array(rows) for name, rows in found.items()},
        shapes_of(folder),
    )


def shapes_of(folder: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of each kind of matrix of a run's model."""
    config, _ = run_folder.reopen(folder)
    init = make_init_params(config.model, run_folder.read_tokenizer(folder).get_vocab_size())
    found = trained.leaves_by_path(jax.eval_shape(init, 0))
    return {
        kind_of(p): x.shape[:-3:-1] for p, x in found.items() if "/kernel" in p and "blocks" in p
    }


def of(method: Method, records: Sequence[Recorded]) -> Recorded:
    """The records of the run with a method."""
    for record in records:
        if record.method == method:
            return record
    norm = f" --grid.norms {method.norm}" if method.norm else ""
    raise UserError(
        f"none of the recorded runs is {method.name}'s: add --grid.optimizers {method.optimizer}"
        f"{norm} to the sweep."
    )


def momenta(records: Recorded, step: int | None) -> tuple[int, dict[str, jax.Array]]:
    """The step of a checkpoint, and its momenta (matrices, out, in) by kind."""
    step, found = trained.load_momenta(CheckpointRef(records.folder, step))
    by_kind: dict[str, list[jax.Array]] = {}
    for path, x in found.items():
        matrices = jnp.swapaxes(x, -1, -2)  # kernels are (in, out)
        by_kind.setdefault(kind_of(path), []).append(matrices.reshape(-1, *matrices.shape[-2:]))
    return step, {kind: jnp.concatenate(parts) for kind, parts in by_kind.items()}
