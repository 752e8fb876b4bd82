"""A run's model for transformers: `python -m examples.export runs/NAME FOLDER`.

The folder has weights, configuration and tokenizer. The networks are GPT-2's (`GPT2LMHeadModel`)
and LLaMA's (`LlamaForCausalLM`). Names are those of their configurations in transformers 5.23.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tokenizers import Tokenizer

from examples.trainer.data.tokenizer import begin_with, end_of
from examples.trainer.models.blocks import NORM_EPSILON
from examples.trainer.models.llama import ROPE_BASE
from examples.trainer.models.state_dict import sizes_of, to_state_dict
from examples.trainer.runs import trained
from examples.trainer.runs.trained import CheckpointRef
from examples.trainer.settings.run import ModelConfig, hidden_width
from examples.trainer.system.errors import UserError, command, load_package
from examples.trainer.system.files import read_json, shown

DType = Literal["float32", "bfloat16"]
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
"""The matrices that GPT-2 of transformers has as (in, out)."""


def export(
    run: tyro.conf.Positional[Path],
    folder: tyro.conf.Positional[Path],
    step: int | None = None,
    dtype: DType | None = None,
    mesh: str = "",
) -> str:
    """Writes a trained model as a folder that transformers reads.

    Args:
      run: folder of a run.
      folder: a new folder for weights, configuration and tokenizer.
      step: step of the checkpoint; the last one by default.
      dtype: type of the weights; None: that of the run.
      mesh: how devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp.
    """
    model = trained.load(CheckpointRef(run, step, mesh))
    network = model.config.model
    kind = dtype or network.param_dtype
    write_folder(folder, model.params, network, model.tokenizer, kind)
    return f"step {model.step} of {run} in {kind}, written to {folder}"


def write_folder(
    folder: Path, params: optax.Params, config: ModelConfig, tokenizer: Tokenizer, dtype: DType
) -> None:
    """Writes a new folder.

    Raises `UserError` for a network that transformers has no name for, `FileExistsError` for a
    folder that exists.
    """
    word, end = end_of(tokenizer)
    values = configuration(config, tokenizer.get_vocab_size(), dtype, end)
    numpy = load_package("safetensors.numpy", "an export", "hf")
    folder.mkdir(parents=True)
    arrays = weights(params, config, dtype)
    numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", values)
    begins = Tokenizer.from_str(tokenizer.to_str())
    begin_with(word, begins)  # each text begins as in the training
    begins.save(str(folder / "tokenizer.json"))
    ends: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), word)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
    write_json(folder / "tokenizer_config.json", {**kind, **ends})


def weights(params: optax.Params, config: ModelConfig, dtype: DType) -> dict[str, np.ndarray]:
    """The arrays by the names of transformers, each in memory of its own."""
    found = {}
    for name, x in to_state_dict(params, config).items():
        transposed = config.family == "gpt" and TRANSPOSED.search(name)
        array = x.astype(jnp.dtype(dtype), copy=False)
        found[name] = np.ascontiguousarray(array.T if transposed else array)
    return found


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a folder by the names of the trainer, as (out, in); also those of the hub."""
    numpy = load_package("safetensors.numpy", "--init-from", "hf")
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= numpy.load_file(path)
    if not found:
        raise UserError(f"{folder} is neither a run nor a folder with model.safetensors.")
    if read_values(folder)["model_type"] == "gpt2":
        full = re.compile(r"^(?!transformer\.|lm_head)")  # the hub's own lack the first part
        found = {full.sub("transformer.", name): x for name, x in found.items()}
        found = {name: x.T if TRANSPOSED.search(name) else x for name, x in found.items()}
    return {name: x for name, x in found.items() if not MASKS.search(name)}


def read_values(folder: Path) -> dict[str, Any]:
    """The configuration of a folder."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} is neither a run nor a folder of transformers: no config.json.")
    return read_json(path)


def read_network(folder: Path) -> ModelConfig:
    """The network of a folder; raises `UserError` for one that is none of the trainer's."""
    values = read_values(folder)
    is_gpt = values.get("model_type") == "gpt2"
    if not is_gpt and values.get("model_type") != "llama":
        raise UserError(f"{folder} has a {values.get('model_type')}, neither a gpt2 nor a llama.")
    heads, length = NAMES["gpt" if is_gpt else "llama"]
    weights = read_weights(folder)
    config, words = sizes_of(
        weights, "gpt" if is_gpt else "llama", int(values[heads]), int(values[length])
    )
    config = dataclasses.replace(config, final_norm="layer" if is_gpt else "rms")
    expected = configuration(config, words, "float32", 0)
    for name in sorted(expected.keys() & values.keys() - FREE):
        if values[name] not in (expected[name], None):
            raise UserError(
                f"{folder}/config.json: {name} is {shown(values[name])}, and the trainer's network"
                f" has {shown(expected[name])}."
            )
    return config


NAMES = {
    "gpt": ("n_head", "n_positions"),
    "llama": ("num_attention_heads", "max_position_embeddings"),
}
FREE = {"architectures", "bos_token_id", "eos_token_id", "torch_dtype", "rope_parameters"} | {
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
}
"""Values of `config.json` that change no logit."""
MASKS = re.compile(r"\.attn\.(masked_)?bias$")
"""Buffers that older versions of transformers kept beside the weights."""


def check_expressible(config: ModelConfig) -> None:
    """Refuses a network that is neither GPT-2 nor LLaMA, by the setting that makes it so."""
    if config.family == "gpt" and config.final_norm != "layer":
        raise UserError(
            f"--model.final-norm {config.final_norm}: GPT-2 of transformers has a LayerNorm before"
            " its head, and this run has an RMSNorm, as the paper's code. Train with"
            " --model.final-norm layer to export."
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
            "layer_norm_epsilon": NORM_EPSILON,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    return both | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "hidden_size": config.d_model,
        "intermediate_size": hidden_width(config),
        "max_position_embeddings": config.context,
        "rms_norm_eps": NORM_EPSILON,
        "hidden_act": "silu",
        # transformers 5 reads the first, 4 the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "rope_theta": ROPE_BASE,
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes values so that a person can read them."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


main = command(export, "examples.export")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
