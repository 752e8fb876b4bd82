"""A small language model whose optimizer changes in the middle of its training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_muonplus as omp

VOCABULARY, WIDTH, BEFORE, AFTER, RATE = 64, 16, 150, 40, 3e-3
LOGITS = 3 * jax.random.normal(jax.random.key(9), (VOCABULARY, VOCABULARY))


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embedding": (VOCABULARY, WIDTH), "up": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    params = zip(keys, shapes.items(), strict=True)
    return {n: jax.random.normal(k, s) / 4 for k, (n, s) in params} | {"bias": jnp.zeros(WIDTH)}


def loss_fn(params, key):
    """Returns the loss of the next of 32 tokens, which leave out half of the vocabulary."""
    tokens = jax.random.randint(key, (32,), 0, VOCABULARY)
    targets = jax.random.categorical(jax.random.fold_in(key, 1), LOGITS[tokens])
    x = params["embedding"][tokens]
    x = x + jnp.tanh(x @ params["up"] + params["bias"][None, :])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets).mean()


def run(tx, params, state, steps):
    def step(carry, i):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, jax.random.fold_in(jax.random.key(1), i))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    scan = jax.jit(lambda *carry: jax.lax.scan(step, carry, jnp.arange(*steps)))
    (params, state), losses = scan(params, state)
    return params, state, np.asarray(losses)


def pair(rate, **options):
    """Returns Optax's Muon and ours with the same update."""
    options = {"adam_learning_rate": RATE, **options}
    as_optax = {"shape_scale": "max", "bias_correction": True}
    as_optax["adam_nesterov"] = options.get("nesterov", False)
    return optax.contrib.muon(rate, **options), omp.muon(rate, **as_optax, **options)


@pytest.mark.parametrize(("nesterov", "back"), [(True, False), (False, True)])
def test_optax_muon_and_ours_continue_each_other(nesterov, back):
    """The unbroken run is that of the old optimizer."""
    dims = jax.tree.map(lambda x: omp.MuonDimensionNumbers() if x.ndim == 2 else None, parameters())
    rate = optax.linear_schedule(0.1, 0.01, 12)
    options = {"muon_weight_dimension_numbers": dims, "weight_decay": 0.1, "nesterov": nesterov}
    old, new = pair(rate, **options)[:: -1 if back else 1]
    params, old_state, _ = run(old, parameters(), old.init(parameters()), (0, 6))
    state, report = omp.take_over(old_state, new.init(params), params)
    assert not report.started_anew and not report.not_used
    actual, expected = (
        run(*x, (6, 12))[0] for x in ((new, params, state), (old, params, old_state))
    )
    for name, before in params.items():
        atol = 1e-4 * np.abs(expected[name] - before).max()
        np.testing.assert_allclose(actual[name], expected[name], atol=atol, rtol=0)


def test_the_loss_goes_on_from_optax_muon_although_parameters_change_their_group():
    """Embedding and head become AdamW's, and its group starts anew.

    Their momentum, if it were kept, would be divided by epsilon for tokens that are not in the
    batch, whatever the count: this is why the group starts anew.
    """
    old, new = pair(0.01, nesterov=True)
    params, old_state, before = run(old, parameters(), old.init(parameters()), (0, BEFORE))
    go_on = functools.partial(run, params=params, steps=(BEFORE, BEFORE + AFTER))
    state, _ = omp.take_over(old_state, new.init(params), params)
    assert np.mean(go_on(new, state=state)[2] - go_on(old, state=old_state)[2]) < 0.1

    adamw = optax.tree.get(state, "ScaleByAdamState")
    momentum = optax.tree.get(old_state, "MuonState").mu
    kept = {**adamw.mu, "embedding": momentum["embedding"], "head": momentum["head"]}
    for count in (0, BEFORE):
        carried = adamw._replace(count=jnp.asarray(count), mu=kept)
        losses = go_on(new, state=optax.tree.set(state, ScaleByAdamState=carried))[2]
        assert losses.max() > 1000 * before[-1]
