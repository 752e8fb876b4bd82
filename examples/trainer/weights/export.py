"""Writes a model in Hugging Face's form: safetensors, configuration and tokenizer in a folder."""

import contextlib
import json
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from examples.trainer.data.tokenizer import begin_with, end_of
from examples.trainer.models.sampling import DEFAULT
from examples.trainer.models.state_dict import expected_arrays, writers
from examples.trainer.settings import hugging_face
from examples.trainer.settings.hugging_face import TOKENIZER
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.system.errors import UserError
from examples.trainer.weights.load import INDEX, ONE_FILE, is_transposed

DType = Literal["float32", "bfloat16"]


def write_folder(
    folder: Path,
    params: optax.Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    dtype: DType,
    shard_bytes: int,
    overwrite: bool,
) -> list[str]:
    """Writes all files of a folder and returns their names; a failure leaves what was there.

    At any time at most one shard, of `shard_bytes` or one larger array, is in memory beside
    `params`. Raises `UserError` for a network that Hugging Face has no name for, and for a folder
    that is not empty, unless `overwrite`: then files of the same names and older weights go.
    """
    word, end = end_of(tokenizer)
    words = tokenizer.get_vocab_size()
    values = hugging_face.to_hugging_face(config, words, dtype, end)
    refuse_taken(folder, overwrite)
    with files.explained(folder, "write"), replaced(folder) as partial:
        write_weights(partial, params, config, words, dtype, shard_bytes)
        write_json(partial / hugging_face.CONFIG, values)
        write_tokenizer(partial, tokenizer, config.context, word)
        sampled = {"do_sample": True, "temperature": DEFAULT.temperature, "top_k": DEFAULT.top_k}
        ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        write_json(partial / "generation_config.json", {**ends, **sampled})
        return sorted(path.name for path in partial.iterdir())


def refuse_taken(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the name of a folder.")
    if any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl")):
        raise UserError(f"{folder} is the folder of a run: give another one to export to.")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder} exists and is not empty: give another folder, or --overwrite to replace a"
            " model that is there."
        )


@contextlib.contextmanager
def replaced(folder: Path) -> Generator[Path]:
    """A folder to write in, whose files take the place of those in `folder` at the end."""
    above = folder.absolute().parent
    above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".partial", ".", above, ignore_cleanup_errors=True) as partial:
        yield Path(partial)
        folder.mkdir(exist_ok=True)
        for older in [*folder.glob("model*.safetensors"), folder / INDEX]:
            older.unlink(missing_ok=True)
        for path in Path(partial).iterdir():
            path.replace(folder / path.name)


def write_weights(
    folder: Path,
    params: optax.Params,
    config: ModelConfig,
    vocab_size: int,
    dtype: DType,
    shard_bytes: int,
) -> None:
    safetensors = optional_packages.load("safetensors", "an export", "hf")
    numpy = optional_packages.load("safetensors.numpy", "an export", "hf")
    make = writers(params, config)
    width = jnp.dtype(dtype).itemsize
    sizes = {x: s.size * width for x, s in expected_arrays(config, vocab_size).items()}
    shards = plan(sizes, shard_bytes)
    places = {}
    for i, names in enumerate(shards, 1):
        file = ONE_FILE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        places |= dict.fromkeys(names, file)
        arrays = {x: array_of(make[x](), is_transposed(x, config.family), dtype) for x in names}
        try:
            numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # of the disk too
            raise UserError(f"cannot write {file} ({error}). To do: make room.") from None
        del arrays  # before the next shard is made
    if len(shards) > 1:
        write_json(
            folder / INDEX,
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places},
        )


def plan(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names in shards of at most `limit` bytes; a larger array is a shard of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def array_of(x: jax.Array, transposed: bool, dtype: DType) -> np.ndarray:
    """An array as Hugging Face has it, in memory of its own."""
    array = np.asarray(x).astype(jnp.dtype(dtype), copy=False)
    return np.ascontiguousarray(array.T if transposed else array)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int, word: str) -> None:
    """The tokenizer, which begins each text with the token that began it in the training."""
    begins = Tokenizer.from_str(tokenizer.to_str())
    begin_with(word, begins)
    (folder / TOKENIZER).write_text(begins.to_str(), encoding="utf-8")
    ends: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), word)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **ends}
    write_json(folder / "tokenizer_config.json", values)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
