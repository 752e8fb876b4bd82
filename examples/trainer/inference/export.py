"""A trained model for transformers: a folder with its weights, its configuration and its tokenizer.

The networks are GPT-2's (`GPT2LMHeadModel`) and LLaMA's (`LlamaForCausalLM`). Names are those of
their configurations in transformers 5.23.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from examples.trainer.data.tokenizer import begin_with, end_of
from examples.trainer.models.sampling import DEFAULT
from examples.trainer.models.state_dict import to_state_dict
from examples.trainer.settings.model import ModelConfig, hidden_width, is_gated, kv_heads
from examples.trainer.system import files
from examples.trainer.system.errors import UserError, load_package

DType = Literal["float32", "bfloat16"]
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
"""The matrices that GPT-2 of transformers has as (in, out)."""


def write_folder(
    folder: Path, params: optax.Params, config: ModelConfig, tokenizer: Tokenizer, dtype: DType
) -> list[str]:
    """Writes a new folder and returns the names of its files; a failure leaves nothing.

    Raises `UserError` for a network that transformers has no name for, or a folder that exists.
    """
    word, end = end_of(tokenizer)
    values = configuration(config, tokenizer.get_vocab_size(), dtype, end)
    numpy = load_package("safetensors.numpy", "an export", "hf")
    if folder.exists():
        raise UserError(f"{folder} exists: give the name of a new folder.")
    above = folder.absolute().parent
    with files.explained(folder, "write"):
        above.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".partial", ".", above) as partial:
            made = Path(partial) / "model"
            made.mkdir()
            arrays = weights(params, config, dtype)
            numpy.save_file(arrays, made / "model.safetensors", metadata={"format": "pt"})
            write_json(made / "config.json", values)
            write_json(made / "generation_config.json", generation(end))
            write_tokenizer(made, tokenizer, config.context, word)
            made.rename(folder)
    return sorted(path.name for path in folder.iterdir())


def weights(params: optax.Params, config: ModelConfig, dtype: DType) -> dict[str, np.ndarray]:
    """The arrays by the names of transformers, each in memory of its own."""
    found = {}
    for name, x in to_state_dict(params, config).items():
        transposed = config.family == "gpt" and TRANSPOSED.search(name)
        array = x.astype(jnp.dtype(dtype), copy=False)
        found[name] = np.ascontiguousarray(array.T if transposed else array)
    return found


def check_expressible(config: ModelConfig) -> None:
    """Refuses a network that is neither GPT-2 nor LLaMA, by the setting that makes it so."""
    if config.family == "gpt" and config.final_norm != "layer":
        raise UserError(
            f"--model.final-norm {config.final_norm}: GPT-2 of transformers has a LayerNorm before"
            " its head, and this run has an RMSNorm, as the paper's code. Train with"
            " --model.final-norm layer to export."
        )
    if is_gated(config) != (config.family == "llama"):
        raise UserError(
            f"--model.mlp {config.mlp}: {config.family} of transformers has no such MLP. Train"
            " without --model.mlp to export."
        )


def configuration(config: ModelConfig, words: int, dtype: str, end: int) -> dict[str, Any]:
    """What `config.json` holds, for a tokenizer of so many words that puts `end` before a text."""
    check_expressible(config)
    both = {
        "vocab_size": words,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }
    if config.family == "gpt":
        return both | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.d_model,
            "n_inner": hidden_width(config),
            "n_positions": config.context,
            "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    return both | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": kv_heads(config),
        "hidden_size": config.d_model,
        "intermediate_size": hidden_width(config),
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        # transformers 5 reads the first, 4 the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "rope_theta": config.rope_base,
    }


def generation(end: int) -> dict[str, Any]:
    """What `generation_config.json` holds: texts are drawn as `examples.generate` draws them."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    return {**ends, "do_sample": True, "temperature": DEFAULT.temperature, "top_k": DEFAULT.top_k}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int, word: str) -> None:
    """The tokenizer, which begins each text with the token that began it in the training."""
    begins = Tokenizer.from_str(tokenizer.to_str())
    begin_with(word, begins)
    begins.save(str(folder / "tokenizer.json"))
    ends: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), word)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **ends}
    write_json(folder / "tokenizer_config.json", values)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
