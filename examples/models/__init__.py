"""Models, one file each, readable on their own."""

from flax import nnx

from examples.models.config import ModelConfig
from examples.models.gpt import GPT
from examples.models.llama import LLaMA


def build(config: ModelConfig, vocab_size: int, rngs: nnx.Rngs) -> GPT | LLaMA:
    """The network that a configuration describes."""
    family = GPT if config.family == "gpt" else LLaMA
    return family(config, vocab_size, rngs)
