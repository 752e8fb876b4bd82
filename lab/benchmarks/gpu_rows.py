"""What `lab.benchmarks.gpu` measures, a generator of rows for each part.

A row has a name, and what was found: ``median_s``, ``of_reference`` (its time over that of Optax's
update, median over rounds), and seconds of one update by class of kernel.
"""

import functools
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import optax_muonplus as omp
from lab.benchmarks import parity, products, timing, trees
from lab.benchmarks.compiled import Update

Row = dict[str, Any]
Timed = Callable[[dict[str, Callable[[], Any]]], dict[str, np.ndarray]]
TINY = trees.Size(16, 1, 40, gated=False)
MOST_LAYERS = 12  # GPT-Small's; Optax's update of 24 layers would compile for minutes
REFERENCE, TORCH = "optax.contrib.muon", "torch.optim.Muon"
PROFILED = 3  # updates in a profile


def rows(part: str, toy: bool, rounds: int, calls: int) -> Iterator[Row]:
    """Makes the rows of a part."""
    size = trees.SIZES["gpt-small" if part == "float32" else part]
    size = TINY if toy else size._replace(layers=min(size.layers, MOST_LAYERS))
    timed = functools.partial(timing.interleaved, rounds=rounds, calls=calls)
    return updates(size, "float32" if part == "float32" else "bfloat16", timed)


def updates(size: trees.Size, dtype: Any, timed: Timed) -> Iterator[Row]:
    """Times whole updates of parameters in a dtype, each in turn with Optax's, and torch's last."""
    shapes = trees.shapes(size, dtype)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    where: dict[str, Any] = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(shapes)}
    reference = Update(optax.contrib.muon(0.02, **where), params, grads)
    for n, (name, (rule, compute_dtype)) in enumerate(rules(dtype, where).items()):
        update = Update(rule, params, grads)
        seconds = timed({REFERENCE: reference, name: update})
        if n == 0:
            yield row_of(
                REFERENCE, reference, seconds, products.operations(size, "newton_schulz", dtype)
            )
        yield row_of(name, update, seconds, products.operations(size, "auto", compute_dtype))
    if importlib.util.find_spec("torch") is None:
        return
    with_torch = TorchUpdate(params, grads)
    seconds = timed({REFERENCE: reference, TORCH: with_torch})
    yield row_of(TORCH, with_torch, seconds, products.operations(size, "newton_schulz", dtype))


def rules(dtype: str, where: dict[str, Any]) -> dict[str, tuple[Any, str | None]]:
    """Makes our updates, each with its dtype of products."""
    make = functools.partial(omp.muonplus, 0.02, **where)
    half: dict[str, Any] = {"compute_dtype": "bfloat16"}
    found: dict[str, tuple[Any, str | None]] = {
        "omp.muonplus, bfloat16": (make(**half), "bfloat16")
    }
    if dtype == "float32":
        return {"omp.muonplus, TF32": (make(compute_dtype="float32"), "float32")} | found
    return found | {"omp.muonplus, col_row": (make(**parity.COL_ROW, **half), "bfloat16")}


def row_of(name: str, update: Any, seconds: dict[str, np.ndarray], operations: float) -> Row:
    """Makes a row of an update that was timed, with its profile."""
    row = {"name": name, **update.figures, **timing.median_and_quartiles(seconds[name])}
    row["of_reference"] = float(np.median(seconds[name] / seconds[REFERENCE]))
    row["tflop_per_s"] = operations / row["median_s"] / 1e12
    return row | (profile(update) if jax.default_backend() == "gpu" and name != TORCH else {})


class TorchUpdate:
    """PyTorch's Muon on the matrices of a tree, with the momentum and shape factor of Optax's."""

    def __init__(self, params: Any, grads: Any):
        torch: Any = importlib.import_module("torch")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.cuda, self.figures = torch.cuda, {}
        self.params = []
        for x, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
            if x.ndim == 2:
                weight, grad = (torch.tensor(np.asarray(a, np.float32)) for a in (x, g))
                dtype = getattr(torch, x.dtype.name)
                weight = torch.nn.Parameter(weight.to(self.device, dtype))
                weight.grad = grad.to(self.device, dtype)
                self.params.append(weight)
        self.optimizer = torch.optim.Muon(self.params, lr=0.02, weight_decay=0.0)

    def __call__(self) -> "TorchUpdate":
        """Takes the next step."""
        self.optimizer.step()
        return self

    def block_until_ready(self) -> None:
        """Waits for the last step."""
        if self.device == "cuda":
            self.cuda.synchronize()


class Event(NamedTuple):
    """One run of a kernel, in nanoseconds."""

    name: str
    start: float
    duration: float


# Names of kernels of cuBLASLt on Hopper and before, of CUTLASS, and of Triton's by XLA.
PRODUCTS = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|_dot_|^dot", re.IGNORECASE)


def profile(update: Callable[[], Any]) -> Row:
    """Runs an update under JAX's profiler; returns the seconds of one by class of kernel."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                result = update()
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return classes(kernels(file), PROFILED)


def kernels(file: Path) -> Iterator[Event]:
    """Reads the kernels of a profile: what ran in a stream of a GPU."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            if line.name.startswith("Stream"):
                yield from (Event(x.name, x.start_ns, x.duration_ns) for x in line.events)


def classes(events: Iterable[Event], runs: int) -> Row:
    """Adds up products and traffic, and the time in which no kernel runs, for one of ``runs``."""
    found = sorted(events, key=lambda event: event.start)
    if not found:
        return {}
    busy, end = 0.0, found[0].start
    for event in found:
        busy += max(0.0, event.start + event.duration - max(end, event.start))
        end = max(end, event.start + event.duration)
    times = {
        "products_s": sum(x.duration for x in found if PRODUCTS.search(x.name)),
        "traffic_s": sum(x.duration for x in found if not PRODUCTS.search(x.name)),
        "waiting_s": end - found[0].start - busy,
    }
    return {name: 1e-9 * x / runs for name, x in times.items()} | {"kernels": len(found) / runs}
