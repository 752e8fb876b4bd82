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

import tests.conftest  # noqa: F401, isort: skip  -- eight devices, before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_muonplus as omp
from tests.support import random_oracle
from tests.support.mesh import make_mesh
from tests.support.random_cases import draw

# What rounding may do is seen by changing the oracle's gradients by a few rounding units, which the
# iteration amplifies as it does its own errors. Of thousands of cases the worst used half of this.
UNITS = 4
MARGIN = 8
# Of the largest entry. The Gram iteration amplifies errors more, until a restart: to 1e-3 at most.
GRAM = 5e-4


def compare(case):
    """The largest error of an update over its tolerance, and the path of its parameter."""
    params, grads = numbers(case)
    found = library_updates(case, params, grads)
    # The coarsest rounding unit on the way.
    dtypes = [case.dtype, case.options.get("compute_dtype") or "float32"]
    level = UNITS * max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
    exact, changed = (random_oracle.updates(case, params, grads, x) for x in (0.0, level))
    gram = case.options.get("polar", "auto") in ("auto", "gram")
    share = max(level, GRAM) if gram else level
    worst = 0.0, ""
    for path, want in exact.items():
        error = np.abs(np.stack([step[path] for step in found]) - want).max()
        allowed = MARGIN * np.abs(changed[path] - want).max() + share * np.abs(want).max()
        ratio = float(error / allowed) if np.isfinite(error) and allowed else math.inf
        worst = max(worst, (ratio if error else 0.0, "/".join(path)))
    return worst


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
    context, given, place = contextlib.nullcontext(), None, {}
    if case.mesh is not None:
        mesh = make_mesh(*case.mesh)
        specs = {leaf.path: PartitionSpec(*(x or None for x in leaf.spec)) for leaf in case.leaves}
        place = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
        given = nested(place) if case.mesh[2] == AxisType.Auto else None
        context = jax.set_mesh(mesh)

    def placed(tree):
        return nested({path: jax.device_put(x, place.get(path)) for path, x in tree.items()})

    tx, params = build(case, given), placed(params)
    compiled = jax.jit if case.wrapped == "jit" else lambda function: function
    init, update = compiled(tx.init), compiled(tx.update)
    seen = []
    with context:
        state = init(params)
        for t in range(case.steps):
            step = placed({path: x[t] for path, x in grads.items()})
            updates, state = update(step, state, params)
            seen.append({path: random_oracle.wide(updates[path[0]][path[1]]) for path in grads})
    return seen


def compare_many(seed, numbers_of_cases, with_mesh=None, progress=lambda text: None):
    """Compares cases and says how many; raises AssertionError for the first that differs."""
    counts, largest = collections.Counter(), 0.0
    for number in numbers_of_cases:
        case = draw(seed, number, with_mesh)
        worst, where = compare(case)
        assert worst <= 1, f"--seed {seed} --number {number}: {worst:.2f} at {where} in {case}"
        counts.update(["cases", case.optimizer, case.dtype, case.wrapped or "eager"])
        largest = max(largest, worst)
        if counts["cases"] % 100 == 0:
            progress(f"{counts['cases']} cases, worst {largest:.2f} of what rounding allows")
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{shown}; worst error {largest:.2f} of what rounding allows"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="run that case alone")
    chosen = parser.parse_args()
    cases = range(chosen.cases) if chosen.number is None else [chosen.number]
    print(compare_many(chosen.seed, cases, progress=functools.partial(print, flush=True)))
