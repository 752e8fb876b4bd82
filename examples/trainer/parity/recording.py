"""A file that records trainings: parameters, logits, and the loss of each step."""

import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from examples.trainer.models.state_dict import Family
from examples.trainer.system.errors import UserError
from optax_muonplus.matrices import Norm

FORM = "give an .npz file of the form that examples/README.md describes"


class Recorded(NamedTuple):
    """The trainings of one model, which differ in the norm of Muon+."""

    init: dict[str, np.ndarray]
    """Parameters before the first step, by their published names, as (out, in)."""
    logits: np.ndarray
    """Of the first micro-batch before the first step: (row, token, word)."""
    losses: dict[Norm, np.ndarray]
    """The loss of each step before its update, mean of the micro-batches."""


class Recording(NamedTuple):
    """What a file holds."""

    inputs: np.ndarray
    """Token ids (step, micro-batch, row, token)."""
    targets: np.ndarray
    """The same for the tokens to predict."""
    families: dict[Family, Recorded]


def read(path: Path) -> Recording:
    """The recording in a file; raises `UserError` if it is not one."""
    with path.open("rb") as file:
        is_zip = zipfile.is_zipfile(file)
    try:
        if not is_zip:
            raise ValueError("it is not an .npz file")
        return parsed(arrays_of(path))
    except KeyError as error:
        raise UserError(f"{path} has no array {error.args[0]}: {FORM}.") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}: {FORM}.") from None


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            return {name: np.asarray(arrays[name]) for name in arrays.files}
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"it cannot be read as an .npz file, {error}") from None


def parsed(arrays: dict[str, np.ndarray]) -> Recording:
    """The recording of some arrays; raises `ValueError`, and `KeyError` for one that is missing."""
    for name, x in arrays.items():
        if x.dtype.kind not in "iuf":
            raise ValueError(f"{name} has no numbers but {x.dtype}")
        if not np.isfinite(x).all():
            raise ValueError(f"{name} has numbers that are not finite")
    for name in ("inputs", "targets"):
        x = arrays[name]
        if x.ndim != 4 or x.dtype.kind == "f" or not x.size:
            raise ValueError(
                f"{name} is {x.dtype} of shape {x.shape}, and has to be whole numbers of shape"
                " (steps, micro-batches, rows, tokens)"
            )
    inputs = arrays["inputs"]
    found: dict[Family, Recorded] = {}
    for family in get_args(Family):
        if any(name.startswith(f"{family}/") for name in arrays):
            found[family] = recorded(arrays, family, inputs.shape)
    if not found:
        raise ValueError("it has no array whose name begins with gpt/ or llama/")
    return Recording(inputs, shaped(arrays, "targets", inputs.shape), found)


def recorded(arrays: dict[str, np.ndarray], family: Family, batches: tuple[int, ...]) -> Recorded:
    logits = arrays[f"{family}/logits"]
    shaped(arrays, f"{family}/logits", (*batches[2:], *logits.shape[-1:]))
    begin = f"{family}/losses/"
    given = {name.removeprefix(begin) for name in arrays if name.startswith(begin)}
    if not given:
        raise KeyError(f"{begin}NORM")
    if unknown := given - {*get_args(Norm)}:
        known = ", ".join(get_args(Norm))
        raise ValueError(f"{begin}{min(unknown)} is of none of the norms {known}")
    losses: dict[Norm, np.ndarray] = {
        norm: shaped(arrays, f"{begin}{norm}", batches[:1])
        for norm in get_args(Norm)
        if norm in given
    }
    of_init = f"{family}/init/"
    init = {name.removeprefix(of_init): x for name, x in arrays.items() if name.startswith(of_init)}
    return Recorded(init, logits, losses)


def shaped(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if arrays[name].shape != shape:
        raise ValueError(f"{name} has the shape {arrays[name].shape} and not {shape}")
    return arrays[name]
