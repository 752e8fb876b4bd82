"""Runs that have a name on the command line: small ones for a laptop, and the paper's recipes.

A recipe is a row of the paper's tables of hyperparameters, for Muon+ or for Muon. `python -m
examples.train gpt-small` starts the recipe of that name, with Muon+; `gpt-small-muon` is the run of
the same row with Muon. Any field can be changed by a flag.

Source: the Muon+ paper (arXiv 2602.21545): its tables "Architecture configurations", "Best training
hyperparameters" and "Training hyperparameters for overtraining", and for the perplexities
"Validation PPL of Muon vs. Muon+" and "Overtraining GPT-Base/LLaMA-350M". What the paper does not
state is taken from its code (K1seki221/MuonPlus @8a9ace1), and is marked as such. `as_published`
has what its code and configurations do where its text differs or is silent.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.rules import Norm
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.errors import UserError

BATCH = 512  # sequences in a step, in all runs
VOCABULARIES = {"gpt2": 50_257, "llama2": 32_000}  # tokens of the two tokenizers


@dataclasses.dataclass(frozen=True)
class Size:
    """A row of the paper's tables of architectures."""

    family: Literal["gpt", "llama"]
    d_model: int
    n_layer: int
    n_head: int
    d_ff: int
    """Width inside an MLP; the GPT table has none, but 4 d_model gives its parameter counts."""
    million: int
    """Parameters, in millions, as the paper counts them."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters; the paper trained its largest models in bfloat16 throughout, and the
    others in mixed precision."""

    @property
    def vocab_size(self) -> int:
        return VOCABULARIES["gpt2" if self.family == "gpt" else "llama2"]


