"""Optimizers by name: their updates, decay, momentum, records, rates, schedules and heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from examples.trainer.settings.model import ModelConfig, head_size
from examples.trainer.settings.rules import RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_init_params


def test_default_rates_by_optimizer():
    large = {"adamw", "adamuon", "mano", "muoneq"}
    for name in RULES:
        assert optimizers.rates(OptimizerConfig(name)).matrices == (
            0.002 if name in large else 0.02
        )
    assert optimizers.rates(OptimizerConfig(learning_rate=0.5)).matrices == 0.5


def cosine(s, begin, steps):
    return 0.5 * (1 + np.cos(np.pi * (s - begin) / (steps - begin)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda s: min(1, (40 - s) / 24)),
        ({"hold_share": 0.75}, lambda s: min(1, (40 - s) / 10)),
        ({"schedule": "warmup_cosine"}, lambda s: 0.25 + 0.1875 * s if s < 4 else cosine(s, 4, 40)),
        # Those of the paper's code.
        ({"schedule_floor": 0.1}, lambda s: max(0.1, min(1, (40 - s) / 24))),
        (
            {"schedule": "warmup_cosine", "warmup_start": 0.0},
            lambda s: s / 4 if s < 4 else cosine(s, 4, 40),
        ),
        # A floor does not lift the warmup, and a cosine ends in it.
        (
            {"schedule": "warmup_cosine", "warmup_start": 0.0, "warmup_share": 0.5,
             "schedule_floor": 0.4},
            lambda s: s / 20 if s < 20 else 0.4 + 0.6 * cosine(s, 20, 40),
        ),
    ],
)  # fmt: skip
def test_schedules_are_their_formulas(settings, expected):
    rate = optimizers.schedule(OptimizerConfig(**settings), 0.5, 40)
    wanted = [0.5 * expected(s) for s in range(41)]
    np.testing.assert_allclose([rate(s) for s in range(41)], wanted, rtol=1e-5, atol=1e-6)


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


SIZED = sorted({*RULES} - {"adamw", "turbo_muon", "hyperball"})


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


@pytest.mark.parametrize("name", [name for name in RULES if name != "adamw"])
def test_the_momentum_is_kept_as_the_flag_says(name):
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.eye(16, 256)}}
    for mu_dtype in (None, "bfloat16", "int8"):
        rule = optimizers.build(OptimizerConfig(name=name, mu_dtype=mu_dtype), steps=10)
        state = omp.transforms.find_momentum(rule.init(params), as_stored=True)
        assert state[0]["up"]["kernel"].dtype == (mu_dtype or "float32")


@pytest.mark.parametrize("name", RULES)
def test_a_decay_that_follows_the_rate_is_as_large_at_its_peak_and_falls_with_it(name):
    """Gradients are zero; hyperball has no decay, and AdamW's group its own, of zero."""
    zeros = {"up": {"kernel": jnp.zeros((4, 8))}, "wte": {"embedding": jnp.zeros((3, 4))}}
    for follows in (False, True):
        config = OptimizerConfig(name=name, learning_rate=0.5, decay_follows_rate=follows)
        rule, rate = optimizers.build(config, 10), optimizers.schedule(config, 1.0, 10)
        params = {"up": {"kernel": jnp.eye(4, 8) + 1}, "wte": {"embedding": jnp.ones((3, 4))}}
        state, update = rule.init(params), jax.jit(rule.update)
        for step in range(10):
            updates, state = update(zeros, state, params)
            share = rate(step) ** (1 + follows) * RULES[name].decays
            expected = -0.5 * 0.1 * share * params["up"]["kernel"]
            rounding = 5e-7 if name == "hyperball" else 0  # of the parameters
            np.testing.assert_allclose(updates["up"]["kernel"], expected, 1e-5, rounding)
            np.testing.assert_array_equal(updates["wte"]["embedding"], 0)
            params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("name", ["muonplus", "muon"])
def test_cautious_decay_reaches_the_rule(name):
    params = {"up": {"kernel": jnp.ones((4, 8))}}
    grads = {"up": {"kernel": jax.random.normal(jax.random.key(0), (4, 8))}}
    plain, cautious, none = (
        optimizers.build(OptimizerConfig(name=name, **given), 10)
        for given in ({}, {"cautious_weight_decay": True}, {"weight_decay": 0})
    )
    plain, cautious, none = (
        rule.update(grads, rule.init(params), params)[0]["up"]["kernel"]
        for rule in (plain, cautious, none)
    )
    np.testing.assert_array_equal(cautious, jnp.where(none < 0, plain, none))
    assert np.any(none > 0) and np.any(none < 0)


# Rules that differ from another in one thing


PARAMS = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.ones((4, 8))}}


def updates_of(rule):
    """Of three steps, whose gradients differ: momenta of equal ones differ in size only."""
    state, found = rule.init(PARAMS), []
    keys = iter(jax.random.split(jax.random.key(0), 6))
    for _ in range(3):
        grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), PARAMS)
        updates, state = rule.update(grads, state, PARAMS)
        found += jax.tree.leaves(updates)
    return found


