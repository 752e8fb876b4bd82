"""Reads the parameters of a model from a folder in Hugging Face's form onto a mesh.

Each array of its safetensors files is read when it is needed. Names are the same as in the state
dicts of the trainer, but for GPT-2's linear layers, which are (in, out), for the prefix, which
files of a network without a head lack, and for buffers that are no parameters, in files of older
versions.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from examples.trainer.models import state_dict
from examples.trainer.models.state_dict import HEAD, Family
from examples.trainer.settings.hugging_face import check_same_network, find_weights
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system import optional_packages
from examples.trainer.system.errors import UserError

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
FLOATS = ("F32", "BF16", "F16", "F64")
AGAIN = "download or export it again"


class Tensor:
    """An array in a file; NumPy reads it by `np.asarray`."""

    def __init__(
        self, path: Path, file: Any, name: str, transposed: bool = False, rows: int | None = None
    ):
        self.file, self.name, self.transposed, self.rows = file, name, transposed, rows
        entry = file.get_slice(name)
        if entry.get_dtype() not in FLOATS:
            raise UserError(
                f"{path}: {name} has the type {entry.get_dtype()}, and this trainer reads"
                f" {', '.join(FLOATS)}: give weights that are not quantized."
            )
        shape = tuple(entry.get_shape())
        self.shape = shape[::-1] if transposed else shape
        if rows is not None and shape:
            self.shape = (min(rows, shape[0]), *shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.file.get_tensor(self.name)
        return np.asarray(array.T if self.transposed else array[: self.rows], dtype)


def open_folder(folder: Path) -> dict[str, tuple[Path, Any]]:
    """The names of all arrays of a folder, each with the path and the handle of its file."""
    found = {}
    for path, names in files_of(folder).items():
        file = open_file(path)
        inside = set(file.keys())
        if missing := sorted(set(names or ()) - inside):
            raise UserError(
                f"{path} has no {missing[0]}, which {INDEX} says it has: {AGAIN}, both files."
            )
        found |= {name: (path, file) for name in names or inside}
    return found


def files_of(folder: Path) -> Mapping[Path, list[str] | None]:
    """The files of a folder with the names that each should have; None for all that it has."""
    index, one = folder / INDEX, folder / ONE_FILE
    if not index.exists():
        if one.is_file():
            return {one: None}
        others = sorted(path.name for path in folder.glob("*.bin"))
        instead = f", but {others[0]}: save it with safe_serialization=True" if others else ""
        raise UserError(f"{folder} has neither {ONE_FILE} nor {INDEX}{instead}.")
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        by_file: dict[Path, list[str]] = {}
        for name, file in places.items():
            by_file.setdefault(folder / Path(file).name, []).append(name)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} does not say where arrays are ({error!r}): {AGAIN}.") from None
    if gone := [path for path in by_file if not path.is_file()]:
        raise UserError(f"{gone[0]} is not there, which {INDEX} names: {AGAIN}.")
    return by_file


def open_file(path: Path) -> Any:
    """A handle of a safetensors file; raises `UserError` for one that is not whole."""
    safetensors = optional_packages.load("safetensors", str(path), "hf")
    try:
        return safetensors.safe_open(path, framework="np").__enter__()
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is no whole safetensors file ({error}): {AGAIN}.") from None


PREFIXES = {"gpt": "transformer.", "llama": "model."}
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
POSITIONS = "transformer.wpe.weight"


def is_transposed(name: str, family: Family) -> bool:
    """Whether Hugging Face has a matrix as (in, out)."""
    return family == "gpt" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None


def published(found: Mapping[str, tuple[Any, Any]], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of the paper's names: of each name, its file to read it from when needed.

    A GPT with a shorter context than that of the file has the first of its positions.
    """
    prefix = PREFIXES[config.family]
    tensors = {}
    for name, (path, file) in found.items():
        if BUFFERS.search(name):
            continue
        full = name if name == HEAD or name.startswith(prefix) else prefix + name
        rows = config.context if full == POSITIONS else None
        tensors[full] = Tensor(path, file, name, is_transposed(full, config.family), rows)
    return tensors


def check_weights(name: str, config: ModelConfig, vocab_size: int) -> None:
    """Refuses weights that do not fit the settings; reads the names and shapes only."""
    with_weights(name, config, lambda found: state_dict.check(found, config, vocab_size))


def load_weights(name: str, config: ModelConfig, vocab_size: int, like: Any) -> optax.Params:
    """The parameters, read array by array, with the shardings of the tree `like`."""

    def placed(path: Any, array: np.ndarray) -> jax.Array:
        leaf = like
        for key in path:
            leaf = leaf[key.key if hasattr(key, "key") else key.idx]
        return jax.make_array_from_callback(array.shape, leaf.sharding, lambda index: array[index])

    return with_weights(
        name, config, lambda found: state_dict.from_state_dict(found, config, vocab_size, placed)
    )


def with_weights(name: str, config: ModelConfig, work: Callable[[Any], Any]) -> Any:
    """`work` on the arrays of a folder, or of the hub; its errors name the folder."""
    folder = find_weights(name)
    check_same_network(name, folder, config)
    found = published(open_folder(folder), config)
    try:
        return work(found)
    except UserError as error:
        raise UserError(f"the weights in {folder}: {error}") from None
