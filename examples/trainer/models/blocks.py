"""What both networks share: causal attention, the layers of a block, and the stack of blocks.

Shapes: B rows, T tokens, D width of the model, H heads, K = D / H width of a head. A weight is a
kernel (in, out), so that the default rules of `optax_muonplus` read it. Blocks are a list, or with
--model.scan one block whose parameters have a leading axis of layers, compiled once for all.

There are three kernels of attention, which compute the same. `plain` holds all scores of a row and
head, T x T. cuDNN's and Pallas' splash attention do not; they are for NVIDIA GPUs and TPUs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models import sharding
from examples.trainer.settings.run import ModelConfig, head_size

STD = 0.02  # GPT-2's, the paper's GPT's, and that of the LLaMA in Hugging Face transformers
NORM_EPSILON = 1e-5  # added to the variance under the root, in all norms but GPT's RMSNorm
TILES = (512, 256, 128)  # positions; 512 is MaxText's default, 128 the lanes of a TPU's registers
Norm = nnx.LayerNorm | nnx.RMSNorm
WIDTH = 64  # widths of heads that splash attention was compiled for here are multiples of this


class Linear(nnx.Linear):
    """A linear layer whose gradients are sums in float32, over rows and over devices."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        y = product(inputs.astype(self.dtype), self.kernel[...])
        return y if self.bias is None else (y + self.bias[...][None, None]).astype(self.dtype)


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Rows (B, T, in) times a kernel (in, out), in the dtype of the rows."""
    return x @ kernel.astype(x.dtype)


def product_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return product(x, kernel), (x, kernel)


def product_backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The devices have parts of the sum over rows, which XLA adds in the dtype of the product."""
    x, kernel = kept
    # In the order of JAX's own derivative: in the other one XLA leaves a side that devices do not
    # divide, such as 5461, whole on each of them.
    rows = [a.reshape(-1, a.shape[-1]) for a in (dy, x)]
    dkernel = jnp.einsum("ro,ri->oi", *rows, preferred_element_type=jnp.float32).T
    return dy @ kernel.astype(x.dtype).T, dkernel.astype(kernel.dtype)


product.defvjp(product_forward, product_backward)


def linear(config: ModelConfig, rngs: nnx.Rngs, **options: Any) -> Callable[..., Linear]:
    """A linear layer of a network, as a function of its widths."""
    given = {"kernel_init": nnx.initializers.normal(STD), **options}
    compute, kept = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
    return functools.partial(Linear, rngs=rngs, dtype=compute, param_dtype=kept, **given)


def norm(
    kind: type[Norm], config: ModelConfig, rngs: nnx.Rngs, epsilon: float = NORM_EPSILON
) -> Norm:
    """A norm over the width of the model, whose results and gradients are float32."""
    kept = jnp.dtype(config.param_dtype)
    return kind(config.d_model, epsilon=epsilon, dtype=jnp.float32, param_dtype=kept, rngs=rngs)


def embedding(size: int, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """A table whose rows are converted after they were chosen: gradients are sums in float32."""
    init, kept = nnx.initializers.normal(STD), jnp.dtype(config.param_dtype)
    return nnx.Embed(
        size, config.d_model, embedding_init=init, dtype=jnp.float32, param_dtype=kept, rngs=rngs
    )


class LanguageModel(nnx.Module):
    """Tokens (B, T) to the logits of the next ones (B, T, V), in float32."""

    wte: nnx.Embed
    lm_head: Linear | None

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """What the head turns into logits, [B, T, D]."""
        raise NotImplementedError

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits, [D, V]."""
        return self.wte.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.hidden(tokens)
        return (x @ self.head().astype(x.dtype)).astype(jnp.float32)


def stack(block: Callable[[nnx.Rngs], nnx.Module], config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """All blocks of a network, each with random numbers of its own."""
    if not config.scan:
        return nnx.List([block(rngs) for _ in range(config.n_layer)])
    return nnx.split_rngs(splits=config.n_layer)(nnx.vmap(block))(rngs)


def run(blocks: Any, config: ModelConfig, x: jax.Array, *shared: jax.Array) -> jax.Array:
    """`x` after all blocks; each gathers its parameters when it needs them."""
    x = sharding.place(x, sharding.BATCH)
    graph: Any = None

    def one(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        block = nnx.merge(graph, sharding.gathered(params, x.dtype))
        return sharding.place(block(x, *shared), sharding.BATCH), None

    step = one
    if config.remat == "full":
        step = jax.checkpoint(one)
    elif sharding.several():
        step = jax.checkpoint(one, policy=sharding.gather_again)
    if config.scan:
        graph, params = split(blocks)
        return jax.lax.scan(step, x, params)[0]
    for block in blocks:
        graph, params = split(block)
        x, _ = step(x, params)
    return x


def split(block: nnx.Module) -> tuple[Any, Any]:
    """The form of a module, and its parameters by their names."""
    graph, state = nnx.split(block)
    return graph, nnx.to_pure_dict(state)


# Attention


plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
cudnn = functools.partial(plain, implementation="cudnn")


def splash(q: jax.Array, k: jax.Array, v: jax.Array, interpret: bool = False) -> jax.Array:
    """Pallas' splash attention; `interpret` computes it on any device, slowly."""
    # Imported here, since it takes a second and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, h, width = q.shape[1:]
    tile = next(n for n in TILES if t % n == 0)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": tile for name in names}
    attention = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((t, t))] * h),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    rows = (x.swapaxes(1, 2) for x in (q * width**-0.5, k, v))
    return jax.vmap(attention)(*rows).swapaxes(1, 2)


KERNELS = {"plain": plain, "cudnn": cudnn, "splash": splash}


def choose(config: ModelConfig, platform: str) -> str:
    """The kernel of attention on a cpu, gpu or tpu; one that was asked for fails in JAX's words."""
    if config.attention != "auto":
        return config.attention
    length, width = config.context, head_size(config)
    if platform == "gpu" and config.compute_dtype == "bfloat16":
        return "cudnn" if length % 64 == 0 and width % 8 == 0 and width <= 128 else "plain"
    if platform == "tpu" and length % TILES[-1] == 0 and width % WIDTH == 0:
        return "splash"
    return "plain"


def attend(q: jax.Array, k: jax.Array, v: jax.Array, config: ModelConfig) -> jax.Array:
    """Lets each position of (B, T, H, K) attend to itself and to earlier ones; (B, T, D)."""
    kernel = KERNELS[choose(config, sharding.platform())]
    mixed = sharding.on_shards(kernel, (sharding.BATCH, None, "tensor", None), q, k, v)
    return mixed.reshape(*q.shape[:2], -1)
