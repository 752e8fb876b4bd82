"""The settings of a run. Each default is written here and nowhere else.

The docstring below a field is what `--help` shows for it.
"""

import dataclasses
import math
import re
from typing import Annotated, Literal

import tyro

from examples.trainer.settings import rules
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.model import check as check_model
from examples.trainer.system.errors import UserError

LARGEST = 2**31 - 1  # steps, rows and seeds are 32-bit integers on devices


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, and how it is turned into tokens."""

    source: Literal["files", "fineweb"] = "files"
    """files: those of paths, or the default text; fineweb: streamed from the Hugging Face hub."""
    paths: tuple[str, ...] = ()
    """Text files, or folders searched for .txt, .md, .py, .jsonl and .parquet; empty: Python's
    standard library."""
    text_field: str = "text"
    """Where the rows of .jsonl and .parquet files have their text; each row is a document."""
    max_bytes: int = 16_000_000
    """Read at most this many bytes of files, in a fixed random order; they are held in memory."""
    tokens: float = 1e9
    """Training tokens to take from fineweb; validation tokens come on top."""
    tokenizer: str = ""
    """gpt2, llama2 or a tokenizer.json; empty: trained on the text of files, gpt2 for fineweb."""
    vocab_size: int = 2048
    """Tokens of a tokenizer that is trained, at least 257 (each byte and the end of a text)."""
    val_fraction: float = 0.05
    """Share of the text that is held out for validation."""
    verify: bool = False
    """Check all tokens against their hashes at the start, also for texts above 256 MB; this reads
    them once."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule; the matrices and the other parameters have separate learning rates."""

    name: rules.Name = "muonplus"
    """Update rule of the matrices; embeddings, norms and biases always get AdamW."""
    learning_rate: float | None = None
    """Peak learning rate of the matrices; None: 0.02, or 0.002 under adamw, adamuon and mano, whose
    updates are larger."""
    adam_learning_rate: float = 0.01
    """Peak learning rate of the other parameters."""
    norm: Literal["none", "col", "row", "col_row", "row_col"] = "col_row"
    """Which norms muonplus sets to one after the polar step, in this order."""
    norm_eps: float = 1e-8
    """Added to a squared norm of muonplus, as in the paper; its code has 1e-7."""
    match_frobenius: bool = False
    """Give the normalized update of muonplus the Frobenius norm that it had before."""
    per_head: bool = False
    """Update each head of the query, key and value projections as a matrix of its own."""
    polar: Literal["auto", "newton_schulz", "gram", "svd"] = "auto"
    """How the polar step is computed: by polynomials (auto: in the cheaper way), or exactly."""
    ns_coeffs: Literal["jordan", "you", "polar_express"] = "jordan"
    """Polynomials of the polar step, by the paper's names."""
    ns_steps: int = 5
    """How many of them, as in all of the paper's runs."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the products of the polar step; sums are in float32. auto: bfloat16 on GPUs and
    TPUs, as in the paper's code, where the polar step allows it, and float32 on CPUs. float16 is as
    fast on GPUs and nearer to the exact step; TPUs have no units for it."""
    beta: float = 0.95
    """Decay of the momentum of the matrices."""
    nesterov: bool = True
    """Look one step ahead with the momentum, as the official code does; not under mano."""
    weight_decay: float = 0.1
    """Decoupled decay of the matrices, times their learning rate."""
    adam_weight_decay: float = 0.0
    """The same for the other parameters; the paper's code uses the decay of the matrices."""
    adam_b1: float = 0.9
    """AdamW's decay of the gradient mean."""
    adam_b2: float = 0.95
    """AdamW's decay of the squared gradient."""
    adam_eps_before_correction: bool = False
    """Add AdamW's epsilon before the bias correction, as the paper's code, not after it."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm, as in the official code; None for no clipping."""
    schedule: Literal["constant_linear", "warmup_cosine"] = "constant_linear"
    """Paper's GPT: 40% constant, then linear to zero; LLaMA: 10% warmup, then cosine to zero."""
    schedule_floor: Annotated[float, tyro.conf.arg(aliases=("--schedule-floor",))] = 0.0
    """Share of the peak rates at which their fall ends; the paper's code has 0.1 for GPT."""
    hold_share: float = 0.4
    """Share of the steps at the peak under constant_linear."""
    warmup_share: float = 0.1
    """Share of the steps until the peak under warmup_cosine."""
    warmup_start: float | None = None
    """Share of the peak rates in the first step of a warmup, 0 in the paper's code, which loses
    that step; None: 1 by the steps of the warmup."""
    record_every: int = 0
    """Updates between records, in matrices.jsonl, of how unequal the rows and columns of each
    matrix are; 0 for none. For muonplus and muon this includes the steps inside the rule; for the
    others only the gradient and the whole update, which includes learning rate and decay."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
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
    """Micro-batches per step: activations need as many times less memory."""
    max_skipped: int = 10
    """Steps in a row that may be skipped because their loss or gradient is not finite; one more
    stops the run."""
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
    """Where a run is computed. This may change with each --resume."""

    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4,tensor=1; empty: all of them on fsdp."""
    distributed: bool = False
    """This is one of several processes, which find each other through SLURM, Open MPI or
    JAX_COORDINATOR_ADDRESS."""
    coordinator: str = ""
    """HOST:PORT of process 0, if they do not find each other; implies --distributed."""
    num_processes: int | None = None
    """Number of processes, if they do not find each other."""
    process_id: int | None = None
    """Number of this process, from 0, if they do not find each other."""
    peak_tflops: float | None = None
    """What a device could do, in TFLOP/s of 16-bit products, for MFU; None: by the kind of device,
    where it is known."""
    profile: str = ""
    """FROM:TO, the steps to record with the profiler of JAX."""


