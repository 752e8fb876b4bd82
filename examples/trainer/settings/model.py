"""The settings of a network, checks of them, and the operations that training it needs."""

import dataclasses
from typing import Literal

import pydantic

from examples.trainer.settings.validation import STRICT, Count

Family = Literal["gpt", "llama"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the network."""

    __pydantic_config__ = STRICT

    family: Family = "gpt"
    """Which network: the paper's GPT or its LLaMA."""
    n_layer: Count = 4
    """Number of transformer blocks."""
    n_head: Count = 4
    """Attention heads; divides d_model."""
    d_model: Count = 128
    """Width of the residual stream."""
    d_ff: Count | None = None
    """Width inside an MLP; None: 4 d_model for gpt, and 8/3 d_model for llama, whose MLP has three
    matrices (as many parameters)."""
    context: Count = 128
    """Tokens per row: the longest text that the model can look back on."""
    tied: bool = True
    """Use the token embedding as output head, as the paper's GPT does."""
    final_norm: Literal["rms", "layer"] = "rms"
    """The norm before the head: RMSNorm as published, or LayerNorm, which llama has nowhere."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the activations. bfloat16 is slower on most CPUs."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and optimizer state. float32 with activations in bfloat16 is mixed
    precision; bfloat16 halves the memory, as the paper's GPT-Huge and LLaMA-7B have it."""
    attention: Literal["auto", "plain", "cudnn", "splash"] = "auto"
    """plain holds all scores of a row, context x context numbers for each head; the others do not.
    auto: cudnn on NVIDIA GPUs and splash on TPUs where they can run, otherwise plain."""
    remat: Literal["none", "full"] = "none"
    """full: recompute the activations of each block in the backward pass, for less memory; on a CPU
    only together with scan."""
    scan: bool = False
    """Stack the blocks' parameters and compile one block for all: deep models compile faster."""

    @pydantic.model_validator(mode="after")
    def fitting(self) -> "ModelConfig":
        """Refuses settings that do not fit each other."""
        width, heads = self.d_model, self.n_head
        if width % heads:
            raise ValueError(
                f"--model.d-model {width} cannot be cut into {heads} heads: choose a multiple of"
                " --model.n-head"
            )
        if self.family == "llama" and self.final_norm != "rms":
            raise ValueError(
                f"--model.final-norm {self.final_norm}: all norms of llama are RMSNorm; give rms,"
                " or --model.family gpt"
            )
        if self.family == "llama" and head_size(self) % 2:
            raise ValueError(
                f"--model.d-model {width} in {heads} heads gives {head_size(self)} numbers a head,"
                " and llama rotates them in pairs: choose an even multiple of --model.n-head"
            )
        return self


def hidden_width(config: ModelConfig) -> int:
    """The width inside an MLP."""
    if config.d_ff is not None:
        return config.d_ff
    return 4 * config.d_model if config.family == "gpt" else 8 * config.d_model // 3


def head_size(config: ModelConfig) -> int:
    return config.d_model // config.n_head


def training_flops_per_token(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions of forward and backward pass, for one token.

    6 for each element of a matrix that multiplies, the output head included: 2 forward, 4 backward.
    Attention adds 6 T D in each layer, T tokens in a row, D the width: two products of 2 T D each
    forward and twice that backward, and half of it, as a token attends to earlier ones only. Norms,
    biases, embedding tables, the optimizer, and what remat computes again count nothing. That is
    the numerator of MFU in the PaLM paper (Chowdhery et al., 2022, appendix B), but for the causal
    half, which MaxText takes too.
    """
    width, of_mlp = config.d_model, 2 if config.family == "gpt" else 3
    matrices = config.n_layer * (4 * width**2 + of_mlp * width * hidden_width(config))
    attention = config.n_layer * config.context * width
    return 6.0 * (matrices + width * tokens + attention)
