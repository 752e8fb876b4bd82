"""Parameters by the names of the paper's code: from a state dict to a tree, and back.

A state dict is a flat dict of arrays, as PyTorch's `model.state_dict()` has it. Names and layouts
are those of K1seki221/MuonPlus @8a9ace1: PyTorch's (out, in), and for GPT one matrix of queries,
keys and values, in this order, each with its heads one after the other.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from examples.trainer.settings.run import Family, ModelConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import make_init_params

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
    return jax.eval_shape(make_init_params(config, vocab_size), 0)


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
