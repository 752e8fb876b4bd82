"""Whether two versions give the same updates: `python -m lab.benchmarks.updates save FILE`.

`save` runs every optimizer of the package for three steps on small trees, on one device and on
meshes of eight simulated ones, and writes all updates and states. `compare FILE FILE` lists what
differs. Another version is measured by its own command, in its checkout, unless arguments are the
same: `PYTHONPATH=../other python lab/benchmarks/updates.py save other.npz` runs this file with it.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp

STEPS = 3

# Shape, axes of the mesh that cut it, and dtype of each leaf.
LEAVES: dict[str, tuple[tuple[int, ...], P, str]] = {
    "embed/embedding": ((64, 16), P("a", "b"), "float32"),
    "norm/scale": ((16,), P("a"), "float32"),
    "q/kernel": ((16, 16), P("a", "b"), "float32"),
    "k/kernel": ((16, 16), P("b", "a"), "float32"),
    "up/kernel": ((16, 64), P("a", "b"), "float32"),
    "up2/kernel": ((16, 64), P("a", "b"), "float32"),
    "down/kernel": ((64, 16), P("b", "a"), "float32"),
    "wide/weight": ((16, 64), P("a", "b"), "float32"),
    "replicated/kernel": ((16, 16), P(), "float32"),
    "narrow/kernel": ((16, 32), P("a", "b"), "bfloat16"),
    "scanned/kernel": ((5, 16, 64), P(None, "a", "b"), "float32"),
    "experts/kernel": ((8, 3, 16, 16), P("a", None, None, "b"), "float32"),
    "attention/query/kernel": ((16, 8, 2), P("a", "b"), "float32"),
    "attention/out/kernel": ((8, 2, 16), P("b", None, "a"), "float32"),
    "fused/kernel": ((16, 48), P("a", "b"), "float32"),
}
MATRICES = {path: x for path, x in LEAVES.items() if not path.startswith(("embed/", "norm/"))}
RULES = [
    ("scanned", omp.MuonDimensionNumbers(-2, -1)),
    ("experts", omp.MuonDimensionNumbers(-1, -2)),
    ("fused", omp.MatrixSpec(0, 1, split_sizes=(16, 16, 16))),
]


def dimension_numbers(params: Any) -> Any:
    """Dimension numbers of some of the :data:`LEAVES`, without rules that match none of them."""
    paths = [str(path) for path, _ in jax.tree.leaves_with_path(params)]
    rules = [rule for rule in RULES if any(rule[0] in path for path in paths)]
    return omp.muon_dimension_numbers(params, rules=rules)


OF_MATRICES: dict[str, Any] = {
    "norm": "col_row", "shape_scale": "spectral", "match_frobenius": False, "nesterov": True,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {**OF_MATRICES, "adam_nesterov": True}
"""The form of every row without its own: arguments unlike the defaults of `muonplus`."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer, on one tree and mesh."""

    name: str
    make: Callable[..., optax.GradientTransformation]
    mesh: str = "none"
    traced: bool = True
    matrices_only: bool = False


def main(argv: list[str]) -> int:
    """Runs a command, and returns the exit status: 1 if anything differs."""
    match argv:
        case ["save", path]:
            save(Path(path))
            return 0
        case ["compare", old, new]:
            return compare(Path(old), Path(new))
    print(__doc__)
    return 2


def save(path: Path) -> None:
    """Runs all cases and writes their results."""
    arrays: dict[str, np.ndarray] = {}
    for case in cases():
        key = f"{case.name} | {case.mesh} | {'jit' if case.traced else 'eager'}"
        print(key, flush=True)
        arrays |= {f"{key} | {name}": x for name, x in run(case).items()}
    np.savez_compressed(path, **arrays)  # ty: ignore[invalid-argument-type]
    print(f"{len(arrays)} arrays in {path}")


