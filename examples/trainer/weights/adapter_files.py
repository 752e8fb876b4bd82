"""Writes the adapters of a model without its weights, as PEFT has them.

Names and values are those of PEFT 0.21: `adapter_config.json`, and `adapter_model.safetensors` with
`base_model.model.LAYER.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from examples.trainer.models.adapters import A, B
from examples.trainer.models.state_dict import is_stacked, place_of
from examples.trainer.settings import hugging_face
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.system.errors import UserError
from examples.trainer.weights.export import DType, array_of, refuse_taken, replaced, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapters(
    folder: Path,
    params: optax.Params,
    config: ModelConfig,
    base: str,
    dtype: DType,
    overwrite: bool,
) -> list[str]:
    """Writes both files and returns their names; `base` says where the model's weights are."""
    hugging_face.check_expressible(config)
    refuse_taken(folder, overwrite)
    numpy = optional_packages.load("safetensors.numpy", "an export", "hf")
    found = {name: (array_of(a, True, dtype), b) for name, a, b in layers(params, config)}
    arrays = {}
    for name, (a, b) in found.items():
        arrays[f"base_model.model.{name}.lora_A.weight"] = a
        arrays[f"base_model.model.{name}.lora_B.weight"] = array_of(b, False, dtype)
    with files.explained(folder, "write"), replaced(folder) as partial:
        numpy.save_file(arrays, partial / WEIGHTS, metadata={"format": "pt"})
        write_json(partial / CONFIG, peft_config(config, base, list(found)))
    return [CONFIG, WEIGHTS]


def peft_config(config: ModelConfig, base: str, names: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": config.family == "gpt",  # GPT-2 has its kernels as (in, out)
        "inference_mode": True,
        "target_modules": names,
    }


def layers(params: Any, config: ModelConfig) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """The name of each adapted layer in Hugging Face's form, its A (in, r) and its B (out, r)."""
    known = dict(jax.tree.leaves_with_path(params))
    for path, a in known.items():
        if path[-1] != DictKey(A):
            continue
        place, numbers = place_of((*path[:-1], DictKey("kernel")), config)
        if place.third is not None:
            raise UserError(
                "--no-merged: the adapters of queries, keys and values are three, and GPT-2 has"
                " one layer for them: export with the adapters merged."
            )
        b = known[*path[:-1], DictKey(B)]
        for i, number in enumerate(numbers):
            own = (a[i], b[i]) if is_stacked(path, config) else (a, b)
            names = place.names(number)
            rows = jnp.split(place.form.write(own[1], config.n_head), len(names))
            for name, part in zip(names, rows, strict=True):
                yield name.removesuffix(".weight"), own[0], part
