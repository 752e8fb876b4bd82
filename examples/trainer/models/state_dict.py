"""Parameters by the names of the paper's code: from a state dict to a tree, and back.

A state dict is a flat dict of arrays, as PyTorch's `model.state_dict()` has it. Names and layouts
are those of K1seki221/MuonPlus @8a9ace1: PyTorch's (out, in), and for GPT one matrix of queries,
keys and values, in this order, each with its heads one after the other.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.trainer.models.language_model import LanguageModel
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError

Family = Literal["gpt", "llama"]


class Published(NamedTuple):
    """Where an array of a tree is in a state dict; `{}` stands for the number of the layer."""

    names: tuple[str, ...]
    """One name, or three whose rows follow each other in the array."""
    by_head: bool = False
    """Whether the rows (3, head, K) of queries, keys and values are (head, 3, K) in the tree."""
    third: int | None = None
    """Which third of the rows under that name; None for all of them."""

    def of(self, layer: int) -> list[str]:
        return [name.format(layer) for name in self.names]


def linear(path: str, name: str, **options: Any) -> dict[str, Published]:
    """A linear layer with a bias."""
    parts = {"kernel": "weight", "bias": "bias"}
    return {f"{path}/{x}": Published((f"{name}.{y}",), **options) for x, y in parts.items()}


def layer_norm(path: str, name: str) -> dict[str, Published]:
    parts = {"scale": "weight", "bias": "bias"}
    return {f"{path}/{x}": Published((f"{name}.{y}",)) for x, y in parts.items()}


H, L = "transformer.h.{}", "model.layers.{}"
QKV = ("query", "key", "value")
OF_LLAMA = {x: f"{L}.self_attn.{x[0]}_proj.weight" for x in QKV}
HEAD = "lm_head.weight"
GPT = {
    "wte/embedding": Published(("transformer.wte.weight",)),
    "wpe/embedding": Published(("transformer.wpe.weight",)),
    **layer_norm("blocks/ln_1", f"{H}.ln_1"),
    **linear("blocks/attn/qkv", f"{H}.attn.c_attn", by_head=True),
    **linear("blocks/attn/query", f"{H}.attn.c_attn", third=0),
    **linear("blocks/attn/key", f"{H}.attn.c_attn", third=1),
    **linear("blocks/attn/value", f"{H}.attn.c_attn", third=2),
    **linear("blocks/attn/out", f"{H}.attn.c_proj"),
    **layer_norm("blocks/ln_2", f"{H}.ln_2"),
    **linear("blocks/mlp/up", f"{H}.mlp.c_fc"),
    **linear("blocks/mlp/down", f"{H}.mlp.c_proj"),
    **layer_norm("ln_f", "transformer.ln_f"),
    "lm_head/kernel": Published((HEAD,)),
}
LLAMA = {
    "wte/embedding": Published(("model.embed_tokens.weight",)),
    "blocks/norm_1/scale": Published((f"{L}.input_layernorm.weight",)),
    "blocks/attn/qkv/kernel": Published(tuple(OF_LLAMA.values()), by_head=True),
    **{f"blocks/attn/{x}/kernel": Published((name,)) for x, name in OF_LLAMA.items()},
    "blocks/attn/out/kernel": Published((f"{L}.self_attn.o_proj.weight",)),
    "blocks/norm_2/scale": Published((f"{L}.post_attention_layernorm.weight",)),
    **{
        f"blocks/mlp/{x}/kernel": Published((f"{L}.mlp.{x}_proj.weight",))
        for x in ("gate", "up", "down")
    },
    "norm_f/scale": Published(("model.norm.weight",)),
    "lm_head/kernel": Published((HEAD,)),
}
TABLES: dict[Family, dict[str, Published]] = {"gpt": GPT, "llama": LLAMA}
"""Path in the tree of a family, without the number of the layer, to the place in a state dict.

