"""The settings of a network, checks of them, and the operations that training it needs."""

import dataclasses
from typing import Literal

import pydantic
import tyro

from examples.trainer.settings.validation import STRICT, Count, FinitePositive


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the network."""

    __pydantic_config__ = STRICT

    family: Literal["gpt", "llama"] = "gpt"
    """Which network: the paper's GPT or its LLaMA."""
    n_layer: Count = 4
    """Number of transformer blocks."""
    n_head: Count = 4
    """Attention heads; divides d_model."""
    n_kv_head: Count | None = None
    """Heads of keys and values under llama: each serves n_head / n_kv_head queries, as in grouped
    query attention (arXiv:2305.13245). None: n_head."""
    d_model: Count = 128
    """Width of the residual stream."""
    d_ff: tyro.conf.Suppress[Count | None] = None
    """Width inside an MLP; None: 4 d_model, or 8/3 d_model with swiglu (as many parameters)."""
    context: Count = 128
    """Tokens per row: the longest text that the model can look back on."""
    mlp: tyro.conf.Suppress[Literal["gelu", "swiglu"] | None] = None
    """What is inside an MLP: GELU between two matrices, or SwiGLU, which has three. None: as
    published, gelu for gpt and swiglu for llama."""
    tied: tyro.conf.Suppress[bool] = True
    """Use the token embedding as output head, as the paper's GPT does."""
    qkv: Literal["fused", "separate"] | None = None
    """fused: the projections to queries, keys and values are one matrix, to the optimizer too;
    separate: three. None: as published, fused for gpt and separate for llama."""
    final_norm: Literal["rms", "layer"] = "rms"
    """The norm before the head: RMSNorm as published, or LayerNorm, which llama has nowhere."""
    depth_scaled_init: tyro.conf.Suppress[bool | None] = None
    """Whether the output projections of attention and MLP begin smaller, with a deviation of
    0.02 / sqrt(2 n_layer). None: as published, so for gpt and not for llama."""
    norm_epsilon: tyro.conf.Suppress[FinitePositive] = 1e-5
    """Added to the variance under the root of norms; gpt's final RMSNorm has 1e-6 always."""
    rope_base: tyro.conf.Suppress[FinitePositive] = 10_000.0
    """Base of llama's rotary positions: the slowest pair makes a full turn in about 2 pi times as
    many tokens."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the activations. bfloat16 is slower on most CPUs."""
    param_dtype: tyro.conf.Suppress[Literal["float32", "bfloat16"]] = "float32"
    """Precision of parameters and optimizer state. float32 with activations in bfloat16 is mixed
    precision; bfloat16 halves the memory, as the paper's GPT-Huge and LLaMA-7B have it."""
    attention: Literal["auto", "plain", "cudnn", "splash"] = "auto"
    """plain holds all scores of a row, context x context numbers for each head; the others do not.
    auto: cudnn on NVIDIA GPUs and splash on TPUs where they can run, otherwise plain."""
    remat: Literal["none", "full", "attention"] = "none"
    """full: recompute the activations of each block in the backward pass, for less memory; on a CPU
    only together with scan. attention: the same, but for what the kernel of attention gives."""
    scan: bool = False
    """Stack the blocks' parameters and compile one block for all: deep models compile faster."""

    @pydantic.model_validator(mode="after")
    def fitting(self) -> "ModelConfig":
        """Refuses settings that do not fit each other."""
        heads, groups = self.n_head, kv_heads(self)
        if self.d_model % heads:
            raise ValueError(
                f"--model.d-model {self.d_model} cannot be cut into {heads} heads: choose a"
                " multiple of --model.n-head"
            )
        if self.family == "llama" and self.final_norm != "rms":
            raise ValueError(
                f"--model.final-norm {self.final_norm}: all norms of llama are RMSNorm; give rms,"
                " or --model.family gpt"
            )
        if heads % groups:
            raise ValueError(
                f"--model.n-kv-head {groups} does not divide --model.n-head {heads}: choose a"
                " divisor"
            )
        if groups != heads and (self.family == "gpt" or is_fused(self)):
            raise ValueError(
                f"--model.n-kv-head {groups} with {heads} heads: only llama with --model.qkv"
                " separate has fewer heads of keys and values; leave it out"
            )
        if self.family == "llama" and head_size(self) % 2:
            raise ValueError(
                f"--model.d-model {self.d_model} in {heads} heads gives {head_size(self)} numbers"
                " a head, and llama rotates them in pairs: choose an even multiple of"
                " --model.n-head"
            )
        return self


def hidden_width(config: ModelConfig) -> int:
    if config.d_ff is not None:
        return config.d_ff
    # The three matrices of a gated MLP then have as many elements as the two of another one.
    return 8 * config.d_model // 3 if is_gated(config) else 4 * config.d_model


def is_gated(config: ModelConfig) -> bool:
    """Whether the MLP is SwiGLU's."""
    return (config.mlp or ("gelu" if config.family == "gpt" else "swiglu")) == "swiglu"


def head_size(config: ModelConfig) -> int:
    return config.d_model // config.n_head


def kv_heads(config: ModelConfig) -> int:
    return config.n_kv_head or config.n_head


def is_fused(config: ModelConfig) -> bool:
    return (config.qkv or ("fused" if config.family == "gpt" else "separate")) == "fused"


def is_depth_scaled(config: ModelConfig) -> bool:
    scaled = config.depth_scaled_init
    return config.family == "gpt" if scaled is None else scaled


def training_flops_per_token(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions of forward and backward pass, for one token.

    6 for each element of a matrix that multiplies, the output head included: 2 forward, 4 backward.
    Attention adds 6 T D in each layer, T tokens in a row, D the width: two products of 2 T D each
    forward and twice that backward, and half of it, as a token attends to earlier ones only. Norms,
    biases, embedding tables, the optimizer, and what remat computes again count nothing. That is
    the numerator of MFU in the PaLM paper (Chowdhery et al., 2022, appendix B), but for the causal
    half, which MaxText takes too.
    """
    width, gates = config.d_model, 3 if is_gated(config) else 2
    projections = (2 + 2 * kv_heads(config) / config.n_head) * width**2
    matrices = config.n_layer * (projections + gates * width * hidden_width(config))
    attention = config.n_layer * config.context * width
    return 6.0 * (matrices + width * tokens + attention)
