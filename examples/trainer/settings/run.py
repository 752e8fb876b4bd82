"""The settings of a run and of its machine. Each default is written here and nowhere else.

The docstring below a field is what `--help` shows for it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.validation import (
    STRICT,
    Count,
    CountOrZero,
    Decay,
    FiniteOrZero,
    Positive,
    Share,
)
from examples.trainer.system.errors import UserError

Family = Literal["gpt", "llama"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the network."""

    __pydantic_config__ = STRICT

    family: Family = "gpt"
    """Which network: the paper's GPT or its LLaMA."""
    n_layer: Count = 4
    """Number of transformer blocks."""
    n_head: Count = 4
    """Attention heads; divides d_model."""
    d_model: Count = 128
    """Width of the residual stream."""
    d_ff: Count | None = None
    """Width inside an MLP; None: 4 d_model for gpt, and 8/3 d_model for llama, whose MLP has three
    matrices (as many parameters)."""
    context: Count = 128
    """Tokens per row: the longest text that the model can look back on."""
    tied: bool = True
    """Use the token embedding as output head, as the paper's GPT does."""
    final_norm: Literal["rms", "layer"] = "rms"
    """The norm before the head: RMSNorm as published, or LayerNorm, which llama has nowhere."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the activations. bfloat16 is slower on most CPUs."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and optimizer state. float32 with activations in bfloat16 is mixed
    precision; bfloat16 halves the memory, as the paper's GPT-Huge and LLaMA-7B have it."""
    attention: Literal["auto", "plain", "cudnn", "splash"] = "auto"
    """plain holds all scores of a row, context x context numbers for each head; the others do not.
    auto: cudnn on NVIDIA GPUs and splash on TPUs where they can run, otherwise plain."""
    remat: Literal["none", "full"] = "none"
    """full: recompute the activations of each block in the backward pass, for less memory; on a CPU
    only together with scan."""
    scan: bool = False
    """Stack the blocks' parameters and compile one block for all: deep models compile faster."""

    @pydantic.model_validator(mode="after")
    def fitting(self) -> "ModelConfig":
        """Refuses settings that do not fit each other."""
        width, heads = self.d_model, self.n_head
        if width % heads:
            raise ValueError(
                f"--model.d-model {width} cannot be cut into {heads} heads: choose a multiple of"
                " --model.n-head"
            )
        if self.family == "llama" and self.final_norm != "rms":
            raise ValueError(
                f"--model.final-norm {self.final_norm}: all norms of llama are RMSNorm; give rms,"
                " or --model.family gpt"
            )
        if self.family == "llama" and head_size(self) % 2:
            raise ValueError(
                f"--model.d-model {width} in {heads} heads gives {head_size(self)} numbers a head,"
                " and llama rotates them in pairs: choose an even multiple of --model.n-head"
            )
        return self


def hidden_width(config: ModelConfig) -> int:
    """The width inside an MLP."""
    if config.d_ff is not None:
        return config.d_ff
    return 4 * config.d_model if config.family == "gpt" else 8 * config.d_model // 3


def head_size(config: ModelConfig) -> int:
    return config.d_model // config.n_head


