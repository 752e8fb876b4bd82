"""The paper's runs as recipes: each row of its tables of hyperparameters, for Muon+ and for Muon.

`python -m examples.train gpt-small` starts the recipe of that name, with Muon+; `gpt-small-muon` is
the run of the same row with Muon. Any field can be changed by a flag.

Source: the Muon+ paper (arXiv 2602.21545): its tables "Architecture configurations", "Best training
hyperparameters" and "Training hyperparameters for overtraining", and for the perplexities
"Validation PPL of Muon vs. Muon+" and "Overtraining GPT-Base/LLaMA-350M". What the paper does not
state is taken from its code (K1seki221/MuonPlus @8a9ace1), and is marked as such.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from examples.trainer.settings.rules import Norm

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
