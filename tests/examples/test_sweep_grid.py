"""The runs of a grid, and the update rule of each method."""

import dataclasses
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from examples.experiments.sweeps import command_line as sweep_command_line
from examples.experiments.sweeps import grid
from examples.experiments.sweeps.grid import Grid, Trial
from examples.experiments.sweeps.results import ADAMW, MUON
from examples.trainer.settings import rules
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.training import optimizers
from tests.support import reference
from tests.support.sweep_results import MATCHED, PLUS

pytestmark = pytest.mark.usefixtures("one_device")

EVERYTHING = Grid(
    orthos=("jordan", "you", "polar_express", "cubic", "svd"), frobenius=("free", "matched")
)


def rule_of(base, asked, trial):
    """The update rule of a run."""
    return grid.configure(RunConfig(optimizer=base), asked, trial, "runs").optimizer


def test_trainer_and_sweeps_have_all_norms_of_the_library():
    assert get_args(rules.Norm) == get_args(omp.matrices.Norm)
    plan = Grid(("muonplus",), norms=("long",), frobenius=("matched",))
    assert [method.name for method in grid.methods(plan)] == ["Muon+ long matched norm"]


def test_methods_of_a_grid_and_their_names():
    assert [method.name for method in grid.methods(Grid())] == [
        "AdamW",
        "Muon",
        "Muon+ col",
        "Muon+ row",
        "Muon+ col_row",
        "Muon+ row_col",
    ]
    assert len(list(grid.methods(EVERYTHING))) == 1 + 5 * (1 + 4 * 2)
    names = {Trial(m, rate, 0).name for m in grid.methods(EVERYTHING) for rate in (0.1, 0.01)}
    assert len(names) == 2 * 46


def test_a_polar_step_says_its_number_of_steps():
    plan = Grid(("muon",), orthos=("jordan", "jordan-3", "cubic-4", "svd"))
    found = [rule_of(OptimizerConfig(), plan, Trial(m, 0.1, 0)) for m in grid.methods(plan)]
    assert [(rule.ns_coeffs, rule.ns_steps, rule.polar) for rule in found] == [
        ("jordan", 5, "auto"),
        ("jordan", 3, "auto"),
        ("cubic", 4, "auto"),
        ("jordan", 5, "svd"),
    ]
    assert [method.name for method in grid.methods(plan)][1:3] == ["Muon jordan-3", "Muon cubic-4"]


@pytest.mark.parametrize("word", ["aol", "schatten"])
@pytest.mark.parametrize("name", ["muonplus", "normuon"])
def test_the_preconditioning_of_a_run_reaches_its_rule(word, name):
    rng = np.random.default_rng(0)
    params = {"up": {"kernel": np.asarray(rng.normal(size=(12, 6)), np.float32)}}
    updates = []
    for given in ("frobenius", word):
        config = OptimizerConfig(name, ns_coeffs="cubic", preconditioning=given)
        rule = optimizers.build(config, steps=10)
        updates.append(rule.update(params, rule.init(params), params)[0]["up"]["kernel"])
    assert np.abs(updates[0] - updates[1]).max() > 0.01 * np.abs(updates[0]).max()


def test_further_seeds_are_run_at_the_best_rate():
    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2, 0.3), seeds=3)
    first = [Trial(MUON, rate, 0) for rate in plan.rates]
    losses = dict(zip(first, (2.0, 1.0, math.inf), strict=True))
    assert list(grid.wanted(plan, {first[0]: 2.0})) == first
    assert list(grid.wanted(plan, losses)) == [*first, Trial(MUON, 0.2, 1), Trial(MUON, 0.2, 2)]
    assert grid.count(plan, {}) == 5


def test_the_mean_of_the_first_seeds_chooses_the_rate():
    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2), seeds=3, chosen_by=2)
    first = [Trial(MUON, rate, seed) for rate in plan.rates for seed in (0, 1)]
    losses = dict(zip(first, (1.0, 2.0, 1.3, 1.4), strict=True))  # 0.1 is better by the first alone
    assert list(grid.wanted(plan, losses)) == [*first, Trial(MUON, 0.2, 2)]
    assert grid.count(plan, {}) == 5


