"""Random trees, options and meshes for the comparison with the oracle, by seed and number."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType

import optax_muonplus as omp


class Leaf(NamedTuple):
    """A parameter.

    Attributes:
      path: names on the way to it.
      shape: its shape.
      out_axes: axes of the output, in the order of flattening; empty if it is no matrix.
      in_axes: axes that the layer sums over, likewise. The others are batch axes.
      fused: ``(axis, sizes)`` of blocks side by side, or None.
      rule: its dimension numbers; None where the default rules know it.
      spec: the mesh axes that each axis is cut over.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    out_axes: tuple[int, ...] = ()
    in_axes: tuple[int, ...] = ()
    fused: tuple[int, tuple[int, ...]] | None = None
    rule: Any = None
    spec: tuple[tuple[str, ...], ...] = ()


class Case(NamedTuple):
    """One comparison.

    Attributes:
      optimizer: a name in ``omp`` or ``omp.baselines``.
      options: its arguments, by name.
      leaves: the parameters.
      dtype: of parameters and gradients.
      sizes: of each leaf's gradients, powers of ten.
      steps: number of updates.
      wrapped: "", "jit" or "inject".
      mesh: ``(sizes, names, types)``, or None.
      seed: of the numbers.
    """

    optimizer: str
    options: dict[str, Any]
    leaves: tuple[Leaf, ...]
    dtype: str
    sizes: tuple[float, ...]
    steps: int
    wrapped: str
    mesh: tuple[Any, ...] | None
    seed: list[int]


# Few, so that programs of the iteration are compiled a few times.
SIDES = (1, 4, 6, 8)
MESH_SIDES = (8, 16)
TABLES = ("jordan", "jordan", "you", "dion", "polar_express", "turbo", "cans", "cubic")
TABLES += ((2.0, -1.5, 0.5),)
MESHES = (((8,), "a"), ((4, 2), "ab"), ((2, 2, 2), "abc"), ((1, 8), "ab"))


def draw(seed: int, number: int, with_mesh: bool | None = None) -> Case:
    """The case of that number; on a mesh or not, or either if not said."""
    rng = np.random.default_rng([seed, number])
    on_mesh = rng.random() < 0.15
    on_mesh = on_mesh if with_mesh is None else with_mesh
    mesh = _mesh(rng) if on_mesh else None
    dtype = str(rng.choice(["float32"] * 6 + ["bfloat16", "float16", "complex64"]))
    optimizer, options = _options(rng, dtype)
    kinds = rng.choice(list(KINDS), size=rng.integers(1, 5), replace=False)
    leaves = [KINDS[kind](rng, MESH_SIDES if on_mesh else SIDES) for kind in kinds]
    if mesh is not None:
        leaves = [leaf._replace(spec=_spec(rng, leaf.shape, mesh)) for leaf in leaves]
    span = 2 if dtype == "float16" else 12
    return Case(
        optimizer,
        options,
        tuple(leaves),
        dtype,
        tuple(10.0 ** rng.uniform(-span, span, len(leaves))),
        int(rng.integers(1, 4)),
        "jit" if mesh else str(rng.choice(["", "", "", "jit", "inject"])),
        mesh,
        [seed, number, 1],
    )


def _mesh(rng):
    sizes, names = MESHES[rng.integers(len(MESHES))]
    types = [AxisType.Auto, AxisType.Explicit][rng.integers(2)]
    return sizes, tuple(names), types


def _spec(rng, shape, mesh):
    """Each mesh axis cuts a random axis that it divides, or none."""
    entries: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for size, name in zip(mesh[0], mesh[1], strict=True):
        possible = [i for i, length in enumerate(left) if length % size == 0]
        if possible and rng.random() < 0.8:
            axis = int(rng.choice(possible))
            entries[axis].append(name)
            left[axis] //= size
    return tuple(tuple(names) for names in entries)


# --- kinds of parameters ------------------------------------------------------------------------


def _sides(rng, sides, count):
    return tuple(int(side) for side in rng.choice(sides, count))


def _kernel(rng, sides):
    return Leaf(("dense", "kernel"), _sides(rng, sides, 2), (1,), (0,))


def _weight(rng, sides):
    return Leaf(("linear", "weight"), _sides(rng, sides, 2), (0,), (1,))


# Queries and keys are in two attentions: in one module their heads would have to agree.
def _query(rng, sides):
    return Leaf(("one/query", "kernel"), _sides(rng, sides, 3), (1, 2), (0,))


def _out(rng, sides):
    return Leaf(("other/out", "kernel"), _sides(rng, sides, 3), (2,), (0, 1))


def _scanned(rng, sides):
    rule = omp.MuonDimensionNumbers(1, 2)
    return Leaf(("scanned", "kernel"), (3, *_sides(rng, sides, 2)), (2,), (1,), None, rule)


