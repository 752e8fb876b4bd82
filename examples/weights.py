"""Weights under other names: those of the paper's code, and the folders of transformers.

A state dict is a flat dict of arrays, as PyTorch's `model.state_dict()` has it. Names and layouts
are those of K1seki221/MuonPlus @8a9ace1: PyTorch's (out, in), and for GPT one matrix of queries,
keys and values, in this order, each with its heads one after the other. Transformers has the same
names. Its networks are GPT-2's (`GPT2LMHeadModel`) and LLaMA's (`LlamaForCausalLM`), and the names
of their configurations are those of transformers 5.23.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from examples.trainer.models.blocks import NORM_EPSILON
from examples.trainer.models.llama import ROPE_BASE
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import trained
from examples.trainer.runs.trained import CheckpointRef
from examples.trainer.settings.run import Family, ModelConfig, RunConfig, hidden_width
from examples.trainer.system.errors import UserError, load_package
from examples.trainer.system.files import read_json, shown
from examples.trainer.training.step import init_params

HEAD = "lm_head.weight"
H, L = "transformer.h.{}", "model.layers.{}"  # the number of the layer takes the place of {}
GPT = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "blocks/ln_1": f"{H}.ln_1",
    "blocks/attn/qkv": f"{H}.attn.c_attn",
    "blocks/attn/out": f"{H}.attn.c_proj",
    "blocks/ln_2": f"{H}.ln_2",
    "blocks/mlp/up": f"{H}.mlp.c_fc",
    "blocks/mlp/down": f"{H}.mlp.c_proj",
    "ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
}
LLAMA = {
    "wte": "model.embed_tokens",
    "blocks/norm_1": f"{L}.input_layernorm",
    **{f"blocks/attn/{x}": f"{L}.self_attn.{x[0]}_proj" for x in ("query", "key", "value", "out")},
    "blocks/norm_2": f"{L}.post_attention_layernorm",
    **{f"blocks/mlp/{x}": f"{L}.mlp.{x}_proj" for x in ("gate", "up", "down")},
    "norm_f": "model.norm",
    "lm_head": "lm_head",
}
TABLES: dict[Family, dict[str, str]] = {"gpt": GPT, "llama": LLAMA}
"""Path of a layer in the tree of a family, without its number, to its name in a state dict."""


def abstract(config: ModelConfig, vocab_size: int) -> Any:
    """The tree of a model, with shapes and types instead of arrays."""
    return jax.eval_shape(lambda: init_params(config, vocab_size, 0))


def from_state_dict(
    state_dict: Mapping[str, ArrayLike], config: ModelConfig, vocab_size: int
) -> optax.Params:
    """The tree of a model, with NumPy arrays of its types, from a state dict.

    The head of a tied model is not read. Raises `UserError` for names and shapes that are not the
    model's.
    """
    tree = abstract(config, vocab_size)
    # Views of one number, so that no memory is taken.
    expected = to_state_dict(jax.tree.map(lambda x: np.broadcast_to(0, x.shape), tree), config)
    shapes = {name: np.shape(x) for name, x in state_dict.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        wanted = expected[name].shape if name in expected else None
        if shapes.get(name) != wanted and (name != HEAD or not config.tied):
            raise UserError(
                f"{name} has the shape {shapes.get(name)}, and in a {config.family} of "
                f"{config.n_layer} layers with these sizes it has {wanted} (None: there is no such "
                "array): give all parameters of one model, and no others."
            )

    def read(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        arrays = []
        for name in names_of(path, config):
            rows = np.asarray(state_dict[name])
            rows = swapped(rows, (3, config.n_head)) if is_fused(name) else rows
            arrays.append((rows.T if path[-1].key == "kernel" else rows).astype(leaf.dtype))
        return np.stack(arrays) if is_stacked(path, config) else arrays[0]

    return jax.tree.map_with_path(read, tree)


def to_state_dict(params: optax.Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The state dict of a model's tree."""
    found = {}
    for path, x in jax.tree.leaves_with_path(params):
        arrays = np.asarray(x) if is_stacked(path, config) else [np.asarray(x)]
        for name, array in zip(names_of(path, config), arrays, strict=True):
            rows = array.T if path[-1].key == "kernel" else array
            found[name] = swapped(rows, (config.n_head, 3)) if is_fused(name) else rows
    return found


def is_fused(name: str) -> bool:
    """Whether its rows (3, head, K) of queries, keys and values are (head, 3, K) in the tree."""
    return ".c_attn." in name


