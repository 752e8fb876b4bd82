"""Which parameters are trained: all, those that `--train-only` finds, or the adapters of LoRA.

The part that is trained is the tree with `optax.MaskedNode` in the place of frozen parameters.
Gradients and the state of the optimizer are trees of that part: what is frozen has none.
"""

from typing import Any

import jax
import optax

from examples.trainer.models.adapters import A, B
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.patterns import search

HOLE = optax.MaskedNode()


def of(params: Any, config: OptimizerConfig) -> Any:
    """The part of a tree that is trained; raises `UserError` if `--train-only` finds nothing."""
    leaves, tree = jax.tree.flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    adapters = {name for name in names if name.rpartition("/")[2] in (A, B)}
    if not (config.train_only or adapters):
        return params
    trained = adapters
    if config.train_only:
        trained = adapters.union(search(config.train_only, names, "--train-only", "parameter"))
    kept = [x if name in trained else HOLE for name, (_, x) in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(tree, kept)


def joined(params: Any, part: Any) -> Any:
    """The whole tree, with the trained part in the place of its own."""
    return jax.tree.map(
        lambda new, old: old if is_hole(new) else new, part, params, is_leaf=is_hole
    )


def is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def completed(given: Any, made: Any) -> Any:
    """`made`, with the arrays that the smaller tree `given` has."""
    known = dict(jax.tree.leaves_with_path(given))
    return jax.tree.map_with_path(lambda path, x: known.get(path, x), made)
