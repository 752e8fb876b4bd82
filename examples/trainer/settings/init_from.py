"""`--init-from`: where the weights are, and settings that follow from them or do not fit."""

import dataclasses
from pathlib import Path
from typing import Any

from examples.trainer.settings.hugging_face import ARCHITECTURES, CONFIG, to_settings
from examples.trainer.settings.model import ModelConfig, hidden_width, is_gated, kv_heads
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import optional_packages
from examples.trainer.system.errors import UserError

TOKENIZER = "tokenizer.json"


def resolve(name: str) -> Path:
    """The folder of weights: one on this disk, or downloaded from the hub if there is none."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UserError(f"--init-from {name}: there is no such folder; give one with {CONFIG}.")
    hub = optional_packages.load("huggingface_hub", f"--init-from {name}", "hf")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # of the network, of the hub: no common class
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"--init-from {name} is no folder here, and the Hugging Face hub does not give it:"
            f" {reason}. Give the path of a folder with {CONFIG}, or a name as OWNER/MODEL."
        ) from None


def beginning_with(name: str, config: RunConfig) -> RunConfig:
    """`config` with the network and the tokenizer of a folder, both of which flags may change."""
    folder = resolve(name)
    model, data = to_settings(folder, config.model), config.data
    if (folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(folder / TOKENIZER))
    return dataclasses.replace(config, model=model, data=data)


def check_same_network(name: str, folder: Path, config: ModelConfig) -> None:
    """Refuses settings of a network that are not those of the folder with its weights."""
    theirs = to_settings(folder, config)
    for field, (key, _) in ARCHITECTURES[theirs.family].keys.items():
        own, wanted = value_of(config, field), value_of(theirs, field)
        if own != wanted and not (field == "context" and own < wanted):
            raise UserError(different(field, own, f"{name} has {key} = {wanted}"))
    for field in ("family", "final_norm", "mlp", "rope_base"):
        if value_of(config, field) != value_of(theirs, field):
            own, wanted = getattr(config, field), getattr(theirs, field)
            raise UserError(different(field, own, f"the weights of {name} are for {wanted}"))


def value_of(config: ModelConfig, field: str) -> Any:
    follows = {"d_ff": hidden_width, "n_kv_head": kv_heads, "mlp": is_gated}
    return follows[field](config) if field in follows else getattr(config, field)


def different(field: str, own: Any, theirs: str) -> str:
    return f"--model.{field.replace('_', '-')} is {own}, and {theirs}: leave that flag out."
