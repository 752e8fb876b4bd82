"""A function of many arrays of one shape, in a program that contains the function once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def map_in_place(
    function: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """``function`` of each array, in a loop that needs no memory but for the results.

    A stack of the arrays, as ``jax.lax.map`` wants, would be a second copy of the model; and a
    program with the function written out for each array would compile as many times as long. The
    loop is differentiable.

    XLA gives the memory of the last outputs of a program to the first results of a loop. Callers
    therefore pass the arrays in reverse order: the loop and the updates made from its results then
    share memory. In the other order they take a second copy.

    Args:
      function: shape-preserving.
      arrays: of one shape and dtype.
    """
    if len(arrays) == 1:
        return [function(arrays[0])]
    # What the function closes over (a traced eps) may be differentiated too.
    closed, closed_over = jax.closure_convert(function, arrays[0])
    return _loop(closed, list(arrays), closed_over)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _loop(
    function: Callable[..., jax.Array], arrays: list[jax.Array], closed_over: list[jax.Array]
) -> list[jax.Array]:
    def body(i: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        y = function(pick(i, arrays), *closed_over)
        return [_replace_if(i == k, old, y) for k, old in enumerate(results)]

    return jax.lax.fori_loop(0, len(arrays), body, [jnp.zeros_like(x) for x in arrays])


@_loop.defjvp
def _derivative(function: Callable[..., jax.Array], primals: Any, tangents: Any) -> Any:
    """Differentiating the loop would keep all results of every turn; written out it does not."""

    def written_out(arrays: list[jax.Array], closed_over: list[jax.Array]) -> list[jax.Array]:
        return [function(x, *closed_over) for x in arrays]

    return jax.jvp(written_out, primals, tangents)


def pick(i: jax.Array, trees: Sequence[Tree]) -> Tree:
    """``trees[i]`` for a traced ``i``, without stacking them: a stack would copy all of them."""
    return jax.lax.switch(i, [functools.partial(lambda tree: tree, tree) for tree in trees])


@jax.jit  # so that it is traced once
def _replace_if(condition: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """``new`` if ``condition``, else ``old``, in the memory of ``old``.

    A ``while`` loop of no turns or one: it compiles in half the time of ``jax.lax.cond``.
    """
    once = (condition, old)
    return jax.lax.while_loop(lambda state: state[0], lambda state: (False, new), once)[1]
