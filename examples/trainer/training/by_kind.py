"""Rules that treat attention and MLP differently, to find out which matrices matter."""

import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

Rule = Callable[..., optax.GradientTransformation]
INTO_MLP = re.compile("(^|/)mlp/(up|gate)/kernel$")


def normalized(rule: Rule, which: Literal["attention", "mlp"]) -> Rule:
    """Returns muonplus on some matrices, and Muon on the others; `rule` is muonplus."""
    names = {"attention": "/attn/", "mlp": "/mlp/"}

    def labels(params: optax.Params) -> Any:
        return by_path(lambda path: names[which] in f"/{path}", params)

    def made(*args: Any, **options: Any) -> optax.GradientTransformation:
        muon = functools.partial(rule, norm="none", match_frobenius=False)
        return optax.partition(
            {True: rule(*args, **options), False: muon(*args, **options)}, labels
        )

    return made


def into_mlp(updates: optax.Updates) -> Any:
    """Returns whether each leaf is the kernel of a layer into an MLP."""
    return by_path(lambda path: bool(INTO_MLP.search(path)), updates)


def by_path(function: Callable[[str], bool], tree: Any) -> Any:
    """Returns the tree with the function of its paths."""

    def of(path: Any, _: Any) -> bool:
        return function(jax.tree_util.keystr(path, simple=True, separator="/"))

    return jax.tree_util.tree_map_with_path(of, tree)
