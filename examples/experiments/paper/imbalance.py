"""How unequal the rows and columns of updates are: the numbers behind the paper's figures.

All functions return what JSON can hold.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_muonplus as omp
from examples.experiments.paper.records import SIDES, Recorded, kinds
from examples.experiments.theory.regions import composed_regions, g_prime
from examples.trainer.system.errors import UserError

ITERATIONS = 20
"""Newton-Schulz steps, up to many more than usual: the paper says that imbalance then fades."""

COEFFICIENTS: dict[str, tuple[Any, int]] = {
    "Jordan": ("jordan", 5),
    "(2, -1.5, 0.5)": ((2.0, -1.5, 0.5), 5),
    "You": ("you", 6),
    "Polar Express": (omp.coefficients.polar_express(8), 8),
}
"""The paper's polynomials, each with as many steps as the paper prints rows of it."""


def spread(values: np.ndarray) -> dict[str, list[float | None]]:
    """Mean, standard deviation and extremes over the last axis."""
    return {
        "mean": plain(values.mean(-1)),
        "std": plain(values.std(-1)),
        "min": plain(values.min(-1)),
        "max": plain(values.max(-1)),
    }


def plain(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """Each value rounded to so many digits; None for values that are not finite."""
    return [float(f"{x:.{digits}g}") if math.isfinite(x) else None for x in values]


def during_training(records: Sequence[Recorded]) -> dict[str, Any]:
    """Relative variance of each method's updates, by kind of matrix and side."""
    return {
        record.method.name: {
            "steps": record.steps,
            **{
                kind: {side: spread(record.relative_variance(kind, side)) for side in SIDES}
                for kind in record.shapes
            },
        }
        for record in records
    }


def rank_correlations(muon: Recorded) -> dict[str, Any]:
    """Spearman's correlation of row or column norms before and after the polar step of Muon."""
    return {
        "steps": muon.steps,
        **{
            kind: {side: spread(muon.values[f"{kind}/polar/{side}_spearman"]) for side in SIDES}
            for kind in muon.shapes
        },
    }


def by_iterations(momenta: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Variance of squared norms after each number of Newton-Schulz steps, by kind.

    Means over matrices: of the variance as in the paper, and of the variance relative to the
    squared mean of the squared norms.
    """

    def measured(polar: Callable[[jax.Array], jax.Array]) -> dict[str, dict[str, jax.Array]]:
        return {kind: variances(polar(x)) for kind, x in momenta.items()}

    @jax.jit
    def after(steps: jax.Array) -> dict[str, dict[str, jax.Array]]:
        return measured(
            lambda x: omp.polar.newton_schulz(x, omp.polar.Orthogonalize(ns_steps=steps))
        )

    counts = list(range(ITERATIONS + 1))
    before = jax.jit(lambda: measured(lambda x: x / frobenius(x)))()
    found = jax.device_get([before, *(after(jnp.asarray(steps)) for steps in counts[1:])])
    factors = {kind: jax.jit(omp.polar.svd)(x) for kind, x in momenta.items()}
    exact = jax.device_get({kind: variances(x) for kind, x in factors.items()})
    result: dict[str, Any] = {"iterations": counts}
    for kind, x in momenta.items():
        # Each direction of the exact factor has size 1; directions that are only rounding are left
        # out.
        missing = len(x) * min(x.shape[-2:]) - float((frobenius(factors[kind]) ** 2).sum())
        result[kind] = {"shape": list(x.shape[-2:]), "missing_directions": round(missing)}
        for name in exact[kind]:
            result[kind][name] = plain(measures[kind][name] for measures in found)
            (result[kind][f"exact_{name}"],) = plain([exact[kind][name]])
    return result


def variances(x: jax.Array) -> dict[str, jax.Array]:
    """`row`, `col`, `relative_row` and `relative_col`: means over matrices (matrices, out, in)."""
    result = {}
    for side, count in zip(SIDES, x.shape[-2:], strict=True):
        variance = omp.diagnostics.norm_variance(x, side)
        mean = frobenius(x)[:, 0, 0] ** 2 / count
        result[side] = variance.mean()
        result[f"relative_{side}"] = (variance / mean**2).mean()
    return result


def frobenius(x: jax.Array) -> jax.Array:
    """Norms of matrices, with axes kept for division."""
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def entries(momenta: Mapping[str, jax.Array], kind: str, layer: int) -> dict[str, Any]:
    """Magnitudes of the entries of one update of Muon and of Muon+."""
    if kind not in momenta or not 0 <= layer < len(momenta[kind]):
        sizes = ", ".join(f"{name} 0 to {len(momenta[name]) - 1}" for name in kinds(momenta))
        raise UserError(f"there is no {kind} of layer {layer}: choose among {sizes}.")
    update = omp.polar.newton_schulz(momenta[kind][layer])
    both = {"Muon": update, "Muon+ col_row": omp.matrices.normalize_matrix(update, "col_row")}
    return {name: [plain(row, 3) for row in np.abs(np.asarray(x))] for name, x in both.items()}


def regions() -> dict[str, Any]:
    """Where each polynomial drives eigenvalues apart, alone and composed with earlier steps."""
    grid = np.linspace(0, 1, 401)
    result: dict[str, Any] = {"lambda": plain(grid)}
    for name, (rows, steps) in COEFFICIENTS.items():
        listed = omp.coefficients.for_steps(rows, steps).rows
        distinct = list(dict.fromkeys(listed))
        result[name] = {
            "slopes": [plain(g_prime(grid, row)) for row in distinct],
            "steps": [composed_regions(row, 1)._asdict() for row in distinct],
            "composed": [composed_regions(listed[:n], n)._asdict() for n in range(1, steps + 1)],
        }
    return json.loads(json.dumps(result))
