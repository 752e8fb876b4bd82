"""Networks of the two families at toy size with random weights, and folders as exported."""

import dataclasses

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.export import write_folder
from examples.trainer.models import sharding
from examples.trainer.settings.run import ModelConfig
from examples.trainer.training.step import make_forward
from examples.weights import abstract

V, T = 257, 12
TOKENS = np.random.default_rng(0).integers(0, V, (3, T), dtype=np.int32)
GPT = ModelConfig(n_layer=2, n_head=2, d_model=16, d_ff=24, context=T, final_norm="layer")
LLAMA = dataclasses.replace(GPT, family="llama", final_norm="rms", n_head=4, tied=False)


def tokenizer():
    """A byte-level tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<|endoftext|>", *alphabet])}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def params_of(config, dtype=None):
    """Parameters that are all random, also those of norms and biases."""
    shapes = abstract(config, V)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(
        lambda x: (0.3 * jax.random.normal(next(keys), x.shape)).astype(dtype or x.dtype), shapes
    )


def logits(config, params):
    forward, _ = make_forward(config, V, one_device())
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(forward)(params, TOKENS))


def one_device():
    return sharding.make_mesh("", jax.devices()[:1])


def write(folder, config, params, dtype="float32"):
    return write_folder(folder, params, config, tokenizer(), dtype)
