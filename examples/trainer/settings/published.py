"""Recipes as the paper's code and configurations have them, where its text differs or is silent.

Source: K1seki221/MuonPlus @8a9ace1. examples/README.md says of each which is known from what.
"""

import dataclasses

from examples.trainer.settings.recipes import ROWS
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError

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
