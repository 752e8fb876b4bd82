"""Runs that have a name on the command line: small ones for a laptop, and the paper's recipes."""

import dataclasses
import math

from examples.trainer.settings import recipes
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.recipes import Recipe
from examples.trainer.settings.run import OptimizerConfig, RunConfig


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
        batch_size=recipes.BATCH,
        eval_every=500,  # 20 batches of validation text: 1 to 2% of the time
        checkpoint_every=500,
    )


def held_out(recipe: Recipe) -> float:
    """The share of FineWeb that an evaluation needs, and a quarter more; at least a thousandth."""
    needed = RunConfig().eval_batches * recipes.BATCH * recipe.context
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
        weight_decay=recipe.weight_decay,
        adam_weight_decay=recipe.weight_decay,
        adam_b1=0.95,  # both as in the paper's code
        adam_b2=0.95,
        schedule="constant_linear" if recipe.size.family == "gpt" else "warmup_cosine",
    )


LLAMA_TINY = RunConfig(
    model=ModelConfig(family="llama", tied=False),
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


def gpt2_small() -> RunConfig:
    """GPT-2's small network (124 M), on 10 billion tokens of FineWeb in steps of 0.5 million.

    Network: `GPT2Config` of Hugging Face transformers. Optimizer: that of the paper's GPT-Small.
    """
    like = run_of_recipe(recipes.ROWS["gpt-small"][0])
    model = dataclasses.replace(like.model, context=1024, final_norm="layer")
    tokens = 10e9
    return dataclasses.replace(
        like,
        model=model,
        data=dataclasses.replace(like.data, tokens=tokens),
        steps=round(tokens / (recipes.BATCH * model.context)),
    )


PRESETS: dict[str, tuple[str, RunConfig]] = {
    "gpt-tiny": ("a 4-layer GPT, minutes on a laptop (the default)", RunConfig()),
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
    "gpt2-small": ("124 M, 10 B tokens: nanoGPT's GPT-2; never run", gpt2_small()),
    **{name: (recipe.line, run_of_recipe(recipe)) for name, recipe in recipes.named()},
}
"""Name to (one line of help, configuration)."""

DEFAULT_PRESET = "gpt-tiny"
