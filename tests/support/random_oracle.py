"""The float64 oracle on a random case: every matrix of every parameter by itself, in NumPy."""

import numpy as np

from tests.support import reference, reference_baselines

# Options of the library that the oracle has another name for, or none.
NAMES = {"ns_coeffs": "table", "ns_steps": "steps"}
OTHER = ("polar", "compute_dtype")


def updates(case, params, grads, noise=0.0):
    """Updates at each step, by path.

    Parameters are held still, gradients have one leading axis for the steps, and ``noise`` is the
    size of random changes of the gradients, relative to them.
    """
    rng = np.random.default_rng([*case.seed, 2])
    found = {}
    for leaf in case.leaves:
        w, g = wide(params[leaf.path]), wide(grads[leaf.path])
        if leaf.out_axes:
            parts = zip(
                matrices(leaf, w), zip(*(matrices(leaf, x) for x in g), strict=True), strict=True
            )
            by_matrix = [
                _of_matrix(case, one, _changed(np.stack(steps), noise, rng)) for one, steps in parts
            ]
            found[leaf.path] = np.stack([joined(leaf, x) for x in zip(*by_matrix, strict=True)])
        else:
            changed = g * (1 + noise * rng.normal(size=g.shape))
            found[leaf.path] = _adamw(case.options, w, changed)
    return found


def wide(x):
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _changed(grads, noise, rng):
    """Changed by matrices of noise, of a size relative to each whole matrix."""
    size = np.sqrt(np.mean(np.abs(grads) ** 2, axis=(1, 2), keepdims=True))
    return grads + noise * size * rng.normal(size=grads.shape)


def _order(leaf):
    """Axes of batches, rows and columns, in the order of matrices."""
    sides = (*leaf.out_axes, *leaf.in_axes)
    return (*(i for i in range(len(leaf.shape)) if i not in sides), *sides)


def matrices(leaf, x):
    """``(out, in)`` matrices of a parameter, block after block, in the order of batch indices."""
    found = []
    for block in _blocks(leaf, x):
        sizes = [np.prod([block.shape[i] for i in axes]) for axes in (leaf.out_axes, leaf.in_axes)]
        found += list(block.transpose(_order(leaf)).reshape(-1, *map(int, sizes)))
    return found


def joined(leaf, found):
    """Puts matrices back into their leaf, as :func:`matrices` took them out."""
    order, blocks, found = _order(leaf), [], list(found)
    for block in _blocks(leaf, np.empty(leaf.shape)):
        count = block.size // found[0].size
        shape = [block.shape[i] for i in order]
        blocks.append(np.stack(found[:count]).reshape(shape).transpose(np.argsort(order)))
        del found[:count]
    return np.concatenate(blocks, axis=getattr(leaf.rule, "split_axis", None) or 0)


def _blocks(leaf, x):
    sizes = getattr(leaf.rule, "split_sizes", None)
    return np.split(x, np.cumsum(sizes)[:-1], axis=leaf.rule.split_axis) if sizes else [x]


def _of_matrix(case, w, grads):
    """The updates of one matrix, step by step."""
    given = case.options
    options = {k: x for k, x in given.items() if not k.startswith("adam_") and k not in OTHER}
    zeros = np.zeros_like(w)
    states = {"normuon": (zeros, 0.0), "mano": (zeros, 0), "adamuon": (zeros, zeros)}
    state, results = states.get(case.optimizer, zeros), []
    if case.optimizer == "muonplus":
        options = {NAMES.get(k, k): x for k, x in options.items()}
        if given["polar"] == "svd":
            options["table"] = "svd"
        elif not isinstance(given["ns_coeffs"], str):
            options["table"] = [given["ns_coeffs"]] * given["ns_steps"]
    for t, g in enumerate(grads):
        if case.optimizer == "muonplus":
            update, state = reference.muonplus_step(w, state, g, t + 1, **options)
        else:
            step = getattr(reference_baselines, f"{case.optimizer}_step")
            update, state = step(w, state, g, **options)
        results.append(update)
    return results


def _adamw(options, w, grads):
    names = ("b1", "b2", "eps", "eps_root", "nesterov", "weight_decay", "learning_rate")
    own = {name: options[f"adam_{name}"] for name in names}
    if own["learning_rate"] is None:
        own["learning_rate"] = options["learning_rate"]
    m = v = np.zeros_like(w)
    results = []
    for t, g in enumerate(grads):
        update, m, v = reference.adamw_step(w, m, v, g, t + 1, **own)
        results.append(update)
    return np.stack(results)
