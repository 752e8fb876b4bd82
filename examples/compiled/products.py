"""Multiplications and additions of the matrix products in a compiled program.

XLA writes a product as `dot`, as a `convolution` on TPUs, or as a call of a library. Attention in
one kernel (cuDNN's) does two products in the forward pass and five in the backward pass, and half
of each where it is causal. A Pallas kernel counts with the estimate that its author gave, and this
package's kernel for symmetric products with the blocks on and below the diagonal, whole.
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

import optax_muonplus as omp
from examples.compiled import walk
from examples.compiled.hlo import Computation, Instruction, Program, Shape
from examples.compiled.walk import Work

LIBRARY_PRODUCT = re.compile(r'custom_call_target="__cublas')
LIBRARY_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
_SYMMETRIC_PRODUCT = re.compile(r'custom_call_target="mosaic_gpu.*symmetric_product', re.DOTALL)
KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2|mosaic_gpu)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


class Product(NamedTuple):
    """Operations of one instruction, its left operand's dtype, and whether it rounds nothing."""

    operations: int
    dtype: str
    highest: bool


def most_work(program: Program) -> Work:
    """The work of the device with the most operations: products and collectives, nothing else.

    The keys are ``("operations", "products")`` and those of
    :func:`examples.compiled.walk.collective`.

    Raises:
      ValueError: if a loop that does something runs for an unknown number of iterations.
    """

    def cost(computation: Computation, x: Instruction) -> Work:
        n = sum(product.operations for product in inside(program, computation, x))
        work = {("operations", "products"): n} if n else {}
        return work | (walk.collective(program, computation, x) or {})

    return walk.most_work(program, cost, "operations")


def inside(program: Program, computation: Computation, x: Instruction) -> list[Product]:
    """The products of an instruction; of a fusion, those of the instructions in it."""
    if x.opcode == "fusion":
        inner = program.computations[x.called[0]]
        found = (inside(program, inner, i) for i in inner.instructions.values())
        return [product for products in found for product in products]
    operations = _operations(computation, x)
    if not operations:
        return []
    ((dtype, _), *_) = computation.instructions[x.operands[0]].shapes
    highest = re.search("highest", x.attributes, re.IGNORECASE) is not None
    return [Product(operations, dtype, highest)]


def _operations(computation: Computation, x: Instruction) -> int:
    if x.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    operands = [computation.instructions[name].shapes for name in x.operands]
    if x.opcode == "dot":
        return _of_dot(x, operands, x.integers("lhs_contracting_dims"))
    if x.opcode == "convolution":
        return _of_convolution(x, operands)
    if LIBRARY_PRODUCT.search(x.attributes):
        axes = _CONTRACTED.search(x.attributes)
        return _of_dot(x, operands, _numbers(axes[1]) if axes else [])
    if found := LIBRARY_ATTENTION.search(x.attributes):
        return _of_attention(x, operands, products=5 if found[1] else 2)
    if _SYMMETRIC_PRODUCT.search(x.attributes):
        return _of_symmetric_product(operands)
    estimate = KERNEL.search(x.attributes) and _ESTIMATE.search(x.attributes)
    return int(estimate[1]) if estimate else 0


def _of_dot(x: Instruction, operands: list[tuple[Shape, ...]], contracted: list[int]) -> int:
    ((_, left), *_) = operands[0]
    (_, out) = x.shapes[0]  # a library's product returns its workspace too
    return 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _of_symmetric_product(operands: list[tuple[Shape, ...]]) -> int:
    ((_, (batch, side, inner)), *_) = operands[0]
    block = omp.polar.Tiling().block
    blocks = side // block
    return batch * blocks * (blocks + 1) * block**2 * inner


def _of_attention(x: Instruction, operands: list[tuple[Shape, ...]], products: int) -> int:
    """Queries and keys come first; a product has 2 operations for each query, key and width."""
    ((_, queries),), ((_, keys),) = operands[:2]
    numbers = re.search(r'"bmm1_dot_dimension_numbers":\{([^{}]*)\}', x.attributes)
    used = [
        axis
        for kind in ("contracting", "batch")
        for axis in _listed(f"rhs_{kind}_dimensions", numbers[1] if numbers else "")
    ]
    positions = math.prod(n for axis, n in enumerate(keys) if axis not in used)
    causal = '"mask_type":"CAUSAL"' in x.attributes
    return products * 2 * math.prod(queries) * positions // (2 if causal else 1)


def _listed(name: str, text: str) -> list[int]:
    found = re.search(rf'"{name}":\[([^\]]*)\]', text)
    return _numbers(found[1]) if found else []


def _of_convolution(x: Instruction, operands: list[tuple[Shape, ...]]) -> int:
    """Twice the pairs of an input and a weight that meet; zeros of padding meet nothing."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    assert labels is not None
    ((_, images),), ((_, weights),) = operands[:2]
    ((_, out), *_) = x.shapes
    spatial = sorted(label for label in labels[3] if label.isdecimal())
    window = re.search(r"window=\{([^}]*)\}", x.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    met = 1
    for i, label in enumerate(spatial):
        sizes = (
            images[labels[1].index(label)],
            weights[labels[2].index(label)],
            out[labels[3].index(label)],
        )
        stride, dilated, spread = (
            int(fields.get(name, "1x" * len(spatial)).split("x")[i])
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        padded = fields.get("pad", "0_0x" * len(spatial)).split("x")[i].split("_")[0]
        met *= _meeting(*sizes, stride, int(padded), dilated, spread)
    features = weights[labels[2].index("i")]
    return 2 * met * out[labels[3].index("b")] * out[labels[3].index("f")] * features


@functools.lru_cache(maxsize=512)
def _meeting(n: int, window: int, out: int, stride: int, pad: int, dilate: int, spread: int) -> int:
    """Pairs of a place in the output and one in the window at which there is an input."""
    at = np.arange(out)[:, None] * stride - pad + np.arange(window)[None] * spread
    return int(np.sum((at >= 0) & (at <= (n - 1) * dilate) & (at % dilate == 0)))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
