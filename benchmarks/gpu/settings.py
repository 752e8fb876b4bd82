"""The sizes of all measurements: those for a GPU, and toys that show on a CPU that all runs."""

import dataclasses
from typing import Literal

from benchmarks import trees
from benchmarks.gpu.variants import OURS, REFERENCE
from benchmarks.training_step import NAMES
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.presets import PRESETS

_MODELS = tuple((name, trees.SIZES[name]) for name in ("gpt-small", "llama-350m", "llama-1b"))
_GPT_SMALL_2 = trees.SIZES["gpt-small"]._replace(layers=2)
_LLAMA_1B_6 = trees.SIZES["llama-1b"]._replace(layers=6)
_GPT_30M = ModelConfig(n_layer=8, n_head=8, d_model=512, context=1024, compute_dtype="bfloat16")

# Table of coefficients and number of steps.
_TABLES = (
    ("jordan", 5), ("you", 6), ("dion", 5), ("turbo", 4), ("polar_express", 5), ("cans", 8)
)  # fmt: skip
_COMPARED = (
    REFERENCE,
    "omp.muon:bfloat16",
    OURS,
    "omp.muonplus:float16",
    "omp.muonplus:bfloat16, kernel",
    "omp.muonplus:float16, kernel",
)
_SWEEPS = (
    ("kernel", (OURS, "omp.muonplus:bfloat16, kernel", "omp.muonplus:float16, kernel")),
    (
        "forms",
        tuple(
            f"omp.muonplus:{dtype}, {polar}"
            for dtype in ("bfloat16", "float16")
            for polar in ("newton_schulz", "gram")
        ),
    ),
    ("float32", (OURS, "omp.muonplus:TF32", "omp.muonplus:X3", "omp.muonplus:float32")),
    (
        "norms",
        (
            "omp.muon:bfloat16",
            OURS,
            *(f"omp.muonplus:bfloat16, {norm}" for norm in ("col", "row", "row_col")),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, numbers of repetitions, and what is compared."""

    # Correctness: matrices of one stack, whose odd long side is padded in half precision.
    matrix: tuple[int, int] = (1024, 2735)
    tables: tuple[tuple[str, int], ...] = _TABLES
    symmetric: tuple[int, ...] = (512, 768, 2048)
    races: int = 50
    parity: trees.Size = _GPT_SMALL_2
    # Rates and whole updates.
    copied_bytes: int = 2**30
    square: int = 8192
    models: tuple[tuple[str, trees.Size], ...] = _MODELS
    compared: tuple[str, ...] = _COMPARED
    calls: int = 10
    rounds: int = 7
    # Sweeps.
    swept: trees.Size = _LLAMA_1B_6
    stack_mib: tuple[float, ...] = (16, 32, 64, 128, 256)
    sweeps: tuple[tuple[str, tuple[str, ...]], ...] = _SWEEPS
    # A step of the trainer.
    step_model: ModelConfig = PRESETS["gpt-small"][1].model
    step_vocabulary: int = 50_257
    step_tokens: int = 16 * 2048
    step_rules: tuple[Literal["adamw", "muon", "muonplus"], ...] = NAMES
    # Training comparison.
    model: ModelConfig = _GPT_30M
    vocabulary: int = 8192
    text_bytes: int = 160_000_000
    rows: int = 64
    accumulate: int = 2  # half the rows at once: scores of attention may take 4 GB a layer
    train_steps: int = 400
    evaluated_batches: int = 10
    rates: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04)
    seeds: tuple[int, ...] = (1, 2, 3)


_TINY = trees.Size(16, 1, 40, gated=False)
_TINY_MODEL = ModelConfig(n_layer=1, n_head=2, d_model=16, context=16)

TOY = Settings(
    matrix=(8, 21),
    tables=(("jordan", 2), ("cans", 2)),
    symmetric=(8,),
    races=2,
    parity=_TINY,
    copied_bytes=2**16,
    square=16,
    models=(("tiny", _TINY),),
    compared=(REFERENCE, OURS, "omp.muonplus:bfloat16, kernel"),
    calls=2,
    rounds=1,
    swept=_TINY,
    stack_mib=(2**-9,),
    sweeps=(("float32", (OURS, "omp.muonplus:X3")),),
    step_model=_TINY_MODEL,
    step_vocabulary=300,
    step_tokens=32,
    step_rules=("muonplus",),
    model=_TINY_MODEL,
    vocabulary=300,
    text_bytes=60_000,
    rows=4,
    accumulate=1,
    train_steps=3,
    evaluated_batches=1,
    rates=(0.01, 0.02),
    seeds=(1,),
)
