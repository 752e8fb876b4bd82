"""Sixty mistakes that people make at their first try, and what is said to each.

No mistake is answered by a raw error of JAX, and none is silent: each row is refused with a
sentence that has the remedy, or is named by `describe`. Mistakes in reading parameters, such as
rules and layer axes, are in tests/parameters.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import baselines, transforms
from optax_muonplus.polar import Orthogonalize

PARAMS = {"up": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}}
TWO_EPS = omp.matrix_chain(omp.normalize(), baselines.Balance())
INTEGERS = jnp.arange(12).reshape(3, 4)
ATTENTION = {"attn": {name: {"kernel": jnp.ones((6, 8))} for name in ("query", "key")}}


def updated(tx, grads=PARAMS, params=PARAMS, **extra):
    return tx.update(grads, tx.init(params), params, **extra)


def with_state_of(tx, other):
    return tx.update(PARAMS, other.init(PARAMS), PARAMS)


def clipped_first():
    tx = optax.chain(transforms.qk_clip(), omp.muonplus(0.1))
    return updated(tx, ATTENTION, ATTENTION, max_logits={"attn": jnp.ones(2)})


# A call, and what its error says.
MISTAKES = {
    # Names of other libraries
    "lr": (lambda: omp.muonplus(lr=0.1), "it is called learning_rate here"),
    "momentum": (lambda: omp.muonplus(0.1, momentum=0.9), "it is called beta here"),
    "mu": (lambda: omp.muonplus(0.1, mu=0.9), "it is called beta here"),
    "betas": (lambda: omp.muonplus(0.1, betas=(0.9, 0.95)), "adam_b1=0.9, adam_b2=0.95"),
    "adamw_betas": (lambda: omp.muonplus(0.1, adamw_betas=(0.9, 0.9)), "adam_b1=0.9, adam_b2="),
    "b1": (lambda: omp.muonplus(0.1, b1=0.9), "it is called adam_b1 here"),
    "norm_mode": (lambda: omp.muonplus(0.1, norm_mode="row"), "it is called norm here"),
    "rms_rate": (lambda: omp.muonplus(0.1, rms_rate=0.2), "it is called consistent_rms here"),
    "adjust_lr_fn": (lambda: omp.muonplus(0.1, adjust_lr_fn="original"), "shape_scale='max' is"),
    "scale_mode": (lambda: omp.muonplus(0.1, scale_mode="spectral"), "consistent_rms=1.0"),
    "coefficients": (lambda: omp.muonplus(0.1, coefficient_type="simple"), "ns_coeffs takes"),
    "num_heads": (lambda: omp.muonplus(0.1, num_heads=4), "omp.per_head(head_size)"),
    "exclude": (lambda: omp.muonplus(0.1, exclude_layers=["x"]), "rules=[(pattern, None)]"),
    "clipnorm": (lambda: omp.muonplus(0.1, clipnorm=1.0), "optax.clip_by_global_norm"),
    "muon_beta2": (lambda: omp.muonplus(0.1, muon_beta2=0.9), "normuon(rate, beta2=0.95)"),
    "beta2 of a rule without": (lambda: baselines.muown(0.1, beta2=0.9), "it is called adam_b2"),
    "an option of another rule": (
        lambda: baselines.normuon(0.1, baselines.AdaMuon(), rule="paper"),
        "no argument rule with AdaMuon, Momentum, Orthogonalize, AdamW: none of them has it",
    ),
    "an option of two values": (
        lambda: omp.optimizer(TWO_EPS, 1, norm_eps=1),
        "in Normalize and in Balance: give it to one of them, as in Normalize(norm_eps=...)",
    ),
    "norm of a rival": (lambda: baselines.turbo_muon(0.1, norm="row"), "it has learning_rate"),
    "a decay for Hyperball": (
        lambda: omp.optimizer(baselines.Hyperball(0.1), 0.1, weight_decay=0.1),
        "The rule ends with Hyperball, which has a learning rate of its own and no weight decay",
    ),
    "a mask for Muown": (
        lambda: omp.optimizer(baselines.Muown(), 0.1, weight_decay_mask={"up": True}),
        "no mask of its decay. Leave weight_decay_mask out",
    ),
    "a maker as rule": (lambda: omp.optimizer(omp.scale_by_muonplus, 0.1), "has to be called"),
    "a rate as rule": (lambda: omp.optimizer(0.1, omp.scale_by_muonplus()), "which is no link"),
    "a misspelt name": (lambda: omp.muonplus(0.1, nestrov=True), "Did you mean 'nesterov'?"),
    "positions of adamw": (lambda: omp.muonplus(3e-3, 0.9, 0.95), "adam_b1=0.9, adam_b2=0.95"),
    "describe's names": (lambda: omp.describe(PARAMS, lr=0.1), "it is called learning_rate here"),
    "a name of the package": (lambda: omp.MuonPlus, "Did you mean 'muonplus'?"),
    # Words and numbers
    "norm": (lambda: omp.muonplus(0.1, norm="colrow"), "Did you mean 'col_row'?"),
    "bf16": (lambda: omp.muonplus(0.1, compute_dtype="bf16"), "Did you mean 'bfloat16'?"),
    "a table's name": (lambda: omp.muonplus(0.1, "polarexpress"), "Did you mean 'polar_express'?"),
    "a flag as a word": (lambda: omp.muonplus(0.1, nesterov="no"), "must be True or False"),
    "momentum 1": (lambda: omp.muonplus(0.1, beta=1.0), "beta must be in [0, 1)"),
    "percent": (lambda: omp.muonplus(0.1, beta=95), "beta must be in [0, 1)"),
    "steps as float": (lambda: omp.muonplus(0.1, ns_steps=5.0), "ns_steps must be an integer"),
    "no steps": (lambda: omp.muonplus(0.1, ns_steps=0), "ns_steps must be an integer of at least"),
    "rows for eight steps": (
        lambda: omp.muonplus(0.1, omp.coefficients.polar_express(8)),
        "Pass ns_steps=8, or 5 rows, as polar_express(5)",
    ),
    "a table too short": (lambda: omp.muonplus(0.1, "turbo"), "Pass ns_steps=4 or fewer"),
    "rows that diverge": (lambda: omp.muonplus(0.1, (9.0, 9.0, 9.0)), "Pass coefficients that"),
    "rate as word": (lambda: omp.muonplus("0.02"), "learning_rate must be a finite number"),
    "negative rate": (lambda: omp.muonplus(-0.02), "learning_rate must be a finite number, not"),
    "negative decay": (lambda: omp.muonplus(0.1, weight_decay=-0.1), "not negative"),
    "NaN": (lambda: omp.muonplus(float("nan")), "must be a finite number"),
    "decay 20": (lambda: omp.muonplus(0.1, weight_decay=20), "would turn the sign of every"),
    # Schedules
    "two arguments": (lambda: omp.muonplus(lambda step, loss: 0.1), "A schedule takes the number"),
    "None": (lambda: omp.muonplus(lambda step: None), "a schedule that returns None"),
    "a factory": (lambda: omp.muonplus(optax.cosine_decay_schedule), "is called first, as in"),
    "a small factory": (lambda: omp.muonplus(optax.constant_schedule), "is called first, as in"),
    "of beta": (lambda: omp.muonplus(0.1, beta=lambda step: 0.9), "optax.inject_hyperparams makes"),
    # Parts and chains
    "a part as link": (
        lambda: baselines.muoneq(0.1, baselines.Balance("col")),
        "Pass link=scale_by_muoneq(balance=Balance(...))",
    ),
    "an optimizer as link": (
        lambda: baselines.hyperball(0.1, omp.muonplus(0.1)),
        "such as omp.scale_by_muonplus()",
    ),
    "Optax's as link": (
        lambda: baselines.hyperball(0.1, optax.adam(0.1)).init(PARAMS),
        "such as optax.scale_by_adam()",
    ),
    "a class as link": (lambda: baselines.normuon(0.1, baselines.NorMuon), "link=NorMuon()"),
    "decay as link": (lambda: baselines.normuon(0.1, 0.1), "Numbers are passed by their names"),
    "two momenta": (lambda: omp.matrix_chain(omp.momentum(), omp.scale_by_muonplus()), "Leave one"),
    "a rate within": (
        lambda: omp.matrix_chain(transforms.scale_by_learning_rate(0.1), omp.orthogonalize()),
        "A chain ends with its rate",
    ),
    "a list of links": (lambda: omp.matrix_chain([omp.momentum()]), "matrix_chain(*links)"),
    "qk_clip first": (clipped_first, "optax.chain(optimizer, qk_clip(...))"),
    "optax.chain as chain": (
        lambda: transforms.partition_with_adamw(optax.chain(omp.momentum())),
        "optax_muonplus.matrix_chain(...) in place of optax.chain",
    ),
    # Arrays
    "integers": (lambda: omp.polar.newton_schulz(INTEGERS), "Pass x.astype(jnp.float32)"),
    "a vector": (lambda: omp.matrices.normalize_matrix(jnp.ones(3)), "reshape a kernel"),
    "a list": (lambda: Orthogonalize()([[1.0, 2.0]]), "Pass jnp.asarray(x, jnp.float32)"),
    "counts among parameters": (lambda: omp.muonplus(0.1).init({"n": INTEGERS}), "got n (int32)"),
    # Updates
    "no gradients of one": (
        lambda: updated(omp.muonplus(0.1), {"up": {"kernel": jnp.ones((4, 6))}}),
        "Gradients do not fit. Missing: up/bias",
    ),
    "gradients turned": (
        lambda: updated(omp.muonplus(0.1), {"up": {**PARAMS["up"], "kernel": jnp.ones((6, 4))}}),
        "up/kernel is (6, 4), its parameter (4, 6)",
    ),
    "decay without parameters": (
        lambda: omp.muonplus(0.1, weight_decay=0.1).update(
            PARAMS, omp.muonplus(0.1, weight_decay=0.1).init(PARAMS)
        ),
        "call update(gradients, state, parameters)",
    ),
    "AdamW's state": (lambda: with_state_of(omp.muonplus(0.1), optax.adamw(0.1)), "take_over"),
    "a mask of words": (
        lambda: omp.muonplus(0.1, weight_decay=0.1, weight_decay_mask=["bias"]),
        "lambda params: jax.tree.map(",
    ),
    "a flag that is traced": (
        lambda: jax.eval_shape(lambda x: omp.muonplus(0.1, nesterov=x) and 0, jnp.array(True)),
        "static_args=('nesterov',)",
    ),
    "no injected rate": (
        lambda: omp.learning_rate(omp.muonplus(0.1).init(PARAMS)),
        "optax.inject_hyperparams(omp.muonplus)(learning_rate=...)",
    ),
}  # fmt: skip
# Arguments that are taken, and what `describe` says of them.
SAID = {
    "no rate for AdamW": ({"learning_rate": 0.02}, "adam_learning_rate is not given"),
    "half a schedule": (
        {"learning_rate": lambda step: 0.02, "adam_learning_rate": 0.003},
        "stays constant beside a schedule",
    ),
    "two scales": ({"consistent_rms": 0.2, "shape_scale": "max"}, "without effect: shape_scale"),
    "steps of an SVD": ({"polar": "svd", "ns_steps": 7}, "without effect: ns_steps"),
    "a mask without decay": ({"weight_decay_mask": lambda x: x}, "without effect: weight_decay_m"),
}


def test_there_are_sixty():
    assert len(MISTAKES) + len(SAID) >= 60


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_a_remedy(name):
    """By this library: the last frames are its own, and none is of JAX or NumPy."""
    call, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, AttributeError), match=re.escape(message)) as found:
        call()
    assert "optax_muonplus" in str(found.traceback[-1].path)


@pytest.mark.parametrize("name", SAID)
def test_a_mistake_that_is_taken_is_said_by_describe(name):
    arguments, line = SAID[name]
    assert line in omp.describe(PARAMS, **arguments)


def test_none_is_a_branch_without_leaves_as_in_jax():
    """A frozen part: no error, and no parameter."""
    tx = omp.muonplus(0.1)
    updates, _ = tx.update((PARAMS, None), tx.init((PARAMS, None)), (PARAMS, None))
    assert updates[1] is None
    np.testing.assert_array_equal(updates[0]["up"]["kernel"], updated(tx)[0]["up"]["kernel"])
