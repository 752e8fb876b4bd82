"""What MeqMuon has in place of AdamW, against a float64 transcription of the paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus.baselines import NormalizedMomentum, meqmuon
from tests.support import reference_baselines
from tests.support.baselines import assert_sharded_is_alone, run, trees

# Tables by both layouts, vectors, and scales of three layers; "up" is a matrix. A slash in a name
# is one in a path.
SHAPES = {
    "wte/embedding": (16, 6),
    "head/kernel": (6, 16),
    "up/kernel": (6, 8),
    "up/bias": (8,),
    "norm/scale": (3, 6),
    "gain": (),
}


def case():
    params, grads = trees(shapes=SHAPES)
    for g in grads:
        g["wte/embedding"][3] = 0  # of a word that is not read
        g["wte/embedding"][5] *= np.float32(1e-9)
    return params, grads


def as_in_the_paper(path, x):
    """Tables as (vocabulary, hidden), and one vector for each layer."""
    if path == "head/kernel":
        return [x.T.astype(float)]
    if path == "norm/scale":
        return list(x.astype(float))
    return [np.atleast_1d(x).astype(float)]


def as_stored(path, parts):
    if path == "norm/scale":
        return np.stack(parts)
    return parts[0].T.reshape(SHAPES[path]) if path == "head/kernel" else parts[0]


def expected(params, grads, **options):
    last = {}
    for path, x in params.items():
        parts = as_in_the_paper(path, x)
        totals = [np.zeros_like(w) for w in parts]
        for g in grads:
            given = as_in_the_paper(path, g[path])
            for i, (w, total, part) in enumerate(zip(parts, totals, given, strict=True)):
                step, totals[i] = reference_baselines.normalized_momentum_step(
                    w, total, part, **options
                )
                parts[i] = w + step
        last[path] = as_stored(path, parts).reshape(SHAPES[path])
    return last


@pytest.mark.parametrize(
    ("others", "options"),
    [
        (NormalizedMomentum(), {"weight_decay": 0.1}),
        (
            NormalizedMomentum(lambda count: 0.3, 0.0, beta=0.5, rms=1.0),
            {"learning_rate": 0.3, "beta": 0.5, "rms": 1.0},
        ),
    ],
    ids=["the matrices' rate and decay", "its own"],
)
def test_parameters_match_the_paper(others, options):
    params, grads = case()
    seen, _ = run(meqmuon(0.05, weight_decay=0.1, others=others), params, grads)
    wanted = expected(params, grads, **{"learning_rate": 0.05, **options})
    for path, found in seen[-1].items():
        if path != "up/kernel":
            moved = np.linalg.norm(wanted[path] - params[path])
            assert np.linalg.norm(found - wanted[path]) <= 1e-5 * moved, path
            assert moved > 0


def test_state_is_one_buffer_for_each_parameter():
    params, _ = case()
    state = meqmuon(0.05).init(params)
    sizes = sum(x.size for x in jax.tree.leaves(state))
    assert sizes == sum(x.size for x in jax.tree.leaves(params))
    omp.transforms.find_momentum(state)  # that of the matrices, of which there is one


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_widened_for_sums(dtype):
    """The squares of 300 are beyond float16."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), case()[0])
    grads = jax.tree.map(lambda x: jnp.full_like(x, 300), params)
    tx = meqmuon(1.0)
    updates, _ = tx.update(grads, tx.init(params), params)
    for path, x in updates.items():
        if path != "up/kernel":
            assert x.dtype == dtype
            np.testing.assert_allclose(np.float32(x), -0.2, rtol=1e-2)


@pytest.mark.several_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_get_the_update_of_one_device(kind):
    cut = {1: P("tensor"), 2: P("fsdp", "tensor")}
    specs = {path: cut.get(len(shape), P()) for path, shape in SHAPES.items()}
    specs["norm/scale"] = P()
    assert_sharded_is_alone(functools.partial(meqmuon, 0.05), *case(), specs, kind)


def test_injected_numbers_may_be_complex_and_updates_of_real_parameters_are_real():
    params = {"up/kernel": jnp.ones((4, 6), jnp.complex64), "bias": jnp.ones(6)}
    tx = optax.inject_hyperparams(meqmuon)(0.1)
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"rms": 0.0}, "rms must be a positive, finite number, got 0.0"),
        ({"learning_rate": "fast"}, "learning_rate must be a finite number, not negative"),
        ({"weight_decay": "none"}, "weight_decay must be a finite number, not negative"),
    ],
)
def test_invalid_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        NormalizedMomentum(**options)
