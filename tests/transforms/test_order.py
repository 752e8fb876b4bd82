"""Chains whose links undo each other, and parts of a rule in the place of the whole."""

import re

import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.baselines import (
    AdaMuon,
    Aurora,
    Balance,
    Hyperball,
    Mano,
    NorMuon,
    adamuon,
    aurora,
    hyperball,
    mano,
    muoneq,
    normuon,
    scale_by_muon,
    scale_by_muoneq,
    turbo_muon,
)
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import (
    AdamW,
    Momentum,
    add_decayed_weights,
    partition_with_adamw,
    scale_by_learning_rate,
)

chain = omp.matrix_chain
PARAMS = {"kernel": jnp.arange(24.0).reshape(4, 6) + jnp.eye(4, 6)}
PARTS = [
    (muoneq, Balance("col"), "scale_by_muoneq(balance=Balance(...))"),
    (aurora, Aurora(rounds=3), "scale_by_aurora(factor=Aurora(...))"),
    (turbo_muon, Orthogonalize(), "scale_by_turbo_muon(polar_factor=Orthogonalize(...))"),
    (turbo_muon, omp.orthogonalize(), "scale_by_turbo_muon(polar_factor=Orthogonalize(...))"),
    (turbo_muon, ScaleByShape("max"), "scale_by_turbo_muon(scale=ScaleByShape(...))"),
    (normuon, Momentum(0.9), "NorMuon(momentum=Momentum(...))"),
    (normuon, omp.momentum(0.9), "NorMuon(momentum=Momentum(...))"),
    (adamuon, Orthogonalize(), "AdaMuon(polar_factor=Orthogonalize(...))"),
    (mano, Momentum(0.9), "Mano(momentum=Momentum(...))"),
    (hyperball, Momentum(0.9), "scale_by_muon(momentum=Momentum(...))"),
    (normuon, jnp.sign, "NorMuon(...)"),
    (normuon, Normalize("row"), "NorMuon(...)"),
]


@pytest.mark.parametrize(("make", "part", "form"), PARTS)
def test_a_part_in_the_place_of_a_rule_is_answered_with_the_right_form(make, part, form):
    with pytest.raises(ValueError, match=rf"Pass link={re.escape(form)}"):
        make(0.1, part)


@pytest.mark.parametrize(
    ("make", "link", "message"),
    [
        (turbo_muon, chain(Orthogonalize(), ScaleByShape()), "has no momentum"),
        (hyperball, omp.orthogonalize(), "not the whole of it"),
        (muoneq, chain(Momentum(), Balance("col")), "has no polar factor"),
        (normuon, 0.95, r"got 0\.95\. Numbers are passed by their names: adamw="),
        (normuon, NorMuon, r"has to be called: link=NorMuon\(\)"),
        (muoneq, scale_by_muoneq, r"has to be called: link=scale_by_muoneq\(\)"),
        (hyperball, Hyperball(0.1), "Hyperball comes after Hyperball"),
        (normuon, omp.muonplus(0.1), r"whole optimizer.* such as\s+omp\.scale_by_muonplus\(\)"),
        (hyperball, omp.muonplus(0.1), "whole optimizer"),
        (hyperball, normuon(0.1), "whole optimizer"),
        (
            hyperball,
            chain(Momentum(), Orthogonalize(), scale_by_learning_rate(0.1)),
            "Hyperball comes after scale_by_learning_rate, which has a learning rate already",
        ),
        (
            aurora,
            chain(Momentum(), Orthogonalize(), scale_by_learning_rate(0.1)),
            "add_decayed_weights comes after scale_by_learning_rate",
        ),
    ],
)
def test_what_is_no_rule_is_refused_when_built(make, link, message):
    with pytest.raises(ValueError, match=message):
        make(0.1, link)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((omp.scale_by_muonplus(), omp.scale_by_muonplus()), "two momenta, in Momentum and Mom"),
        ((omp.momentum(), NorMuon()), "two momenta, in Momentum and NorMuon"),
        ((AdaMuon(), Mano()), "two momenta"),
        ((omp.momentum(), omp.orthogonalize(), Orthogonalize()), "right after Orthogonalize"),
        ((omp.scale_by_muonplus(), omp.orthogonalize()), "right after ScaleByShape"),
        ((scale_by_learning_rate(0.1), omp.momentum()), "Momentum comes after scale_by_learning"),
        ((omp.momentum(), scale_by_learning_rate(0.1), omp.normalize()), "Normalize comes after"),
        ((Hyperball(0.1), scale_by_learning_rate(0.1)), "comes after Hyperball"),
        (
            (omp.momentum(), scale_by_learning_rate(0.1), add_decayed_weights(0.1)),
            "add_decayed_weights comes after scale_by_learning_rate",
        ),
        ((omp.momentum(), omp.muon(0.1)), "whole optimizer"),
        ((add_decayed_weights(20.0), scale_by_learning_rate(0.1)), "weight_decay=20.0 times"),
    ],
)
def test_links_that_undo_each_other_are_refused_when_built(links, message):
    with pytest.raises(ValueError, match=message):
        chain(*links)


def downhill(tx):
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    return bool(jnp.vdot(updates["kernel"], PARAMS["kernel"]) < 0)


@pytest.mark.parametrize(
    "tx",
    [
        hyperball(0.1, optax.scale_by_adam()),
        hyperball(0.1, NorMuon()),
        hyperball(0.1, scale_by_muon(Momentum(0.9))),
        hyperball(0.1, chain(Momentum(), Normalize("row"))),
        normuon(0.1, chain(NorMuon(shape_scale="none"), ScaleByShape(consistent_rms=0.2))),
        muoneq(0.1, scale_by_muoneq(balance=Balance("col"))),
        partition_with_adamw(
            chain(optax.trace(0.9), Orthogonalize(), scale_by_learning_rate(0.1)), AdamW(0.1)
        ),
        partition_with_adamw(chain(optax.adam(0.1)), AdamW(0.1)),
    ],
)
def test_other_rules_go_downhill(tx):
    assert downhill(tx)


def test_ascent_that_is_asked_for_is_left_alone():
    links = (optax.scale(-1.0), omp.momentum(), omp.orthogonalize(), scale_by_learning_rate(0.1))
    assert not downhill(chain(*links))
