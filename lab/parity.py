"""Compares the trainer with a recorded training: `python -m lab.parity FILE.npz --heads N`.

The file holds trainings of a GPT, of a LLaMA, or of both, with Muon+ of some norms:

- `inputs`, `targets`, integers (steps, micro-batches, rows, tokens): what is read and predicted;
- `FAMILY/init/NAME`: parameters before the first step by their published names, as (out, in);
- `FAMILY/logits` (rows, tokens, words): of `inputs[0, 0]` before the first step;
- `FAMILY/losses/NORM` (steps,): the loss of each step before its update, mean of micro-batches.

The trainer repeats them with its own model, loss, micro-batches, clipping, schedule and optimizer.
What the file lacks is a flag, with the default of the paper's code.
"""

import dataclasses
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from pydantic import Field

from examples.trainer.models import sharding
from examples.trainer.runs.launch import keep_compiled_programs
from examples.trainer.settings import validation
from examples.trainer.settings.run import (
    Family,
    ModelConfig,
    Norm,
    OptimizerConfig,
    RunConfig,
    hidden_width,
)
from examples.trainer.settings.validation import Count, Positive, Share
from examples.trainer.system.errors import UserError, run_command
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_forward, make_functions
from examples.weights import from_state_dict, sizes_of

FORM = "give an .npz file of the form that `python -m pydoc lab.parity` describes"


PUBLISHED = OptimizerConfig(
    learning_rate=0.01,
    adam_learning_rate=0.01,
    match_frobenius=False,
    shape_scale="spectral",
    norm_eps=1e-7,
    compute_dtype="float32",
    weight_decay=0.1,
    adam_weight_decay=0.1,
    adam_b1=0.95,
    adam_b2=0.95,
    adam_nesterov=False,
    adam_eps_before_correction=True,
    warmup_start=0.0,
)
"""The optimizer of the paper's code; norm and schedule are those of a training."""


@dataclasses.dataclass(frozen=True)
class Parity:
    """Repeats the trainings of a file with this trainer, and compares logits and losses.

    The exit status is 1 if something differs by more than the tolerance.
    """

    file: tyro.conf.Positional[Path]
    """The .npz file with the trainings."""
    heads: Count
    """Attention heads of the models, which their parameters do not show."""
    tolerance: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=2)] = (1e-4, 1e-3)
    """The largest difference of a logit, and the largest relative difference of a step's loss. One
    number stands for both."""
    gpt_schedule: Literal["constant_linear", "warmup_cosine"] = "constant_linear"
    """How the rates of a GPT move."""
    gpt_floor: Share = 0.1
    """Share of the peak rates at which their fall ends."""
    llama_schedule: Literal["constant_linear", "warmup_cosine"] = "warmup_cosine"
    """How the rates of a LLaMA move."""
    llama_floor: Share = 0.0
    """Share of the peak rates at which their fall ends."""
    optimizer: OptimizerConfig = PUBLISHED


class Model(NamedTuple):
    """A model of a file, and what was recorded of it."""

    family: Family
    config: ModelConfig
    words: int
    params: Any
    """Before the first step, as NumPy arrays."""
    logits: np.ndarray
    losses: dict[Norm, np.ndarray]


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file; raises `UserError` if they are not numbers."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise UserError(f"{path} is not an .npz file: {FORM}.")
    try:
        with np.load(path) as arrays:
            found = {name: np.asarray(arrays[name]) for name in arrays.files}
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as an .npz file, {error}: {FORM}.") from None
    for name, x in found.items():
        if x.dtype.kind not in "iuf" or not np.isfinite(x).all():
            raise UserError(f"{path}: {name} has other values than finite numbers: {FORM}.")
    return found


def models(arrays: dict[str, np.ndarray], heads: int) -> Iterator[Model]:
    """The models of the arrays; raises `ValueError` or `UserError` for what does not fit."""
    tokens = np.stack([arrays["inputs"], arrays["targets"]])
    if tokens.ndim != 5 or tokens.dtype.kind == "f" or not tokens.size:
        raise ValueError(f"inputs and targets are {tokens.dtype} {tokens.shape[1:]}")
    steps, _, rows, length = tokens.shape[1:]
    for family in get_args(Family):
        of_family = {
            n.removeprefix(f"{family}/"): x for n, x in arrays.items() if n.startswith(f"{family}/")
        }
        if not of_family:
            continue
        init = {n.removeprefix("init/"): x for n, x in of_family.items() if n.startswith("init/")}
        config, words = sizes_of(init, family, heads, length)
        validation.check(config, "--model.")
        if not 0 <= tokens.min() <= tokens.max() < words or length > config.context:
            raise ValueError(f"{family} has {words} words and {config.context} positions: too few")
        logits = shaped(of_family, "logits", (rows, length, words))
        losses: dict[Norm, np.ndarray] = {
            norm: shaped(of_family, f"losses/{norm}", (steps,))
            for norm in get_args(Norm)
            if f"losses/{norm}" in of_family
        }
        if len(losses) != sum(name.startswith("losses/") for name in of_family) or not losses:
            raise ValueError(
                f"the norms of {family}/losses/NORM are of {', '.join(get_args(Norm))}"
            )
        params = from_state_dict(init, config, words)
        yield Model(family, config, words, params, logits, losses)


