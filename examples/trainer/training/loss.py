"""The loss, from hidden states and the head: it never holds all logits.

Rows stay on their devices, and their tokens are taken in chunks. Gradients are computed together
with the loss, chunk by chunk, so that no product is done twice; XLA leaves them out where only the
loss is used. Optax's loss of all logits makes a step of the default run 12% longer, and in chunks
under jax.checkpoint it would do the product with the head once more.

Shapes: B rows, T tokens, D width of the model, V words, C tokens in a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from examples.trainer.data.loader import NO_TARGET
from examples.trainer.models import sharding

CHUNK_BYTES = {"tpu": 128 * 2**20}
"""Most bytes of the float32 logits of a chunk on a device: TPUs have so much fast memory."""
OTHER_CHUNK_BYTES = 512 * 2**20  # 4,000 tokens by 32,000 words
LARGE = 4096  # words; a larger odd head is filled up once, as XLA would do in every product

product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


@jax.custom_vjp
def head_loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean nats per token of targets (B, T), from hidden states (B, T, D) and a head (D, V)."""
    return over_rows(x, head, targets)[0]


def forward(x: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
    loss, dx, dhead = over_rows(x, head, targets)
    return loss, (dx.astype(x.dtype), dhead.astype(head.dtype))


def backward(gradients: Any, dloss: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The gradients that the forward pass has computed, times that of the loss."""
    dx, dhead = ((g * dloss).astype(g.dtype) for g in gradients)
    return dx, dhead, None


head_loss.defvjp(forward, backward)


def over_rows(x: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    """The loss, and its gradients by hidden states and head, each device for its own rows."""
    words, mesh = head.shape[1], sharding.several()
    shards = mesh.shape["tensor"] if mesh else 1
    unit = 128 if words > LARGE and words % (8 * shards) else 1
    full = jnp.pad(head, ((0, 0), (0, -words % (unit * shards))))
    full = sharding.place(full.astype(x.dtype), None, "tensor")
    compute = functools.partial(in_chunks, words, 4 * full.shape[1] // shards)
    along = sharding.spec((sharding.BATCH,), x.shape[:1], mesh)[0] if mesh else None
    # XLA refuses sums over axes of one device beside others that it cuts itself.
    axes = tuple(axis for axis in along or () if mesh and mesh.shape[axis] > 1)
    if axes:
        rows = P(axes)
        compute = jax.shard_map(
            functools.partial(compute, axes=axes),
            in_specs=(rows, P(), rows),
            out_specs=(P(), rows, P()),
            axis_names=set(axes),
            check_vma=False,  # sums over the devices are the same on all of them
        )
    loss, dx, dhead = compute(x, full, targets)
    return loss / targets.size, dx / targets.size, dhead[:, :words] / targets.size


def in_chunks(
    words: int,
    bytes_of_token: int,
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, ...]:
    """The sum of nats of rows (B, T, D), and its gradients, chunk by chunk."""
    rows, length, width = x.shape
    size = chunk_size(length, rows * bytes_of_token)
    tokens = x.reshape(rows, -1, size, width).swapaxes(0, 1).reshape(-1, rows * size, width)
    labels = targets.reshape(rows, -1, size).swapaxes(0, 1).reshape(-1, rows * size)

    def add(total: Any, chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        tokens, labels = chunk
        nats, back = jax.vjp(lambda x: sum_of_nats(x, labels, words), product(tokens, head))
        dlogits = back(jnp.ones_like(nats))[0].astype(x.dtype)
        dhead = total[1] + product(tokens.T, dlogits)
        return (total[0] + nats, dhead), product(dlogits, head.T).astype(x.dtype)

    begin = jnp.zeros(()), jnp.zeros(head.shape)
    (nats, dhead), dx = jax.lax.scan(add, begin, (tokens, labels))
    dx = dx.reshape(-1, rows, size, width).swapaxes(0, 1).reshape(x.shape)
    return jax.lax.psum(nats, axes), dx, jax.lax.psum(dhead, axes)


def chunk_size(length: int, bytes_of_column: int) -> int:
    """The most tokens of a row that fit, of those numbers that divide its length."""
    most = CHUNK_BYTES.get(sharding.platform(), OTHER_CHUNK_BYTES) // bytes_of_column
    return next(n for n in range(length, 0, -1) if length % n == 0 and n <= max(1, most))


def sum_of_nats(logits: jax.Array, targets: jax.Array, words: int) -> jax.Array:
    """The cross-entropy of logits (C, V), of which the first are of words."""
    if words < logits.shape[1]:
        logits = jnp.where(jnp.arange(logits.shape[1])[None] < words, logits, -jnp.inf)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(jnp.where(targets == NO_TARGET, 0.0, nats))
