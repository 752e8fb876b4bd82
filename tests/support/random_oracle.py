"""The float64 oracle on a random case: every matrix of every parameter by itself, in NumPy."""

import numpy as np

from tests.support import reference, reference_baselines

# Options of the library that the oracle has another name for, or none.
NAMES = {"ns_coeffs": "table", "ns_steps": "steps"}
OTHER = ("polar", "compute_dtype")


def updates(case, params, grads, noise=0.0):
    """Updates at each step, by path.

    Args:
      case: see ``random_cases``.
      params: by path, held still.
      grads: by path, with one leading axis for the steps.
      noise: random changes of the gradients, of this size relative to them.
    """
    rng = np.random.default_rng([*case.seed, 2])
    return {
        leaf.path: _of_leaf(case, leaf, wide(params[leaf.path]), wide(grads[leaf.path]), noise, rng)
        for leaf in case.leaves
    }


def wide(x):
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _of_leaf(case, leaf, params, grads, noise, rng):
    if not leaf.out_axes:
        changed = grads * (1 + noise * rng.normal(size=grads.shape))
        return _adamw(case.options, params, changed)
    parts = matrices(leaf, params)
    by_step = zip(*(matrices(leaf, g) for g in grads), strict=True)
    results = [
        _of_matrix(case, w, _changed(np.stack(g), noise, rng))
        for w, g in zip(parts, by_step, strict=True)
    ]
    return np.stack([joined(leaf, list(step)) for step in zip(*results, strict=True)])


def _changed(grads, noise, rng):
    """Changed by matrices of noise, of a size relative to each whole matrix."""
    size = np.sqrt(np.mean(np.abs(grads) ** 2, axis=(1, 2), keepdims=True))
    return grads + noise * size * rng.normal(size=grads.shape)


def matrices(leaf, x):
    """``(out, in)`` matrices of a parameter, block after block, in the order of batch indices."""
    order = (*batch_axes(leaf), *leaf.out_axes, *leaf.in_axes)
    found = []
    for block in _blocks(leaf, x):
        sizes = [np.prod([block.shape[i] for i in axes]) for axes in (leaf.out_axes, leaf.in_axes)]
        found += list(block.transpose(order).reshape(-1, *map(int, sizes)))
    return found


def joined(leaf, found):
    """Puts matrices back into their leaf, as :func:`matrices` took them out."""
    order = (*batch_axes(leaf), *leaf.out_axes, *leaf.in_axes)
    blocks = []
    for block in _blocks(leaf, np.empty(leaf.shape)):
        count = int(np.prod([block.shape[i] for i in batch_axes(leaf)]))
        stack, found = np.stack(found[:count]), found[count:]
        shape = [block.shape[i] for i in order]
        blocks.append(stack.reshape(shape).transpose(np.argsort(order)))
    return np.concatenate(blocks, axis=leaf.fused[0]) if leaf.fused else blocks[0]


def batch_axes(leaf):
    return tuple(i for i in range(len(leaf.shape)) if i not in (*leaf.out_axes, *leaf.in_axes))


def _blocks(leaf, x):
    if leaf.fused is None:
        return [x]
    axis, sizes = leaf.fused
    return np.split(x, np.cumsum(sizes)[:-1], axis=axis)


def _of_matrix(case, w, grads):
    """The updates of one matrix, step by step."""
    given = case.options
    options = {k: x for k, x in given.items() if not k.startswith("adam_") and k not in OTHER}
    zeros = np.zeros_like(w)
    if case.optimizer == "muonplus":
        options = {NAMES.get(k, k): x for k, x in options.items()}
        if given["polar"] == "svd":
            options["table"] = "svd"
        elif not isinstance(given["ns_coeffs"], str):
            options["table"] = [given["ns_coeffs"]] * given["ns_steps"]
        state, results = zeros, []
        for t, g in enumerate(grads):
            update, state = reference.muonplus_step(w, state, g, t + 1, **options)
            results.append(update)
        return results
    step = getattr(reference_baselines, f"{case.optimizer}_step")
    state = {"normuon": (zeros, 0.0), "mano": (zeros, 0), "adamuon": (zeros, zeros)}.get(
        case.optimizer, zeros
    )
    results = []
    for g in grads:
        update, state = step(w, state, g, **options)
        results.append(update)
    return results


def _adamw(options, w, grads):
    names = ("b1", "b2", "eps", "eps_root", "nesterov", "weight_decay")
    own = {name: options[f"adam_{name}"] for name in names}
    rate = options["adam_learning_rate"]
    rate = options["learning_rate"] if rate is None else rate
    m = v = np.zeros_like(w)
    results = []
    for t, g in enumerate(grads):
        update, m, v = reference.adamw_step(w, m, v, g, t + 1, learning_rate=rate, **own)
        results.append(update)
    return np.stack(results)
