"""Shapes of the parameters of the paper's models and of a mixture of experts, in Flax's names.

`models/` has the shapes of four models of AlgoPerf, as they are.

Query, key and value are three matrices, where the GPT of the paper's code has one. Each layer of
the mixture has one leaf (experts, in, out) for all kernels of a kind, and a router. Its sizes are
those of DeepSeekMoE 16B's routed experts (arXiv:2401.06066).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

import optax_muonplus as omp

Name = Literal[
    "gpt-256", "gpt-384", "gpt-small", "gpt-base", "gpt-large", "gpt-huge",
    "llama-60m", "llama-130m", "llama-350m", "llama-1b", "llama-7b", "deepseek-moe",
]  # fmt: skip
Model = Literal["resnet-50", "vit-s", "conformer", "wmt"]
MODELS = Path(__file__).parent / "models"


class Size(NamedTuple):
    """Width, depth, width inside an MLP, whether it has LLaMA's third matrix, and how many MLPs."""

    width: int
    layers: int
    feed_forward: int
    gated: bool
    experts: int = 0  # none: one MLP in each layer, without a router


# The paper's table "Architecture configurations" (arXiv 2602.21545), and three others.
SIZES = {
    "gpt-256": Size(256, 12, 4 * 256, False),  # the default of lab.benchmarks.collectives
    "gpt-384": Size(384, 6, 4 * 384, False),  # GPT-Small cut to one second on two CPU cores
    "gpt-small": Size(768, 12, 3072, False),
    "gpt-base": Size(1024, 24, 4096, False),
    "gpt-large": Size(1280, 36, 5120, False),
    "gpt-huge": Size(4096, 32, 16384, False),
    "llama-60m": Size(512, 8, 1376, True),
    "llama-130m": Size(768, 12, 2048, True),
    "llama-350m": Size(1024, 24, 2736, True),
    "llama-1b": Size(2048, 24, 5461, True),
    "llama-7b": Size(4096, 32, 11008, True),
    "deepseek-moe": Size(2048, 24, 1408, True, experts=64),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every command that updates parameters of such shapes."""

    tree: Name = "gpt-384"
    """Shapes of the parameters."""
    layers: int | None = None
    """Number of layers, if not the model's own."""
    width: int | None = None
    """Width, if not the model's own; the feed-forward width is scaled with it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and gradients."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""

    @property
    def size(self) -> Size:
        """The model's size with the depth and width that were asked for."""
        size = SIZES[self.tree]
        width = self.width or size.width
        feed_forward = size.feed_forward * width // size.width
        layers = self.layers or size.layers
        return size._replace(width=width, layers=layers, feed_forward=feed_forward)

    @property
    def changed(self) -> list[str]:
        """Parts of a file's name: the width and depth that are not the model's own."""
        names = ("width", "layers")
        return [f"{name}{value}" for name in names if (value := getattr(self, name))]


def shapes(size: Size, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Makes a tree of shapes, without embedding and head."""

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, dtype)}

    d, f, experts = size.width, size.feed_forward, (size.experts,) if size.experts else ()
    scale = {"scale": jax.ShapeDtypeStruct((d,), dtype)}
    block: dict[str, Any] = {name: kernel(d, d) for name in ("q", "k", "v", "o")}
    block |= {"norm_1": scale, "norm_2": scale}
    mlp = {"up": kernel(*experts, d, f), "down": kernel(*experts, f, d)}
    if size.gated:
        mlp["gate"] = kernel(*experts, d, f)
    block |= {"experts": mlp, "router": kernel(d, size.experts)} if experts else mlp
    return {f"block_{i}": block for i in range(size.layers)} | {"norm_out": scale}


def shapes_of_model(name: Model, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Reads a tree of shapes from its file, which names the source."""
    leaves = json.loads((MODELS / f"{name}.json").read_text())["leaves"]
    shaped = {path: jax.ShapeDtypeStruct(tuple(shape), dtype) for path, shape in leaves.items()}
    return traverse_util.unflatten_dict(shaped, sep="/")


# The argument of `omp.muon_dimension_numbers` for `scanned` trees.
LAYER_AXES = {"^blocks/": 0}


def scanned(tree: dict[str, Any]) -> dict[str, Any]:
    """Joins all blocks of a tree to one, with a leading axis of layers in each leaf."""
    blocks = [name for name in tree if name.startswith("block_")]

    def stack(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = x.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jax.ShapeDtypeStruct((len(blocks), *x.shape), x.dtype, sharding=sharding)

    others = {name: leaf for name, leaf in tree.items() if name not in blocks}
    return {"blocks": jax.tree.map(stack, tree[blocks[0]]), **others}


def dimension_numbers(tree: dict[str, Any]) -> Any:
    """Reads a tree by the default rules; the blocks of a scanned one have an axis of layers."""
    return omp.muon_dimension_numbers(tree, layer_axes=LAYER_AXES if "blocks" in tree else None)


def random_like(tree: Any, seed: int = 0) -> Any:
    """Draws Gaussian arrays in the shapes of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return treedef.unflatten([make(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])
