"""What can be chosen about a run. Each default is written here and nowhere else.

The docstring below a field is what `--help` shows for it.
"""

import dataclasses
import types
from typing import Any, Literal, get_type_hints

from examples.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the network; the vocabulary size comes from the tokenizer."""

    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Attention heads; divides d_model."""
    d_model: int = 128
    """Width of the residual stream."""
    context: int = 128
    """Tokens per row, the longest the model can look back."""
    tied: bool = True
    """Use the token embedding as output head, as the paper's GPT does."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the activations; parameters stay float32. bfloat16 is slower on most CPUs."""
    remat: bool = False
    """Compute the activations of each block again in the backward pass: less memory, more time."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, and how it becomes tokens."""

    paths: tuple[str, ...] = ()
    """Text files, or folders searched for .txt, .md and .py; empty: Python's standard library."""
    max_bytes: int = 16_000_000
    """Read at most this many bytes of text, in a fixed random order of the files."""
    vocab_size: int = 2048
    """Tokens in the byte-pair vocabulary, at least 257 (each byte and the end of a text)."""
    val_fraction: float = 0.05
    """Share of the text that is held out for validation."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule; the matrices and the other parameters have separate learning rates."""

    name: Literal["muonplus", "muon", "adamw"] = "muonplus"
    """Update rule of the matrices; embeddings, norms and biases always get AdamW."""
    learning_rate: float = 0.02
    """Peak learning rate of the matrices under muonplus and muon."""
    adam_learning_rate: float = 0.01
    """Peak learning rate of what AdamW updates: everything under adamw."""
    norm: Literal["none", "col", "row", "col_row", "row_col"] = "col_row"
    """Which norms muonplus sets to one after the polar step, in this order."""
    beta: float = 0.95
    """Decay of the momentum of the matrices."""
    nesterov: bool = True
    """Look one step ahead with the momentum, as the official code does."""
    weight_decay: float = 0.1
    """Decoupled decay of the matrices, times the learning rate; the rest is not decayed."""
    adam_b1: float = 0.9
    """AdamW's decay of the gradient mean."""
    adam_b2: float = 0.95
    """AdamW's decay of the squared gradient."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm, as in the official code; None for no clipping."""
    schedule: Literal["constant_linear", "warmup_cosine"] = "constant_linear"
    """Paper's GPT: 40% constant, then linear to zero; LLaMA: 10% warmup, then cosine to zero."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    name: str = ""
    """Folder under runs_dir; empty: the first unused of <preset>-<optimizer>, ...-2, ...-3."""
    runs_dir: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Decides the initial parameters, the order of the data and the sample."""
    steps: int = 400
    """Optimizer steps."""
    batch_size: int = 16
    """Rows per step, on all devices together; a step sees batch_size x context tokens."""
    accumulate: int = 1
    """Pieces a step's rows are worked through in: as many times less memory for activations."""
    eval_every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    eval_batches: int = 20
    """Validation batches, always the same; fewer if the validation text is shorter."""
    checkpoint_every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    prompt: str = ""
    """Start of the sample written at the end; empty: the start of a document."""
    sample_tokens: int = 200
    """Length of the sample in tokens."""


@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """Where a run is computed, which is no part of the run: it may change with each --resume."""

    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4,tensor=1; empty: all of them on fsdp."""
    distributed: bool = False
    """This is one of several processes, as SLURM, Open MPI or JAX_COORDINATOR_ADDRESS tell it."""
    coordinator: str = ""
    """HOST:PORT of process 0, where they do not find each other; implies --distributed."""
    num_processes: int | None = None
    """Number of processes, likewise."""
    process_id: int | None = None
    """Number of this process, from 0, likewise."""


PRESETS: dict[str, tuple[str, RunConfig]] = {
    "gpt-tiny": ("a 4-layer GPT on a laptop CPU in a few minutes (the default)", RunConfig()),
    "gpt-micro": (
        "a 2-layer GPT in seconds, to see that everything works",
        RunConfig(
            model=ModelConfig(n_layer=2, n_head=2, d_model=32, context=32),
            data=DataConfig(max_bytes=300_000, vocab_size=512),
            steps=40,
            batch_size=8,
            eval_every=20,
            eval_batches=4,
            checkpoint_every=20,
            sample_tokens=40,
        ),
    ),
}
"""Name to (one line of help, configuration)."""

DEFAULT_PRESET = "gpt-tiny"


def check(config: RunConfig) -> None:
    """Refuses values that would only fail later, or not at all."""
    positive = {
        "--steps": config.steps,
        "--batch-size": config.batch_size,
        "--accumulate": config.accumulate,
        "--eval-every": config.eval_every,
        "--eval-batches": config.eval_batches,
        "--checkpoint-every": config.checkpoint_every,
        "--sample-tokens": config.sample_tokens,
        "--data.max-bytes": config.data.max_bytes,
        **{
            f"--model.{field.replace('_', '-')}": getattr(config.model, field)
            for field in ("n_layer", "n_head", "d_model", "context")
        },
    }
    for flag, value in positive.items():
        if value < 1:
            raise UserError(f"{flag} is {value}: give at least 1.")
    if config.model.d_model % config.model.n_head:
        raise UserError(
            f"--model.d-model {config.model.d_model} cannot be cut into {config.model.n_head} "
            f"heads: choose a multiple of --model.n-head."
        )
    if not 0 < config.data.val_fraction < 1:
        raise UserError(f"--data.val-fraction {config.data.val_fraction}: give a number in (0, 1).")
    if config.data.vocab_size < 257:
        raise UserError(f"--data.vocab-size {config.data.vocab_size}: give at least 257.")


def from_dict(cls: Any, values: dict[str, Any]) -> Any:
    """The inverse of `dataclasses.asdict` after a trip through JSON."""
    hints = get_type_hints(cls)
    built = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            value = from_dict(hint, value)
        elif isinstance(hint, types.GenericAlias) and hint.__origin__ is tuple:
            value = tuple(value)
        built[key] = value
    return cls(**built)