def check(config: RunConfig) -> None:
    """Refuses values that would fail only later, or would silently do nothing useful."""
    positive = {
        "--steps": config.steps,
        "--batch-size": config.batch_size,
        "--accumulate": config.accumulate,
        "--eval-every": config.eval_every,
        "--eval-batches": config.eval_batches,
        "--checkpoint-every": config.checkpoint_every,
        "--sample-tokens": config.sample_tokens,
    }
    for flag, value in positive.items():
        if not 1 <= value <= LARGEST:
            raise UserError(f"{flag} is {value}: give at least 1, at most {LARGEST}.")
    if not 0 <= config.seed <= LARGEST:
        raise UserError(f"--seed is {config.seed}: give a number from 0 to {LARGEST}.")
    if config.max_skipped < 0:
        raise UserError(f"--max-skipped is {config.max_skipped}: give 0 or more steps.")
    check_optimizer(config.optimizer)
    check_model(config.model)
    if config.data.max_bytes < 1:
        raise UserError(f"--data.max-bytes is {config.data.max_bytes}: give at least 1.")
    if not 0 < config.data.val_fraction < 1:
        raise UserError(f"--data.val-fraction {config.data.val_fraction}: give a number in (0, 1).")
    if config.data.vocab_size < 257:
        raise UserError(f"--data.vocab-size {config.data.vocab_size}: give at least 257.")
    if not (config.data.tokens > 0 and math.isfinite(config.data.tokens)):
        raise UserError(f"--data.tokens is {config.data.tokens}: give a positive number.")


def check_optimizer(config: OptimizerConfig) -> None:
    """Refuses rates and limits that the library does not see as numbers, or cannot judge."""
    not_negative = {
        "learning-rate": config.learning_rate,
        "adam-learning-rate": config.adam_learning_rate,
        "adam-weight-decay": config.adam_weight_decay,
    }
    for name, value in not_negative.items():
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise UserError(f"--optimizer.{name} is {value}: give a finite number, 0 or more.")
    if config.clip_norm is not None and not config.clip_norm > 0:
        raise UserError(
            f"--optimizer.clip-norm is {config.clip_norm}: give a positive number, or None for no "
            "clipping."
        )
    for name in ("schedule_floor", "hold_share", "warmup_share", "warmup_start"):
        share = getattr(config, name)
        if share is not None and not 0 <= share <= 1:
            flag = f"--optimizer.{name.replace('_', '-')}"
            raise UserError(f"{flag} is {share}: give a number from 0 to 1.")
    if config.record_every < 0:
        raise UserError(
            f"--optimizer.record-every is {config.record_every}: give a number of updates, or 0 "
            "for no records."
        )


def check_machine(machine: MachineConfig, steps: int) -> None:
    """Refuses flags about the machine that mean nothing."""
    if machine.peak_tflops is not None and not machine.peak_tflops > 0:
        raise UserError(f"--peak-tflops is {machine.peak_tflops}: give a positive number.")
    profiled = profiled_steps(machine)
    if profiled and profiled[-1] > steps:
        raise UserError(
            f"--profile {machine.profile} goes beyond the last step, {steps}: give earlier steps."
        )


def profiled_steps(machine: MachineConfig) -> range | None:
    """The steps that --profile names, both ends included; None without the flag."""
    if not machine.profile:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", machine.profile)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(
            f"--profile {machine.profile}: give the first and the last step to record, as 10:12."
        )
    return range(int(found[1]), int(found[2]) + 1)