SIZES = {
    "gpt-small": Size("gpt", 768, 12, 12, 3072, 124),
    "gpt-base": Size("gpt", 1024, 24, 16, 4096, 362),
    "gpt-large": Size("gpt", 1280, 36, 20, 5120, 774),
    "gpt-huge": Size("gpt", 4096, 32, 32, 16384, 6654, "bfloat16"),
    "llama-60m": Size("llama", 512, 8, 8, 1376, 58),
    "llama-130m": Size("llama", 768, 12, 12, 2048, 134),
    "llama-350m": Size("llama", 1024, 24, 16, 2736, 368),
    "llama-1b": Size("llama", 2048, 24, 32, 5461, 1339),
    "llama-7b": Size("llama", 4096, 32, 32, 11008, 6738, "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One run of the paper."""

    size: Size
    context: int
    """Tokens in a sequence."""
    billions: float
    """Training tokens, in billions."""
    optimizer: Literal["muonplus", "muon"]
    learning_rate: float
    """Peak rate; AdamW has the same for the other parameters, as in the paper's code."""
    weight_decay: float
    """Times the learning rate; AdamW's parameters have the same, as in the paper's code."""
    norm: Norm
    """Norm directions of Muon+; none: Muon."""
    perplexity: float
    """The paper's result, on validation text of FineWeb."""

    @property
    def steps(self) -> int:
        """Optimizer steps that read the training tokens once."""
        return round(self.billions * 1e9 / (BATCH * self.context))

    @property
    def line(self) -> str:
        name = "Muon+" if self.optimizer == "muonplus" else "Muon"
        tokens = f"{self.size.million} M, {self.billions:g} B tokens"
        return f"{tokens}, {name}: the paper's ppl {self.perplexity:.2f}"


def row(
    size: str,
    context: int,
    billions: float,
    learning_rates: tuple[float, float],
    weight_decay: float,
    norm: Norm,
    perplexities: tuple[float, float],
) -> tuple[Recipe, Recipe]:
    """The recipes with Muon+ and with Muon of a row of the paper; each pair is (Muon, Muon+)."""
    muon, muonplus = (
        Recipe(SIZES[size], context, billions, name, rate, weight_decay, direction, perplexity)
        for name, rate, direction, perplexity in zip(
            ("muon", "muonplus"), learning_rates, ("none", norm), perplexities, strict=True
        )
    )
    return muonplus, muon


ROWS = {
    "gpt-small": row("gpt-small", 2048, 3.0, (0.005, 0.01), 0.1, "col_row", (29.66, 27.64)),
    "gpt-base": row("gpt-base", 4096, 7.2, (0.005, 0.005), 0.1, "row", (21.70, 19.98)),
    "gpt-large": row("gpt-large", 8192, 15.5, (0.02, 0.01), 0.1, "row_col", (17.82, 16.91)),
    "gpt-huge": row("gpt-huge", 1024, 20.0, (0.01, 0.01), 0.005, "row_col", (15.90, 14.69)),
    "gpt-base-72b": row("gpt-base", 4096, 72.0, (0.005, 0.005), 0.1, "row_col", (16.97, 15.84)),
    "llama-60m": row("llama-60m", 1024, 1.1, (0.06, 0.06), 0.1, "row_col", (25.75, 25.25)),
    "llama-130m": row("llama-130m", 1024, 2.2, (0.02, 0.02), 0.1, "col_row", (19.06, 18.65)),
    "llama-350m": row("llama-350m", 4096, 6.4, (0.04, 0.04), 0.1, "col_row", (14.02, 13.41)),
    "llama-1b": row("llama-1b", 4096, 13.1, (0.02, 0.02), 0.1, "row_col", (10.68, 10.31)),
    "llama-7b": row("llama-7b", 1024, 19.8, (0.01, 0.01), 0.005, "row_col", (10.54, 10.12)),
    "llama-350m-72b": row("llama-350m", 4096, 72.0, (0.04, 0.04), 0.1, "col_row", (11.48, 11.03)),
}
"""Name to the recipes with Muon+ and with Muon."""


def named() -> Iterator[tuple[str, Recipe]]:
    for name, (muonplus, muon) in ROWS.items():
        yield name, muonplus
        yield f"{name}-muon", muon


NORM_EPS = 1e-7  # whatever a configuration says
GPT_FLOOR = 0.1  # of the peak rate; its text says that the rate falls to zero

RATES = {"llama-60m": (0.04, 0.05), "llama-350m": (0.1, 0.1)}
"""Recipe to peak rate and decay of the configuration, where they are not those of the tables.

The configurations are of Muon+: Muon's runs keep the rates of the tables.
"""


def as_published(name: str, config: RunConfig) -> RunConfig:
    if name.removesuffix("-muon") not in ROWS:
        raise UserError(
            f"--as-published is for the recipes of the paper, {', '.join(ROWS)}; {name} is none."
        )
    gpt = config.model.family == "gpt"
    rule = dataclasses.replace(
        config.optimizer,
        norm_eps=NORM_EPS,
        adam_eps_before_correction=True,
        schedule_floor=GPT_FLOOR if gpt else 0.0,
        warmup_start=None if gpt else 0.0,
    )
    if name in RATES:
        rate, decay = RATES[name]
        rule = dataclasses.replace(
            rule,
            learning_rate=rate,
            adam_learning_rate=rate,
            weight_decay=decay,
            adam_weight_decay=decay,
        )
    return dataclasses.replace(config, optimizer=rule)


def run_of_recipe(recipe: Recipe) -> RunConfig:
    """All settings of a run of the paper; what the paper does not state keeps its default."""
    return RunConfig(
        model=model_of_recipe(recipe),
        data=DataConfig(
            source="fineweb",
            tokens=recipe.billions * 1e9,
            tokenizer="gpt2" if recipe.size.family == "gpt" else "llama2",
            val_fraction=held_out(recipe),
        ),
        optimizer=optimizer_of_recipe(recipe),
        steps=recipe.steps,
        batch_size=BATCH,
        eval_every=500,  # 20 batches of validation text: 1 to 2% of the time
        checkpoint_every=500,
    )


def held_out(recipe: Recipe) -> float:
    """The share of FineWeb that an evaluation needs, and a quarter more; at least a thousandth."""
    needed = RunConfig().eval_batches * BATCH * recipe.context
    return max(0.001, math.ceil(1e4 * 1.25 * needed / (recipe.billions * 1e9)) / 1e4)


def model_of_recipe(recipe: Recipe) -> ModelConfig:
    size = recipe.size
    return ModelConfig(
        family=size.family,
        n_layer=size.n_layer,
        n_head=size.n_head,
        d_model=size.d_model,
        d_ff=size.d_ff,
        context=recipe.context,
        tied=size.family == "gpt",
        compute_dtype="bfloat16",
        param_dtype=size.param_dtype,
        remat="full",  # this and scan change no result; deep models need them to fit and to compile
        scan=True,
    )


def optimizer_of_recipe(recipe: Recipe) -> OptimizerConfig:
    return OptimizerConfig(
        name=recipe.optimizer,
        learning_rate=recipe.learning_rate,
        adam_learning_rate=recipe.learning_rate,
        norm=recipe.norm,
        match_frobenius=False,
        shape_scale="spectral",
        adam_nesterov=False,
        weight_decay=recipe.weight_decay,
        adam_weight_decay=recipe.weight_decay,
        adam_b1=0.95,  # both as in the paper's code
        adam_b2=0.95,
        schedule="constant_linear" if recipe.size.family == "gpt" else "warmup_cosine",
    )


# A GPT as published, but for the norm before the head: Hugging Face's GPT-2 has a LayerNorm there,
# so that the model can be exported.
GPT_TINY = RunConfig(model=ModelConfig(final_norm="layer"), data=DataConfig(source="documentation"))

LLAMA_TINY = RunConfig(
    model=ModelConfig(family="llama", tied=False),
    data=DataConfig(source="documentation"),
    optimizer=OptimizerConfig(schedule="warmup_cosine"),
)

MICRO = RunConfig(
    model=ModelConfig(n_layer=2, n_head=2, d_model=32, context=32),
    data=DataConfig(max_bytes=300_000, vocab_size=512),
    steps=40,
    batch_size=8,
    eval_every=20,
    eval_batches=4,
    checkpoint_every=20,
    sample_tokens=40,
)


PRESETS: dict[str, tuple[str, RunConfig]] = {
    "gpt-tiny": ("a 4-layer GPT, minutes on a laptop (the default)", GPT_TINY),
    "gpt-micro": ("a 2-layer GPT in seconds, to see that all works", MICRO),
    "llama-tiny": ("a 4-layer LLaMA, minutes on a laptop", LLAMA_TINY),
    "llama-micro": (
        "a 2-layer LLaMA in seconds",
        dataclasses.replace(
            MICRO,
            model=dataclasses.replace(MICRO.model, family="llama", tied=False),
            optimizer=LLAMA_TINY.optimizer,
        ),
    ),
    **{name: (recipe.line, run_of_recipe(recipe)) for name, recipe in named()},
}
"""Name to (one line of help, configuration)."""

DEFAULT_PRESET = "gpt-tiny"
