"""The loss of a small language model whose optimizer changes in the middle of its training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import optax_muonplus as omp

VOCABULARY, WIDTH, BEFORE, AFTER, RATE = 64, 16, 150, 40, 3e-3
LOGITS = 3 * jax.random.normal(jax.random.key(9), (VOCABULARY, VOCABULARY))


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embedding": (VOCABULARY, WIDTH), "up": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    params = zip(keys, shapes.items(), strict=True)
    return {n: jax.random.normal(k, s) / 4 for k, (n, s) in params} | {"bias": jnp.zeros(WIDTH)}


def loss_fn(params, key):
    """Of the next of 32 tokens, which leave out half of the vocabulary."""
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


def matching(maker, **options):
    """Of one rate for each group, and updates of Optax's Muon."""
    return maker(0.01, adam_learning_rate=RATE, **options)


def ours():
    return matching(omp.muon, shape_scale="max", bias_correction=True)


def test_the_loss_goes_on_from_optax_muon_although_parameters_change_their_group():
    """Embedding and head become AdamW's, and its group starts anew.

    What of them is kept, their momentum, would be divided by epsilon for tokens that are not in the
    batch, whatever the count: this is why the group starts anew.
    """
    old, new = matching(optax.contrib.muon), ours()
    params, old_state, before = run(old, parameters(), old.init(parameters()), (0, BEFORE))
    _, _, unbroken = run(old, params, old_state, (BEFORE, BEFORE + AFTER))
    state, _ = omp.take_over(old_state, new.init(params), params)
    go_on = functools.partial(run, new, params, steps=(BEFORE, BEFORE + AFTER))
    assert np.mean(go_on(state)[2] - unbroken) < 0.1

    adamw = optax.tree.get(state, "ScaleByAdamState")
    momentum = optax.tree.get(old_state, "MuonState").mu
    kept = {**adamw.mu, "embedding": momentum["embedding"], "head": momentum["head"]}
    for count in (0, BEFORE):
        carried = adamw._replace(count=jnp.asarray(count), mu=kept)
        losses = go_on(optax.tree.set(state, ScaleByAdamState=carried))[2]
        assert losses.max() > 1000 * before[-1]