def training_flops_per_token(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions of forward and backward pass, for one token.

    6 for each element of a matrix that multiplies, the output head included: 2 forward, 4 backward.
    Attention adds 6 T D in each layer, T tokens in a row, D the width: two products of 2 T D each
    forward and twice that backward, and half of it, as a token attends to earlier ones only. Norms,
    biases, embedding tables, the optimizer, and what remat computes again count nothing. That is
    the numerator of MFU in the PaLM paper (Chowdhery et al., 2022, appendix B), but for the causal
    half, which MaxText takes too.
    """
    width, of_mlp = config.d_model, 2 if config.family == "gpt" else 3
    matrices = config.n_layer * (4 * width**2 + of_mlp * width * hidden_width(config))
    attention = config.n_layer * config.context * width
    return 6.0 * (matrices + width * tokens + attention)


Name = Literal["muonplus", "muon", "adamw"]
Norm = Literal["none", "col", "row", "col_row", "row_col", "long"]
"""Those of the library, which takes seconds to import."""

TITLES: dict[Name, str] = {"muonplus": "Muon+", "muon": "Muon", "adamw": "AdamW"}
DEFAULT_RATES: dict[Name, float] = {"muonplus": 0.02, "muon": 0.02, "adamw": 0.002}
"""Peak rates of the matrices; an update of AdamW changes each element by about its rate."""
MUON = ("beta", "nesterov", "polar", "ns_coeffs", "ns_steps", "compute_dtype", "shape_scale")
TAKEN: dict[Name, tuple[str, ...]] = {
    "muonplus": (*MUON, "norm", "norm_eps", "match_frobenius"),
    "muon": MUON,
    "adamw": (),
}
"""The settings that are arguments of a rule, by the same names."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule. Its defaults are those of `omp.muonplus`, with clipping and a schedule."""

    __pydantic_config__ = STRICT

    name: Name = "muonplus"
    """Update rule of the matrices; embeddings, norms and biases always get AdamW."""
    learning_rate: FiniteOrZero | None = None
    """Peak learning rate of the matrices; None: 0.02, or 0.002 under adamw."""
    adam_learning_rate: FiniteOrZero | None = None
    """Peak learning rate of the other parameters; None: that of the matrices."""
    norm: Norm = "row_col"
    """Which norms muonplus sets to one after the polar step, in this order. long: those of the
    longer side, and for squares of none."""
    norm_eps: FiniteOrZero = 1e-8
    """Added to a squared norm of muonplus, as in the paper; its code has 1e-7."""
    match_frobenius: bool = True
    """Give the normalized update of muonplus the Frobenius norm that it had before."""
    shape_scale: Literal["spectral", "max", "none"] = "max"
    """Factor of muonplus and muon for a matrix (out, in): sqrt(out / in), the same but at least 1,
    or 1."""
    polar: Literal["auto", "newton_schulz", "gram", "svd"] = "auto"
    """How the polar step is computed: by polynomials (auto: in the cheaper way), or exactly."""
    ns_coeffs: Literal["jordan", "you", "polar_express", "cubic"] = "jordan"
    """Polynomials of the polar step, by the paper's names; cubic ones take fewer products."""
    ns_steps: Annotated[int, Field(ge=1, le=100)] = 5
    """How many of them, as in all of the paper's runs."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products of the polar step; sums are in float32. auto: bfloat16 on GPUs and
    TPUs, as in the paper's code, and float32 on CPUs."""
    beta: Decay = 0.95
    """Decay of the momentum of the matrices."""
    nesterov: bool = True
    """Look one step ahead with the momentum, as the official code does."""
    weight_decay: FiniteOrZero = 0.0
    """Decoupled decay of the matrices, times their learning rate."""
    adam_weight_decay: FiniteOrZero = 0.0
    """The same for the other parameters; the paper's code uses the decay of the matrices."""
    adam_b1: Decay = 0.9
    """AdamW's decay of the gradient mean."""
    adam_b2: Decay = 0.999
    """AdamW's decay of the squared gradient."""
    adam_nesterov: bool = True
    """Let AdamW look one step ahead too (NAdamW), as Optax's Muon does, and the paper does not."""
    adam_eps_before_correction: bool = False
    """Add AdamW's epsilon before the bias correction, as the paper's code, not after it."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm, as in the official code; None for no clipping."""
    schedule: Literal["constant_linear", "warmup_cosine"] = "constant_linear"
    """Paper's GPT: 40% constant, then linear to zero; LLaMA: 10% warmup, then cosine to zero."""
    schedule_floor: Share = 0.0
    """Share of the peak rates at which their fall ends: a linear fall to zero stops there, as in
    the paper's code, which has 0.1 for GPT; a cosine is scaled to end there, as Optax's."""
    hold_share: Share = 0.4
    """Share of the steps at the peak under constant_linear."""
    warmup_share: Share = 0.1
    """Share of the steps until the peak under warmup_cosine."""
    warmup_start: Share | None = None
    """Share of the peak rates in the first step of a warmup, 0 in the paper's code, which loses
    that step; None: 1 by the steps of the warmup."""


def check_taken(given: OptimizerConfig, before: OptimizerConfig, names: Sequence[Name]) -> None:
    """Refuses a flag that changes no run of some rules; `before` is what the flags change."""
    for setting in TAKEN["muonplus"]:
        if any(setting in TAKEN[name] for name in names):
            continue
        value = getattr(given, setting)
        if value != getattr(before, setting):
            raise UserError(
                f"--optimizer.{setting.replace('_', '-')} {value} would change nothing under "
                f"{', '.join(names)}: leave it out."
            )


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
    init_from: str = ""
    """Begin from the weights of a run, or of a folder that examples.export or transformers wrote,
    with their network and tokenizer."""
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


TrackerName = Literal["tensorboard", "wandb"]


@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """Where a run is computed and shown. This may change with each --resume."""

    __pydantic_config__ = STRICT

    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4,tensor=1; empty: all on fsdp."""
    distributed: bool = False
    """This is one of several processes, which find each other through SLURM, Open MPI or a
    TPU pod."""
    coordinator: str = ""
    """HOST:PORT of process 0, if they do not find each other; implies --distributed."""
    num_processes: int | None = None
    """Number of processes, if they do not find each other."""
    process_id: int | None = None
    """Number of this process, from 0, if they do not find each other."""
    profile: CountOrZero = 0
    """Record so many steps, from the third on, with JAX's profiler, into the folder of the run."""
    tracker: tuple[TrackerName, ...] = ()
    """Dashboards that get the figures of metrics.jsonl too."""
