"""QK-clip: heads whose attention logits grew too large get smaller queries and keys."""

import math
import weakref
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus.extras.heads import FUSED, KEY, QUERY
from optax_muonplus.frame import (
    DimensionNumbersTree,
    ResolvedTree,
    beside_updates,
    check_gradients,
    flatten_tree,
    listed,
)
from optax_muonplus.method import POSITIVE, check_number, check_word, known_count
from optax_muonplus.transforms._attention import QueryKeyLayer, query_key_modules
from optax_muonplus.trees import LayerAxes, Rules, names_to_read, reader_of, resolve

Fused = Literal["blocks", "by_head"]
# What qk_clip has made and is still in use, by its id: an optimizer must not take it for gradients.
_MADE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def qk_clip(
    threshold: ArrayLike = 100.0,
    *,
    head_size: int | None = None,
    fused: Fused | None = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QK-clip of MuonClip: bounds attention logits by scaling queries and keys, head by head.

    Comes last, after the learning rate, and needs the largest logit of each head::

      tx = optax.chain(omp.muonplus(0.02), omp.transforms.qk_clip(100.0))
      updates, state = tx.update(grads, state, params, max_logits={"blocks/0/attn": maxima})

    With S the largest logit of a head over the batch, before the softmax and after the scale, the
    rows of queries and keys of the new parameters, weights and biases, are multiplied by

    .. math::
      \sqrt{\gamma}, \qquad \gamma = \min(1, \tau / S)

    so that S would have been the threshold :math:`\tau`. A head of keys that several heads of
    queries share gets the smallest of their factors. Values are not changed. A head whose S is at
    most the threshold, or not finite, keeps its update to the bit.

    Layers are found by the names by which :func:`optax_muonplus.per_head` finds them: ``query`` and
    ``key``, ``q_proj`` and ``k_proj``, ``wq`` and ``wk``, ``qkv``, ``c_attn``, ... . ``max_logits``
    is a tree with an array (heads,) for each module that has such layers, in the module's place:
    its path begins with the path of the module, as for values that ``sow`` collects. Layers that
    are stacked along an axis have an array (layers, heads). If gradients are sums over
    micro-batches, give the largest logits of all of them.

    Where queries and keys are normalized after their projections (QK-norm), logits do not depend on
    the size of the weights, and the link refuses to work. It has no rule for latent attention
    (MLA), nor for keys and values in one kernel.

    Args:
      threshold: :math:`\tau`; 100 in Kimi K2.
      head_size: outputs of one head, needed for fused kernels only.
      fused: how outputs follow each other in a kernel of queries, keys and values. ``"blocks"``:
        all queries, all keys, all values. ``"by_head"``: the queries of a head of keys, this head,
        its values, and then the next, as in Megatron-LM.
      weight_dimension_numbers: as in :func:`orthogonalize`, as are the next two: the axes that a
        kernel reduces are its inputs.
      rules: for kernels that the default rules would read in another way.
      layer_axes: the axes along which layers are stacked.

    Returns:
      A transformation without state.

    Raises:
      ValueError: unless the threshold is positive; at init, if no module has queries and keys, if
        one has keys that cannot be told from values, if it has QK-norm, or for fused kernels
        without ``head_size`` and ``fused``; at an update without parameters or ``max_logits``, for
        maxima that are not of the modules and their heads, and by an optimizer of this library that
        gets the updates of this as gradients.

    Source: Kimi Team, arXiv:2507.20534, section 2.1. The paper has latent attention, where no head
    shares keys; Megatron-LM gives all queries of shared keys the factor of the keys.
    """
    check_number("threshold", threshold, POSITIVE)
    if fused is not None:
        check_word("fused", fused, get_args(Fused))
    size = None if head_size is None else known_count("head_size", head_size, 2**31 - 1)
    dims = reader_of(weight_dimension_numbers, rules, layer_axes)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        _modules(resolve(params, dims), size, fused)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, *, max_logits: Any = None, **_: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None or max_logits is None:
            raise ValueError(
                "qk_clip scales parameters by the largest attention logits of their heads: call"
                " update(gradients, state, parameters, max_logits={'path/of/attention': maxima})."
            )
        check_gradients(updates, params)
        tree = resolve(updates, dims)
        modules = _modules(tree, size, fused)
        new, own = list(tree.arrays), jax.tree.leaves(beside_updates(updates, params))
        for module, maxima in _by_module(max_logits, modules).items():
            factors = _head_factors(modules[module], maxima, threshold, size, fused)
            for layer, of_heads in zip(modules[module], factors, strict=True):
                i = layer.leaf.index
                new[i] = _scaled(new[i], own[i], _per_output(layer, of_heads))
                _MADE[id(new[i])] = new[i]
        return tree.unflatten(new), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def not_clipped(updates: optax.Updates) -> optax.Updates:
    """Returns gradients; raises ValueError for those that are updates of :func:`qk_clip`."""
    if any(_MADE.get(id(x)) is x for x in jax.tree.leaves(updates)):
        raise ValueError(
            "qk_clip stands before the optimizer, which takes its updates for gradients. It scales"
            " what parameters become, so that it comes last: optax.chain(optimizer, qk_clip(...))."
        )
    return updates


def _modules(
    tree: ResolvedTree, size: int | None, fused: Fused | None
) -> dict[str, list[QueryKeyLayer]]:
    """Returns the layers of each module; fused ones need ``size`` and ``fused``."""
    modules = query_key_modules(tree)
    if None in (size, fused) and any(x.side == FUSED for xs in modules.values() for x in xs):
        raise ValueError(
            "Fused queries, keys and values do not say where their heads lie. Give"
            " qk_clip(head_size=..., fused='blocks') for all queries, then all keys, then all"
            " values, or fused='by_head' where they take turns."
        )
    return modules


def _by_module(max_logits: Any, modules: dict[str, list[QueryKeyLayer]]) -> dict[str, jax.Array]:
    """Returns the maxima of each module: the one with the longest path that theirs begins with."""
    paths, arrays, _ = flatten_tree(max_logits)
    found, unknown = {}, []
    for name, maxima in zip(names_to_read(paths), arrays, strict=True):
        fitting = [m for m in modules if f"{name}/".startswith(f"{m}/" if m else "")]
        if fitting and (module := max(fitting, key=len)) not in found and jnp.ndim(maxima):
            found[module] = jnp.asarray(maxima)
        else:
            unknown.append(f"{name} {list(jnp.shape(maxima))}")
    if unknown or len(found) < len(modules):
        raise ValueError(
            "max_logits must have one array (*layers, heads) for each attention module, at its"
            f" path. Modules: {listed((module, None) for module in modules)}. Without maxima:"
            f" {listed((m, None) for m in modules if m not in found) or 'none'}. Maxima of no"
            f" module, or more than one for a module: {', '.join(unknown) or 'none'}."
        )
    return found


def _head_factors(
    layers: list[QueryKeyLayer],
    maxima: jax.Array,
    threshold: ArrayLike,
    size: int | None,
    fused: Fused | None,
) -> list[jax.Array]:
    """Returns for each layer the factor of each of its heads, (*layers, heads of the layer)."""
    stack, heads = maxima.shape[:-1], maxima.shape[-1]
    beyond = jnp.isfinite(maxima) & (maxima > threshold)
    queries = jnp.sqrt(jnp.where(beyond, threshold / maxima, 1.0))
    size = size or next(x.outputs(stack) // heads for x in layers if x.side == QUERY)
    found = []
    for layer in layers:
        n = layer.outputs(stack) // max(size, 1)
        shared = {QUERY: heads, KEY: n, FUSED: (n - heads) // 2}[layer.side]
        expected = {QUERY: heads, KEY: n, FUSED: heads + 2 * shared}[layer.side]
        if n * size != layer.outputs(stack) or n != expected or shared < 1 or heads % shared:
            raise ValueError(
                f"{layer.leaf.name} of shape {layer.leaf.shape} does not have the heads of its"
                f" max_logits of shape {maxima.shape}: {heads} heads of queries, with {size}"
                " outputs each. Give (*layers, heads of queries), and qk_clip(head_size=...)."
            )
        grouped = queries.reshape(*stack, shared, heads // shared)
        keys = grouped.min(axis=-1, keepdims=True)
        if layer.side == FUSED:
            order = [grouped, keys, jnp.ones_like(keys)]
            if fused == "blocks":
                order = [x.reshape(*stack, 1, -1) for x in order]
            found.append(jnp.concatenate(order, axis=-1).reshape(*stack, n))
        else:
            found.append(queries if layer.side == QUERY else keys[..., 0])
    return found


def _per_output(layer: QueryKeyLayer, factors: jax.Array) -> jax.Array:
    """Returns factors of heads in the places of their outputs, to multiply the leaf."""
    shape = layer.leaf.shape
    free = [1 if axis in layer.inputs else n for axis, n in enumerate(shape)]
    size = math.prod(free) // factors.size
    return jnp.repeat(factors, size, axis=-1).reshape(free)


def _scaled(update: jax.Array, parameter: Any, factor: jax.Array) -> jax.Array:
    """Returns the update after which the parameter is ``factor`` times what it would have been."""
    wide = jnp.promote_types(jnp.result_type(update, parameter), jnp.float32)
    u, p, f = (jnp.asarray(x, wide) for x in (update, parameter, factor))
    f = f * jnp.ones_like(u)  # on a mesh with explicit axes it then lies where the update does
    return jnp.where(f < 1, f * u + (f - 1) * p, u).astype(jnp.result_type(update))