A model has those paths that its settings ask for, of `attn/qkv` and `attn/query`, for example.
"""


def abstract(config: ModelConfig, vocab_size: int) -> Any:
    """The tree of a model, with shapes and types instead of arrays."""
    model = nnx.eval_shape(lambda: LanguageModel(config, vocab_size, nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def from_state_dict(
    state_dict: Mapping[str, ArrayLike], config: ModelConfig, vocab_size: int
) -> optax.Params:
    """The tree of a model, with NumPy arrays of its types, from a state dict.

    The tree has a list of blocks or stacked ones, and one matrix of queries, keys and values or
    three, as `config` says. A tied model takes a state dict with its head too, if that is the
    token embedding. Raises `UserError` for names and shapes that are not the model's.
    """
    check(state_dict, config, vocab_size)

    def read(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        place, layers = place_of(path, config)
        arrays = []
        for layer in layers:
            rows = np.concatenate([np.asarray(state_dict[name]) for name in place.of(layer)])
            rows = rows if place.third is None else np.split(rows, 3)[place.third]
            rows = swapped(rows, (3, config.n_head)) if place.by_head else rows
            arrays.append((rows.T if is_kernel(path) else rows).astype(leaf.dtype))
        return np.stack(arrays) if is_stacked(path, config) else arrays[0]

    return jax.tree.map_with_path(read, abstract(config, vocab_size))


def to_state_dict(params: optax.Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The state dict of a model's tree."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for path, x in jax.tree.leaves_with_path(params):
        place, layers = place_of(path, config)
        arrays = np.asarray(x) if is_stacked(path, config) else [np.asarray(x)]
        for layer, array in zip(layers, arrays, strict=True):
            rows = array.T if is_kernel(path) else array
            rows = swapped(rows, (config.n_head, 3)) if place.by_head else rows
            names = place.of(layer)
            for name, own in zip(names, np.split(rows, len(names)), strict=True):
                parts.setdefault(name, {})[place.third or 0] = own
    joined = {name: [rows[i] for i in sorted(rows)] for name, rows in parts.items()}
    return {name: x[0] if len(x) == 1 else np.concatenate(x) for name, x in joined.items()}


def swapped(rows: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    """The rows, of which the two outer axes have these sizes, in the order of the second first."""
    return rows.reshape(*axes, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def is_kernel(path: Any) -> bool:
    return path[-1].key == "kernel"


def is_stacked(path: Any, config: ModelConfig) -> bool:
    return config.scan and path[0].key == "blocks"


def place_of(path: Any, config: ModelConfig) -> tuple[Published, range]:
    """Where an array of a tree is in a state dict, and of which layers it is."""
    words = jax.tree_util.keystr(path, simple=True, separator="/")
    layers = range(config.n_layer if is_stacked(path, config) else 1)
    if numbered := re.fullmatch(r"blocks/(\d+)/(.*)", words):
        words, layer = f"blocks/{numbered[2]}", int(numbered[1])
        layers = range(layer, layer + 1)
    if words not in TABLES[config.family]:
        raise UserError(
            f"the published {config.family} has no {words}: only a network with the MLP as"
            " published (without --model.mlp) has a state dict."
        )
    return TABLES[config.family][words], layers


def sizes_of(
    state_dict: Mapping[str, ArrayLike], family: Family, n_head: int, context: int
) -> tuple[ModelConfig, int]:
    """The settings of the model that has a state dict, and its number of words.

    A state dict does not say the number of heads, nor the longest context where positions have no
    parameters.
    """
    table = TABLES[family]
    (up,), (embedding,) = table["blocks/mlp/up/kernel"].names, table["wte/embedding"].names
    any_layer = re.compile(r"\d+".join(map(re.escape, up.split("{}"))))
    vocab_size, d_model = matrix_shape(state_dict, embedding)
    if "wpe/embedding" in table:
        context, _ = matrix_shape(state_dict, table["wpe/embedding"].names[0])
    head = state_dict.get(HEAD)
    config = ModelConfig(
        family=family,
        n_layer=sum(any_layer.fullmatch(name) is not None for name in state_dict),
        n_head=n_head,
        d_model=d_model,
        d_ff=matrix_shape(state_dict, up.format(0))[0],
        context=context,
        tied=head is None or np.array_equal(head, state_dict[embedding]),
    )
    return config, vocab_size


def matrix_shape(state_dict: Mapping[str, ArrayLike], name: str) -> tuple[int, int]:
    """The shape of a matrix that every state dict of a family has."""
    shape = np.shape(state_dict.get(name, 0))
    if len(shape) != 2:
        raise UserError(f"{name} is no matrix (out, in): give all parameters of the model.")
    return shape


def check(found: Mapping[str, ArrayLike], config: ModelConfig, vocab_size: int) -> None:
    """Refuses a state dict with other names or shapes than the model's."""
    # Views of one number, so that no memory is taken.
    tree = jax.tree.map(lambda x: np.broadcast_to(0, x.shape), abstract(config, vocab_size))
    expected = {name: x.shape for name, x in to_state_dict(tree, config).items()}
    model = f"a {config.family} of {config.n_layer} layers"
    if missing := sorted(expected.keys() - found.keys()):
        raise UserError(f"missing in {model}: {', '.join(missing[:4])}. Give all parameters.")
    more = found.keys() - expected.keys()
    (embedding,) = TABLES[config.family]["wte/embedding"].names
    if config.tied and HEAD in more and np.array_equal(found[HEAD], found[embedding]):
        more -= {HEAD}
    if more:
        raise UserError(f"not in {model}: {', '.join(sorted(more)[:4])}. Leave them out.")
    for name, wanted in expected.items():
        shape = np.shape(found[name])
        if shape != wanted:
            raise UserError(
                f"{name} has the shape {shape}, and in {model} with these sizes it has {wanted}:"
                " give parameters and sizes of one model."
            )
