"""Random trees, options and meshes against the float64 oracle in NumPy, as many as you like.

    python -m tests.random_comparison --cases 2000 --seed 1
    python -m tests.random_comparison --seed 1 --number 17     # that case alone

The test suite runs the first cases of seed 0.
"""

import argparse
import collections
import contextlib
import functools
import inspect
import math
from typing import NamedTuple

import tests.conftest  # noqa: F401, isort: skip  -- eight devices, before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_muonplus as omp
from tests.support import random_oracle
from tests.support.random_cases import Case, draw

# What rounding may do is seen by changing the oracle's gradients by a few rounding units, which the
# iteration amplifies as it does its own errors. Of thousands of cases the worst used half of this.
UNITS = 4
MARGIN = 8
# Of the largest entry. The Gram iteration amplifies errors more, until a restart: to 1e-3 at most.
GRAM = 5e-4


class Result(NamedTuple):
    """How a comparison went.

    Attributes:
      worst: the largest error over its tolerance, of all parameters and steps.
      where: the parameter.
      matrices: how many matrices were compared.
    """

    worst: float
    where: str
    matrices: int


def compare(case: Case) -> Result:
    """Every update of a case beside the oracle's."""
    params, grads = numbers(case)
    found = library_updates(case, params, grads)
    exact = random_oracle.updates(case, params, grads)
    level = UNITS * rounding(case)
    changed = random_oracle.updates(case, params, grads, noise=level)
    results = []
    for leaf in case.leaves:
        want, other = exact[leaf.path], changed[leaf.path]
        error = np.abs(np.stack([step[leaf.path] for step in found]) - want).max()
        gram = case.options.get("polar", "auto") in ("auto", "gram")
        share = max(level, GRAM) if gram else level
        allowed = MARGIN * np.abs(other - want).max() + share * np.abs(want).max()
        count = len(random_oracle.matrices(leaf, want[0])) if leaf.out_axes else 0
        ratio = float(error / allowed) if np.isfinite(error) and allowed else math.inf
        results.append(Result(ratio if error else 0.0, "/".join(leaf.path), count))
    worst = max(results, key=lambda result: result.worst)
    return worst._replace(matrices=sum(result.matrices for result in results))


def numbers(case):
    """Parameters, and gradients with one leading axis for the steps, by path."""
    rng = np.random.default_rng(case.seed)

    def gaussian(*shape):
        x = rng.normal(size=shape)
        return x + 1j * rng.normal(size=shape) if case.dtype == "complex64" else x

    params = {leaf.path: jnp.asarray(gaussian(*leaf.shape), case.dtype) for leaf in case.leaves}
    grads = {
        leaf.path: jnp.asarray(size * gaussian(case.steps, *leaf.shape), case.dtype)
        for leaf, size in zip(case.leaves, case.sizes, strict=True)
    }
    return params, grads


def rounding(case):
    """The coarsest rounding unit on the way."""
    dtypes = [case.dtype, case.options.get("compute_dtype") or "float32"]
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def nested(flat):
    tree = {}
    for (module, name), value in flat.items():
        tree.setdefault(module, {})[name] = value
    return tree


def build(case, sharding):
    """The optimizer of a case."""
    factory = getattr(omp, case.optimizer, None) or getattr(omp.baselines, case.optimizer)
    rules = [("/".join(leaf.path), leaf.rule) for leaf in case.leaves if leaf.rule is not None]
    dims = functools.partial(omp.muon_dimension_numbers, rules=rules)
    if case.wrapped == "inject":
        names = ("ns_steps", "rounds", "muon_weight_dimension_numbers")
        static = [name for name in names if name in inspect.signature(factory).parameters]
        factory = optax.inject_hyperparams(factory, static, hyperparam_dtype=jnp.float32)
    return factory(**case.options, muon_weight_dimension_numbers=dims, sharding=sharding)


def library_updates(case, params, grads):
    """Updates of the library at each step, by path."""
    context, given = contextlib.nullcontext(), None
    if case.mesh is not None:
        sizes, names, kind = case.mesh
        devices = jax.devices()[: math.prod(sizes)]
        mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=devices)
        specs = {leaf.path: PartitionSpec(*(x or None for x in leaf.spec)) for leaf in case.leaves}
        place = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
        params = {path: jax.device_put(x, place[path]) for path, x in params.items()}
        given = nested(place) if kind == AxisType.Auto else None
        context = jax.set_mesh(mesh)
    tx = build(case, given)
    compiled = jax.jit if case.wrapped == "jit" else lambda function: function
    init, update = compiled(tx.init), compiled(tx.update)
    seen = []
    with context:
        state = init(nested(params))
        for t in range(case.steps):
            step = {path: x[t] for path, x in grads.items()}
            if case.mesh is not None:
                step = {path: jax.device_put(x, place[path]) for path, x in step.items()}
            updates, state = update(nested(step), state, nested(params))
            seen.append({path: random_oracle.wide(updates[path[0]][path[1]]) for path in params})
    return seen


def compare_many(seed, numbers_of_cases, with_mesh=None, progress=lambda text: None):
    """Compares cases and says how many; raises AssertionError for the first that differs."""
    counts, worst = collections.Counter(), 0.0
    for number in numbers_of_cases:
        case = draw(seed, number, with_mesh)
        result = compare(case)
        counts.update(
            {"cases": 1, "matrices": result.matrices, "on a mesh": case.mesh is not None,
             case.optimizer: 1, case.dtype: 1, case.wrapped or "eager": 1}
        )  # fmt: skip
        worst = max(worst, result.worst)
        assert result.worst <= 1, f"--seed {seed} --number {number}: {result} in {case}"
        if counts["cases"] % 100 == 0:
            progress(f"{counts['cases']} cases, worst {worst:.2f} of what rounding allows")
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{shown}; worst error {worst:.2f} of what rounding allows"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="run that case alone")
    given = parser.parse_args()
    cases = range(given.cases) if given.number is None else [given.number]
    print(compare_many(given.seed, cases, progress=functools.partial(print, flush=True)))


if __name__ == "__main__":
    main()
