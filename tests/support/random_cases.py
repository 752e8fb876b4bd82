"""Random trees, options and meshes for the comparison with the oracle, by seed and number."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType

import optax_muonplus as omp

# Few sides, so that programs of the iteration are compiled a few times.
SIDES, MESH_SIDES = (1, 4, 6, 8), (8, 16)
MESHES = (((8,), "a"), ((4, 2), "ab"), ((2, 2, 2), "abc"), ((1, 8), "ab"))
TABLES = ("jordan", "jordan", "you", "dion", "polar_express", "turbo", "cans", "cubic")
TABLES += ((2.0, -1.5, 0.5),)
DTYPES = ("float32",) * 6 + ("bfloat16", "float16", "complex64")
RIVALS = ("normuon", "adamuon", "aurora", "mano", "meqmuon", "muoneq", "turbo_muon", "hyperball")


class Leaf(NamedTuple):
    """A parameter.

    Attributes:
      path: names of its module and of itself.
      shape: its shape.
      out_axes: axes of the output, in the order of flattening; empty if it is no matrix.
      in_axes: axes that the layer sums over, likewise. The others are batch axes.
      rule: its dimension numbers; None where the default rules know it.
      spec: the mesh axes that each axis is cut over.
    """

    path: tuple[str, str]
    shape: tuple[int, ...]
    out_axes: tuple[int, ...] = ()
    in_axes: tuple[int, ...] = ()
    rule: Any = None
    spec: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
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


def _cut(path, axis, rest, *blocks):
    """A kernel with blocks side by side on an axis, and the other axis of size ``rest``."""
    shape = (sum(blocks), rest) if axis == 0 else (rest, sum(blocks))
    return Leaf(path, shape, (1,), (0,), omp.MatrixSpec(0, 1, blocks, axis))


DIMS = omp.MuonDimensionNumbers
# Of a function that draws so many sides. Queries and keys are in two attentions: in one module
# their heads would have to agree.
KINDS = {
    "kernel": lambda s: Leaf(("dense", "kernel"), s(2), (1,), (0,)),
    "weight": lambda s: Leaf(("linear", "weight"), s(2), (0,), (1,)),
    "query": lambda s: Leaf(("one/query", "kernel"), s(3), (1, 2), (0,)),
    "out": lambda s: Leaf(("other/out", "kernel"), s(3), (2,), (0, 1)),
    "scanned": lambda s: Leaf(("scanned", "kernel"), (3, *s(2)), (2,), (1,), DIMS(1, 2)),
    "experts": lambda s: Leaf(("experts", "w"), (*s(1), 2, *s(2)), (2,), (3,), DIMS(-1, -2)),
    "conv": lambda s: Leaf(("conv", "kernel"), (2, 3, *s(2)), (3,), (0, 1, 2), DIMS((0, 1, 2), 3)),
    "fused": lambda s: _cut(("fused", "kernel"), 1, *s(4)),
    "fused inputs": lambda s: _cut(("joined", "kernel"), 0, *s(3)),
    "bias": lambda s: Leaf(("dense", "bias"), s(1)),
    "embedding": lambda s: Leaf(("embed", "embedding"), s(2)),
    "norm": lambda s: Leaf(("norm", "scale"), s(1)),
}


def draw(seed: int, number: int, with_mesh: bool | None = None) -> Case:
    """The case of that number; on a mesh or not, or either if not said."""
    rng = np.random.default_rng([seed, number])

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    def sides(count):
        return tuple(pick(*(MESH_SIDES if mesh else SIDES)) for _ in range(count))

    on_mesh = rng.random() < 0.15 if with_mesh is None else with_mesh
    mesh = (*pick(*MESHES), pick(AxisType.Auto, AxisType.Explicit)) if on_mesh else None
    dtype = pick(*DTYPES)
    optimizer = pick(*["muonplus"] * 5, *RIVALS) if dtype == "float32" else "muonplus"
    kinds = rng.choice(list(KINDS), size=rng.integers(1, 5), replace=False)
    leaves = [KINDS[kind](sides) for kind in kinds]
    leaves = [leaf._replace(spec=_spec(rng, leaf.shape, mesh)) for leaf in leaves]
    span = 2 if dtype == "float16" else 12
    return Case(
        optimizer,
        _options(pick, optimizer, dtype),
        tuple(leaves),
        dtype,
        tuple(10.0 ** rng.uniform(-span, span, len(leaves))),
        pick(1, 2, 3),
        "jit" if mesh else pick("", "", "", "jit", "inject"),
        mesh,
        [seed, number, 1],
    )


def _spec(rng, shape, mesh):
    """Each mesh axis cuts a random axis that it divides, or none."""
    entries, left = [[] for _ in shape], list(shape)
    for size, name in zip(*mesh[:2], strict=True) if mesh else ():
        possible = [i for i, length in enumerate(left) if length % size == 0]
        if possible and rng.random() < 0.8:
            axis = int(rng.choice(possible))
            entries[axis].append(name)
            left[axis] //= size
    return tuple(map(tuple, entries))


def _options(pick, optimizer, dtype):
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
    own = {
        "normuon": {
            "beta2": pick(0.5, 0.95),
            "rule": pick("code", "paper"),
            "side": pick("row", "long", "long_row"),
        },
        # Polar factors of signs may have entries that are zero but for rounding, made +-1 then.
        "adamuon": {"beta2": pick(None, 0.5), "sign": False},
        "aurora": {"rounds": pick(1, 2), "ns_coeffs": "jordan", "ns_steps": 5},
        "muoneq": {"sides": pick("row", "col", "both")},
        "hyperball": {"learning_rate": 0.02},  # at 1 a matrix of one entry may be stepped to zero
        "muonplus": _of_muonplus(pick, dtype),
    }
    options = {**common, **own.get(optimizer, {})}
    return {k: x for k, x in options.items() if (optimizer, k) != ("hyperball", "weight_decay")}


def _of_muonplus(pick, dtype):
    table = pick(*TABLES)
    most = {"you": 6, "dion": 5, "turbo": 4}.get(table, 8)
    norm = pick("none", "col", "row", "col_row", "row_col", "long", "long_row", "long_col")
    polar = pick("auto", "auto", "newton_schulz", "gram", "svd")
    narrow = table != "cans" and polar != "gram" and dtype != "complex64"
    return {
        "ns_coeffs": table,
        "ns_steps": pick(*range(1, most + 1)),
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
