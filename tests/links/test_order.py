"""Chains of which one link undoes another, and what is not a link."""

import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.contrib import (
    AdaMuon,
    Balance,
    Mano,
    NorMuon,
    hyperball,
    scale_by_muon,
    scale_by_muoneq,
)
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum

chain = omp.matrix_chain
PARAMS = {"kernel": jnp.arange(24.0).reshape(4, 6) + jnp.eye(4, 6)}


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((omp.scale_by_muonplus(), omp.scale_by_muonplus()), "Momentum after ScaleByShape: a seco"),
        ((omp.momentum(), NorMuon()), "NorMuon after Momentum: a second momentum"),
        ((AdaMuon(), Mano()), "a second momentum"),
        ((omp.momentum(), omp.orthogonalize(), Orthogonalize()), "Orthogonalize after Orthogonal"),
        ((omp.scale_by_muonplus(), omp.orthogonalize()), "Orthogonalize after ScaleByShape"),
        ((omp.momentum(), omp.normalize(), omp.orthogonalize()), "Orthogonalize after Normalize"),
        ((omp.orthogonalize(), omp.momentum()), "Momentum after Orthogonalize: a momentum of"),
        ((omp.normalize(), optax.scale(2.0), omp.momentum()), "Momentum after Normalize"),
        ((omp.momentum(), omp.muon(0.1)), "whole optimizer"),
    ],
)
def test_links_that_undo_each_other_are_refused_when_built(links, message):
    with pytest.raises(ValueError, match=message):
        chain(*links)


@pytest.mark.parametrize("link", [0.95, NorMuon, [omp.momentum()]])
def test_what_is_no_link_is_refused(link):
    with pytest.raises(TypeError, match="which is not a link"):
        chain(link)


@pytest.mark.parametrize("make", [lambda rule, rate: hyperball(rate, rule), omp.optimizer])
def test_a_whole_optimizer_is_no_rule(make):
    with pytest.raises(ValueError, match=r"whole optimizer.* such as\s+omp\.scale_by_muonplus\(\)"):
        make(omp.muonplus(0.1), 0.1)


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
        omp.optimizer(chain(NorMuon(shape_scale="none"), ScaleByShape(consistent_rms=0.2)), 0.1),
        omp.optimizer(scale_by_muoneq(balance=Balance("col")), 0.1),
        omp.optimizer(chain(optax.trace(0.9), Orthogonalize()), 0.1),
        omp.optimizer(chain(optax.adam(0.1)), None, others=optax.adam(0.1)),
    ],
)
def test_other_rules_go_downhill(tx):
    assert downhill(tx)
