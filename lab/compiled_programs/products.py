"""Multiplications and additions of the matrix products in a compiled program.

XLA writes a product as `dot`, as a `convolution` on TPUs, or as a call of a library. Kernels of
attention are known by name: all of them are causal here. Another Pallas kernel counts with the
estimate that its author gave, and is refused without one.
"""

import functools
import math
import re

import numpy as np

from lab.compiled_programs import collectives
from lab.compiled_programs.hlo import Computation, Instruction, Program, Shape
from lab.compiled_programs.walk import Work

LIBRARY_PRODUCT = re.compile(r'custom_call_target="__cublas')
_OTHER_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|dot|conv)', re.IGNORECASE)
# Products of queries by keys, or of that size, in kernels of attention: cuDNN's, and Pallas' splash
# attention, whose names JAX gives them. Kernels of the backward pass compute the scores again.
ATTENTION = {
    "__cudnn$fmhaSoftmaxBackward": 5,
    "__cudnn$fmhaSoftmax": 2,
    "dot_product_attention_bwd": 5,
    "dot_product_attention_fwd": 2,
    "splash_mha_fwd": 2,
    "splash_mha_dkv": 4,
    "splash_mha_dq": 3,
}
KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2|mosaic_gpu)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^{}]*?"dimensions":\s*\[([^\]]*)\]')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def cost(program: Program, computation: Computation, x: Instruction) -> Work:
    """``("operations", "products")`` of an instruction, and the cost of a collective."""
    n = operations(program, computation, x)
    work: Work = {("operations", "products"): n} if n else {}
    return work | collectives.cost(program, computation, x)


def operations(program: Program, computation: Computation, x: Instruction) -> int:
    """Operations of an instruction, or of all instructions in a fusion.

    Raises:
      ValueError: for a product by a library or a kernel that cannot be counted.
    """
    if x.opcode == "fusion":
        inner = program.computations[x.called[0]]
        return sum(operations(program, inner, i) for i in inner.instructions.values())
    if x.opcode not in ("dot", "scaled-dot", "ragged-dot", "convolution", "custom-call"):
        return 0
    if attention := _of_attention(computation, x):
        return attention
    operands = [computation.instructions[name].shapes for name in x.operands]
    if x.opcode == "dot":
        return _of_dot(x, operands, x.integers("lhs_contracting_dims"))
    if x.opcode == "convolution":
        return _of_convolution(x, operands)
    if LIBRARY_PRODUCT.search(x.attributes):
        axes = _CONTRACTED.search(x.attributes)
        return _of_dot(x, operands, collectives.numbers(axes[1]) if axes else [])
    if KERNEL.search(x.attributes):
        estimate = _ESTIMATE.search(x.attributes)
        if estimate is None:
            raise ValueError(f"{x.name} is a kernel without an estimate of its work")
        return int(estimate[1])
    if x.opcode != "custom-call" or _OTHER_LIBRARY.search(x.attributes):
        raise ValueError(f"{x.name} is a {x.opcode}, which cannot be counted")
    return 0


def _of_attention(computation: Computation, x: Instruction) -> int:
    """Operations of a kernel of attention; 0 for another instruction."""
    # cuDNN's are named by the target of the call, Pallas' by the instruction.
    name = f"{x.name} {x.attributes}"
    products = next((n for kernel, n in ATTENTION.items() if kernel in name), 0)
    if x.opcode != "custom-call" or not products:
        return 0
    operands = (computation.instructions[name].shapes for name in x.operands)
    (_, queries), (_, keys), *_ = (shape for (shape,) in operands if re.match("b?f[0-9]", shape[0]))
    scores = re.search(_SCORES, x.attributes)
    positions = collectives.numbers(scores[1])[-1] if scores else keys[-2]
    # Half of the pairs: the kernels leave out what is masked.
    return products * 2 * math.prod(queries) * positions // 2


def _of_dot(x: Instruction, operands: list[tuple[Shape, ...]], contracted: list[int]) -> int:
    ((_, left), *_) = operands[0]
    (_, out) = x.shapes[0]  # a library's product returns its workspace too
    return 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)


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
