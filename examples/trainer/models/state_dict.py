"""Parameters by the names of the paper's code: from a state dict to a tree, and back.

A state dict is a flat dict of arrays, as PyTorch's `model.state_dict()` has it. Names and layouts
are those of K1seki221/MuonPlus @8a9ace1: PyTorch's (out, in), and for GPT one matrix of queries,
keys and values, in this order, each with its heads one after the other.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.trainer.models.language_model import build
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError

Family = Literal["gpt", "llama"]


class Form(NamedTuple):
    """How an array lies in a tree here, given that of the state dict and the number of heads."""

    read: Callable[[Any, int], Any]
    write: Callable[[Any, int], Any]
    """The inverse of `read`."""


def by_head(rows: Any, n_head: int) -> Any:
    """Rows (3, head, K) of queries, keys and values in the order (head, 3, K)."""
    return rows.reshape(3, n_head, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def by_third(rows: Any, n_head: int) -> Any:
    """The inverse of `by_head`."""
    return rows.reshape(n_head, 3, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


SAME = Form(lambda x, n_head: x, lambda x, n_head: x)
TRANSPOSED = Form(lambda x, n_head: x.T, lambda x, n_head: x.T)
HEADS = Form(by_head, by_third)
HEADS_TRANSPOSED = Form(
    lambda x, n_head: by_head(x, n_head).T, lambda x, n_head: by_third(x.T, n_head)
)


class Published(NamedTuple):
    """Where an array of a tree is in a state dict; `{}` stands for the number of the layer."""

    name: str | tuple[str, str, str]
    """One name, or three whose rows follow each other in the array."""
    form: Form = SAME
    third: int | None = None
    """Which third of the rows under that name; None for all of them."""

    def names(self, layer: int) -> list[str]:
        names = [self.name] if isinstance(self.name, str) else self.name
        return [name.format(layer) for name in names]


H = "transformer.h.{}"
GPT = {
    "wte/embedding": Published("transformer.wte.weight"),
    "wpe/embedding": Published("transformer.wpe.weight"),
    "blocks/ln_1/scale": Published(f"{H}.ln_1.weight"),
    "blocks/ln_1/bias": Published(f"{H}.ln_1.bias"),
    "blocks/attn/qkv/kernel": Published(f"{H}.attn.c_attn.weight", HEADS_TRANSPOSED),
    "blocks/attn/qkv/bias": Published(f"{H}.attn.c_attn.bias", HEADS),
    "blocks/attn/query/kernel": Published(f"{H}.attn.c_attn.weight", TRANSPOSED, third=0),
    "blocks/attn/query/bias": Published(f"{H}.attn.c_attn.bias", third=0),
    "blocks/attn/key/kernel": Published(f"{H}.attn.c_attn.weight", TRANSPOSED, third=1),
    "blocks/attn/key/bias": Published(f"{H}.attn.c_attn.bias", third=1),
    "blocks/attn/value/kernel": Published(f"{H}.attn.c_attn.weight", TRANSPOSED, third=2),
    "blocks/attn/value/bias": Published(f"{H}.attn.c_attn.bias", third=2),
    "blocks/attn/out/kernel": Published(f"{H}.attn.c_proj.weight", TRANSPOSED),
    "blocks/attn/out/bias": Published(f"{H}.attn.c_proj.bias"),
    "blocks/ln_2/scale": Published(f"{H}.ln_2.weight"),
    "blocks/ln_2/bias": Published(f"{H}.ln_2.bias"),
    "blocks/mlp/up/kernel": Published(f"{H}.mlp.c_fc.weight", TRANSPOSED),
    "blocks/mlp/up/bias": Published(f"{H}.mlp.c_fc.bias"),
    "blocks/mlp/down/kernel": Published(f"{H}.mlp.c_proj.weight", TRANSPOSED),
    "blocks/mlp/down/bias": Published(f"{H}.mlp.c_proj.bias"),
    "ln_f/scale": Published("transformer.ln_f.weight"),
    "ln_f/bias": Published("transformer.ln_f.bias"),
    "lm_head/kernel": Published("lm_head.weight", TRANSPOSED),
}

L = "model.layers.{}"
Q, K, V = (f"{L}.self_attn.{letter}_proj.weight" for letter in "qkv")
LLAMA = {
    "wte/embedding": Published("model.embed_tokens.weight"),
    "blocks/norm_1/scale": Published(f"{L}.input_layernorm.weight"),
    "blocks/attn/qkv/kernel": Published((Q, K, V), HEADS_TRANSPOSED),
    "blocks/attn/query/kernel": Published(Q, TRANSPOSED),
    "blocks/attn/key/kernel": Published(K, TRANSPOSED),
    "blocks/attn/value/kernel": Published(V, TRANSPOSED),
    "blocks/attn/out/kernel": Published(f"{L}.self_attn.o_proj.weight", TRANSPOSED),
    "blocks/norm_2/scale": Published(f"{L}.post_attention_layernorm.weight"),
    "blocks/mlp/gate/kernel": Published(f"{L}.mlp.gate_proj.weight", TRANSPOSED),
    "blocks/mlp/up/kernel": Published(f"{L}.mlp.up_proj.weight", TRANSPOSED),
    "blocks/mlp/down/kernel": Published(f"{L}.mlp.down_proj.weight", TRANSPOSED),
    "norm_f/scale": Published("model.norm.weight"),
    "lm_head/kernel": Published("lm_head.weight", TRANSPOSED),
}

TABLES: dict[Family, dict[str, Published]] = {"gpt": GPT, "llama": LLAMA}
"""Path in the tree of a family, without the number of the layer, to the place in a state dict.

