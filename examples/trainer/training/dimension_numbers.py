"""Which axes make the parameters of the models matrices."""

import re
from collections.abc import Callable
from typing import Any

import jax
import optax

import optax_muonplus as omp
from examples.trainer.models.adapters import A
from examples.trainer.settings.run import OptimizerConfig

# The rule for kernels of blocks under --model.scan, [layer, in, out]: each layer is a matrix. So
# are the adapters of LoRA.
STACKED = ("(^|/)blocks/[a-z]+/[a-z]+/(kernel|lora_[ab])$", omp.MuonDimensionNumbers(1, 2), 3)


def of(config: OptimizerConfig, head_size: int | None) -> Callable[[optax.Params], Any]:
    """The function that says how the parameters are matrices: whole kernels, or heads."""
    if not config.per_head:
        return whole_kernels if config.lora_matrices == "both" else without_a

    def heads(params: optax.Params) -> Any:
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        if not any("attn" in jax.tree_util.keystr(path) for path in paths):
            return whole_kernels(params)  # of a part that another rule updates than attention
        return omp.per_head(head_size, rules=rules_for(params))(params)

    return heads


def without_a(params: optax.Params) -> Any:
    """The same as `whole_kernels`, but that A of LoRA's adapters is no matrix."""

    def of_leaf(path: Any, _: Any, numbers: Any) -> Any:
        return None if is_a(path) else numbers

    numbers = whole_kernels(params)
    if not any(is_a(path) for path, _ in jax.tree.leaves_with_path(params)):
        return numbers
    return jax.tree.map_with_path(of_leaf, params, numbers)


def is_a(path: Any) -> bool:
    return jax.tree_util.keystr(path[-1:], simple=True) == A


def whole_kernels(params: optax.Params) -> Any:
    """The axes that make each parameter a matrix; None for parameters that get AdamW."""
    return omp.muon_dimension_numbers(params, rules=rules_for(params))


def rules_for(params: optax.Params) -> list[Any]:
    """The rule for stacked blocks, if there are any.

    The default rules of the library do not guess the meaning of three axes.
    """
    leaves = jax.tree.leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return [STACKED] if any(re.search(STACKED[0], name) for name in names) else []
