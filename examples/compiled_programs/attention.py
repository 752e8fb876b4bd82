"""Kernels of attention: the products that they do, and the rate at which they do them.

Shah et al., FlashAttention-3 (arXiv 2407.08608v2), write above the bars of figures 5 and 6 what
cuDNN reaches on an H100 SXM5, in TFLOP/s, for heads of 64 and of 128 numbers. Figure 6 has no
causal backward pass: it is taken to lose what the forward pass of figure 5 loses to the mask.
Rates here are shares of the data sheet's peak, and those of the H100 are assumed for all devices.
NVIDIA measured causal heads of 128 at 4,096 tokens (cudnn-frontend @816ea45,
benchmark/attention_training/results/llama3.1): shares forward and backward are 0.56 and 0.41 on an
A100, 0.62 and 0.50 on an H200, 0.53 and 0.44 on a GB200; here they are 0.52 and 0.43. No
measurement of TPUs was found.
"""

import math

import numpy as np

# Products of queries by keys, or of that size, in kernels of attention: cuDNN's, and Pallas' splash
# attention, whose names JAX gives them. Kernels of the backward pass compute the scores again.
PRODUCTS = {
    "__cudnn$fmhaSoftmaxBackward": 5,
    "__cudnn$fmhaSoftmax": 2,
    "dot_product_attention_bwd": 5,
    "dot_product_attention_fwd": 2,
    "splash_mha_fwd": 2,
    "splash_mha_dkv": 4,
    "splash_mha_dq": 3,
}
_FORWARD = 2  # products of the forward pass; kernels of the backward pass do more

_PEAK = 989  # of the H100 that was measured
_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_CAUSAL = {64: (225, 288, 334, 363, 379, 388), 128: (315, 410, 484, 518, 529, 539)}
_FULL = {64: (335, 373, 395, 408, 412, 413), 128: (497, 574, 617, 609, 600, 595)}
_FULL_BACKWARD = {64: (266, 348, 395, 417, 432, 433), 128: (305, 408, 465, 499, 518, 516)}


def products_of(name: str) -> int:
    """How many products a kernel of attention does, by its name; 0 for another kernel."""
    return next((n for kernel, n in PRODUCTS.items() if kernel in name), 0)


def operations(products: int, queries: tuple[int, ...], positions: int) -> int:
    """Operations of products of queries, of that shape, and so many keys.

    Half of them: attention is causal in all models here, and its kernels leave the rest out.
    """
    return products * 2 * math.prod(queries) * positions // 2


def share_of_peak(products: int, width: int, positions: int) -> float:
    """The share of the peak rate that a kernel reaches for heads of that width.

    Between measured numbers of tokens it is linear in their logarithm; beyond them, and between the
    two widths, it is that of the next smaller one measured, or of the smallest.
    """
    row = max((w for w in _CAUSAL if w <= width), default=min(_CAUSAL))
    causal, full = np.array(_CAUSAL[row]), np.array(_FULL[row])
    rates = causal if products == _FORWARD else np.array(_FULL_BACKWARD[row]) * causal / full
    return float(np.interp(math.log2(positions), np.log2(_TOKENS), rates)) / _PEAK
