"""An actor and a critic on a pole and cart, in plain JAX: `python -m examples.actor_critic`.

The outputs of actor and critic are kernels of two axes as all others are, but they are heads, and
get AdamW. The critic's has one row, of which a normalization would leave the signs alone. The
default rules know the last numbered layer of a network that is called actor, critic, policy, value
or Q, and `describe` shows which it is.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_muonplus as omp

ENVIRONMENTS, STEPS, DISCOUNT, TRACE = 64, 32, 0.99, 0.95
# Inputs are few, and a kernel of few inputs would have steps that are several times Muon's.
OPTIONS: dict[str, Any] = {
    "learning_rate": 0.01,
    "adam_learning_rate": 3e-3,
    "match_frobenius": True,
}


def network(key, sizes):
    """Returns kernels (in, out) and biases, with outputs that are small at first."""
    layers = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        scale = fan_in**-0.5 * (0.01 if i == len(sizes) - 2 else 1)
        kernel = scale * jax.random.normal(jax.random.fold_in(key, i), (fan_in, fan_out))
        layers[f"layer_{i}"] = {"kernel": kernel, "bias": jnp.zeros(fan_out)}
    return layers


def apply(layers, x):
    """Returns the outputs of a network, with tanh between its layers."""
    *hidden, last = layers.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def pole_and_cart(state, action):
    """Returns the next state of each pole, and whether it has fallen (Barto et al., 1983)."""
    x, speed, angle, turn = state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * turn**2 * jnp.sin(angle)) / 1.1
    drag = 0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    bend = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / drag
    pull = push - 0.05 * bend * jnp.cos(angle) / 1.1
    new = jnp.stack(
        [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend]
    )
    return new.T, (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.21)


def start(key):
    """Returns states near the upright one."""
    return jax.random.uniform(key, (ENVIRONMENTS, 4), minval=-0.05, maxval=0.05)


def roll_out(actor, state, key):
    """Returns the state after some steps, and what was seen, done and fallen in each of them."""

    def step(state, key):
        of_action, of_start = jax.random.split(key)
        action = jax.random.categorical(of_action, apply(actor, state))
        new, fallen = pole_and_cart(state, action)
        new = jnp.where(fallen[:, None], start(of_start), new)
        return new, (state, action, fallen)

    return jax.lax.scan(step, state, jax.random.split(key, STEPS))


def advantages(values, last, fallen):
    """Returns generalized advantages; each step on which a pole does not fall is worth one."""

    def back(later, now):
        advantage, following = later
        value, is_over = now
        goes_on = 1.0 - is_over
        error = goes_on * (1 + DISCOUNT * following) - value
        advantage = error + DISCOUNT * TRACE * goes_on * advantage
        return (advantage, value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last), last), (values, fallen), reverse=True)[1]


def loss(params, seen, state):
    """Returns the loss of actor and critic together."""
    states, actions, fallen = seen
    values, last = apply(params["critic"], states)[..., 0], apply(params["critic"], state)[..., 0]
    gained = advantages(*jax.lax.stop_gradient((values, last)), fallen)
    returns = gained + jax.lax.stop_gradient(values)
    gained = (gained - gained.mean()) / (gained.std() + 1e-8)
    log_p = jax.nn.log_softmax(apply(params["actor"], states))
    chosen = jnp.take_along_axis(log_p, actions[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1).mean()
    return jnp.mean((values - returns) ** 2) - jnp.mean(chosen * gained) - 0.01 * entropy


def train(tx, params, iterations=200):
    """Yields after each iteration how many steps there were for each pole that fell."""
    key = jax.random.key(1)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def iterate(params, opt_state, state, key):
        state, seen = roll_out(params["actor"], state, key)
        grads = jax.grad(loss)(params, seen, state)
        updates, opt_state = tx.update(grads, opt_state, params)
        length = seen[2].size / jnp.maximum(seen[2].sum(), 1)
        return optax.apply_updates(params, updates), opt_state, state, length

    opt_state, state = tx.init(params), start(jax.random.key(2))
    for i in range(iterations):
        carried = params, opt_state, state, jax.random.fold_in(key, i)
        params, opt_state, state, length = iterate(*carried)
        yield float(length)


def main():
    """Shows who gets what, and trains."""
    actor, critic = jax.random.split(jax.random.key(0))
    params = {"actor": network(actor, (4, 64, 64, 2)), "critic": network(critic, (4, 64, 64, 1))}
    print(omp.describe(params, **OPTIONS))
    # A clip is for AdamW's group: Muon+ does not see how large a gradient is.
    tx = optax.chain(optax.clip_by_global_norm(1.0), omp.muonplus(**OPTIONS))
    for i, length in enumerate(train(tx, params)):
        if i % 40 == 39:
            print(f"iteration {i + 1:3}: a pole falls every {length:5.0f} steps")


if __name__ == "__main__":
    main()
