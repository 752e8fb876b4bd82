"""The kernels of causal attention, and which one runs on a device.

`plain` holds all scores of a row and head, T x T. The others do not. cuDNN's and Pallas' splash
attention are written for NVIDIA GPUs and TPUs; `chunked` is plain JAX and runs everywhere.

All take queries, keys and values (B, T, H, K) of one type, and return the same. All but cuDNN's
also take the number of each token's document, (B, T): tokens then see those of their own. JAX gives
cuDNN masks as arrays of T x T numbers only, which is what such a kernel is there to avoid.

In `chunked`, queries and keys are cut into blocks of C positions, and a scan goes through the pairs
of blocks (i, j) of the lower triangle: later keys are never multiplied. The softmax is kept up to
date as blocks of keys come in. The backward pass computes each block of scores again. Memory is
that of queries, keys and values, and grows with T; the work is (1 + C/T) / 2 of that of all scores.

Glossary of shapes: B rows, T tokens, H heads, K width of a head, N blocks of C tokens.

Source of `chunked`: Milakov and Gimelshein (arXiv 1805.02867) for the softmax; Dao et al.,
FlashAttention (arXiv 2205.14135), algorithms 1 and 4.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from examples.trainer.models.layers import Layout
from examples.trainer.settings.model import ModelConfig, head_size
from examples.trainer.system.errors import UserError

KEPT = "attention"  # what rematerialization may keep, by this name
BLOCK = 256  # positions; scores of one head are then 256 KiB, which the cache of a CPU holds


def chunked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """Softmax(q k / sqrt(K)) v over the position itself and earlier ones; all are (B, T, H, K).

    With the number of each token's document, (B, T), over those of the same document.
    """
    b, t, h, width = q.shape
    numbers = document_blocks(documents, block)
    blocks = (in_blocks(x, block, "constant") for x in (q, k, v))
    out = attend_blocks(*blocks, numbers)  # [N, B, H, C, K]
    return out.transpose(1, 0, 3, 2, 4).reshape(b, -1, h, width)[:, :t]


def in_blocks(x: jax.Array, block: int, padding: str) -> jax.Array:
    """(B, T, H, K) as blocks (N, B, H, C, K).

    Positions that are added come last, where no other position sees them.
    """
    b, t, h, width = x.shape
    n = max(2, -(-t // block))  # with two, a quarter of the work falls away
    size = -(-t // n)
    padded = jnp.pad(x, ((0, 0), (0, n * size - t), (0, 0), (0, 0)), mode=padding)
    return padded.reshape(b, n, size, h, width).transpose(1, 0, 3, 2, 4)


def document_blocks(documents: jax.Array | None, block: int) -> jax.Array | None:
    """The documents of tokens (B, T) as blocks (N, B, 1, C, 1)."""
    return None if documents is None else in_blocks(documents[..., None, None], block, "edge")


def largest_logits(
    q: jax.Array, k: jax.Array, documents: jax.Array | None = None, block: int = BLOCK
) -> jax.Array:
    """The largest q k / sqrt(K) of each row and head, (B, 1, H, 1), over what softmax sees."""
    numbers = document_blocks(documents, block)
    q, k = (in_blocks(x, block, "edge") for x in (q, k))  # adds logits that are there already

    def add(largest: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
        i, j = pair
        return jnp.maximum(largest, scores_of(q, k, numbers, i, j).max(axis=(2, 3))), None

    largest = scan_pairs(add, jnp.full(q.shape[1:3], -jnp.inf), len(q))
    return largest[:, None, :, None]


@jax.custom_vjp
def attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None
) -> jax.Array:
    """The same for blocks (N, B, H, C, K), and (N, B, 1, C, 1) of documents."""
    return attend_blocks_forward(q, k, v, documents)[0]


def attend_blocks_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None
) -> tuple[jax.Array, Any]:
    """The result, and for the backward pass the log of the sum of each softmax."""

    def add(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        out, largest, total = carry
        i, j = pair
        scores = scores_of(q, k, documents, i, j)
        top = jnp.maximum(largest[i], scores.max(axis=-1))
        weights, kept = jnp.exp(scores - top[..., None]), jnp.exp(largest[i] - top)
        return (
            out.at[i].set(out[i] * kept[..., None] + product(weights.astype(v.dtype), v[j])),
            largest.at[i].set(top),
            total.at[i].set(total[i] * kept + weights.sum(axis=-1)),
        ), None

    rows = q.shape[:-1]
    # Not -inf: a block of keys may have none of the document, and -inf - -inf is no number.
    lowest = jnp.full(rows, jnp.finfo(jnp.float32).min)
    begin = (jnp.zeros(q.shape, jnp.float32), lowest, jnp.zeros(rows))
    out, largest, total = scan_pairs(add, begin, len(q))
    out = checkpoint_name((out / total[..., None]).astype(q.dtype), KEPT)
    return out, (q, k, v, documents, out, checkpoint_name(largest + jnp.log(total), KEPT))


def attend_blocks_backward(
    kept: Any, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, documents, out, log_total = kept
    # Of each softmax: its gradient's mean, which is the product of the output and its gradient.
    mean = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    scale = q.shape[-1] ** -0.5

    def add(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        dq, dk, dv = carry
        i, j = pair
        weights = jnp.exp(scores_of(q, k, documents, i, j) - log_total[i][..., None])
        dweights = product(dout[i], v[j].mT)
        dscores = (weights * (dweights - mean[i][..., None]) * scale).astype(q.dtype)
        return (
            dq.at[i].add(product(dscores, k[j])),
            dk.at[j].add(product(dscores.mT, q[i])),
            dv.at[j].add(product(weights.astype(q.dtype).mT, dout[i])),
        ), None

    zeros = jnp.zeros(q.shape, jnp.float32)
    dq, dk, dv = scan_pairs(add, (zeros, zeros, zeros), len(q))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend_blocks.defvjp(attend_blocks_forward, attend_blocks_backward)


def scan_pairs(step: Callable[[Any, jax.Array], tuple[Any, None]], begin: Any, n: int) -> Any:
    """The carry after all pairs of blocks (i, j) with j <= i, row by row."""
    return jax.lax.scan(step, begin, jnp.stack(jnp.tril_indices(n), axis=-1))[0]


def scores_of(
    q: jax.Array, k: jax.Array, documents: jax.Array | None, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Scores of query block i and key block j, (B, H, C, C).

    Later keys, and those of another document, have -inf.
    """
    size = q.shape[3]
    positions = jnp.arange(size)
    seen = ((j * size + positions)[None] <= (i * size + positions)[:, None])[None, None]
    if documents is not None:
        seen = seen & (documents[i] == documents[j].mT)
    scores = product(q[i], k[j].mT) * q.shape[-1] ** -0.5
    return jnp.where(seen, scores, -jnp.inf)


product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


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
