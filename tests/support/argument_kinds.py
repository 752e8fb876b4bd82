"""Every argument of every optimizer and link, by its kind, and values that are not of that kind."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np

import optax_muonplus as omp

NAN = float("nan")
# Functions with hyperparameters, and what they cannot do without.
OPTIMIZERS = {
    "muonplus": omp.muonplus,
    "muon": omp.muon,
    "optimizer": functools.partial(omp.optimizer, omp.contrib.NorMuon()),
    "hyperball": omp.contrib.hyperball,
}
RULES = ("NorMuon", "AdaMuon", "Mano", "Aurora", "Balance")
FACTORIES = {
    **{name: functools.partial(make, learning_rate=0.1) for name, make in OPTIMIZERS.items()},
    **{name: getattr(omp.contrib, name) for name in RULES},
    "scale_by_muonplus": omp.scale_by_muonplus,
    "momentum": omp.momentum,
    "orthogonalize": omp.orthogonalize,
    "normalize": omp.normalize,
    "scale_by_shape": omp.scale_by_shape,
}
KINDS = {
    "rate": ("learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay"),
    "decay": ("beta", "beta2", "adam_b1", "adam_b2"),
    "not negative": ("eps", "norm_eps", "nu_eps", "adam_eps_root"),
    "positive": ("consistent_rms", "damping"),
    "flag": (
        "match_frobenius",
        "nesterov",
        "bias_correction",
        "adaptive",
        "cautious_weight_decay",
        "adam_nesterov",
        "sign",
    ),
    "count": ("rounds",),
    "count or None": ("ns_steps",),
    "word": (
        "ns_coeffs",
        "norm",
        "shape_scale",
        "polar",
        "preconditioning",
        "side",
        "sides",
    ),
    "dtype": ("mu_dtype", "compute_dtype"),
    "value": (
        "rule",
        "others",
        "momentum",
        "polar_factor",
        "run",
        "where",
        "fields",
    ),
    "tree": (
        "weight_decay_mask",
        "muon_weight_dimension_numbers",
        "weight_dimension_numbers",
        "sharding",
        "state_sharding",
        "rules",
        "layer_axes",
    ),
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}

NO_NUMBER = [
    "0.5", (0.5,), [0.5], True, np.True_, object(), NAN, np.float32(NAN), jnp.float32(NAN),
    np.array(NAN), float("inf"), np.float64(-np.inf), jnp.full(2, 0.5), np.full(1, 0.5), 0.5j,
    jnp.array(True),
]  # fmt: skip


def forms(*numbers):
    """Each number as Python, NumPy and JAX have it, alone and as an array without axes."""
    makers = (float, np.float32, np.float64, np.array, jnp.float32, jnp.bfloat16)
    return [make(number) for number in numbers for make in makers]


NO_COUNT = [True, False, 0, -1, 101, 1000, 2.0, "5", np.float32(5), jnp.ones(2, int)]

# None is not here, because some arguments take it for "not given".
REFUSED = {
    "rate": [*NO_NUMBER, *forms(-0.25)],
    "decay": [*NO_NUMBER, *forms(1.0, -0.25, 2.0), lambda step: 0.9],
    "not negative": [*NO_NUMBER, *forms(-0.25), lambda step: 0.5],
    "positive": [*NO_NUMBER, *forms(0.0, -0.25), lambda step: 0.5],
    "flag": ["no", "False", None, 2, 0.0, np.array([True, False]), jnp.array(True)],
    "count": [*NO_COUNT, None],
    "count or None": NO_COUNT,
    "word": ["no such word", None, 5],
    "dtype": ["int32", "bool", "uint8", "float33", "float8_e4m3fn", 5, int, bool, "U4"],
}


WITH_RATES = ("muonplus", "optimizer", "hyperball")


def cases():
    """``(factory's name, argument, kind)`` of every argument that has a kind but a tree."""
    for factory, make in FACTORIES.items():
        for name in inspect.signature(make).parameters:
            if name != "learning_rate" or factory in WITH_RATES:
                is_word = name == "rule" and factory in RULES
                yield factory, name, "word" if is_word else KIND_OF[name]
