"""Operations of all matrix products that a traced function asks for, whoever does them.

Over the number of devices, this is what one device does if they share the work evenly.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from examples.compiled_programs import attention


def operations(jaxpr: Any, platform: str) -> int:
    """Multiplications and additions of products, loops as often as they run.

    Of code for several platforms, that for ``platform`` ("cuda", "tpu", "cpu") counts; of other
    branches, the one with the most. A kernel counts with the estimate of its author.

    Raises:
      ValueError: for products in a loop of unknown length, or a kernel without an estimate.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = list(_jaxprs(params))
        if name == "dot_general":
            total += _of_product(equation)
        elif name == "scan":
            total += params["length"] * operations(params["jaxpr"].jaxpr, platform)
        elif name == "cond":
            total += _of_branches(params, platform)
        elif name == "pallas_call" or attention.products_of(name):
            total += _of_kernel(equation)
        elif name == "shard_map":
            devices = params["mesh"].size
            total += devices * sum(operations(jaxpr, platform) for jaxpr in inner)
        else:
            found = sum(operations(jaxpr, platform) for jaxpr in inner)
            if name == "while" and found:
                raise ValueError("products in a loop of unknown length cannot be counted")
            total += found
    return total


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def _of_product(equation: Any) -> int:
    ((contracted, _), _) = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    out = math.prod(equation.outvars[0].aval.shape)
    return 2 * out * math.prod(left[axis] for axis in contracted)


def _of_branches(params: dict[str, Any], platform: str) -> int:
    """Of a choice by platform the branch that is taken, of another the one with most."""
    branches = [branch.jaxpr for branch in params["branches"]]
    platforms = params.get("branches_platforms")
    if platforms is None:
        return max(operations(branch, platform) for branch in branches)
    taken = next(i for i, names in enumerate(platforms) if names is None or platform in names)
    return operations(branches[taken], platform)


def _of_kernel(equation: Any) -> int:
    """Kernels of attention are known by name; their floating arguments begin with queries, keys."""
    name = f"{equation.primitive.name} {equation.params.get('name', '')}"
    if products := attention.products_of(name):
        arguments = [x.aval for x in equation.invars]
        queries, keys, *_ = (x.shape for x in arguments if jnp.issubdtype(x.dtype, jnp.floating))
        # Pallas' is (..., heads, positions, width), cuDNN's (rows, positions, heads, width).
        positions = keys[-2] if "splash" in name else keys[-3]
        return attention.operations(products, queries, positions)
    estimate = equation.params.get("cost_estimate")
    if estimate is None:
        raise ValueError(f"the kernel {name} has no estimate")
    return int(estimate.flops)
