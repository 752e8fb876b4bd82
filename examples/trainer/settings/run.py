"""The settings of a run and of its machine. Each default is written here and nowhere else.

The docstring below a field is what `--help` shows for it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
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
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the products of the polar step; sums are in float32. auto: bfloat16 on GPUs and
    TPUs, as in the paper's code, and float32 on CPUs. float16 is as fast on GPUs and nearer to the
    exact step; TPUs have no units for it."""
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
