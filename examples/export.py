"""A run's model for transformers: `python -m examples.export runs/NAME FOLDER`.

The folder has weights, configuration and tokenizer.
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tokenizers import Tokenizer

from examples.trainer.data.tokenizer import begin_with, end_of
from examples.trainer.runs import trained
from examples.trainer.runs.trained import CheckpointRef
from examples.trainer.settings.run import ModelConfig
from examples.trainer.system.errors import command, load_package
from examples.weights import TRANSPOSED, configuration, to_state_dict

DType = Literal["float32", "bfloat16"]


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


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes values so that a person can read them."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


main = command(export, "examples.export")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
