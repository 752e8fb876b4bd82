"""Tables of AlgoPerf's workloads: `python -m examples.submissions.algoperf.workloads`.

`trees/` has path and shape of each parameter, made by `jax.eval_shape` from the benchmark's public
models with its own versions of JAX and Flax; `{0..3}` in a path stands for each of these numbers.
The command writes `tables.md`.
"""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import optax_muonplus as omp

FOLDER = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in (FOLDER / "trees").glob("*.json"))

# The layer whose outputs are the model's, as `is_output_params` of the workload says. It says
# "Dense_17" for ogbg, which that tree does not have, and the other two have tied embeddings.
OUTPUT_LAYERS = {
    "criteo1tb": "Dense_7",
    "fastmri": "Conv_0",
    "imagenet_resnet": "Dense_0",
    "imagenet_vit": "head",
    "librispeech_conformer": "Dense_0",
    "librispeech_deepspeech": "Dense_0",
}


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Returns path and shape of each parameter of a workload."""
    folded = json.loads((FOLDER / "trees" / f"{name}.json").read_text())
    return {path: tuple(shape) for key, shape in folded.items() for path in _expanded(key)}


def _expanded(key: str) -> list[str]:
    """Returns the paths that `{0..3}` and `{0,2}` in a key stand for."""
    parts: list[list[str]] = []
    for part in re.split(r"(\{[^}]*\})", key):
        numbers = part.strip("{}").partition("..")
        if numbers[1]:
            parts.append([str(i) for i in range(int(numbers[0]), int(numbers[2]) + 1)])
        else:
            parts.append(part.strip("{}").split(",") if part.startswith("{") else [part])
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree of dicts of `{path: value}`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def tree(known: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the parameters of these paths and shapes, without numbers."""
    return nested({path: jax.ShapeDtypeStruct(x, jnp.float32) for path, x in known.items()})


def rules(name: str) -> list[tuple[str, None]]:
    """Returns what a workload's author would say: which is the output layer."""
    layer = OUTPUT_LAYERS.get(name)
    return [] if layer is None else [(f"^{layer}/kernel$", None)]


def tables() -> str:
    """Returns a page with the table of each workload."""
    page = ["# What each parameter of AlgoPerf's workloads gets", ""]
    page += ["`python -m examples.submissions.algoperf.workloads` writes this page.", ""]
    for name in NAMES:
        known = shapes(name)
        count = sum(map(math.prod, known.values()))
        table = omp.describe(
            tree(known), rules=rules(name), shape_scale="max", match_frobenius=True
        )
        page += [
            f"## {name}: {count / 1e6:.1f} million parameters",
            "",
            "```text",
            table,
            "```",
            "",
        ]
    return "\n".join(page)


if __name__ == "__main__":
    (FOLDER / "tables.md").write_text(tables())