def swapped(rows: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    """The rows, of which the two outer axes have these sizes, in the order of the second first."""
    return rows.reshape(*axes, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def is_stacked(path: Any, config: ModelConfig) -> bool:
    """Whether an array holds all layers."""
    return config.scan and path[0].key == "blocks"


def names_of(path: Any, config: ModelConfig) -> list[str]:
    """The names of an array of a tree in a state dict: one for each layer that it holds."""
    *layer, kind = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    numbers = [int(x) for x in layer if x.isdigit()]
    if is_stacked(path, config):
        numbers = list(range(config.n_layer))
    name = TABLES[config.family]["/".join(x for x in layer if not x.isdigit())]
    end = "bias" if kind == "bias" else "weight"
    return [f"{name.format(number)}.{end}" for number in numbers] or [f"{name}.{end}"]


def sizes_of(
    state_dict: Mapping[str, ArrayLike], family: Family, n_head: int, context: int
) -> tuple[ModelConfig, int]:
    """The settings of the model that has a state dict, and its number of words.

    A state dict does not say the number of heads, nor the longest context where positions have no
    parameters. Raises `KeyError` where a layer lacks that each model has.
    """
    table = TABLES[family]
    up = f"{table['blocks/mlp/up']}.weight"
    any_layer = re.compile(r"\d+".join(map(re.escape, up.split("{}"))))
    embedding = state_dict[f"{table['wte']}.weight"]
    vocab_size, d_model = np.shape(embedding)
    if "wpe" in table:
        context, _ = np.shape(state_dict[f"{table['wpe']}.weight"])
    head = state_dict.get(HEAD)
    config = ModelConfig(
        family=family,
        n_layer=sum(any_layer.fullmatch(name) is not None for name in state_dict),
        n_head=n_head,
        d_model=d_model,
        d_ff=np.shape(state_dict[up.format(0)])[0],
        context=context,
        tied=head is None or np.array_equal(head, embedding),
    )
    return config, vocab_size


# Folders of transformers

TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
"""The matrices that GPT-2 of transformers has as (in, out)."""
NAMES = {
    "gpt": ("n_head", "n_positions"),
    "llama": ("num_attention_heads", "max_position_embeddings"),
}
FREE = {"architectures", "bos_token_id", "eos_token_id", "torch_dtype", "rope_parameters"} | {
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
}
"""Values of `config.json` that change no logit."""
MASKS = re.compile(r"\.attn\.(masked_)?bias$")
"""Buffers that older versions of transformers kept beside the weights."""


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a folder by the names of the trainer, as (out, in); also those of the hub."""
    numpy = load_package("safetensors.numpy", "--init-from", "hf")
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= numpy.load_file(path)
    if not found:
        raise UserError(f"{folder} is neither a run nor a folder with model.safetensors.")
    if read_values(folder)["model_type"] == "gpt2":
        full = re.compile(r"^(?!transformer\.|lm_head)")  # the hub's own lack the first part
        found = {full.sub("transformer.", name): x for name, x in found.items()}
        found = {name: x.T if TRANSPOSED.search(name) else x for name, x in found.items()}
    return {name: x for name, x in found.items() if not MASKS.search(name)}


def read_values(folder: Path) -> dict[str, Any]:
    """The configuration of a folder."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} is neither a run nor a folder of transformers: no config.json.")
    return read_json(path)


def read_network(folder: Path) -> ModelConfig:
    """The network of a folder; raises `UserError` for one that is none of the trainer's."""
    values = read_values(folder)
    is_gpt = values.get("model_type") == "gpt2"
    if not is_gpt and values.get("model_type") != "llama":
        raise UserError(f"{folder} has a {values.get('model_type')}, neither a gpt2 nor a llama.")
    heads, length = NAMES["gpt" if is_gpt else "llama"]
    weights = read_weights(folder)
    config, words = sizes_of(
        weights, "gpt" if is_gpt else "llama", int(values[heads]), int(values[length])
    )
    config = dataclasses.replace(config, final_norm="layer" if is_gpt else "rms")
    expected = configuration(config, words, "float32", 0)
    for name in sorted(expected.keys() & values.keys() - FREE):
        if values[name] not in (expected[name], None):
            raise UserError(
                f"{folder}/config.json: {name} is {shown(values[name])}, and the trainer's network"
                f" has {shown(expected[name])}."
            )
    return config


def check_expressible(config: ModelConfig) -> None:
    """Refuses a network that is neither GPT-2 nor LLaMA, by the setting that makes it so."""
    if config.family == "gpt" and config.final_norm != "layer":
        raise UserError(
            f"--model.final-norm {config.final_norm}: GPT-2 of transformers has a LayerNorm before"
            " its head, and this run has an RMSNorm, as the paper's code. Train with"
            " --model.final-norm layer to export."
        )


def configuration(config: ModelConfig, words: int, dtype: str, end: int) -> dict[str, Any]:
    """What `config.json` holds, for a tokenizer of so many words that puts `end` before a text."""
    check_expressible(config)
    both = {
        "vocab_size": words,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }
    if config.family == "gpt":
        return both | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.d_model,
            "n_inner": hidden_width(config),
            "n_positions": config.context,
            "layer_norm_epsilon": NORM_EPSILON,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    return both | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "hidden_size": config.d_model,
        "intermediate_size": hidden_width(config),
        "max_position_embeddings": config.context,
        "rms_norm_eps": NORM_EPSILON,
        "hidden_act": "silu",
        # transformers 5 reads the first, 4 the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "rope_theta": ROPE_BASE,
    }


# Weights that a run begins from: --init-from

OWN = ("compute_dtype", "param_dtype", "attention", "remat", "scan")
"""The settings of a network that do not say which one it is."""


def with_network(config: RunConfig) -> RunConfig:
    """The settings of a run, with the network and the tokenizer of the weights it begins from."""
    folder, words = Path(config.init_from), str(Path(config.init_from) / run_folder.TOKENIZER)
    if config.data.tokenizer not in ("", words):
        raise UserError(f"--data.tokenizer: the weights of --init-from {folder} have their own.")
    is_run = (folder / "checkpoints").is_dir()
    network = run_folder.read_config(folder)[0].model if is_run else read_network(folder)
    own = {name: getattr(config.model, name) for name in OWN}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(network, **own),
        data=dataclasses.replace(config.data, tokenizer=words),
    )


def load_weights(folder: Path, config: ModelConfig, vocab_size: int) -> optax.Params:
    """The parameters of a folder as a network of this form has them, as NumPy arrays."""
    if not (folder / "checkpoints").is_dir():
        return from_state_dict(read_weights(folder), config, vocab_size)
    if jax.process_count() > 1:
        raise UserError(f"--init-from {folder}: several processes begin from an exported folder.")
    model = trained.load(CheckpointRef(folder))
    own = to_state_dict(jax.device_get(model.params), model.config.model)
    return from_state_dict(own, config, vocab_size)