def compare(old: Path, new: Path) -> int:
    """Prints which arrays differ and by how much; returns 1 if any does, else 0."""
    with np.load(old) as a, np.load(new) as b:
        missing = sorted(set(a.files) ^ set(b.files))
        different: dict[str, list[float]] = {}
        for name in sorted(set(a.files) & set(b.files)):
            if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
                missing.append(f"{name}: {a[name].dtype}{a[name].shape}")
            elif a[name].tobytes() != b[name].tobytes():
                case = " | ".join(name.split(" | ")[:3])
                different.setdefault(case, []).append(relative(a[name], b[name]))
    for name in missing:
        print(f"only in one file, or of another shape or dtype: {name}")
    for case, values in different.items():
        print(f"{case}: {len(values)} arrays differ, by up to {max(values):.1e}")
    print(f"{sum(map(len, different.values()))} arrays differ, {len(missing)} are unmatched")
    return 1 if different or missing else 0


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest absolute value of ``a``."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-300))


def cases() -> Iterator[Case]:
    """Every optimizer on one device; the main choices on meshes, under jit and without."""
    every = optimizers()
    for name, make in every.items():
        yield Case(name, make)
    for name, make in links().items():
        yield Case(name, make, matrices_only=True)
        yield Case(name, make, traced=False, matrices_only=True)
        yield Case(name, make, "explicit", matrices_only=True)
    for name in ("muonplus", "muonplus bfloat16", "muonplus adaptive", "normuon", "injected"):
        yield Case(name, every[name], traced=False)
    for name in ("muonplus", "muonplus row matched aol", "muonplus bfloat16", "muon as optax",
                 "normuon", "adamuon", "mano", "turbo_muon", "injected", "recorded"):  # fmt: skip
        yield Case(name, every[name], "auto")
        yield Case(name, every[name], "explicit")
    for name in ("muonplus", "muonplus gram"):
        yield Case(name, every[name], "auto", traced=False)
        yield Case(name, every[name], "replicas")


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Optimizers of whole trees by name, without defaults that changed."""

    def plus(**kwargs: Any) -> Callable[..., optax.GradientTransformation]:
        return lambda **given: omp.muonplus(0.02, **{**PUBLISHED, **kwargs, **given})

    def injected(**given: Any) -> optax.GradientTransformation:
        made = optax.inject_hyperparams(
            omp.muonplus, static_args=("muon_weight_dimension_numbers", "sharding")
        )
        schedule = optax.linear_schedule(0.02, 0.01, 10)
        return made(schedule, consistent_rms=0.2, **PUBLISHED, **given)

    def recorded(**given: Any) -> optax.GradientTransformation:
        return omp.contrib.recorded(
            omp.muonplus(0.02, **PUBLISHED, **given),
            every=2,
            weight_dimension_numbers=dimension_numbers,
        )

    return {
        "muonplus": plus(weight_decay=0.1, adam_learning_rate=3e-3),
        "muonplus without nesterov": plus(nesterov=False),
        "muonplus row matched aol": plus(norm="row", match_frobenius=True, preconditioning="aol"),
        "muonplus col max": plus(norm="col", shape_scale="max", preconditioning="schatten"),
        "muonplus row_col corrected": plus(norm="row_col", bias_correction=True),
        "muonplus bfloat16": plus(compute_dtype="bfloat16", mu_dtype="bfloat16"),
        "muonplus gram": plus(polar="gram", ns_coeffs="polar_express", ns_steps=7),
        "muonplus svd": plus(polar="svd", consistent_rms=0.2),
        "muonplus adaptive": plus(adaptive=True, preconditioning="spectral"),
        "muonplus function": plus(polar=omp.polar.svd),
        "muon": lambda **given: omp.muon(
            0.02, ns_coeffs="dion", shape_scale="spectral", nesterov=True, **given),
        "muon as optax": plus(
            norm="none", shape_scale="max", bias_correction=True, polar="newton_schulz"),
        "muonplus default norm": plus(norm="row_col", shape_scale="max", match_frobenius=True),
        **rivals(),
        "injected": injected,
        "recorded": recorded,
    }  # fmt: skip


def rivals() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Optimizers of ``omp.contrib``, like :func:`optimizers`."""
    by_paper = omp.contrib.NorMuon(rule="paper")
    contrib = omp.contrib

    def made(rule: Any, rate: float, decay: float = 0.0) -> Callable[..., Any]:
        return lambda **given: omp.optimizer(rule, rate, decay, where=where_of(given))

    return {
        "normuon": made(contrib.NorMuon(), 0.02, 0.01),
        "normuon paper": made(by_paper, 0.02),
        "adamuon": made(contrib.AdaMuon(), 1e-3),
        "turbo_muon": made(contrib.scale_by_turbo_muon(), 0.02),
        "mano": made(contrib.Mano(), 1e-3, 0.1),
        "aurora": made(contrib.scale_by_aurora(), 0.05, 0.025),
        "hyperball": lambda **given: contrib.hyperball(0.014, where=where_of(given)),
        "muoneq": made(contrib.scale_by_muoneq(), 1e-3, 0.1),
    }


