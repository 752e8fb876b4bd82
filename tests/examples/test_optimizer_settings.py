"""Optimizers by name: their updates, records, default rates and schedules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from examples.trainer.settings import validation
from examples.trainer.settings.model import ModelConfig, head_size
from examples.trainer.settings.rules import RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_init_params


@pytest.mark.parametrize(("name", "equal"), [("muonplus", True), ("muon", False)])
def test_muonplus_is_muon_with_equal_rows(name, equal):
    params = {"up": {"kernel": jnp.zeros((8, 4))}}
    grads = {"up": {"kernel": jax.random.normal(jax.random.key(0), (8, 4))}}
    rule = optimizers.build(OptimizerConfig(name=name), steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    rows = np.linalg.norm(updates["up"]["kernel"], axis=0)  # one for each of the 4 outputs
    assert bool(np.ptp(rows) < 1e-4 * rows.mean()) == equal


@pytest.mark.parametrize("name", RULES)
def test_only_matrices_decay(name):
    config = OptimizerConfig(name=name)
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.ones((4, 4))}}
    grads = jax.tree.map(jnp.zeros_like, params)
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    # With zero gradients only the decay is left, and only on the matrix.
    expected = -optimizers.rates(config).matrices * config.weight_decay * RULES[name].decays
    rounding = 1e-7 if name == "muown" else 0  # of the parameters, which it makes anew
    np.testing.assert_allclose(updates["up"]["kernel"], expected, rtol=1e-5, atol=rounding)
    np.testing.assert_array_equal(updates["wte"]["embedding"], 0)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_can_be_recorded(name):
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.eye(4, 8)}}
    plain, recorded = (
        optimizers.build(OptimizerConfig(name=name, record_every=every), 10) for every in (0, 1)
    )
    grads = jax.tree.map(jnp.flip, params)
    expected, _ = plain.update(grads, plain.init(params), params)
    updates, state = recorded.update(grads, recorded.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    record = omp.diagnostics.read(state)
    assert record.step == 1 and list(record.values) == ["up/kernel"]
    last = "update" if RULES[name].records_inside else "after"
    assert record.values["up/kernel"][f"{last}/rms"] > 0


def test_default_rates_by_optimizer():
    names = {name: optimizers.rates(OptimizerConfig(name=name)) for name in RULES}
    assert {name for name, rate in names.items() if rate.matrices == 0.002} == {
        "adamw",
        "adamuon",
        "mano",
        "meqmuon",
        "muoneq",
        "muown",
    }
    assert optimizers.rates(OptimizerConfig(learning_rate=0.5)).matrices == 0.5


def test_schedules_at_known_steps():
    steps, peak = 100, 0.5
    constant = optimizers.schedule(OptimizerConfig(schedule="constant_linear"), peak, steps)
    np.testing.assert_allclose([constant(i) for i in (0, 40, 70, 100)], [0.5, 0.5, 0.25, 0])
    cosine = optimizers.schedule(OptimizerConfig(schedule="warmup_cosine"), peak, steps)
    np.testing.assert_allclose(
        [cosine(i) for i in (0, 10, 55, 100)], [0.05, 0.5, 0.25, 0], atol=1e-6
    )


def test_schedules_of_the_papers_code():
    """At s of 40 steps: 1 for s < 16, then max(0.1, 1 - (s - 16) / 24); s / 4, then a cosine."""
    gpt = optimizers.schedule(OptimizerConfig(schedule_floor=0.1), 0.5, 40)
    expected = [0.5 if s < 16 else 0.5 * max(0.1, 1 - (s - 16) / 24) for s in range(40)]
    np.testing.assert_allclose([gpt(s) for s in range(40)], expected, rtol=1e-6)
    config = OptimizerConfig(schedule="warmup_cosine", warmup_start=0.0)
    llama = optimizers.schedule(config, 0.5, 40)
    cosine = [0.25 * (1 + np.cos(np.pi * (s - 4) / 36)) for s in range(4, 40)]
    expected = [*(0.5 * s / 4 for s in range(4)), *cosine]
    np.testing.assert_allclose([llama(s) for s in range(40)], expected, rtol=1e-5, atol=1e-7)


def test_a_floor_does_not_lift_the_warmup():
    config = OptimizerConfig(
        schedule="warmup_cosine", warmup_start=0.0, warmup_share=0.5, schedule_floor=0.4
    )
    rate = optimizers.schedule(config, 1.0, 8)
    np.testing.assert_allclose([rate(s) for s in (0, 1, 2, 4, 7)], [0, 0.25, 0.5, 1, 0.4])
    held = optimizers.schedule(OptimizerConfig(hold_share=0.75), 1.0, 8)
    np.testing.assert_allclose([held(s) for s in (0, 6, 7)], [1, 1, 0.5])


def test_norm_eps_reaches_the_rule():
    params = {"up": {"kernel": jnp.ones((4, 4))}}
    grads = {"up": {"kernel": jnp.eye(4)}}
    for eps in (1e-8, 3.0):
        rule = optimizers.build(OptimizerConfig(norm_eps=eps, weight_decay=0, norm="row"), 10)
        updates, _ = rule.update(grads, rule.init(params), params)
        rows = np.linalg.norm(updates["up"]["kernel"], axis=0) / 0.02
        assert np.all(rows > 0.99) if eps < 1 else np.all(rows < 0.6)


def test_one_kind_of_matrices_may_be_normalized_and_another_have_its_own_rate():
    kernels = {"attn": {"query": {"kernel": jnp.zeros((4, 8))}}}
    kernels |= {"mlp": {name: {"kernel": jnp.zeros((4, 8))} for name in ("up", "down")}}
    params = {"blocks": {"0": kernels}, "wte": {"embedding": jnp.ones((3, 4))}}
    keys = iter(jax.random.split(jax.random.key(0), 4))
    grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)

    def updates(**settings):
        config = OptimizerConfig(weight_decay=0, **settings)
        optimizers.check(config)
        rule = optimizers.build(config, 10)
        update, state = rule.update(grads, rule.init(params), params)
        return update, omp.diagnostics.read(state) if config.record_every else None

    muon, plus = updates(name="muon")[0], updates()[0]
    for which, kind in (("attention", "attn"), ("mlp", "mlp")):
        mixed, record = updates(normalized=which, record_every=1)
        assert record is not None
        expected = {"0": muon["blocks"]["0"] | {kind: plus["blocks"]["0"][kind]}}
        jax.tree.map(np.testing.assert_array_equal, mixed, muon | {"blocks": expected})
    flat = updates(shape_scale="none")[0]["blocks"]["0"]["mlp"]["up"]["kernel"]  # (in, out)
    up = plus["blocks"]["0"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(np.sqrt(8 / 4) * flat, up, rtol=1e-5)
    larger = updates(mlp_in_rate=2.0)[0]
    up = plus["blocks"]["0"]["mlp"].pop("up"), larger["blocks"]["0"]["mlp"].pop("up")
    np.testing.assert_allclose(2 * up[0]["kernel"], up[1]["kernel"], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, plus, larger)


@pytest.mark.parametrize("name", ["muonplus", "adamw"])
def test_adamw_epsilon_before_the_bias_correction(name):
    params = {"wte": {"embedding": jnp.zeros((2, 2))}, "up": {"kernel": jnp.zeros((2, 2))}}
    config = OptimizerConfig(
        name=name, adam_b1=0.9, adam_b2=0.95, adam_eps_before_correction=True, record_every=2
    )
    rule = optimizers.build(config, steps=100)
    state, m, v = rule.init(params), 0.0, 0.0
    for t in range(1, 4):
        g = np.array([[1e-8, -3e-8], [1.0, -2.0]]) * t
        updates, state = rule.update(
            jax.tree.map(lambda _, g=g: jnp.float32(g), params), state, params
        )
        g = g / np.sqrt(2 * np.square(g).sum())  # the gradient of both is clipped
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        expected = -0.01 * m / (1e-8 + np.sqrt(v)) * np.sqrt(1 - 0.95**t) / (1 - 0.9**t)
        np.testing.assert_allclose(updates["wte"]["embedding"], expected, rtol=1e-4)
    assert omp.diagnostics.read(state)


@pytest.mark.parametrize(
    ("field", "value"), [("schedule_floor", 1.5), ("hold_share", -0.1), ("warmup_start", np.nan)]
)
def test_shares_are_from_0_to_1(field, value):
    flag = f"--optimizer.{field.replace('_', '-')} is {value}: it should be"
    with pytest.raises(UserError, match=flag):
        validation.check(OptimizerConfig(**{field: value}), "--optimizer.")


def test_adamw_decays_each_group_by_its_own():
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.ones((4, 4))}}
    for name in ("adamw", "muonplus"):
        config = OptimizerConfig(name=name, weight_decay=0.2, adam_weight_decay=0.3)
        rule = optimizers.build(config, steps=10)
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = rule.update(zeros, rule.init(params), params)
        after = optax.apply_updates(params, updates)
        rate = optimizers.rates(config).matrices
        np.testing.assert_allclose(after["up"]["kernel"], 1 - 0.2 * rate, rtol=1e-6)
        expected = 1 - 0.3 * config.adam_learning_rate
        np.testing.assert_allclose(after["wte"]["embedding"], expected, rtol=1e-6)


SIZED = sorted({*RULES} - {"adamw", "turbo_muon", "hyperball", "muown"})


@pytest.mark.parametrize(
    ("name", "matched"), [*((name, False) for name in SIZED), ("muonplus", True)]
)
def test_the_table_has_the_size_of_updates(name, matched):
    """At learning rate 1, with an exact polar factor, of a kernel 16 x 64 and of one 64 x 16."""
    config = OptimizerConfig(
        name=name,
        polar="svd",
        learning_rate=1.0,
        weight_decay=0,
        match_frobenius=matched,
        clip_norm=None,
    )
    keys = jax.random.split(jax.random.key(0))
    grads = {
        "up": {"kernel": jax.random.normal(keys[0], (16, 64))},
        "down": {"kernel": jax.random.normal(keys[1], (64, 16))},
    }
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(grads), grads)
    lines = {
        line.split()[0]: line.split() for line in optimizers.describe(config, grads).splitlines()
    }
    for path in ("up", "down"):
        rms = float(jnp.sqrt(jnp.mean(jnp.square(updates[path]["kernel"]))))
        assert float(lines[f"{path}/kernel"][5]) == pytest.approx(rms, rel=0.005)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_per_head_is_described(family, scan):
    model = ModelConfig(family, n_layer=2, n_head=4, d_model=16, context=8, scan=scan)
    params = jax.eval_shape(make_init_params(model, 300), 0)
    table = optimizers.describe(OptimizerConfig(per_head=True), params, head_size(model))
    lines = {line.split()[0]: line for line in table.splitlines()}
    where = "blocks" if scan else "blocks/{0..1}"
    layers = 2 if scan else 1
    sizes = {"qkv": 12} if family == "gpt" else {"query": 4, "key": 4, "value": 4}
    for name, heads in sizes.items():
        assert f"4x16x{heads * layers} " in lines[f"{where}/attn/{name}/kernel"]
    assert f"16x16x{layers} " in lines[f"{where}/attn/out/kernel"]


# test_fused_projection.py has the three others, with queries, keys and values in one kernel.
@pytest.mark.parametrize("name", sorted({*RULES} - {"adamw", "muonplus", "muon", "normuon"}))
def test_per_head_updates_each_head_as_if_it_were_alone(name):
    config = OptimizerConfig(name=name, clip_norm=None)
    grad, kernel = jax.random.normal(jax.random.key(0), (2, 16, 12))
    heads = [(grad[:, i : i + 4], kernel[:, i : i + 4]) for i in (0, 4, 8)]

    def updates(config, grads, params):
        rule = optimizers.build(config, steps=10, head_size=4)
        return jax.jit(lambda g, p: rule.update(g, rule.init(p), p)[0])(grads, params)

    whole = [{"attn": {"query": {"kernel": x}}} for x in (grad, kernel)]
    found = updates(dataclasses.replace(config, per_head=True), *whole)
    alone = updates(config, *(dict(enumerate(x)) for x in zip(*heads, strict=True)))
    expected = np.concatenate(list(alone.values()), axis=1)
    np.testing.assert_allclose(found["attn"]["query"]["kernel"], expected, rtol=1e-4, atol=1e-6)
