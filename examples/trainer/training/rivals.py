"""The options of the optimizers that Muon+ is compared with, as a run's settings have them."""

from typing import Any

from examples.trainer.settings.run import OptimizerConfig
from optax_muonplus import baselines
from optax_muonplus.transforms import AdamW


def options(config: OptimizerConfig, polar: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the optimizer that `config` names, of which `polar` are the polar step's."""
    # Mano's default is without Nesterov, and it has no polar step.
    nesterov = config.nesterov and config.name != "mano"
    given = {"beta": config.beta, "nesterov": nesterov, "mu_dtype": config.mu_dtype}
    if config.name == "mano":
        return given
    if config.name == "turbo_muon":  # it has its own polar step
        return given | {"compute_dtype": polar["compute_dtype"]}
    if config.name == "muoneq_max":
        given |= {"shape_scale": "max", "consistent_rms": None}
    return given | polar


def others(config: OptimizerConfig, adamw: dict[str, Any]) -> dict[str, Any]:
    """The argument for parameters that are not matrices; `adamw` are the options of AdamW."""
    if config.name == "meqmuon":
        rate, decay = adamw["learning_rate"], adamw["weight_decay"]
        return {"others": baselines.NormalizedMomentum(rate, decay, config.beta)}
    return {"adamw": AdamW(**adamw)}
