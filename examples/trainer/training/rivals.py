"""The links of the optimizers that Muon+ is compared with, as a run's settings have them."""

from typing import Any

from examples.trainer.settings.run import OptimizerConfig
from optax_muonplus import baselines
from optax_muonplus.matrices import ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import AdamW, Momentum, matrix_chain


def link(config: OptimizerConfig, polar: dict[str, Any]) -> Any:
    """The link of the optimizer that `config` names; `polar` are the options of the polar step."""
    # Mano's default is without Nesterov, and it has no polar step.
    nesterov = config.nesterov and config.name != "mano"
    momentum = Momentum(config.beta, nesterov, mu_dtype=config.mu_dtype)
    if config.name == "mano":
        return baselines.Mano(momentum=momentum)
    if config.name == "turbo_muon":  # it has its own polar step
        own = Orthogonalize(
            "turbo", 4, preconditioning="aol_out", compute_dtype=polar["compute_dtype"]
        )
        return baselines.scale_by_turbo_muon(momentum, own)
    factor = Orthogonalize(**polar)
    if config.name == "aurora":
        return baselines.scale_by_aurora(momentum, baselines.Aurora(factor))
    if config.name == "hyperball":  # around Muon
        return matrix_chain(momentum, factor)
    if config.name == "muoneq_max":
        shape = ScaleByShape("max")
        return baselines.scale_by_muoneq(momentum, polar_factor=factor, scale=shape)
    links = {
        "adamuon": baselines.AdaMuon,
        "meqmuon": baselines.scale_by_meqmuon,
        "muoneq": baselines.scale_by_muoneq,
        "muown": baselines.Muown,
        "normuon": baselines.NorMuon,
    }
    return links[config.name](momentum=momentum, polar_factor=factor)


def others(config: OptimizerConfig, adamw: dict[str, Any]) -> dict[str, Any]:
    """The argument for parameters that are not matrices; `adamw` are the options of AdamW."""
    if config.name == "meqmuon":
        rate, decay = adamw["learning_rate"], adamw["weight_decay"]
        return {"others": baselines.NormalizedMomentum(rate, decay, config.beta)}
    return {"adamw": AdamW(**adamw)}
