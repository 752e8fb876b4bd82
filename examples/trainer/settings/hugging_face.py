"""Networks in Hugging Face's form: their `config.json`, and what `--init-from` takes of a folder.

The networks are GPT-2's (`GPT2LMHeadModel`) and LLaMA's (`LlamaForCausalLM`); names and defaults
are those of their configurations in transformers 5.23. A network of the trainer that is neither of
the two is an error that names the setting.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from examples.trainer.settings.model import (
    ModelConfig,
    hidden_width,
    is_gated,
    kv_heads,
    vocabulary,
)
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.system.errors import UserError

CONFIG = "config.json"
Family = Literal["gpt", "llama"]


class Architecture(NamedTuple):
    """A network in Hugging Face's words."""

    model_type: str
    name: str
    keys: dict[str, tuple[str, Any]]
    """Setting of the trainer to the key and its default; None where it follows from others."""
    only: dict[str, tuple[Any, ...]]
    """Key to the values that the trainer computes; the first is the default, and is written."""
    fixed: dict[str, Any]
    """Settings of the trainer that every such network has."""


ARCHITECTURES: dict[Family, Architecture] = {
    "gpt": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocab_size": ("vocab_size", 50_257),
            "n_layer": ("n_layer", 12),
            "n_head": ("n_head", 12),
            "d_model": ("n_embd", 768),
            "d_ff": ("n_inner", None),
            "context": ("n_positions", 1024),
            "norm_epsilon": ("layer_norm_epsilon", 1e-5),
            "tied": ("tie_word_embeddings", True),
        },
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        {"final_norm": "layer", "mlp": None},
    ),
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        {
            "vocab_size": ("vocab_size", 32_000),
            "n_layer": ("num_hidden_layers", 32),
            "n_head": ("num_attention_heads", 32),
            "n_kv_head": ("num_key_value_heads", None),
            "d_model": ("hidden_size", 4096),
            "d_ff": ("intermediate_size", 11008),
            "context": ("max_position_embeddings", 2048),
            "norm_epsilon": ("rms_norm_eps", 1e-6),
            "tied": ("tie_word_embeddings", False),
        },
        {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
        {"final_norm": "rms", "mlp": None},
    ),
}
ROPE_BASE = 10_000.0


def check_expressible(config: ModelConfig) -> None:
    """Refuses a network that is neither GPT-2 nor LLaMA, by the setting that makes it so."""
    name = ARCHITECTURES[config.family].name
    if config.family == "gpt" and config.final_norm != "layer":
        raise UserError(
            f"--model.final-norm {config.final_norm}: {name} of Hugging Face has a LayerNorm before"
            " its head, and this run has an RMSNorm, as the paper's code. Train with"
            " --model.final-norm layer to export."
        )
    if is_gated(config) != (config.family == "llama"):
        raise UserError(
            f"--model.mlp {config.mlp}: {name} of Hugging Face has no such MLP. Train without"
            " --model.mlp to export."
        )


def to_hugging_face(config: ModelConfig, tokens: int, dtype: str, end: int) -> dict[str, Any]:
    """What `config.json` holds, for a tokenizer of so many tokens that puts `end` before a text."""
    check_expressible(config)
    kind = ARCHITECTURES[config.family]
    values = dataclasses.asdict(config)
    values |= {"d_ff": hidden_width(config), "n_kv_head": kv_heads(config)}
    values["vocab_size"] = vocabulary(config, tokens)
    # transformers 5 reads the first, 4 the second.
    rope = {"rope_type": "default", "rope_theta": config.rope_base}
    rotary = {"rope_parameters": rope, "rope_theta": config.rope_base}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        **{key: values[field] for field, (key, _) in kind.keys.items()},
        **{key: accepted[0] for key, accepted in kind.only.items()},
        **(rotary if config.family == "llama" else dropout),
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.exists():
        raise UserError(
            f"{folder} has no {CONFIG}: give a folder as save_pretrained of transformers or"
            " examples.export writes it."
        )
    with files.parsing(path, "is no JSON", "Download or export it again."):
        values = json.loads(path.read_bytes())
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(
            f"{path} has no model_type, so that it is no configuration of Hugging Face: give the"
            " folder of a model, not that of a run (for a run: --from-run)."
        )
    return values


