"""How unequal the rows and columns of updates are: the numbers behind the paper's figures.

From what the runs of a sweep recorded (`--optimizer.record-every`) and from the momenta in their
checkpoints. All functions give what JSON can hold.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_muonplus as omp
from examples import runs, tables, trained, training
from examples.errors import UserError
from examples.grid import Cell, Method
from examples.optimizers import RECORDED_INSIDE
from examples.trained import Place
from optax_muonplus import theory
from optax_muonplus.diagnostics import Side
from optax_muonplus.matrices import normalize_matrix

SIDES: tuple[Side, ...] = ("row", "col")
KINDS = ("query", "key", "value", "out", "gate", "up", "down")
"""What the kernels of a block do, in its order."""

ITERATIONS = 20
"""Of Newton-Schulz; the paper says that imbalance fades with many, but costs as many products."""

COEFFICIENTS: dict[str, tuple[Any, int]] = {
    "Jordan": ("jordan", 5),
    "(2, -1.5, 0.5)": ((2.0, -1.5, 0.5), 5),
    "You": ("you", 6),
    "Polar Express": (omp.coefficients.polar_express(8), 8),
}
"""The paper's polynomials, with as many steps as it prints rows of them."""


@dataclass(frozen=True)
class Recorded:
    """What one run recorded of its matrices."""

    method: Method
    folder: Path
    steps: list[int]
    values: dict[str, np.ndarray]
    """`kind/stage/measure` to numbers (records, matrices); kinds are query, up, ..."""
    shapes: dict[str, tuple[int, int]]
    """Kind to (out, in)."""

    def stage(self) -> str:
        """What the update is called: baselines are recorded as a whole."""
        return "update" if self.method.optimizer in RECORDED_INSIDE else "after"

    def relative_variance(self, kind: str, side: str) -> np.ndarray:
        """Variance of the update's squared norms over their squared mean; (records, matrices).

        So the size of the update, and a learning rate in it, do not matter.
        """
        out, into = self.shapes[kind]
        start = f"{kind}/{self.stage()}"
        mean = (into if side == "row" else out) * self.values[f"{start}/rms"] ** 2
        return self.values[f"{start}/{side}_variance"] / mean**2


def kinds(data: Mapping[str, Any]) -> list[str]:
    """The kinds of matrices there are, in the order of a block."""
    return [kind for kind in KINDS if kind in data]


def kind_of(path: str) -> str:
    """What a kernel does: `query` for blocks/0/attn/query/kernel."""
    return path.split("/")[-2]


def read(folder: Path) -> list[Recorded]:
    """The records of a sweep: those of each method at its best rate, with the first seed."""
    sweep = tables.read(folder)
    best = [Cell(method, sweep.best_rate(method), 0) for method in sweep.methods()]
    return [read_run(folder / "runs" / cell.name, cell.method) for cell in best]


def read_run(folder: Path, method: Method) -> Recorded:
    """The records of one run."""
    records = runs.read_metrics(folder / runs.MATRICES)
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
    config, _ = runs.reopen(folder)
    init = training.make_init_params(config.model, runs.read_tokenizer(folder).get_vocab_size())
    found = trained.by_path(jax.eval_shape(init, 0))
    return {
        kind_of(p): x.shape[:-3:-1] for p, x in found.items() if "/kernel" in p and "blocks" in p
    }


def spread(values: np.ndarray) -> dict[str, list[float | None]]:
    """Mean, standard deviation and extremes over the last axis."""
    return {
        "mean": plain(values.mean(-1)),
        "std": plain(values.std(-1)),
        "min": plain(values.min(-1)),
        "max": plain(values.max(-1)),
    }