def test_optax_muon_has_the_updates_of_optax():
    config = OptimizerConfig(name="optax_muon", learning_rate=0.02, clip_norm=None)
    rate = functools.partial(optimizers.schedule, config, steps=10)
    theirs = optax.contrib.muon(
        rate(0.02),
        weight_decay=0.1,
        adam_learning_rate=rate(0.01),
        adam_b2=0.95,
        muon_weight_dimension_numbers={
            "wte": {"embedding": None},
            "up": {"kernel": optax.contrib.MuonDimensionNumbers()},
        },
    )
    found = updates_of(optimizers.build(config, steps=10))
    for x, y in zip(found, updates_of(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_two_flags_make_muon_that_of_optax():
    given = {"shape_scale": "max", "bias_correction": True, "adam_nesterov": True}
    configs = OptimizerConfig(name="muon", **given), OptimizerConfig(name="optax_muon")
    found = (updates_of(optimizers.build(config, steps=10)) for config in configs)
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


def test_one_flag_makes_adamw_nadamw():
    config = OptimizerConfig(name="adamw", adam_nesterov=True, learning_rate=0.01)
    config = dataclasses.replace(config, adam_weight_decay=config.weight_decay)
    rate = optimizers.schedule(config, 0.01, 10)
    theirs = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.nadamw(rate, b1=config.adam_b1, b2=config.adam_b2, weight_decay=config.weight_decay),
    )
    for x, y in zip(updates_of(optimizers.build(config, 10)), updates_of(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


def test_muoneq_max_is_muoneq_but_for_its_size():
    """Of a matrix with 4 inputs and 8 outputs: sqrt(8 / 4) in place of 0.2 sqrt(8)."""
    own, as_muon = (
        updates_of(
            optimizers.build(
                OptimizerConfig(name=name, learning_rate=1.0, weight_decay=0.0), steps=10
            )
        )[0]
        for name in ("muoneq", "muoneq_max")
    )
    np.testing.assert_allclose(as_muon, own * 2**0.5 / (0.2 * 8**0.5), rtol=1e-5, atol=1e-6)


# Heads


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


K, HEADS = 4, 3


@pytest.mark.parametrize("name", [name for name in RULES if name != "adamw"])
def test_each_head_has_matrices_for_query_key_and_value(name):
    config = OptimizerConfig(name=name, clip_norm=None)
    grad, kernel = jax.random.normal(jax.random.key(0), (2, 16, 3 * HEADS * K))
    starts = range(0, 3 * HEADS * K, K)
    blocks = [(grad[:, i : i + K], kernel[:, i : i + K]) for i in starts]

    def updates(config, grads, params):
        rule = optimizers.build(config, steps=10, head_size=K)
        return jax.jit(lambda g, p: rule.update(g, rule.init(p), p)[0])(grads, params)

    whole = [{"attn": {"qkv": {"kernel": x}}} for x in (grad, kernel)]
    found = updates(dataclasses.replace(config, per_head=True), *whole)
    alone = updates(config, *(dict(enumerate(x)) for x in zip(*blocks, strict=True)))
    expected = np.concatenate(list(alone.values()), axis=1)
    np.testing.assert_allclose(found["attn"]["qkv"]["kernel"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("which", ["attention", "mlp"])
def test_heads_where_only_a_part_is_normalized(which):
    """The part without attention has no heads, and is updated as ever."""
    qkv, up = jax.random.normal(jax.random.key(0), (2, 16, 3 * HEADS * K))
    grads = {"attn": {"qkv": {"kernel": qkv}}, "mlp": {"up": {"kernel": up}}}

    def updates(**changes):
        config = OptimizerConfig(per_head=True, clip_norm=None, **changes)
        rule = optimizers.build(config, steps=10, head_size=K)
        return jax.jit(lambda g: rule.update(g, rule.init(g), g)[0])(grads)

    mixed, plus, muon = updates(normalized=which), updates(), updates(name="muon")
    expected = plus if which == "attention" else muon
    np.testing.assert_allclose(
        mixed["attn"]["qkv"]["kernel"], expected["attn"]["qkv"]["kernel"], atol=1e-6
    )
    expected = plus if which == "mlp" else muon
    np.testing.assert_allclose(
        mixed["mlp"]["up"]["kernel"], expected["mlp"]["up"]["kernel"], atol=1e-6
    )


def test_the_table_says_which_updates_have_another_size():
    params = {"blocks": {"0": {"mlp": {"up": {"kernel": jnp.ones((4, 8))}}}}}
    config = OptimizerConfig(normalized="attention", mlp_in_rate=3)
    *_, normalized, larger = optimizers.describe(config, params).splitlines()
    assert normalized == "only matrices of attention are normalized: others have Muon's rms"
    assert larger == "updates of matrices into the MLP have 3 times this rms"
