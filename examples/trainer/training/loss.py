"""The training and validation loss, from hidden states and the head: it never holds all logits.

Tokens are taken in chunks. On a mesh each device takes those of its own rows, and its part of the
words. When a gradient is wanted, it is computed together with the loss, chunk by chunk, so that no
product is done twice.

Glossary of shapes: B rows, T tokens, D model width, V words, W words on one device, C tokens in a
chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.trainer.models.layers import HEAD, RULES, Layout, shard_count, spec

CHUNK_BYTES = 512 * 2**20
"""Most bytes of the float32 logits of a chunk: 4,000 tokens by 32,000 words. The gradient of the
head is read and written once for each chunk."""

TPU_CHUNK_BYTES = 128 * 2**20
"""The same on TPUs, whose fast memory holds so much: larger chunks go through the slow one."""

WORDS = 128
"""A head of more than 32 times as many words is filled up to a multiple of them, once before the
chunks: XLA would fill up an odd number, and cut it off again, in every product of every chunk."""

NO_TARGET = -1  # of positions that are added to fill a chunk or a batch


class Scores(NamedTuple):
    """How well each token was predicted, (B, T)."""

    nats: jax.Array
    """Its cross-entropy."""
    hits: jax.Array
    """Whether no other word was likelier."""


Gradients = tuple[jax.Array, jax.Array]
"""The gradients by hidden states and by the head."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def head_loss(x: jax.Array, head: jax.Array, targets: jax.Array, layout: Layout) -> jax.Array:
    """Mean cross-entropy in nats per token of targets (B, T).

    The logits are those of hidden states (B, T, D) and a head (D, V).
    """
    return jnp.mean(token_scores(x, head, targets, layout).nats)


def head_loss_forward(
    x: jax.Array, head: jax.Array, targets: jax.Array, layout: Layout
) -> tuple[jax.Array, Gradients]:
    scores, (dx, dhead) = on_mesh(x, head, targets, layout, with_gradients=True)
    dx, dhead = dx / targets.size, dhead / targets.size
    return jnp.mean(scores.nats), (dx.astype(x.dtype), dhead.astype(head.dtype))


