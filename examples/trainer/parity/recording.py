"""Reads a file that records trainings: parameters, logits, and the loss of each step."""

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
    arrays = arrays_of(path)
    for name, x in arrays.items():
        if x.dtype.kind not in "iuf":
            raise UserError(f"{path}: {name} has no numbers but {x.dtype}: {FORM}.")
        if not np.isfinite(x).all():
            raise UserError(f"{path}: {name} has numbers that are not finite: {FORM}.")
    inputs, targets = (taken(path, arrays, name) for name in ("inputs", "targets"))
    for name, x in (("inputs", inputs), ("targets", targets)):
        if x.ndim != 4 or x.dtype.kind == "f" or not x.size:
            raise UserError(
                f"{path}: {name} is {x.dtype} of shape {x.shape}, and has to be whole numbers of "
                f"shape (steps, micro-batches, rows, tokens): {FORM}."
            )
    check_shape(path, "targets", targets, inputs.shape)
    families = {
        family: recorded(path, arrays, family, inputs.shape)
        for family in get_args(Family)
        if any(name.startswith(f"{family}/") for name in arrays)
    }
    if not families:
        raise UserError(f"{path} has no array whose name begins with gpt/ or llama/: {FORM}.")
    return Recording(inputs, targets, families)


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise UserError(f"{path} is not an .npz file: {FORM}.")
    try:
        with np.load(path) as arrays:
            return {name: np.asarray(arrays[name]) for name in arrays.files}
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as an .npz file, {error}: {FORM}.") from None


def recorded(
    path: Path, arrays: dict[str, np.ndarray], family: Family, batches: tuple[int, ...]
) -> Recorded:
    steps, _, *rows = batches
    logits = taken(path, arrays, f"{family}/logits")
    check_shape(path, f"{family}/logits", logits, (*rows, *logits.shape[-1:]))
    losses = below(arrays, f"{family}/losses/")
    if not losses:
        raise UserError(f"{path} has no array {family}/losses/NORM: {FORM}.")
    if unknown := losses.keys() - get_args(Norm):
        known = ", ".join(get_args(Norm))
        raise UserError(f"{path}: {family}/losses/{min(unknown)} is of none of the norms {known}.")
    for norm, x in losses.items():
        check_shape(path, f"{family}/losses/{norm}", x, (steps,))
    in_order: dict[Norm, np.ndarray] = {
        norm: losses[norm] for norm in get_args(Norm) if norm in losses
    }
    return Recorded(below(arrays, f"{family}/init/"), logits, in_order)


def below(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def taken(path: Path, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise UserError(f"{path} has no array {name}: {FORM}.")
    return arrays[name]


def check_shape(path: Path, name: str, x: np.ndarray, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise UserError(f"{path}: {name} has the shape {x.shape} and not {shape}: {FORM}.")
