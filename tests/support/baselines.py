"""The baselines built by name, and several steps of them."""

import jax
import numpy as np
import optax

import optax_muonplus as omp

STEPS = 5
# Kernels as Flax stores them, (in, out): W is their transpose.
SHAPES = {"tall": (12, 20), "wide": (20, 12), "square": (16, 16)}
NAMES = (
    "normuon",
    "adamuon",
    "aurora",
    "hyperball",
    "mano",
    "meqmuon",
    "muoneq",
    "muown",
    "namo",
    "radial_brake",
    "turbo_muon",
)
# The others are chains of functions on the momentum of Muon.
WITH_STATE = ("normuon", "adamuon", "hyperball", "mano", "muown")


def build(name, rate=0.05, **options):
    return getattr(omp.baselines, name)(rate, **options)


def decay(name, weight_decay):
    """The option, but for Hyperball, which has no decay."""
    return {} if name == "hyperball" else {"weight_decay": weight_decay}


def trees(seed=0, shapes=SHAPES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    params = {k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()}
    grads = [{k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()} for _ in range(STEPS)]
    return params, grads


def run(tx, params, grads):
    """Parameters after each step."""
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen, state
