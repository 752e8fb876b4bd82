"""The operations that training a model needs for a token, whatever program does it."""

from examples.trainer.settings.model import ModelConfig, hidden_width, is_gated, kv_heads


def training_flops_per_token(config: ModelConfig, vocabulary: int) -> float:
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
    return 6.0 * (matrices + width * vocabulary + attention)