def test_a_walk_ends_when_the_best_rate_has_a_neighbour_on_either_side():
    plan = Grid(("muon",), rates=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), seeds=2, start=0.5)
    losses = {}
    while left := [trial for trial in grid.wanted(plan, losses) if trial not in losses]:
        losses[left[0]] = abs(left[0].rate - 0.2)
    order = [(trial.rate, trial.seed) for trial in losses]
    assert order == [(0.4, 0), (0.5, 0), (0.6, 0), (0.3, 0), (0.2, 0), (0.1, 0), (0.2, 1)]
    assert grid.count(plan, losses) == 7 == len(list(grid.wanted(plan, losses)))


@pytest.mark.parametrize("method", list(grid.methods(EVERYTHING)), ids=lambda method: method.name)
def test_one_step_of_every_method(method):
    rng = np.random.default_rng(0)
    kernel, table = rng.normal(size=(12, 6)), rng.normal(size=(3, 6))
    base = OptimizerConfig(weight_decay=0.1, clip_norm=None, nesterov=False)
    config = rule_of(base, EVERYTHING, Trial(method, 0.03, 0))
    params = {"up": {"kernel": kernel}, "wte": {"embedding": table}}
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    grads = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), params)
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    betas = {"b1": base.adam_b1, "b2": base.adam_b2}
    g, rate = grads["wte"]["embedding"], base.adam_learning_rate
    expected, *_ = reference.adamw_step(table, 0.0, 0.0, g, 1, learning_rate=rate, **betas)
    np.testing.assert_allclose(updates["wte"]["embedding"], expected, rtol=1e-5, atol=1e-7)
    w, g = kernel.T, grads["up"]["kernel"].T.astype(float)
    if method == ADAMW:
        options = {"learning_rate": 0.03, "weight_decay": 0.1, **betas}
        expected, *_ = reference.adamw_step(w, 0.0, 0.0, g, 1, **options)
    else:
        expected, _ = reference.muonplus_step(
            w,
            np.zeros_like(w),
            g,
            1,
            learning_rate=0.03,
            table=method.ortho,
            norm=method.norm or "none",
            match_frobenius=method.frobenius == "matched",
            weight_decay=0.1,
        )
    error = np.linalg.norm(updates["up"]["kernel"].T - expected) / np.linalg.norm(expected)
    assert error < 1e-5


SEVERAL = [
    *grid.methods(Grid(get_args(rules.Name))),
    MUON,
    dataclasses.replace(MUON, ortho="svd"),
    MATCHED,
]


def loss_of(params):
    """Nats of tokens after those before them."""
    tokens, table = np.arange(64) ** 2 % 11, params["wte"]["embedding"]
    hidden = jnp.tanh(table[tokens[:-1]] @ params["up"]["kernel"]) @ params["down"]["kernel"]
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, tokens[1:])
    return losses.mean()


@pytest.mark.parametrize("method", dict.fromkeys(SEVERAL), ids=lambda method: method.name)
def test_loss_falls_with_every_method(method):
    """Of a small network: no rule knows more of a model than its parameters."""
    large = ("adamuon", "mano", "meqmuon", "muoneq", "muown")
    rate = 0.02 if method.optimizer not in large else 0.005
    rule = optimizers.build(rule_of(OptimizerConfig(), Grid(), Trial(method, rate, 0)), steps=40)
    shapes = {"wte": {"embedding": (11, 8)}, "up": {"kernel": (8, 16)}, "down": {"kernel": (16, 8)}}
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = rule.init(params), []
    for _ in range(20):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.15


def test_rules_with_large_updates_get_the_rates_of_adamw():
    plan = Grid(get_args(rules.Name))
    for method in grid.methods(plan):
        large = method.optimizer in ("adamw", "adamuon", "mano", "meqmuon", "muoneq", "muown")
        assert grid.rates(plan, method) == (plan.adam_rates if large else plan.rates)


def test_same_rate_sets_the_rate_of_the_other_parameters():
    trial = Trial(PLUS, 0.06, 0)
    base = OptimizerConfig(adam_learning_rate=0.5)
    assert rule_of(base, Grid(), trial).adam_learning_rate == 0.5
    assert rule_of(base, Grid(same_rate=True), trial).adam_learning_rate == 0.06


def test_recipes_have_the_rates_of_the_paper():
    plan = sweep_command_line.parse(["llama-60m"])[0].grid
    assert plan.rates == (0.005, 0.01, 0.02, 0.04, 0.06, 0.08) and plan.same_rate
    assert sweep_command_line.parse(["gpt-small-muon"])[0].grid.rates == (
        0.003,
        0.005,
        0.01,
        0.02,
        0.04,
    )
    assert not sweep_command_line.parse([])[0].grid.same_rate