def _experts(rng, sides):
    rule = omp.MuonDimensionNumbers(-1, -2)
    return Leaf(("experts", "w"), (*_sides(rng, sides, 1), 2, *_sides(rng, sides, 2)), (2,), (3,),
                None, rule)  # fmt: skip


def _conv(rng, sides):
    rule = omp.MuonDimensionNumbers((0, 1, 2), 3)
    return Leaf(("conv", "kernel"), (2, 3, *_sides(rng, sides, 2)), (3,), (0, 1, 2), None, rule)


def _fused(rng, sides):
    rows, *blocks = _sides(rng, sides, 4)
    rule = omp.MatrixSpec(0, 1, split_sizes=tuple(blocks))
    return Leaf(("fused", "kernel"), (rows, sum(blocks)), (1,), (0,), (1, tuple(blocks)), rule)


def _fused_inputs(rng, sides):
    columns, *blocks = _sides(rng, sides, 3)
    rule = omp.MatrixSpec(0, 1, split_sizes=tuple(blocks), split_axis=0)
    return Leaf(("joined", "kernel"), (sum(blocks), columns), (1,), (0,), (0, tuple(blocks)), rule)


KINDS = {
    "kernel": _kernel,
    "weight": _weight,
    "query": _query,
    "out": _out,
    "scanned": _scanned,
    "experts": _experts,
    "conv": _conv,
    "fused": _fused,
    "fused inputs": _fused_inputs,
    "bias": lambda rng, sides: Leaf(("dense", "bias"), _sides(rng, sides, 1)),
    "embedding": lambda rng, sides: Leaf(("embed", "embedding"), _sides(rng, sides, 2)),
    "norm": lambda rng, sides: Leaf(("norm", "scale"), _sides(rng, sides, 1)),
}


# --- options ------------------------------------------------------------------------------------


def _options(rng, dtype):
    def pick(*choices):
        return choices[rng.integers(len(choices))]

    common = {
        "learning_rate": pick(1.0, 0.02),
        "beta": pick(0.0, 0.5, 0.95),
        "weight_decay": pick(0.0, 0.1),
        "nesterov": pick(False, True),
        "adam_b1": pick(0.0, 0.9),
        "adam_b2": pick(0.5, 0.9),  # Optax computes 1 - 0.999 in float32, to 3e-5
        "adam_eps": pick(1e-8, 1e-3),
        "adam_eps_root": pick(0.0, 1e-3),
        "adam_nesterov": pick(False, True),
        "adam_weight_decay": pick(0.0, 0.2),
        "adam_learning_rate": pick(None, 0.3),
    }
    rivals = ("normuon", "adamuon", "aurora", "mano", "meqmuon", "muoneq", "turbo_muon")
    optimizer = pick(*["muonplus"] * 5, *rivals, "hyperball")
    if optimizer == "muonplus" or dtype != "float32":
        return "muonplus", {**common, **_of_muonplus(rng, pick, dtype)}
    own = {
        "normuon": {
            "beta2": pick(0.5, 0.95),
            "rule": pick("code", "paper"),
            "side": pick("row", "long", "long_row"),
        },
        # Polar factors of signs may have entries that are zero but for rounding, made +-1 then.
        "adamuon": {"beta2": pick(None, 0.5), "sign": False},
        "aurora": {"rounds": pick(1, 2), "ns_coeffs": "jordan", "ns_steps": 5},
        "mano": {},
        "meqmuon": {},
        "muoneq": {"sides": pick("row", "col", "both")},
        "turbo_muon": {},
        "hyperball": {},
    }
    if optimizer == "hyperball":
        del common["weight_decay"]  # it has none
        common["learning_rate"] = 0.02  # at 1 a matrix of one entry may be stepped to zero
    return optimizer, {**common, **own[optimizer]}


def _of_muonplus(rng, pick, dtype):
    table = pick(*TABLES)
    most = {"you": 6, "dion": 5, "turbo": 4}.get(table, 8)
    norm = pick("none", "col", "row", "col_row", "row_col", "long", "long_row", "long_col")
    polar = pick("auto", "auto", "newton_schulz", "gram", "svd")
    narrow = table != "cans" and polar != "gram" and dtype != "complex64"
    return {
        "ns_coeffs": table,
        "ns_steps": int(rng.integers(1, most + 1)),
        "polar": polar,
        "preconditioning": pick("frobenius", "frobenius", "spectral", "schatten", "aol", "aol_out"),
        "eps": pick(1e-30, 1e-30, 1e-8),
        "norm": norm,
        "norm_eps": pick(1e-8, 1e-3),
        "match_frobenius": norm != "none" and pick(False, True),
        "shape_scale": pick("spectral", "max", "none"),
        "consistent_rms": pick(None, None, 0.2),
        "bias_correction": pick(False, True),
        "adaptive": pick(False, False, True),
        "compute_dtype": pick(None, None, None, "bfloat16" if narrow else None),
    }