def to_settings(folder: Path, own: ModelConfig) -> ModelConfig:
    """`own` with the network of a folder; raises `UserError` for one that is not computed here."""
    values = read_config(folder)
    try:
        return dataclasses.replace(own, **settings_of(values))
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: {error}.") from None


def settings_of(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a network in Hugging Face's words; raises `ValueError`, as what it calls."""
    family = family_of(values)
    kind = ARCHITECTURES[family]
    for key, accepted in kind.only.items():
        if values.get(key, accepted[0]) not in accepted:
            raise ValueError(
                f"{key} is {values[key]!r}, and this trainer computes {accepted[0]!r} only: give"
                " another model"
            )
    settings = {field: number(values, *key) for field, key in kind.keys.items()}
    if family == "llama":
        settings["rope_base"] = rope_base(values)
        check_head_dim(values, settings["d_model"], settings["n_head"])
    else:
        settings |= {"n_kv_head": None, "rope_base": ROPE_BASE}
    return {"family": family, **kind.fixed, **settings}


def family_of(values: dict[str, Any]) -> Family:
    for family, kind in ARCHITECTURES.items():
        if kind.model_type == values["model_type"]:
            return family
    known = " and ".join(kind.model_type for kind in ARCHITECTURES.values())
    raise ValueError(
        f"model_type is {values['model_type']!r}, and this trainer has {known}: give one of these"
        " models"
    )


def number(values: dict[str, Any], key: str, default: Any) -> Any:
    """The value of a key, which has the type of the default, or is a number if that is None."""
    found = values.get(key)
    if found is None:
        return default
    kind = int if default is None else type(default)
    if kind is float and type(found) is int:
        found = float(found)
    if type(found) is not kind or (kind is not bool and not found > 0):
        wanted = {bool: "true or false", int: "a whole number above 0", float: "a number above 0"}
        raise ValueError(
            f"{key} is {files.shown(found)}, and has to be {wanted[kind]}: put back the file that"
            " came with the weights"
        )
    return found


def rope_base(values: dict[str, Any]) -> float:
    """The base of the rotary positions; raises `ValueError` for positions that are scaled."""
    given = {"rope_theta": values.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):  # of transformers 4 and 5
        part = values.get(key) or {}
        part = part if isinstance(part, dict) else {"type": part}
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"{key} has positions that are scaled ({kind}), and this trainer has none: give a"
                " model without"
            )
        if nested := next((name for name, x in part.items() if isinstance(x, dict)), None):
            raise ValueError(
                f"{key} has positions of their own for each kind of layer, as {nested}, and this"
                " trainer has one kind: give another model"
            )
        given |= part
    return number(given, "rope_theta", ROPE_BASE)


def check_head_dim(values: dict[str, Any], width: int, heads: int) -> None:
    given = values.get("head_dim")
    if given is not None and given * heads != width:
        raise ValueError(
            f"head_dim is {given}, and this trainer has heads of hidden_size / num_attention_heads"
            f" = {width / heads:g} numbers: give another model"
        )


TOKENIZER = "tokenizer.json"


def find_weights(name: str) -> Path:
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
    folder = find_weights(name)
    model, data = to_settings(folder, config.model), config.data
    if (folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(folder / TOKENIZER))
    return dataclasses.replace(config, model=model, data=data)


def check_same_network(name: str, folder: Path, config: ModelConfig) -> None:
    """Refuses settings of a network that are not those of the folder with its weights."""
    theirs = to_settings(folder, config)
    for field, (key, _) in ARCHITECTURES[theirs.family].keys.items():
        own, wanted = value_of(config, field), value_of(theirs, field)
        # Runs of before say no vocab_size; the shapes of the weights say whether they fit.
        fits = (field == "context" and own < wanted) or (field == "vocab_size" and own is None)
        if own != wanted and not fits:
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
