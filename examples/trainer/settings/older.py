"""What saved settings mean that were written before some fields were added.

A field that changes what a run computes unless it has another value than its default needs that
value here: runs and sweeps of earlier versions then stay what they were.
"""

from collections.abc import Callable, Mapping
from typing import Any

from examples.trainer.settings.model import ModelConfig


def of_model(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The network before there was a choice of these: llama had another epsilon only."""
    if saved.get("family") == "llama":
        return {"norm_epsilon": 1e-6}
    return {
        "qkv": "separate",
        "final_norm": "layer",
        "depth_scaled_init": False,
        "norm_epsilon": 1e-6,
    }


FIELDS: dict[type, Callable[[Mapping[str, Any]], dict[str, Any]]] = {ModelConfig: of_model}
"""Class of settings to the values of fields that saved settings may lack."""


def completed(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings with the fields that have another meaning where they are absent."""
    return {**FIELDS[cls](saved), **saved} if cls in FIELDS else dict(saved)
