"""QK-clip: scales down queries and keys of heads with too large attention logits."""

import collections
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_muonplus as omp
from optax_muonplus.matrices import POSITIVE, check_number, check_word, known_count
from optax_muonplus.transforms import LeafInfo, attention_layer, flatten_tree

Fused = Literal["blocks", "by_head"]
_NORM = r"((q|k|qk|query|key)_?(ln|((layer|rms)_?)?norm)|norm_?(q|k|query|key))(/|$)"
QUERY, FUSED, KEY = "query", "query, key, value", "key"  # what a layer computes


class QueryKeyLayer(NamedTuple):
    """A kernel or bias of queries, keys or both, and its input axes."""

    side: str
    leaf: LeafInfo
    inputs: tuple[int, ...]

    def outputs(self, layers: tuple[int, ...]) -> int:
        """Returns the number of outputs of one layer; ``layers`` is the shape of the stack."""
        free = tuple(n for axis, n in enumerate(self.leaf.shape) if axis not in self.inputs)
        if free[: len(layers)] != layers:
            raise ValueError(
                f"{self.leaf.name} has the shape {self.leaf.shape}, and its max_logits have"
                f" {layers} layers. Give an array (*layers, heads), one layer after the other."
            )
        return math.prod(free[len(layers) :])


def qk_clip(
    threshold: ArrayLike = 100.0,
    *,
    head_size: int | None = None,
    fused: Fused | None = None,
    where: omp.Matrices | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QK-clip of MuonClip: bounds attention logits by scaling queries and keys, head by head.

    Put it last, after the learning rate. Before an optimizer it would receive gradients and clip
    nothing, without an error. It needs the largest logit of each head::

      tx = optax.chain(omp.muonplus(0.02), omp.contrib.qk_clip(100.0))
      updates, state = tx.update(grads, state, params, max_logits={"blocks/0/attn": maxima})

    With S the largest logit of a head over the batch, before the softmax and after the scale, the
    rows of queries and keys of the new parameters, weights and biases, are multiplied by

    .. math::
      \sqrt{\gamma}, \qquad \gamma = \min(1, \tau / S)

    which makes S the threshold :math:`\tau`. If several heads of queries share a head of keys,
    its factor is the smallest of theirs. Values are not changed. If S is at most the threshold, or
    not finite, the update of the head stays the same to the bit.

    Layers are found by the same names as in :func:`optax_muonplus.per_head`: ``query`` and ``key``,
    ``q_proj`` and ``k_proj``, ``wq`` and ``wk``, ``qkv``, ``c_attn``, ... . ``max_logits`` is a
    tree with an array (heads,), or (layers, heads) for stacked layers, for each module with such
    layers. The path of the array begins with the path of the module, as for values that ``sow``
    collects. If gradients are sums over micro-batches, give the largest logits of all of them.

    If queries and keys are normalized after their projections (QK-norm), logits do not depend on
    the size of the weights, and init raises an error. Latent attention (MLA), and keys and values
    in one kernel, are not supported.

    Args:
      threshold: :math:`\tau`; 100 in Kimi K2.
      head_size: outputs of one head of queries; needed for fused kernels, and if heads of values
        have another size.
      fused: the order of outputs in a kernel of queries, keys and values. ``"blocks"``: all
        queries, all keys, all values. ``"by_head"``, as in Megatron-LM: for each head of keys its
        queries, keys and values.
      where: which parameters are matrices; a kernel's reduction axes are its inputs.

    Returns:
      A transformation without state.

    Raises:
      ValueError: for a threshold that is not positive. At init, if no module has queries and keys,
        for keys and values in one kernel, for QK-norm, and for fused kernels without ``head_size``
        and ``fused``. At init also if the outputs of queries and the inputs of the output
        projection differ in number, as with gates in the same kernel. At an update, without
        parameters or ``max_logits``, and for maxima that do not fit the modules and their heads.

    Source: Kimi Team, arXiv:2507.20534, section 2.1, for latent attention without shared keys.
    Megatron-LM gives all queries of shared keys the factor of the keys.
    """
    check_number("threshold", threshold, POSITIVE)
    if fused is not None:
        check_word("fused", fused, get_args(Fused))
    size = None if head_size is None else known_count("head_size", head_size)
    read = (where or omp.Matrices()).read

    def init_fn(params: optax.Params) -> optax.EmptyState:
        _modules(read(params).leaves, size, fused)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, *, max_logits: Any = None, **_: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None or max_logits is None:
            raise ValueError(
                "qk_clip scales parameters by the largest attention logits of their heads: call"
                " update(gradients, state, parameters, max_logits={'path/of/attention': maxima})."
            )
        tree = read(updates)
        modules = _modules(tree.leaves, size, fused)
        new, own = list(tree.arrays), read(params).arrays
        for module, maxima in _by_module(max_logits, modules).items():
            factors = _head_factors(modules[module], maxima, threshold, size, fused)
            for layer, of_heads in zip(modules[module], factors, strict=True):
                i = layer.leaf.index
                new[i] = _scale_outputs(new[i], own[i], _per_output(layer, of_heads))
        return tree.unflatten(new), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _modules(
    leaves: Sequence[LeafInfo], size: int | None, fused: Fused | None
) -> dict[str, list[QueryKeyLayer]]:
    modules = query_key_modules(leaves)
    if size is None:
        _check_outputs(modules, leaves)
    if None in (size, fused) and any(x.side == FUSED for xs in modules.values() for x in xs):
        raise ValueError(
            "The order of heads in fused queries, keys and values is not known. Give"
            " qk_clip(head_size=..., fused='blocks') for all queries, then all keys, then all"
            " values, or fused='by_head' where they take turns."
        )
    return modules


def _check_outputs(modules: dict[str, list[QueryKeyLayer]], leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless queries have as many outputs as the output projection inputs."""
    for leaf in leaves:
        module, outputs = attention_layer(_name(leaf.path)) or ("", "")
        for x in modules.get(module, []) if outputs == "output" and leaf.layout else []:
            read = [n for axis, n in enumerate(leaf.shape) if axis not in leaf.matrix.output_axes]
            made = [n for axis, n in enumerate(x.leaf.shape) if axis not in x.inputs]
            if x.side == QUERY and x.inputs and math.prod(read) != math.prod(made):
                raise ValueError(
                    f"{x.leaf.name} of shape {x.leaf.shape} has more or fewer outputs than"
                    f" {leaf.name} of shape {leaf.shape} has inputs. Gates beside queries would be"
                    " scaled too: give them a layer of their own. If heads of queries and values"
                    " differ in size, pass qk_clip(head_size=...)."
                )


def _by_module(max_logits: Any, modules: dict[str, list[QueryKeyLayer]]) -> dict[str, jax.Array]:
    """Returns the maxima of each module; the longest matching path of a module decides."""
    paths, arrays, _ = flatten_tree(max_logits)
    found, unknown = {}, []
    for name, maxima in zip(map(_name, paths), arrays, strict=True):
        fitting = [m for m in modules if f"{name}/".startswith(f"{m}/" if m else "")]
        if fitting and (module := max(fitting, key=len)) not in found and jnp.ndim(maxima):
            found[module] = jnp.asarray(maxima)
        else:
            unknown.append(f"{name} {list(jnp.shape(maxima))}")
    if unknown or len(found) < len(modules):
        raise ValueError(
            "max_logits must have one array (*layers, heads) for each attention module, at its"
            f" path. Modules: {', '.join(modules)}. Without maxima:"
            f" {', '.join(m for m in modules if m not in found) or 'none'}. Maxima of no"
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
    """Returns the factors of the heads of each layer, (*layers, heads of the layer)."""
    maxima = maxima.astype(jnp.promote_types(maxima.dtype, jnp.float32))
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
        in_groups = queries.reshape(*stack, shared, heads // shared)
        keys = in_groups.min(axis=-1, keepdims=True)
        if layer.side == FUSED:
            order = [in_groups, keys, jnp.ones_like(keys)]
            if fused == "blocks":
                order = [x.reshape(*stack, 1, -1) for x in order]
            found.append(jnp.concatenate(order, axis=-1).reshape(*stack, n))
        else:
            found.append(queries if layer.side == QUERY else keys[..., 0])
    return found


def _per_output(layer: QueryKeyLayer, factors: jax.Array) -> jax.Array:
    """Repeats the factors of heads for their outputs, in a shape that broadcasts to the leaf."""
    free = [1 if axis in layer.inputs else n for axis, n in enumerate(layer.leaf.shape)]
    return jnp.repeat(factors, math.prod(free) // factors.size, axis=-1).reshape(free)


def _scale_outputs(update: jax.Array, parameter: Any, factor: jax.Array) -> jax.Array:
    """Returns the update that scales the new parameter by ``factor``."""
    wide = jnp.promote_types(jnp.result_type(update, parameter), jnp.float32)
    u, p, f = (jnp.asarray(x, wide) for x in (update, parameter, factor))
    f = f * jnp.ones_like(u)  # with the update's sharding on Explicit axes
    return jnp.where(f < 1, f * u + (f - 1) * p, u).astype(jnp.result_type(update))


def query_key_modules(leaves: Sequence[LeafInfo]) -> dict[str, list[QueryKeyLayer]]:
    """Returns the layers with queries and keys, by the path of their module."""
    names = [_name(leaf.path) for leaf in leaves]
    found: dict[str, list[QueryKeyLayer]] = collections.defaultdict(list)
    for name, leaf in zip(names, leaves, strict=True):
        kernel = re.sub(r"/(bias|b)$", "", re.sub(r"_bias$", "_weight", name))
        module, outputs = attention_layer(kernel) or ("", "")
        side = outputs.removeprefix("latent ")
        if side not in (QUERY, FUSED, KEY):
            continue
        if kernel == name and leaf.layout is None:
            raise ValueError(f"{leaf.name} is not a matrix ({leaf.rule}). Give a rule for it.")
        inputs = leaf.matrix.reduction_axes if kernel == name else ()
        found[module].append(QueryKeyLayer(side, leaf, inputs))
    modules = {m: x for m, x in found.items() if {layer.side for layer in x} != {KEY}}
    _check_modules(modules, names)
    return modules


def _name(path: Iterable[str]) -> str:
    """Joins a path by slashes, also where flattened models of PyTorch have dots."""
    return "/".join(path).replace(".", "/")


def _check_modules(modules: dict[str, list[QueryKeyLayer]], names: list[str]) -> None:
    """Raises ValueError for modules that are not supported, and if there are none."""
    shown = ", ".join(names)
    if not modules:
        raise ValueError(
            "No module has layers with the names of queries and keys (query and key, q_proj and"
            f" k_proj, wq and wk, qkv, c_attn, ...). The paths are: {shown}."
        )
    alone = [
        module
        for module, layers in modules.items()
        if {x.side for x in layers} == {QUERY}
        or any("latent" in (attention_layer(_name(x.leaf.path)) or ("", ""))[1] for x in layers)
    ]
    if alone:
        raise ValueError(
            f"{', '.join(alone)}: queries without a layer of keys alone, by their names. There is"
            " no rule for keys and values in one kernel, or for latent attention. The paths are:"
            f" {shown}."
        )
    prefixes = tuple(f"{module}/" if module else "" for module in modules)
    norms = [x for x in names if x.startswith(prefixes) and re.search(f"(^|/){_NORM}", x)]
    if norms:
        raise ValueError(
            f"{', '.join(norms)}: norms of queries and keys undo a scaling of weights, and bound"
            " the logits already. Leave qk_clip out."
        )
