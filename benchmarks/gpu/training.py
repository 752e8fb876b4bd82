"""A step of the trainer, and short training runs with Muon and with Muon+."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console

from benchmarks import training_step
from benchmarks.gpu import text
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import Figures
from examples.trainer.data.placement import place_batch
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.training import sharding
from examples.trainer.training.setup import TrainingSetup, assemble

Rule = Literal["muon", "muonplus"]
RULES: tuple[Rule, ...] = ("muon", "muonplus")

# TFLOP/s of products of half-precision numbers, without sparsity, by NVIDIA's data sheets.
PEAK = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12}


def step(settings: Settings, console: Console) -> Figures:
    """Tokens in a second, the share of the device's peak, and the optimizer's share of a step."""
    base = RunConfig(model=settings.step_model)
    vocabulary, tokens = settings.step_vocabulary, settings.step_tokens
    names = settings.step_rules
    figures = training_step.measure(
        base, vocabulary, tokens, settings.rounds, console, names, settings.calls
    )
    operations = operations_of_step(settings.step_model, vocabulary, tokens)
    peak = next((x for name, x in PEAK.items() if name in jax.devices()[0].device_kind), None)
    for name in names:
        seconds = figures[name]["median_s"]
        figures[name] |= {
            "tokens_per_s": tokens / seconds,
            "tflop_per_s": operations / seconds / 1e12,
        }
        if peak is not None:
            figures[name]["mfu"] = operations / seconds / peak
    return figures | {"tokens": tokens, "tflop": operations / 1e12}


def operations_of_step(model: ModelConfig, vocabulary: int, tokens: int) -> int:
    """Multiplications and additions of a step, without those that remat repeats.

    Six for each token and parameter that is multiplied, and 12 for each token, layer, feature and
    position of the context, as in the appendix of the PaLM paper (Chowdhery et al., 2022).
    """
    params = training_step.make_program(RunConfig(model=model), "adamw", vocabulary).abstract.params
    leaves = jax.tree.leaves_with_path(params)
    looked_up = ("wpe",) if model.tied else ("wpe", "wte")
    multiplied = sum(
        x.size
        for path, x in leaves
        if x.ndim > 1 and not any(name in jax.tree_util.keystr(path) for name in looked_up)
    )
    attention = 12 * model.n_layer * model.d_model * model.context
    return tokens * (6 * multiplied + attention)


def settings_of_run(rule: Rule, rate: float, seed: int, settings: Settings) -> RunConfig:
    """A run of the comparison; both rules give updates of the same Frobenius norm."""
    return RunConfig(
        model=settings.model,
        data=text.data_config(settings),
        optimizer=OptimizerConfig(
            name=rule, learning_rate=rate, norm="col_row", match_frobenius=rule == "muonplus"
        ),
        seed=seed,
        steps=settings.train_steps,
        batch_size=settings.rows,
        accumulate=settings.accumulate,
        eval_batches=settings.evaluated_batches,
    )


def train(rule: Rule, rate: float, seed: int, settings: Settings) -> Figures:
    """One run, from its first step to its validation loss."""
    config = settings_of_run(rule, rate, seed, settings)
    mesh = sharding.make_mesh("", jax.devices())
    setup = assemble(config, text.tokens(settings), mesh)
    losses = _losses(setup, config.steps)
    return {
        "rule": rule,
        "learning_rate": rate,
        "seed": seed,
        "train_loss": [round(x, 4) for x in losses["train"]],
        **losses["validation"],
    }


def _losses(setup: TrainingSetup, steps: int) -> dict[str, Any]:
    state = setup.init()
    place = sharding.of_batch(setup.mesh)
    losses = []
    for i in range(steps):
        state, measured = setup.train_step(state, *place_batch(setup.loader, i, place))
        losses.append(measured.loss)
        if i >= 2:
            losses[i - 2].block_until_ready()  # enough is enqueued; batches must not pile up
    parts = np.array_split(np.array(list(map(float, losses))), min(steps, 20))
    means = [float(part.mean()) for part in parts]
    return {"train": means, "validation": dataclasses.asdict(setup.evaluate(state.params))}


def best_rate(rule: Rule, done: dict[str, Figures]) -> float | None:
    """The rate with the lowest validation loss among the runs of a rule; None if there is none."""
    runs = [x for x in done.values() if x.get("rule") == rule and np.isfinite(x["val_loss"])]
    return min(runs, key=lambda x: x["val_loss"])["learning_rate"] if runs else None


def summary(done: dict[str, Figures]) -> Figures:
    """Mean validation loss of each rule at its best rate, and the error of the mean over seeds."""
    result: Figures = {}
    for rule in RULES:
        rate = best_rate(rule, done)
        at_best = [
            x["val_loss"]
            for x in done.values()
            if x.get("rule") == rule and x["learning_rate"] == rate
        ]
        if at_best:
            error = np.std(at_best, ddof=1) / np.sqrt(len(at_best)) if len(at_best) > 1 else None
            result[rule] = {
                "learning_rate": rate,
                "seeds": len(at_best),
                "val_loss": float(np.mean(at_best)),
                "standard_error": None if error is None else float(error),
            }
    return result