def shaped(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of that shape; raises `ValueError` for another one."""
    if arrays[name].shape != shape:
        raise ValueError(f"{name} has the shape {arrays[name].shape} and not {shape}")
    return arrays[name]


COLUMNS = "{:<7} {:<17} {:>18} {:>8} {:>9}"


class Difference(NamedTuple):
    """The largest difference of something; infinite where a number is not finite."""

    family: Family
    what: str
    size: float
    step: str
    """Counted from 0; empty before the first step."""
    allowed: float

    def line(self) -> str:
        """A line of the table, with a mark at what is too large."""
        size = f"{self.size:.1e}{' !' if self.size > self.allowed else ''}"
        return COLUMNS.format(self.family, self.what, size, self.step, f"{self.allowed:.0e}")


def compare(parity: Parity, arrays: dict[str, np.ndarray], model: Model) -> Iterator[Difference]:
    """The differences of a model, as they become known."""
    rule = dataclasses.replace(
        parity.optimizer,
        schedule=getattr(parity, f"{model.family}_schedule"),
        schedule_floor=getattr(parity, f"{model.family}_floor"),
    )
    with jax.default_matmul_precision("highest"):  # accelerators round operands otherwise
        forward, _ = make_forward(model.config, model.words, one_device())
        tokens = arrays["inputs"][0, 0].astype(np.int32)
        logits = jax.jit(forward)(model.params, tokens)
        error = np.nan_to_num(np.abs(np.asarray(logits) - model.logits).max(), nan=np.inf)
        yield Difference(model.family, "logits", float(error), "", parity.tolerance[0])
        for norm, losses in model.losses.items():
            own = repeated(arrays, model, dataclasses.replace(rule, norm=norm))
            with np.errstate(divide="ignore"):  # a recorded loss of zero
                errors = np.nan_to_num(np.abs(own - losses) / np.abs(losses), nan=np.inf)
            step = int(errors.argmax())
            worst, allowed = float(errors[step]), parity.tolerance[-1]
            yield Difference(model.family, f"losses, {norm}", worst, str(step), allowed)


def repeated(arrays: dict[str, np.ndarray], model: Model, optimizer: OptimizerConfig) -> np.ndarray:
    """The loss of each step of a training; NaN for a step that was skipped."""
    steps, pieces, _, length = arrays["inputs"].shape
    rule = dataclasses.replace(optimizer, learning_rate=0.0, adam_learning_rate=0.0)
    config = RunConfig(model=model.config, optimizer=rule, steps=steps, accumulate=pieces)
    functions = make_functions(config, model.words, one_device())
    params = jax.tree.map(jnp.array, model.params)  # a copy, since a step reuses its memory
    state = functions.init(0, jax.device_put(params, sharding.of_params(params, one_device())))
    found = []
    for batch in zip(arrays["inputs"], arrays["targets"], strict=True):
        rows = (x.reshape(-1, length).astype(np.int32) for x in batch)
        state, measured = functions.train_step(state, optimizers.rates(optimizer), *rows)
        found.append(measured.loss)
    return np.array(jax.device_get(found))


def one_device() -> jax.sharding.Mesh:
    """The mesh of the first device."""
    return sharding.make_mesh("", jax.devices()[:1])


def run(parity: Parity) -> int:
    """Prints the differences; 1 if one of them is not allowed."""
    validation.check(parity)
    optimizers.check(parity.optimizer)
    keep_compiled_programs()
    arrays = read(parity.file)
    try:
        found = list(models(arrays, parity.heads))
    except KeyError as error:
        raise UserError(f"{parity.file} has no array {error.args[0]}: {FORM}.") from None
    except (ValueError, UserError) as error:
        raise UserError(f"{parity.file}: {str(error).rstrip('.')}: {FORM}.") from None
    for family, config, words, *_ in found:
        print(
            f"{family}: {config.n_layer} layers, {config.n_head} heads, width {config.d_model}, "
            f"{hidden_width(config)} inside an MLP, {words} words"
        )
    print("\n" + COLUMNS.format("model", "compared", "largest difference", "at step", "allowed"))
    large = 0
    for model in found:
        for difference in compare(parity, arrays, model):
            print(difference.line(), flush=True)
            large += difference.size > difference.allowed
    print(f"\n{large} larger than allowed (marked with !)." if large else "")
    return int(large > 0 or not found)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    command = "python -m lab.parity"
    return run_command(lambda: run(tyro.cli(Parity, args=argv, prog=command)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