def plain(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """So many digits of each number; None for what is not finite."""
    return [float(f"{x:.{digits}g}") if math.isfinite(x) else None for x in values]


def during_training(records: Sequence[Recorded]) -> dict[str, Any]:
    """Relative variance of each method's updates, by kind of matrix and side."""
    return {
        own.method.name: {
            "steps": own.steps,
            **{
                kind: {side: spread(own.relative_variance(kind, side)) for side in SIDES}
                for kind in own.shapes
            },
        }
        for own in records
    }


def rank_correlations(own: Recorded) -> dict[str, Any]:
    """Spearman's, of the norms of rows or columns before and after the polar step of Muon."""
    return {
        "steps": own.steps,
        **{
            kind: {side: spread(own.values[f"{kind}/polar/{side}_spearman"]) for side in SIDES}
            for kind in own.shapes
        },
    }


def of(method: Method, records: Sequence[Recorded]) -> Recorded:
    """The run with a method."""
    for own in records:
        if own.method == method:
            return own
    norm = f" --grid.norms {method.norm}" if method.norm else ""
    raise UserError(
        f"none of the recorded runs is {method.name}'s: add --grid.optimizers {method.optimizer}"
        f"{norm} to the sweep."
    )


def momenta(own: Recorded, step: int | None) -> tuple[int, dict[str, jax.Array]]:
    """A checkpoint's step and momenta (matrices, out, in) by kind."""
    step, found = trained.load_momenta(Place(own.folder, step))
    by_kind: dict[str, list[jax.Array]] = {}
    for path, x in found.items():
        upright = jnp.swapaxes(x, -1, -2)  # kernels are (in, out)
        by_kind.setdefault(kind_of(path), []).append(upright.reshape(-1, *upright.shape[-2:]))
    return step, {kind: jnp.concatenate(parts) for kind, parts in by_kind.items()}


def by_iterations(moments: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Variance of squared norms after so many Newton-Schulz steps, by kind, mean over matrices.

    That of the paper, and relative to the squared mean of the squared norms.
    """

    def measured(polar: Callable[[jax.Array], jax.Array]) -> dict[str, dict[str, jax.Array]]:
        return {kind: variances(polar(x)) for kind, x in moments.items()}

    @jax.jit
    def after(steps: jax.Array) -> dict[str, dict[str, jax.Array]]:
        return measured(lambda x: omp.polar.newton_schulz(x, ns_steps=steps))

    counts = list(range(ITERATIONS + 1))
    before = jax.jit(lambda: measured(lambda x: x / frobenius(x)))()
    found = jax.device_get([before, *(after(jnp.asarray(steps)) for steps in counts[1:])])
    factors = {kind: jax.jit(omp.polar.svd)(x) for kind, x in moments.items()}
    exact = jax.device_get({kind: variances(x) for kind, x in factors.items()})
    result: dict[str, Any] = {"iterations": counts}
    for kind, x in moments.items():
        # Of the exact factor each direction has size 1, but those that rounding made are left out.
        missing = len(x) * min(x.shape[-2:]) - float((frobenius(factors[kind]) ** 2).sum())
        result[kind] = {"shape": list(x.shape[-2:]), "missing_directions": round(missing)}
        for word in exact[kind]:
            result[kind][word] = plain(one[kind][word] for one in found)
            (result[kind][f"exact_{word}"],) = plain([exact[kind][word]])
    return result


def variances(x: jax.Array) -> dict[str, jax.Array]:
    """Means over matrices (matrices, out, in), for `row`, `col`, `relative_row`, `relative_col`."""
    result = {}
    for side, count in zip(SIDES, x.shape[-2:], strict=True):
        variance = omp.diagnostics.norm_variance(x, side)
        mean = frobenius(x)[:, 0, 0] ** 2 / count
        result[side] = variance.mean()
        result[f"relative_{side}"] = (variance / mean**2).mean()
    return result


def frobenius(x: jax.Array) -> jax.Array:
    """Norms of matrices, with axes to divide by."""
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def entries(moments: Mapping[str, jax.Array], kind: str, layer: int) -> dict[str, Any]:
    """Magnitudes of the entries of one update, as Muon makes it and as Muon+ does."""
    if kind not in moments or not 0 <= layer < len(moments[kind]):
        sizes = ", ".join(f"{name} 0 to {len(moments[name]) - 1}" for name in kinds(moments))
        raise UserError(f"there is no {kind} of layer {layer}: choose among {sizes}.")
    update = omp.polar.newton_schulz(moments[kind][layer])
    both = {"Muon": update, "Muon+ col_row": normalize_matrix(update, "col_row")}
    return {name: [plain(row, 3) for row in np.abs(np.asarray(x))] for name, x in both.items()}


def regions() -> dict[str, Any]:
    """Where each polynomial drives eigenvalues apart, by itself and after those before it."""
    grid = np.linspace(0, 1, 401)
    result: dict[str, Any] = {"lambda": plain(grid)}
    for name, (rows, steps) in COEFFICIENTS.items():
        listed = omp.coefficients.resolve(rows, steps).rows
        distinct = list(dict.fromkeys(listed))
        result[name] = {
            "slopes": [plain(theory.g_prime(grid, row)) for row in distinct],
            "steps": [one._asdict() for row in distinct for one in theory.step_regions(row, 1)],
            "composed": [theory.composed_regions(rows, n)._asdict() for n in range(1, steps + 1)],
        }
    return json.loads(json.dumps(result))
