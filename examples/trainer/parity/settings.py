"""What a file does not say of the trainings that it records, and by how much ours may differ."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from examples.trainer.models.published_names import Family
from examples.trainer.settings import validation
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.settings.validation import Count, Positive, Share
from examples.trainer.training import optimizers
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


def check(parity: Parity) -> None:
    validation.check(parity)
    optimizers.check(parity.optimizer)


def optimizer_for(parity: Parity, family: Family, norm: Norm) -> OptimizerConfig:
    if family == "gpt":
        schedule, floor = parity.gpt_schedule, parity.gpt_floor
    else:
        schedule, floor = parity.llama_schedule, parity.llama_floor
    return dataclasses.replace(parity.optimizer, norm=norm, schedule=schedule, schedule_floor=floor)
