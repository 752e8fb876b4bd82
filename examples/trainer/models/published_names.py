"""Where each parameter of the paper's code lies in the trees of the models here.

Names and layouts are those of state dicts of K1seki221/MuonPlus @8a9ace1: PyTorch's (out, in), and
for GPT one matrix of queries, keys and values, in this order, each with its heads one after the
other. `examples.trainer.models.state_dict` reads these tables.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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
