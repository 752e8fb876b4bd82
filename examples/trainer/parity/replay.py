"""Repeats recorded trainings with the trainer's own functions, and compares logits and losses."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh
from pydantic import Field

from examples.trainer.models.state_dict import Family, from_state_dict, sizes_of
from examples.trainer.parity.recording import Recording
from examples.trainer.settings.model import ModelConfig, head_size, hidden_width
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.settings.validation import Count, Positive, Share
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.program import make_program
from examples.trainer.training.step import make_forward, shardings_of
from optax_muonplus.matrices import Norm


@dataclasses.dataclass(frozen=True)
class PublishedOptimizer(OptimizerConfig):
    """The optimizer as the paper's code has it. File and family say what is not a flag here."""

    name: tyro.conf.Suppress[Literal["muonplus"]] = "muonplus"
    norm: tyro.conf.Suppress[Norm] = "none"
    schedule: tyro.conf.Suppress[Literal["constant_linear", "warmup_cosine"]] = "constant_linear"
    schedule_floor: tyro.conf.Suppress[Share] = 0.0
    record_every: tyro.conf.Suppress[int] = 0
    learning_rate: float = 0.01
    """Peak learning rate of the matrices."""
    adam_learning_rate: float = 0.01
    """Peak learning rate of the other parameters."""
    norm_eps: float = 1e-7
    """Added to a squared norm of muonplus."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the products of the polar step."""
    adam_weight_decay: float = 0.1
    """Decoupled decay of the other parameters, times their learning rate."""
    adam_b1: float = 0.95
    """AdamW's decay of the gradient mean."""
    adam_eps_before_correction: bool = True
    """Add AdamW's epsilon before the bias correction; without it after, as Optax."""
    warmup_start: float | None = 0.0
    """Share of the peak rates in the first step of a warmup; None: 1 by the steps of the warmup."""


@dataclasses.dataclass(frozen=True)
class Parity:
    """Repeats the trainings of a file with this trainer, and compares logits and losses.

    The exit status is 1 if something differs by more than the tolerance.
    """

    file: tyro.conf.Positional[Path]
    """The .npz file with the trainings."""
    heads: Count
    """Attention heads of the models, which their parameters do not say."""
    tolerance: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=2)] = (1e-4, 1e-3)
    """The largest difference of a logit, and the largest relative difference of a step's loss; one
    number is for both."""
    gpt_schedule: Literal["constant_linear", "warmup_cosine"] = "constant_linear"
    """How the rates of a GPT move."""
    gpt_floor: Share = 0.1
    """Share of the peak rates at which their fall ends."""
    llama_schedule: Literal["constant_linear", "warmup_cosine"] = "warmup_cosine"
    """How the rates of a LLaMA move."""
    llama_floor: Share = 0.0
    """Share of the peak rates at which their fall ends."""
    optimizer: PublishedOptimizer = PublishedOptimizer()


def optimizer_for(parity: Parity, family: Family, norm: Norm) -> OptimizerConfig:
    if family == "gpt":
        schedule, floor = parity.gpt_schedule, parity.gpt_floor
    else:
        schedule, floor = parity.llama_schedule, parity.llama_floor
    return dataclasses.replace(parity.optimizer, norm=norm, schedule=schedule, schedule_floor=floor)


class Model(NamedTuple):
    """A model of a recording."""

    config: ModelConfig
    vocab_size: int
    params: optax.Params
    """Before the first step, as NumPy arrays."""


def load(path: Path, recording: Recording, family: Family, n_head: int) -> Model:
    """The model of a family; raises `UserError` for arrays that cannot be of one model."""
    recorded, length = recording.families[family], recording.inputs.shape[-1]
    tokens = np.stack([recording.inputs, recording.targets])
    try:
        config, words = sizes_of(recorded.init, family, n_head, length)
        check_heads(config)
        params = from_state_dict(recorded.init, config, words)
        if not 0 <= tokens.min() <= tokens.max() < words:
            raise UserError(
                f"the tokens go from {tokens.min()} to {tokens.max()}, and the embedding has "
                f"{words} rows: give the parameters of a model of these tokens."
            )
        if length > config.context:
            raise UserError(
                f"rows have {length} tokens, and the model has {config.context} positions: give "
                "shorter rows, or more positions."
            )
        if recorded.logits.shape[-1] != words:
            raise UserError(
                f"there are logits of {recorded.logits.shape[-1]} words, and the embedding has "
                f"{words} rows: give the logits of this model."
            )
    except UserError as error:
        raise UserError(f"{path}, {family}: {error}") from None
    return Model(config, words, params)


