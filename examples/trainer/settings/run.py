"""The settings of a run. Each default is written here and nowhere else.

The docstring below a field is what `--help` shows for it.
"""

import dataclasses
from typing import Annotated, Literal

import pydantic
import tyro
from pydantic import Field

from examples.trainer.settings import rules
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.validation import (
    STRICT,
    Count,
    CountOrZero,
    Decay,
    FiniteOrZero,
    FinitePositive,
    Positive,
    Share,
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule; the matrices and the other parameters have separate learning rates."""

    __pydantic_config__ = STRICT

    name: rules.Name = "muonplus"
    """Update rule of the matrices; embeddings, norms and biases always get AdamW,
    with the adam_learning_rate and adam_weight_decay."""
    learning_rate: FiniteOrZero | None = None
    """Peak learning rate of the matrices; None: 0.01 in a new run of gpt-tiny with muonplus, else
    0.02, or 0.002 under adamw, adamuon, mano and muoneq, whose updates are larger.
    Under hyperball it is a share of a matrix's norm."""
    adam_learning_rate: FiniteOrZero = 0.01
    """Peak learning rate of the other parameters."""
    norm: rules.Norm = "col_row"
    """Which norms muonplus sets to one after the polar step, in this order. long: those of the
    longer side, and for squares of none, rows or columns; auto: of the side that varies more."""
    norm_eps: FiniteOrZero = 1e-8
    """Added to a squared norm of muonplus, as in the paper; its code has 1e-7."""
    match_frobenius: bool = False
    """Give the normalized update of muonplus the Frobenius norm that it had before."""
    shape_scale: Literal["spectral", "max", "none"] = "spectral"
    """Factor of muonplus and muon for a matrix (out, in): sqrt(out / in), the same but at least 1,
    or 1."""
    normalized: Literal["all", "attention", "mlp"] = "all"
    """The matrices that muonplus normalizes; the others get Muon."""
    mlp_in_rate: FinitePositive = 1.0
    """Rate of the matrices into an MLP (up and gate) over that of the others."""
    shard_over_data: bool = False
    """Shard the state over the data axis of --mesh too, as ZeRO-1; parameters are copied there."""
    per_head: bool = False
    """Update each head of the query, key and value projections as a matrix of its own."""
    polar: Literal["auto", "newton_schulz", "gram", "svd"] = "auto"
    """How the polar step is computed: by polynomials (auto: in the cheaper way), or exactly."""
    ns_coeffs: Literal["jordan", "you", "polar_express", "cubic"] = "jordan"
    """Polynomials of the polar step, by the paper's names; cubic ones take fewer products."""
    ns_steps: Annotated[int, Field(ge=1, le=100)] = 5
    """How many of them, as in all of the paper's runs."""
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius"
    """The norm that a matrix is divided by before the polynomials."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the products of the polar step; sums are in float32. auto: bfloat16 on GPUs and
    TPUs, as in the paper's code, where the polar step allows it, and float32 on CPUs. float16 is as
    fast on GPUs and nearer to the exact step; TPUs have no units for it."""
    beta: Decay = 0.95
    """Decay of the momentum of the matrices."""
    mu_dtype: Literal["float32", "bfloat16"] | None = None
    """How the momentum of the matrices is kept, but for adamw; None: as they are themselves."""
    nesterov: bool = True
    """Look one step ahead with the momentum, as the official code does; not under mano."""
    bias_correction: bool = False
    """Under muonplus and muon, divide the momentum by what its zero start left out, as
    optax.contrib.muon does."""
    adam_nesterov: bool = False
    """Let the AdamW of the other parameters look one step ahead too (NAdamW), as omp.muonplus and
    optax.contrib.muon do by default, and the paper does not; not under adamw."""
    weight_decay: FiniteOrZero = 0.1
    """Decoupled decay of the matrices, times their learning rate; hyperball has none."""
    cautious_weight_decay: bool = False
    """Under muonplus and muon, decay only the entries that the update moves towards zero anyway."""
    decay_follows_rate: bool = False
    """Let the decay of the matrices follow their learning rate: a step decays by its square."""
    adam_weight_decay: FiniteOrZero = 0.0
    """The same for the other parameters; the paper's code uses the decay of the matrices."""
    adam_b1: Decay = 0.9
    """AdamW's decay of the gradient mean."""
    adam_b2: Decay = 0.95
    """AdamW's decay of the squared gradient."""
    adam_eps_before_correction: bool = False
    """Add AdamW's epsilon before the bias correction, as the paper's code, not after it."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm, as in the official code; None for no clipping."""
    qk_clip: FinitePositive | None = None
    """Largest attention logit of a head: beyond it, its queries and keys are scaled down after the
    update. Kimi K2 has 100; None for no such bound, and then no logits are measured."""
    schedule: Literal["constant_linear", "warmup_cosine"] = "constant_linear"
    """Paper's GPT: 40% constant, then linear to zero; LLaMA: 10% warmup, then cosine to zero."""
    schedule_floor: Annotated[Share, tyro.conf.arg(aliases=("--schedule-floor",))] = 0.0
    """Share of the peak rates at which their fall ends: a linear fall to zero stops there, as in
    the paper's code, which has 0.1 for GPT; a cosine is scaled to end there, as Optax's."""
    hold_share: Share = 0.4
    """Share of the steps at the peak under constant_linear."""
    warmup_share: Share = 0.1
    """Share of the steps until the peak under warmup_cosine."""
    warmup_start: Share | None = None
    """Share of the peak rates in the first step of a warmup, 0 in the paper's code, which loses
    that step; None: 1 by the steps of the warmup."""
    record_every: CountOrZero = 0
    """Updates between records, in matrices.jsonl, of how unequal the rows and columns of each
    matrix are; 0 for none. For muonplus and muon this includes the steps inside the rule; for the
    others only the gradient and the whole update, which includes learning rate and decay."""

    @pydantic.model_validator(mode="after")
    def fitting(self) -> "OptimizerConfig":
        """Refuses settings that do not fit each other."""
        given = {"mlp-in-rate": self.mlp_in_rate != 1, "qk-clip": self.qk_clip is not None}
        if rules.RULES[self.name].holds_norms and any(given.values()):
            raise ValueError(
                f"{named(given)}: {self.name} holds the norms of matrices or rows, which this would"
                " change. Leave it out"
            )
        return self


def named(given: dict[str, bool]) -> str:
    """The flags of the optimizer that are given."""
    return " and ".join(f"--optimizer.{name}" for name, is_given in given.items() if is_given)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    __pydantic_config__ = STRICT

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    name: str = ""
    """Folder under runs_dir; empty: the first unused of <preset>-<optimizer>, ...-2, ...-3."""
    runs_dir: str = "runs"
    """Where run folders are made."""
    seed: CountOrZero = 0
    """Decides the initial parameters, the order of the data and the sample."""
    steps: Count = 400
    """Optimizer steps."""
    batch_size: Count = 16
    """Rows per step, on all devices together; a step sees batch_size x context tokens."""
    accumulate: Count = 1
    """Micro-batches per step: activations need as many times less memory."""
    eval_every: Count = 100
    """Steps between evaluations; the last step is always evaluated."""
    eval_batches: Count = 20
    """Validation batches, always the same; fewer if the validation text is shorter."""
    checkpoint_every: Count = 200
    """Steps between checkpoints; the last step is always saved."""
    prompt: str = ""
    """Start of the sample written at the end; empty: the start of a document."""
    sample_tokens: Count = 200
    """Length of the sample in tokens."""


def with_document_token(config: RunConfig, token: int | None) -> RunConfig:
    """The run whose network masks documents that begin with this token; None for no mask."""
    network = dataclasses.replace(config.model, document_token=token)
    return dataclasses.replace(config, model=network)
