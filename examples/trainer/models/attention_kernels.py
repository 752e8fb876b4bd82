"""The kernels of causal attention, and which one runs on a device.

`plain` holds all scores of a row and head, T x T. The others do not. cuDNN's and Pallas' splash
attention are written for NVIDIA GPUs and TPUs; `chunked` is plain JAX and runs everywhere.

All take queries, keys and values (B, T, H, K) of one type, and return the same. All but cuDNN's
also take the number of each token's document, (B, T): tokens then see those of their own. JAX gives
cuDNN masks as arrays of T x T numbers only, which is what such a kernel is there to avoid.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.trainer.models.chunked_attention import KEPT, chunked_attention
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig, head_size
from examples.trainer.system.errors import UserError

OWN = {"gpu": "cudnn", "tpu": "splash"}
"""The kernel that is written for a platform."""

LARGEST_TILE = 512  # positions; MaxText's default for splash attention
SMALLEST_TILE = 128  # lanes of a TPU's vector registers
HEAD = 64  # widths of heads that splash attention was compiled for here are multiples of this


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None = None
) -> jax.Array:
    mask = None if documents is None else documents[:, None, :, None] == documents[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Pallas' splash attention; `interpret` computes it on any device, slowly."""
    # Imported here, since it takes a second and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, h, width = q.shape[1:]
    tile = next(n for n in (LARGEST_TILE, 256, SMALLEST_TILE) if t % n == 0)
    attention = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((t, t))] * h),
        block_sizes=kernels.BlockSizes(
            block_q=tile,
            block_kv=tile,
            block_q_dkv=tile,
            block_kv_dkv=tile,
            block_q_dq=tile,
            block_kv_dq=tile,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
        residual_checkpoint_name=KEPT,
    )
    segments = None if documents is None else kernels.SegmentIds(documents, documents)
    rows = (x.swapaxes(1, 2) for x in (q * width**-0.5, k, v))
    out = jax.vmap(attention)(*rows, segments)
    return out.swapaxes(1, 2)


def is_of_attention(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """The policy of rematerialization that keeps what these kernels give, and nothing else."""
    named = primitive.name == "name" and parameters["name"] == KEPT
    return named or primitive.name.startswith("dot_product_attention_fwd")  # cuDNN's


KERNELS = {"plain": plain, "chunked": chunked_attention, "cudnn": cudnn, "splash": splash}


class Choice(NamedTuple):
    """A kernel, and why another one that was wanted cannot run; empty if it can."""

    kernel: str
    reason: str


@functools.cache
def choose(config: ModelConfig, layout: Layout, length: int) -> Choice:
    """The kernel for rows of `length` tokens: the one asked for, or chunked if that cannot run."""
    wanted = config.attention
    if wanted == "auto":
        wanted = OWN.get(layout.platform, "chunked")
    width, dtype = head_size(config), jnp.dtype(config.compute_dtype)
    row = jax.ShapeDtypeStruct((1, length, config.n_head, width), dtype)
    reason = ""
    if wanted in OWN.values() and OWN.get(layout.platform) != wanted:
        reason = f"{wanted} is not for a {layout.platform}"
    elif wanted == "cudnn" and config.document_token is not None:
        reason = "cudnn cannot mask documents (--data.document-mask) without T x T numbers"
    elif wanted == "cudnn":
        reason = problem_of_cudnn(row, layout)
    elif wanted == "splash" and length % SMALLEST_TILE:
        reason = f"splash needs rows of a multiple of {SMALLEST_TILE} tokens, not {length}"
    elif wanted == "splash" and width % HEAD:
        reason = f"splash needs heads of a multiple of {HEAD} numbers, not {width}"
    return Choice("chunked", reason) if reason else Choice(wanted, "")


def problem_of_cudnn(row: jax.ShapeDtypeStruct, layout: Layout) -> str:
    """Why cuDNN cannot compute the attention of a row, and its gradient; empty if it can."""

    def total(x: jax.Array) -> jax.Array:
        return cudnn(x, x, x).astype(jnp.float32).sum()

    try:
        gradient = jax.jit(jax.grad(total)).trace(row)
        # Some installations lack a library that cuDNN loads when it compiles (JAX issue 32430).
        # Compile-only devices and other hosts cannot be tried.
        if layout.is_here:
            gradient.lower().compile()
    except (RuntimeError, NotImplementedError, ValueError) as error:  # XLA's are RuntimeErrors
        return f"cudnn: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return ""


def check_attention(config: ModelConfig, layout: Layout) -> None:
    """Refuses a kernel that was asked for by name and cannot run."""
    choice = choose(config, layout, config.context)
    if choice.reason and config.attention != "auto":
        raise UserError(
            f"--model.attention {config.attention} cannot be used: {choice.reason}. Choose auto, "
            "chunked or plain."
        )


def describe(config: ModelConfig, layout: Layout) -> str:
    """The kernel in words, with the reason if it is not the one written for the device."""
    choice = choose(config, layout, config.context)
    apart = "" if config.document_token is None else " within documents"
    return f"{choice.kernel} attention{apart}" + (f" ({choice.reason})" if choice.reason else "")