A model has those paths that its settings ask for, of `attn/qkv` and `attn/query`, for example.
"""


HEAD = "lm_head.weight"


def from_state_dict(
    state_dict: Mapping[str, ArrayLike], config: ModelConfig, vocab_size: int
) -> optax.Params:
    """The tree of a model, with NumPy arrays of its types, from a state dict.

    The tree has a list of blocks or stacked ones, and one matrix of queries, keys and values or
    three, as `config` says. A tied model takes a state dict with its head too, if that is the
    token embedding. Raises `UserError` for names and shapes that are not the model's.
    """
    shapes = abstract(config, vocab_size)
    check(state_dict, config, vocab_size)

    def read(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        place, layers = place_of(path, config)
        arrays = [read_array(state_dict, place, i, config.n_head, leaf.dtype) for i in layers]
        return np.stack(arrays) if is_stacked(path, config) else arrays[0]

    return jax.tree.map_with_path(read, shapes)


def to_state_dict(params: optax.Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The state dict of a model's tree."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for path, x in jax.tree.leaves_with_path(params):
        place, layers = place_of(path, config)
        arrays = np.asarray(x) if is_stacked(path, config) else [np.asarray(x)]
        for layer, array in zip(layers, arrays, strict=True):
            names = place.names(layer)
            rows = np.split(place.form.write(array, config.n_head), len(names))
            for name, own in zip(names, rows, strict=True):
                parts.setdefault(name, {})[place.third or 0] = own
    joined = {name: [rows[i] for i in sorted(rows)] for name, rows in parts.items()}
    return {name: x[0] if len(x) == 1 else np.concatenate(x) for name, x in joined.items()}


def sizes_of(
    state_dict: Mapping[str, ArrayLike], family: Family, n_head: int, context: int
) -> tuple[ModelConfig, int]:
    """The settings of the model that has a state dict, and its number of words.

    A state dict does not say the number of heads, nor the longest context where positions have no
    parameters.
    """
    table = TABLES[family]
    up = table["blocks/mlp/up/kernel"]
    any_layer = re.compile(r"\d+".join(map(re.escape, str(up.name).split("{}"))))
    vocab_size, d_model = matrix_shape(state_dict, embedding_name(family))
    d_ff, _ = matrix_shape(state_dict, up.names(0)[0])
    if "wpe/embedding" in table:
        context, _ = matrix_shape(state_dict, table["wpe/embedding"].names(0)[0])
    head = state_dict.get(HEAD)
    tied = head is None or np.array_equal(head, state_dict[embedding_name(family)])
    config = ModelConfig(
        family=family,
        n_layer=sum(any_layer.fullmatch(name) is not None for name in state_dict),
        n_head=n_head,
        d_model=d_model,
        d_ff=d_ff,
        context=context,
        tied=tied,
    )
    return config, vocab_size


def matrix_shape(state_dict: Mapping[str, ArrayLike], name: str) -> tuple[int, int]:
    """The shape of a matrix that every state dict of a family has."""
    if name not in state_dict:
        raise UserError(f"{name} is missing: give all parameters of the model.")
    shape = np.shape(state_dict[name])
    if len(shape) != 2:
        raise UserError(f"{name} has the shape {shape}: give a matrix (out, in).")
    return shape


def embedding_name(family: Family) -> str:
    (name,) = TABLES[family]["wte/embedding"].names(0)
    return name


def abstract(config: ModelConfig, vocab_size: int) -> Any:
    """The tree of a model, with shapes and types instead of arrays."""
    model = nnx.eval_shape(lambda: build(config, vocab_size, nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


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


def is_stacked(path: Any, config: ModelConfig) -> bool:
    return config.scan and path[0].key == "blocks"


def read_array(
    state_dict: Mapping[str, ArrayLike], place: Published, layer: int, n_head: int, dtype: Any
) -> np.ndarray:
    """The array of one layer, as it lies in a tree."""
    with np.errstate(over="ignore"):  # named below
        found = {name: np.asarray(state_dict[name]).astype(dtype) for name in place.names(layer)}
    for name, array in found.items():
        if not np.isfinite(array).all():
            raise UserError(f"{name} has numbers that are not finite in {dtype}: give other ones.")
    rows = np.concatenate(list(found.values()))
    if place.third is not None:
        rows = np.split(rows, 3)[place.third]
    return place.form.read(rows, n_head)


def expected_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's state dict, by name."""
    # Views of one number, so that no memory is taken.
    tree = jax.tree.map(lambda x: np.broadcast_to(0, x.shape), abstract(config, vocab_size))
    return {name: x.shape for name, x in to_state_dict(tree, config).items()}


