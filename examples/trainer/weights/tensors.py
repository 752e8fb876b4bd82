"""The arrays of a folder of safetensors files, each of which is read when it is needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
