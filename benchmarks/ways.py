"""Functions and files that updates, states and batches pass.

`benchmarks.house` starts this file as a process of its own, `python -P benchmarks/ways.py` and the
checkout, which is on PYTHONPATH and the working directory. It prints the figures as JSON.
"""

import importlib
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

RUN = [
    *("gpt-micro", "--model.n-layer", "1", "--model.d-model", "16", "--model.context", "16"),
    *("--data.vocab-size", "300", "--steps", "1", "--batch-size", "8"),
    *("--eval-batches", "1", "--sample-tokens", "1"),
]


class Call(NamedTuple):
    """A call of a function of the checkout."""

    file: str
    line: int
    name: str


def main(checkout: str) -> None:
    """Measures all figures and prints them."""
    jax.config.update("jax_enable_compilation_cache", False)
    import optax_muonplus as omp  # here, as only a process for it has it from the checkout

    library = Path(checkout, "optax_muonplus")
    if library not in Path(omp.__file__).parents:
        raise SystemExit(f"{omp.__file__} was imported, which is not in {checkout}.")
    two = {"kernel": leaf((64, 256)), "bias": leaf((256,))}
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shardings = {
        "kernel": NamedSharding(mesh, P("data", "model")),
        "bias": NamedSharding(mesh, P("model")),
    }
    placed = {name: leaf(x.shape, sharding=shardings[name]) for name, x in two.items()}
    updates = {
        "update on one device": tracer(omp.muonplus(0.02), two),
        "update on a 4 x 2 mesh": tracer(omp.muonplus(0.02, sharding=shardings), placed),
    }
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape), two)
    tx = omp.muonplus(0.02)
    state = tx.init(arrays)  # the first time, modules and tables are made too
    tx.update(arrays, state, arrays)
    fresh = iter([omp.muonplus(0.02) for _ in range(2)])  # a second init finds the first's records
    actions = updates | {
        "update of arrays, not traced": lambda: tx.update(arrays, state, arrays),
        "parameters through init": lambda: next(fresh).init(arrays),
    }
    ways = {
        name: passed(calls_of(action, library)) | {"tree walks": walks_of(action, library)}
        for name, action in actions.items()
    }
    batch = calls_of(one_step, Path(checkout), without=library)
    ways["batch through the trainer"] = passed(batch)
    print(json.dumps(ways))


def leaf(shape: tuple[int, ...], dtype: Any = "float32", sharding: Any = None) -> Any:
    """Describes an array that is not made."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def tracer(tx: optax.GradientTransformation, params: Any) -> Callable[[], Any]:
    """Returns a function that traces one update without anything that JAX has cached."""
    state = jax.eval_shape(tx.init, params)

    def trace() -> Any:
        jax.clear_caches()
        return jax.jit(lambda *args: tx.update(*args)).trace(params, state, params)

    trace()  # the first time, modules and tables are made too
    return trace


def one_step() -> None:
    """Runs the trainer's command for one step on a small text."""
    command = importlib.import_module("examples.train").main
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        text = Path(folder, "text.txt")
        text.write_text("".join(f"{i} is the square root of {i * i}.\n" for i in range(2000)))
        status = command([*RUN, "--data.paths", str(text), "--runs-dir", folder])
    if status:
        raise SystemExit(f"python -m examples.train {' '.join(RUN)} ended with {status}.")


# Calls ------------------------------------------------------------------------------------------


def calls_of(action: Callable[[], Any], root: Path, without: Path | None = None) -> list[Call]:
    """Lists the calls of functions in files below `root`, in order, of all threads.

    Comprehensions and lambdas are left out, as they belong to the function around them.
    """
    found = []
    inside = f"{root}{os.sep}"
    # This file, and environments that lie in a checkout, are no part of a way.
    outside = (__file__, f"{inside}.", *([f"{without}{os.sep}"] if without else []))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file, name = code.co_filename, code.co_name
        wanted = file.startswith(inside) and not file.startswith(outside)
        if event == "call" and wanted and name[0] != "<":
            found.append(Call(file, code.co_firstlineno, name))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def walks_of(action: Callable[[], Any], root: Path) -> int:
    """Counts how often files below ``root`` walk a tree with its paths."""
    inside, found = f"{root}{os.sep}", []
    walks = {
        function.__code__
        for name, function in vars(jax.tree_util).items()
        if name.endswith("_with_path") and isinstance(function, FunctionType)
    }

    def profile(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if event == "call" and frame.f_code in walks and caller.startswith(inside):
            found.append(frame)

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return len(found)


def passed(calls: list[Call]) -> dict[str, Any]:
    """Counts calls and changes of file from one call to the next; lists the functions entered."""
    files = itertools.pairwise(call.file for call in calls)
    return {
        "calls": len(calls),
        "switches of file": sum(a != b for a, b in files),
        "entered": sorted({(call.file, call.line) for call in calls}),
    }


if __name__ == "__main__":
    main(sys.argv[1])