def check_heads(config: ModelConfig) -> None:
    heads, width = config.n_head, config.d_model
    what = ""
    if width % heads:
        what = f"does not divide the width {width}"
    elif config.family == "llama" and head_size(config) % 2:
        what = f"makes heads of {head_size(config)} numbers, and llama rotates them in pairs"
    if what:
        raise UserError(f"--heads {heads} {what}: give the number of heads that was trained with.")


def first_logits(model: Model, tokens: np.ndarray) -> np.ndarray:
    """The logits of tokens (row, token) before the first step."""
    forward = make_forward(model.config, model.vocab_size, one_device())
    found, _ = jax.jit(forward)(model.params, tokens.astype(np.int32), None, 0)
    return np.asarray(found)


def repeated_losses(recording: Recording, model: Model, optimizer: OptimizerConfig) -> np.ndarray:
    """The loss of each step of a training; NaN for a step that was skipped."""
    steps, micro_batches, _, length = recording.inputs.shape
    rule = dataclasses.replace(optimizer, learning_rate=0.0, adam_learning_rate=0.0)
    words, mesh = model.vocab_size, one_device()
    program = make_program(model.config, rule, steps, micro_batches, words, mesh)
    params = jax.tree.map(jnp.array, model.params)  # a copy, since a step reuses its memory
    placed = jax.device_put(params, shardings_of(program.abstract.params))
    state = program.init_from(placed, 0)
    found = []
    for inputs, targets in zip(recording.inputs, recording.targets, strict=True):
        rows = (x.reshape(-1, length).astype(np.int32) for x in (inputs, targets))
        state, measured = program.train_step(state, optimizers.rates(optimizer), *rows)
        found.append(measured.loss)
    return np.array(jax.device_get(found))


def one_device() -> Mesh:
    return sharding.make_mesh("", jax.devices()[:1])


COLUMNS = "{:<7} {:<17} {:>18} {:>8} {:>9}"
HEADER = COLUMNS.format("model", "compared", "largest difference", "at step", "allowed")


class Difference(NamedTuple):
    """The largest difference of something."""

    family: Family
    what: str
    size: float
    """Infinite where a number is not finite."""
    step: int | None
    """Counted from 0; None before the first step."""
    allowed: float

    @property
    def is_small(self) -> bool:
        return self.size <= self.allowed

    def __str__(self) -> str:
        step = "" if self.step is None else str(self.step)
        size = f"{self.size:.1e}{'' if self.is_small else ' !'}"
        return COLUMNS.format(self.family, self.what, size, step, f"{self.allowed:.0e}").rstrip()


def compare(
    parity: Parity, recording: Recording, family: Family, model: Model
) -> Iterator[Difference]:
    """The differences of a family, as they become known."""
    of_logits, of_losses = parity.tolerance[0], parity.tolerance[-1]
    recorded = recording.families[family]
    with jax.default_matmul_precision("highest"):  # accelerators round operands otherwise
        logits = first_logits(model, recording.inputs[0, 0])
        error = with_infinite(np.abs(logits - recorded.logits))
        yield Difference(family, "logits", float(error.max()), None, of_logits)
        for norm, losses in recorded.losses.items():
            own = repeated_losses(recording, model, optimizer_for(parity, family, norm))
            with np.errstate(divide="ignore"):  # a recorded loss of zero
                error = with_infinite(np.abs(own - losses) / np.abs(losses))
            step = int(error.argmax())
            yield Difference(family, f"losses, {norm}", float(error[step]), step, of_losses)


def with_infinite(errors: np.ndarray) -> np.ndarray:
    """The errors, where those that are not numbers count as infinite."""
    return np.where(np.isnan(errors), np.inf, errors)


def described(family: Family, model: Model) -> str:
    config = model.config
    return (
        f"{family}: {config.n_layer} layers, {config.n_head} heads, width {config.d_model}, "
        f"{hidden_width(config)} inside an MLP, {model.vocab_size} words"
    )
