"""Checks of parameters, gradients and states, which name the leaves that are wrong."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.frame.leaves import LeafInfo, Path, flatten_with_names, listed, path_name
from optax_muonplus.method import supported

# Updates that nothing may follow, by their ids.
_LAST: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def mark_as_last(update: Any) -> None:
    """Lets every optimizer refuse ``update``, made by a link that comes last, as a gradient."""
    _LAST[id(update)] = update


def check_only_matrices(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless all ``leaves`` are matrices."""
    others = [leaf.name for leaf in leaves if leaf.layout is None]
    if others:
        raise ValueError(
            f"Not matrices: {', '.join(others)}. This transformation is for matrices only: leave"
            " the others to AdamW with optax_muonplus.muonplus, or with optax.partition and"
            " optax_muonplus.partition_labels; or give these leaves dimension numbers."
        )


def check_inexact(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError for leaves that are not floating-point of 16 bits at least."""
    check_inexact_dtypes([leaf.path for leaf in leaves], [leaf.dtype for leaf in leaves])


def check_inexact_dtypes(paths: Sequence[Path], dtypes: Sequence[Any]) -> None:
    """Raises ValueError for leaves that are not floating-point of 16 bits at least, naming them."""
    wrong = [
        f"{'/'.join(path)} ({dtype})"
        for path, dtype in zip(paths, dtypes, strict=True)
        if not supported(dtype)
    ]
    if wrong:
        raise ValueError(
            f"Parameters must be floating-point, got {', '.join(wrong)}. Keep counters, keys and"
            " what is stored in 8 bits out of the parameters, or freeze them with optax.masked or"
            " optax.partition."
        )


def check_gradients(gradients: Any, like: Any, what: str = "parameter") -> None:
    """Raises ValueError, naming the leaves, unless gradients are those of ``like``.

    A gradient has its parameter's shape: NumPy's broadcasting would stretch a (1, 6) to (4, 6)
    without a word. It is floating-point, and complex if and only if the parameter is; a momentum
    buffer may be complex where the gradient is not, since ``mu_dtype`` says so. Leaves are matched
    by their paths, and those that are in one of the trees only are left to Optax.
    """
    if _LAST and any(_LAST.get(id(x)) is x for x in jax.tree.leaves(gradients)):
        raise ValueError(
            "qk_clip stands before the optimizer, which takes its updates for gradients. It scales"
            " what parameters become, so that it comes last: optax.chain(optimizer, qk_clip(...))."
        )
    like = gradients if like is None else like
    if jax.tree.structure(gradients) == jax.tree.structure(like):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True)
        if not any(_misfit(x, other, what) for x, other in pairs):
            return  # only a message needs names
    known = dict(zip(*flatten_with_names(like), strict=True))
    named = zip(*flatten_with_names(gradients), strict=True)
    misfits = [(path_name(path), _misfit(x, known.get(path, x), what)) for path, x in named]
    wrong = [f"{name} is {misfit}" for name, misfit in misfits if misfit]
    if wrong:
        raise ValueError(
            f"Gradients do not fit: {'; '.join(wrong)}. Each must have its parameter's shape, and"
            " be complex where that is. Call update(gradients, state, parameters) with gradients as"
            " jax.grad returns them, and leave out what is not trained."
        )


def _misfit(x: Any, other: Any, what: str) -> str:
    """Says why ``x`` is no gradient of ``other``; nothing if it is one."""
    dtype, is_complex = jnp.result_type(x), jnp.iscomplexobj(x)
    if not supported(dtype):
        return f"{dtype}, not floating-point of 16 bits at least"
    if np.shape(x) != np.shape(other):
        return f"{np.shape(x)}, its {what} {np.shape(other)}"
    if is_complex != jnp.iscomplexobj(other) and (is_complex or what == "parameter"):
        return f"{dtype}, its {what} {jnp.result_type(other)}"
    return ""


def beside_updates(updates: Any, params: Any) -> Any:
    """Puts None into ``params`` where ``updates`` are None, as for the static parts of a model.

    Equinox's own examples pass a whole model, some leaves of which are functions.
    """
    is_none = lambda x: x is None  # noqa: E731
    if params is None or not any(map(is_none, jax.tree.leaves(updates, is_leaf=is_none))):
        return params
    return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)


_GRADIENTS = (
    " Call update(gradients, state, parameters) with gradients as jax.grad returns them. What is"
    " not trained is left out of all three, or frozen with optax.masked."
)
_STATE = " Make it for these parameters: tx.init(parameters)."
# Classes of wrappers, and of links without arrays, do not tell optimizers apart.
_EVERYWHERE = ("EmptyState", "MaskedState", "PartitionState", "tuple")


@contextlib.contextmanager
def explained(
    state: Any,
    updates: optax.Updates,
    params: optax.Params | None,
    first: Callable[[optax.Params], Any],
) -> Generator[None, None, None]:
    """Lets an error of an update say that the state is of another optimizer or model, if it is.

    Every other error stays as it is, and this one has it as its cause. States are compared after
    an error only, because the one to compare with has to be made, by ``first``:
    ``optax.inject_hyperparams`` makes a transformation anew at every update, whose trace would
    take a tenth longer.
    """
    if params is not None and jax.tree.structure(params) != jax.tree.structure(updates):
        _check_names("Gradients do not fit.", _names(updates), _names(params), _GRADIENTS)
    try:
        yield
    except Exception as error:
        _explain(error, state, updates, params, first)
        raise


def _explain(error: Exception, state: Any, updates: Any, params: Any, first: Any) -> None:
    """Raises ValueError, caused by ``error``, for a state of another optimizer or model."""
    try:
        expected = jax.eval_shape(first, updates if params is None else params)
    except Exception:  # it says nothing of the state, and would hide the error
        return
    if _classes(state) != _classes(expected):
        raise wrong_state(state, _classes(expected)) from error
    owner, remedy = "parameters", _STATE
    if params is None:  # gradients may be the ones that are wrong
        owner, remedy = "gradients", _GRADIENTS + _STATE
    # Counts belong to no parameter: an update that needs one says so itself.
    names = _names(state, least_ndim=1), _names(expected, least_ndim=1)
    _check_names(f"The state does not fit the {owner}.", *names, remedy, error)


def check_structure(state: Any, after: Any) -> None:
    """Raises ValueError for a state of another structure than the one that an update made of it."""
    if jax.tree.structure(after) != jax.tree.structure(state):
        raise wrong_state(state, _classes(after))


def _names(tree: Any, least_ndim: int = 0) -> set[str]:
    """Returns the paths of leaves with so many axes or more."""
    paths_and_leaves = zip(*flatten_with_names(tree), strict=True)
    return {path_name(path) for path, x in paths_and_leaves if getattr(x, "ndim", 0) >= least_ndim}


def _check_names(
    said: str, names: set[str], right: set[str], remedy: str, error: Exception | None = None
) -> None:
    """Raises ValueError if a tree has other leaves than the expected ones."""
    lacking, more = (sorted(x) for x in (right - names, names - right))
    if lacking or more:
        found = f" Missing: {listed((x, None) for x in lacking)}." if lacking else ""
        found += f" Too many: {listed((x, None) for x in more)}." if more else ""
        raise ValueError(f"{said}{found}{remedy}") from error


def wrong_state(state: Any, expected: list[str]) -> ValueError:
    """Makes the error for ``state``, where one of the ``expected`` classes should be."""
    found = _classes(state)
    has, should = _shown(found), _shown(expected)
    both = f"it has {has}, where {should} should be"
    if has == should:
        both = f"its other parts are the same, {has}"
    return ValueError(
        f"Got the state of another optimizer: {_differences(found, expected)} ({both}). To go on"
        " from it in the middle of a run, make it the"
        " state of this one: state, report = optax_muonplus.take_over(state, tx.init(params),"
        " params). To start from the beginning, use tx.init(params)."
    )


def _differences(found: list[str], expected: list[str]) -> str:
    """Says what a state lacks and has besides; of common parts only if nothing else differs."""
    lacking, more = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    telling = [name for name in (*lacking, *more) if not name.startswith(_EVERYWHERE)]
    said = []
    for names, word in ((lacking, "missing"), (more, "too many")):
        if shown := [_word(name) for name in names if not telling or name in telling]:
            said.append(f"{', '.join(shown)} {word}")
    return " and ".join(said) or "its parts have another order"


def _word(name: str) -> str:
    """Writes the class of a state, and the setting that makes it."""
    if name == "MaskedState":
        return "MaskedState, which a mask makes (weight_decay_mask, optax.masked),"
    return name.replace("tuple", "a chain")


def _classes(state: Any) -> list[str]:
    """Returns the names of the classes of states, from the outside to the inside."""
    return list(_walk(state))


def _walk(node: Any) -> Iterator[str]:
    level = jax.tree_util.default_registry.flatten_one_level(node)
    if level is None or isinstance(node, optax.MaskedNode):
        return
    if isinstance(node, tuple):
        yield type(node).__name__ if hasattr(node, "_fields") else f"tuple of {len(node)}"
    for child in level[0]:
        yield from _walk(child)


def _shown(classes: list[str]) -> str:
    names = [name for name in dict.fromkeys(classes) if not name.startswith(_EVERYWHERE)]
    return ", ".join(names) or "no classes of states"