def check(found: Mapping[str, ArrayLike], config: ModelConfig, vocab_size: int) -> None:
    """Refuses a state dict with other names or shapes than the model's; reads a tied head only."""
    expected = expected_shapes(config, vocab_size)
    model = f"a {config.family} of {config.n_layer} layers"
    if missing := sorted(expected.keys() - found.keys()):
        raise UserError(f"{named(missing)} missing: give all parameters of {model}.")
    more = found.keys() - expected.keys()
    if config.tied and HEAD in more:
        embedding = embedding_name(config.family)
        if not np.array_equal(found[HEAD], found[embedding]):
            raise UserError(
                f"{HEAD} differs from {embedding}, and this model has one matrix for both: leave "
                "the head out, or give a model that is not tied."
            )
        more -= {HEAD}
    if more:
        raise UserError(f"{named(sorted(more))} not in {model}: leave out what it does not have.")
    for name, wanted in expected.items():
        shape = tuple(np.shape(found[name]))
        if shape != wanted:
            raise UserError(
                f"{name} has the shape {shape}, and in {model} with these sizes it has "
                f"{wanted}: give parameters and sizes of one model."
            )


def named(names: list[str], most: int = 3) -> str:
    """The first names, how many there are beyond them, and a verb."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more} {'is' if len(names) == 1 else 'are'}"