def head_loss_backward(
    layout: Layout, gradients: Gradients, dloss: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """The gradients that the forward pass has computed, times that of the loss."""
    dx, dhead = ((g * dloss).astype(g.dtype) for g in gradients)
    return dx, dhead, None


head_loss.defvjp(head_loss_forward, head_loss_backward)


def token_scores(x: jax.Array, head: jax.Array, targets: jax.Array, layout: Layout) -> Scores:
    """The scores of the targets (B, T), for hidden states (B, T, D) and a head (D, V)."""
    return on_mesh(x, head, targets, layout, with_gradients=False)[0]


class Shards(NamedTuple):
    """How many words and bytes of a chunk there are, and the mesh axes that cut the arrays.

    These are rows, words and the head's width.
    """

    words: int
    chunk_bytes: int
    batch: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()


def on_mesh(
    x: jax.Array, head: jax.Array, targets: jax.Array, layout: Layout, with_gradients: bool
) -> tuple[Scores, Any]:
    """The scores, computed by the devices of a mesh.

    With gradients, also those of the sum of all nats, by hidden states and by the head.
    """
    words = head.shape[1]
    chunk_bytes = TPU_CHUNK_BYTES if layout.platform == "tpu" else CHUNK_BYTES
    mesh = layout.mesh
    if mesh is None or mesh.size == 1:
        return on_device(x, head, targets, Shards(words, chunk_bytes), with_gradients)
    batch, vocab = RULES["batch"], RULES["vocab"]
    head = jnp.pad(head, ((0, 0), (0, -words % shard_count(mesh, vocab))))
    head_spec = spec(HEAD, head.shape, mesh)
    shards = Shards(words, chunk_bytes, batch, vocab, head_spec[0] or ())
    scores, gradients = jax.shard_map(
        functools.partial(on_device, shards=shards, with_gradients=with_gradients),
        mesh=mesh,
        in_specs=(P(batch), head_spec, P(batch)),
        out_specs=(P(batch), (P(batch), head_spec) if with_gradients else None),
        check_vma=False,  # all but the head's gradient is the same on devices that share rows
    )(x, head, targets)
    if not with_gradients:
        return scores, None
    dx, dhead = gradients
    return scores, (dx, dhead[:, :words])


def on_device(
    x: jax.Array, head: jax.Array, targets: jax.Array, shards: Shards, with_gradients: bool
) -> tuple[Scores, Any]:
    """The same for one device's rows of `x` (B, T, D) and its shard of the head."""
    head = jax.lax.all_gather(head.astype(x.dtype), shards.embed, axis=0, tiled=True)  # [D, W]
    width = head.shape[1]
    added = -width % WORDS if width > 32 * WORDS else 0
    head = jnp.pad(head, ((0, 0), (0, added)))
    local = jnp.arange(head.shape[1])
    words = jnp.where(local < width, jax.lax.axis_index(shards.vocab) * width + local, shards.words)
    most = max(1, shards.chunk_bytes // (4 * head.shape[1]))
    n = -(-targets.size // most)
    size = -(-targets.size // n)
    more = n * size - targets.size
    tokens = jnp.pad(x.reshape(-1, x.shape[-1]), ((0, more), (0, 0))).reshape(n, size, -1)
    labels = jnp.pad(targets.reshape(-1), (0, more), constant_values=NO_TARGET).reshape(n, size)

    def add(dhead: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        scores, dlogits = score_chunk(*chunk, head, words, shards)
        if not with_gradients:
            return dhead, (scores, None)
        dx = jax.lax.psum(product(dlogits, head.T), shards.vocab).astype(x.dtype)
        return dhead + product(chunk[0].T, dlogits), (scores, dx)

    begin = jnp.zeros(head.shape, jnp.float32) if with_gradients else jnp.zeros(())
    if n == 1:
        dhead, (scores, dx) = add(begin, (tokens[0], labels[0]))
    else:
        dhead, (scores, dx) = jax.lax.scan(add, begin, (tokens, labels))
    scores = Scores(*(score.reshape(-1)[: targets.size].reshape(targets.shape) for score in scores))
    if not with_gradients:
        return scores, None
    dx = dx.reshape(-1, x.shape[-1])[: targets.size].reshape(x.shape)
    dhead, axes = dhead[:, :width], shards.batch
    if shards.embed:  # of which each device keeps its shard
        dhead = jax.lax.psum_scatter(dhead, shards.embed, scatter_dimension=0, tiled=True)
        axes = tuple(axis for axis in axes if axis not in shards.embed)
    dhead = jax.lax.psum(dhead, axes)
    return scores, (dx, dhead)


def score_chunk(
    x: jax.Array, targets: jax.Array, head: jax.Array, words: jax.Array, shards: Shards
) -> tuple[Scores, jax.Array]:
    """The scores of tokens (C, D), and the gradient of the sum of their nats by logits (C, W).

    `words` are the numbers of the head's words; those that were added to it have no weight.
    """
    logits = jnp.where((words < shards.words)[None], product(x, head), -jnp.inf)
    largest = jax.lax.pmax(logits.max(axis=1), shards.vocab)
    weights = jnp.exp(logits - largest[:, None])
    total = jax.lax.psum(weights.sum(axis=1), shards.vocab)
    is_target = words[None] == targets[:, None]
    wanted = jax.lax.psum(jnp.where(is_target, logits, 0).sum(axis=1), shards.vocab)
    is_token = targets != NO_TARGET
    nats = jnp.where(is_token, largest + jnp.log(total) - wanted, 0)
    # One factor a token, not a quotient a word: dividing takes a TPU longer than the product with
    # the head. Added tokens have the factor 0, and no word is their target.
    dlogits = weights * jnp.where(is_token, 1 / total, 0)[:, None] - is_target
    return Scores(nats, wanted >= largest), dlogits.astype(x.dtype)


product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