def links() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Transformations of matrices only, like :func:`optimizers`."""

    def chained(**given: Any) -> optax.GradientTransformation:
        where = where_of(given)
        return optax.chain(
            omp.momentum(0.9),
            omp.orthogonalize("polar_express", 6, where=where),
            omp.normalize("row_col", where=where),
            omp.scale_by_shape("max", where=where),
        )

    return {
        "links": chained,
        "scale_by_muonplus": lambda **given: omp.scale_by_muonplus(
            **OF_MATRICES, where=where_of(given)
        ),
    }


def where_of(given: dict[str, Any]) -> omp.Matrices:
    """The arguments of `omp.muonplus` that decide which parameters are matrices."""
    numbers = given["muon_weight_dimension_numbers"]
    return omp.Matrices(weight_dimension_numbers=numbers, sharding=given.get("sharding"))


def run(case: Case) -> dict[str, np.ndarray]:
    """Updates and states of three steps by name."""
    leaves = MATRICES if case.matrices_only else LEAVES
    mesh = make_mesh(case.mesh)
    shardings = None if mesh is None else {p: NamedSharding(mesh, x[1]) for p, x in leaves.items()}
    params = random_tree(leaves, shardings, 0)
    given: dict[str, Any] = {"muon_weight_dimension_numbers": dimension_numbers}
    if case.mesh in ("auto", "replicas"):
        given["sharding"] = shardings
    arrays: dict[str, np.ndarray] = {}
    with jax.set_mesh(mesh) if case.mesh == "explicit" else contextlib.nullcontext():
        tx = case.make(**given)
        state = tx.init(params)
        update = jax.jit(tx.update) if case.traced else tx.update
        for step in range(STEPS):
            updates, state = update(random_tree(leaves, shardings, step + 1), state, params)
            arrays |= named(f"update {step}", updates)
    return arrays | named("state", state)


def make_mesh(name: str) -> Mesh | None:
    """The mesh of a case; None for one device."""
    if name == "none":
        return None
    sizes = {"a": 2, "b": 2, "c": 2} if name == "replicas" else {"a": 4, "b": 2}
    kind = AxisType.Explicit if name == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes))


def random_tree(leaves: dict[str, Any], shardings: Any, seed: int) -> dict[str, jax.Array]:
    """Normally distributed arrays in the shapes of ``leaves``."""
    rng = np.random.default_rng(seed)
    tree = {
        path: jnp.asarray(rng.standard_normal(shape).astype(np.float32), dtype)
        for path, (shape, _, dtype) in leaves.items()
    }
    return jax.device_put(tree, shardings) if shardings else tree


def named(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by their paths; bfloat16 as float32, since NumPy cannot write it."""
    return {
        f"{prefix}{jax.tree_util.keystr(path)}": np.asarray(
            x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        )
        for path, x in jax.tree.leaves_with_path(tree)
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
