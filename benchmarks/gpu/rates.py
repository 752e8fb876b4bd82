"""How fast the device copies and multiplies."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import products, timing, trees
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import Figures, guarded
from benchmarks.gpu.variants import PRECISIONS, products_in


def copy(settings: Settings, console: Console) -> Figures:
    """Bytes read and written in a second, by an operation on each element of a large array."""
    x = jnp.ones(settings.copied_bytes // 2, jnp.bfloat16)
    program = jax.jit(lambda x: x * 1.5)
    seconds = timing.interleaved(
        {"copy": lambda: program(x)}, settings.rounds, console, settings.calls
    )
    median = float(np.median(seconds["copy"]))
    return {"tb_per_s": 2 * x.nbytes / median / 1e12, "median_s": median}


def square(settings: Settings, console: Console) -> Figures:
    """TFLOP/s of products of large square matrices, by dtype or precision."""
    n = settings.square
    halves = {name: _rate(n, name, settings, console) for name in ("bfloat16", "float16")}
    return halves | {
        name: _rate(n, "float32", settings, console, precision)
        for name, precision in PRECISIONS.items()
    }


def _rate(
    n: int, dtype: str, settings: Settings, console: Console, precision: str | None = None
) -> Figures:
    def measured() -> Figures:
        with products_in(precision):
            chain = products.chain(n, n, dtype)
            seconds = timing.interleaved({"chain": chain.run}, settings.rounds, console)
        operations = products.flops(chain.products)
        return {"tflop_per_s": operations / float(np.median(seconds["chain"])) / 1e12}

    return guarded(measured)


def of_shapes(size: trees.Size, dtype: str, settings: Settings, console: Console) -> dict[str, Any]:
    """TFLOP/s of the products of a model's update, stacked as the update stacks them."""
    chains = products.chains(size, dtype)
    programs = {name: chain.run for name, chain in chains.items()}
    seconds = timing.interleaved(programs, settings.rounds, console)
    each = products.seconds_of_each(chains, seconds)
    return {
        "x".join(map(str, product)): {"tflop_per_s": 2 * math.prod(product) / s / 1e12}
        for product, s in each.items()
    }
