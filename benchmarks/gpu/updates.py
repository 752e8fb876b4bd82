"""Whole updates beside each other: time and memory, and what else may vary."""

import contextlib
import dataclasses
import importlib
import time
import unittest.mock
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console

from benchmarks import products, timing, trees
from benchmarks.gpu import variants
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import Figures, Unavailable, guarded
from benchmarks.gpu.variants import REFERENCE, VARIANTS, Variant


@dataclasses.dataclass
class Update:
    """A compiled update, whose state each call replaces."""

    compiled: Any
    grads: Any
    state: Any
    params: Any

    def __call__(self) -> Any:
        """Makes the next update."""
        updates, self.state = self.compiled(self.grads, self.state, self.params)
        return updates


def compile_update(
    variant: Variant, params: Any, grads: Any, sharding: Any = None
) -> tuple[Update, Figures]:
    """An update ready to run, and what its compilation tells."""
    with variants.products_in(variant.precision):
        tx = variants.optimizer(variant, params, sharding)
        state = jax.jit(tx.init)(params)
        begin = time.perf_counter()
        lowered = jax.jit(tx.update, donate_argnums=1).lower(grads, state, params)
        compiled = lowered.compile()
        seconds = time.perf_counter() - begin
    memory: Any = compiled.memory_analysis()
    return Update(compiled, grads, state, params), {
        "compile_s": seconds,  # or the time to read it from the cache
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }


def random_trees(size: trees.Size, scanned: bool = False) -> tuple[Any, Any]:
    """Parameters and gradients in bfloat16, as Optax multiplies in the gradients' dtype."""
    shapes = trees.shapes(size, dtype=jnp.bfloat16)
    shapes = trees.scanned(shapes) if scanned else shapes
    return trees.random_like(shapes, 0), trees.random_like(shapes, 1)


def compare(
    size: trees.Size,
    names: Mapping[str, Variant],
    settings: Settings,
    console: Console,
    scanned: bool = False,
) -> Figures:
    """Times updates in turn: one that fails says how, and the others are timed.

    Args:
      size: of the model.
      names: the updates.
      settings: how often they run.
      console: where progress is shown.
      scanned: all layers of a kernel in one leaf.
    """
    params, grads = random_trees(size, scanned)
    programs: dict[str, Update] = {}
    rows = {}
    for name, variant in names.items():

        def prepared(name: str = name, variant: Variant = variant) -> Figures:
            update, figures = compile_update(variant, params, grads)
            jax.block_until_ready(update())
            programs[name] = update
            return figures | {"tflop": _operations(size, variant) / 1e12}

        console.print(f"  compiling {name}")
        rows[name] = guarded(prepared)
    seconds = timing.interleaved(programs, settings.rounds, console, settings.calls)
    for name, values in seconds.items():
        low, median, high = (float(x) for x in np.quantile(values, [0.25, 0.5, 0.75]))
        rows[name] |= {
            "median_s": median,
            "quartiles_s": [low, high],
            "tflop_per_s": rows[name]["tflop"] / median,
        }
        if REFERENCE in seconds:
            rows[name]["of_optax"] = float(np.median(values / seconds[REFERENCE]))
    return rows


def _operations(size: trees.Size, variant: Variant) -> int:
    """Of the method's products, with both triangles of symmetric ones."""
    polar = "newton_schulz" if variant.kind == "optax" else variant.options.get("polar", "auto")
    dtype = "bfloat16" if variant.kind == "optax" else variant.options.get("compute_dtype")
    with variants.products_in(variant.precision):
        return products.flops(products.needed(size, polar, dtype))


def only(*names: str) -> dict[str, Variant]:
    """Some of the variants, by name."""
    return {name: VARIANTS[name] for name in names}


@contextlib.contextmanager
def stacks_of(n_bytes: int) -> Generator[None]:
    """With another bound of stacks of matrices, which no argument sets."""
    module = importlib.import_module("optax_muonplus._execution.stacks")
    if not hasattr(module, "STACK_BYTES"):
        raise Unavailable("this version of the library has no stacks.STACK_BYTES")
    with unittest.mock.patch.object(module, "STACK_BYTES", n_bytes):
        yield


def stack_bound(mib: float, settings: Settings, console: Console) -> Figures:
    """An update with stacks of at most ``mib`` MiB."""
    with stacks_of(int(mib * 2**20)):
        return compare(settings.swept, only(variants.OURS), settings, console)


def one_device_mesh(settings: Settings, console: Console) -> Figures:
    """An update of parameters on a mesh of one device beside one without a mesh."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    params, grads = random_trees(settings.swept)
    place = jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(*["data"] * (x.ndim > 1))), params
    )
    on_mesh = jax.device_put((params, grads), (place, place))
    variant = VARIANTS[variants.OURS]
    programs, rows = {}, {}
    for name, trees_of, given in (
        ("no mesh", (params, grads), None), ("mesh", on_mesh, place)
    ):  # fmt: skip
        programs[name], rows[name] = compile_update(variant, *trees_of, given)
    seconds = timing.interleaved(programs, settings.rounds, console, settings.calls)
    return {name: rows[name] | {"median_s": float(np.median(seconds[name]))} for name in rows}


def peak_memory(name: str, settings: Settings) -> Figures:
    """What the device says of its memory before and after updates; its peak never falls again."""
    device = jax.devices()[0]
    if device.memory_stats() is None:
        raise Unavailable(f"{device.device_kind} does not tell its memory")
    params, grads = random_trees(settings.swept)
    update, figures = compile_update(VARIANTS[name], params, grads)
    before = device.memory_stats()
    for _ in range(settings.calls):
        result = update()
    jax.block_until_ready(result)
    after = device.memory_stats()
    return figures | {
        "bytes_in_use_before": before["bytes_in_use"],
        "peak_before": before["peak_bytes_in_use"],
        "peak_after": after["peak_bytes_in_use"],
    }
