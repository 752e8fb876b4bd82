"""`optimizer` of any rule, and options of values as keywords."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import baselines
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import AdamW, Momentum, plainly, takes_options

PARAMS = {"up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
GRADS = jax.tree.map(lambda x: np.float32(np.random.default_rng(0).normal(size=x.shape)), PARAMS)


def assert_same(one, other):
    found, expected = (tx.update(GRADS, tx.init(PARAMS), PARAMS)[0] for tx in (one, other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_optimizer_of_the_parts_of_muonplus_is_muonplus():
    rule = omp.scale_by_muonplus(Momentum(0.9), scale=ScaleByShape("max"))
    adamw = AdamW(0.3, b2=0.9, weight_decay=0.2)
    found = omp.optimizer(rule, 0.1, 0.05, adamw=adamw)
    ours = {"adam_learning_rate": 0.3, "adam_b2": 0.9, "adam_weight_decay": 0.2}
    assert_same(found, omp.muonplus(0.1, beta=0.9, shape_scale="max", weight_decay=0.05, **ours))


@pytest.mark.parametrize(
    ("by_name", "by_value"),
    [
        (
            lambda: omp.scale_by_muonplus(norm="row", beta=0.5, ns_steps=3, shape_scale="none"),
            lambda: omp.scale_by_muonplus(
                Momentum(0.5), Orthogonalize(ns_steps=3), Normalize("row"), ScaleByShape("none")
            ),
        ),
        (
            lambda: omp.scale_by_muonplus(None, Orthogonalize(ns_steps=3), ns_coeffs="you"),
            lambda: omp.scale_by_muonplus(polar_factor=Orthogonalize("you", 3)),
        ),
        (
            lambda: omp.matrix_chain(baselines.NorMuon(0.5, momentum=Momentum(0.5))),
            lambda: omp.transforms.links_of(baselines.normuon(0.1, beta2=0.5, beta=0.5))[0],
        ),
    ],
)
def test_an_option_by_its_name_changes_the_value_that_has_it(by_name, by_value):
    one, other = by_name(), by_value()
    other = other if isinstance(other, optax.GradientTransformation) else omp.matrix_chain(other)
    grads = {"kernel": GRADS["up"]["kernel"]}
    found, expected = (tx.update(grads, tx.init(grads))[0] for tx in (one, other))
    np.testing.assert_array_equal(found["kernel"], expected["kernel"])


def test_an_option_changes_the_link_that_is_given():
    link = baselines.NorMuon(0.5, rule="paper")
    assert_same(
        baselines.normuon(0.1, link, adamw=AdamW(0.3), nu_eps=1e-3, beta=0.5, adam_b1=0.5),
        baselines.normuon(
            0.1,
            baselines.NorMuon(0.5, 1e-3, "paper", momentum=Momentum(0.5)),
            adamw=AdamW(0.3, b1=0.5),
        ),
    )


def test_options_that_depend_on_each_other_are_changed_together():
    """Turbo's table has four rows, and any other is checked with the steps it comes with."""
    baselines.turbo_muon(0.1, ns_coeffs="polar_express", ns_steps=6)
    baselines.turbo_muon(0.1, ns_steps=6, ns_coeffs="polar_express")


def test_a_rule_with_a_rate_of_its_own_gets_it():
    rate = optax.linear_schedule(0.1, 0.0, 5)
    chain = omp.matrix_chain(baselines.scale_by_muon(), baselines.Hyperball(0.7))
    assert_same(omp.optimizer(chain, rate), baselines.hyperball(rate))


@pytest.mark.parametrize(
    "rule", [omp.scale_by_muonplus(), baselines.NorMuon(), baselines.AdaMuon()]
)
def test_the_run_of_a_chain_reaches_rules_options_and_recorders(rule):
    calls = []

    def run(*args):
        calls.append(args)
        return plainly(*args)

    tx = omp.optimizer(omp.matrix_chain(rule, run=run), 0.1, beta=0.5)
    found, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert len(calls) == 1
    expected = omp.optimizer(rule, 0.1, beta=0.5)
    expected, _ = expected.update(GRADS, expected.init(PARAMS), PARAMS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
    if not hasattr(rule, "momentum"):
        tx = omp.diagnostics.recorded(tx, every=1)
        tx.update(GRADS, tx.init(PARAMS), PARAMS)
        assert len(calls) == 4  # the update, its polar factor again, and what follows that


def test_a_signature_has_the_options_and_their_defaults():
    parameters = inspect.signature(baselines.aurora).parameters
    assert list(parameters)[:4] == ["learning_rate", "link", "weight_decay", "weight_decay_mask"]
    shown = {name: str(p) for name, p in parameters.items()}
    assert shown["rounds"] == "rounds=2" and shown["ns_steps"] == "ns_steps=12"
    assert shown["adam_b1"] == "adam_b1=0.9" and shown["beta"] == "beta=0.95"
    assert not {"shape", "machine", "divisor", "bounded", "norm", "where"} & shown.keys()
    assert inspect.getdoc(baselines.aurora).startswith("Aurora on the matrices")


def test_a_function_of_a_users_own_takes_options():
    @takes_options
    def mine(learning_rate, link=baselines.NorMuon(beta2=0.5), *, twice=False, **where):  # noqa: B008
        return omp.optimizer(link, learning_rate * (1 + twice), **where)

    @takes_options
    def alone(learning_rate, link=baselines.NorMuon()):  # noqa: B008
        """A rule."""

    for made, has_rest in ((mine, True), (alone, False)):
        assert ("All other arguments are those of" in made.__doc__) == has_rest
    assert_same(
        mine(0.1, twice=True, nu_eps=1e-3, adam_b1=0.5, rules=()),
        baselines.normuon(0.2, beta2=0.5, nu_eps=1e-3, adam_b1=0.5),
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        mine(lr=0.1)
    with pytest.raises(TypeError, match="multiple values for argument 'learning_rate'"):
        mine(0.1, learning_rate=0.1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        mine()


def test_numbers_are_injected_where_they_are_given():
    make = optax.inject_hyperparams(baselines.normuon)
    tx = make(0.1, link=baselines.NorMuon(rule="paper"), beta2=0.5)
    state = tx.init(PARAMS)
    assert state.hyperparams.keys() == {"learning_rate", "weight_decay", "beta2"}
    assert_same(tx, baselines.normuon(jnp.float32(0.1), rule="paper", beta2=jnp.float32(0.5)))
