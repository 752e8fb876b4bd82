"""The models: sizes of the paper, groups of their parameters, and what each equation promises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_trainer_sharding import ADAMW, CUBE, compiled_step, curve, job

import optax_muonplus as omp
from examples import models, optimizers, sharding
from examples.config import OptimizerConfig
from examples.errors import UserError
from examples.loss import next_token_loss
from examples.models import llama
from examples.models.config import ModelConfig, check
from examples.recipes import SIZES

TOY = ModelConfig(n_layer=3, n_head=2, d_model=16, d_ff=40, context=12)
LLAMA = dataclasses.replace(TOY, family="llama", tied=False)
TOYS = {"gpt": TOY, "llama": LLAMA}
V = 50
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, V)


def split(config, vocab_size=V):
    """The model as a function of parameters and tokens, and its first parameters."""
    graph, state = nnx.split(models.build(config, vocab_size, nnx.Rngs(0)))
    return lambda params, tokens: nnx.merge(graph, params)(tokens), nnx.to_pure_dict(state)


def shapes(config, vocab_size=V):
    """The parameters without their numbers."""
    model = nnx.eval_shape(lambda: models.build(config, vocab_size, nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def stacked(params):
    """The parameters of a model with a list of blocks, as those of one with stacked blocks."""
    blocks = list(params["blocks"].values())
    return {**params, "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)}


def leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(tree)
    }


# Sizes

# The tables count GPT with these positions: Small, Large and Huge with the 1024 of GPT-2, Base with
# 8192. The recipes have as many as a sequence has tokens, which moves their counts by up to 1.2%.
POSITIONS = {"gpt-small": 1024, "gpt-base": 8192, "gpt-large": 1024, "gpt-huge": 1024}


# A list of blocks takes seconds to trace and has the same numbers: the smallest stands for all.
@pytest.mark.parametrize(
    ("name", "scan"), [*((name, True) for name in SIZES), ("llama-60m", False)]
)
def test_parameter_counts_of_the_paper(name, scan):
    size = SIZES[name]
    config = ModelConfig(
        family=size.family,
        n_layer=size.n_layer,
        n_head=size.n_head,
        d_model=size.d_model,
        d_ff=size.d_ff,
        context=POSITIONS.get(name, 1024),
        tied=size.family == "gpt",
        scan=scan,
    )
    count = sum(x.size for x in jax.tree.leaves(shapes(config, size.vocab_size)))
    assert count / 1e6 == pytest.approx(size.million, rel=0.004)


def test_hidden_width():
    assert shapes(dataclasses.replace(TOY, d_ff=None))["blocks"][0]["mlp"]["up"][
        "kernel"
    ].shape == (
        16,
        64,
    )
    gate = shapes(dataclasses.replace(LLAMA, d_ff=None))["blocks"][0]["mlp"]["gate"]["kernel"]
    assert gate.shape == (16, 42)


# Groups


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", TOYS)
def test_groups(family, tied, scan):
    params = shapes(dataclasses.replace(TOYS[family], tied=tied, scan=scan))
    numbers = optimizers.dimension_numbers if scan else None  # unstacked, by the default rules
    labels = leaves(omp.partition_labels(params, numbers))
    matrices = {path for path, label in labels.items() if label == "muon"}
    assert matrices == {path for path in labels if "blocks" in path and path.endswith("kernel")}
    assert len(matrices) == {"gpt": 6, "llama": 7}[family] * (1 if scan else 3)
    table = optimizers.describe(OptimizerConfig(), params)
    assert (
        f"{len(matrices)} parameters, {3 * len(matrices) // (1 if scan else 3)} matrices" in table
    )
    assert "40x16x3" in table if scan else "40x16x1" in table  # out x in x layers


def test_default_rules_do_not_take_stacked_kernels_for_heads():
    # (layer, in, out) has as many axes as Flax's (in, head, out of a head): only a rule can tell.
    params = shapes(dataclasses.replace(TOY, scan=True))
    query = optimizers.dimension_numbers(params)["blocks"]["attn"]["query"]["kernel"]
    assert query == omp.MuonDimensionNumbers(1, 2)
    with pytest.raises(ValueError, match="blocks/mlp"):
        omp.muon_dimension_numbers(params)


@pytest.mark.parametrize("family", TOYS)
def test_stacked_blocks_are_updated_like_a_list_of_them(family):
    _, params = split(TOYS[family])
    grads = jax.tree.map(lambda x: jnp.sin(1000 * x), params)
    rule = optimizers.build(OptimizerConfig(), steps=10)
    update = jax.jit(lambda grads, params: rule.update(grads, rule.init(params), params)[0])
    each, together = update(grads, params), update(stacked(grads), stacked(params))
    for path, one in leaves(stacked(each)).items():
        np.testing.assert_allclose(one, leaves(together)[path], atol=1e-6, err_msg=path)


# What a model computes


@pytest.mark.parametrize("family", TOYS)
def test_scan_and_list_give_the_same(family):
    apply, params = split(TOYS[family])
    scanned, _ = split(dataclasses.replace(TOYS[family], scan=True))

    def loss(apply, params):
        return next_token_loss(apply(params, TOKENS), TOKENS)

    each, grads = jax.jit(jax.value_and_grad(functools.partial(loss, apply)))(params)
    for remat in (False, True):
        config = dataclasses.replace(TOYS[family], scan=True, remat=remat)
        scanned, own = split(config)
        assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, stacked(params))
        run = jax.jit(jax.value_and_grad(functools.partial(loss, scanned)))
        one, own_grads = run(stacked(params))
        assert float(one) == pytest.approx(float(each), abs=1e-6)
        for path, grad in leaves(stacked(grads)).items():
            np.testing.assert_allclose(leaves(own_grads)[path], grad, atol=1e-6, err_msg=path)


def test_layers_of_a_stack_begin_differently():
    _, params = split(dataclasses.replace(LLAMA, scan=True))
    kernel = np.asarray(params["blocks"]["attn"]["query"]["kernel"])
    assert np.std(kernel) == pytest.approx(0.02, rel=0.1)
    assert np.abs(np.corrcoef(kernel.reshape(3, -1)) - np.eye(3)).max() < 0.2


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", TOYS)
def test_no_position_sees_a_later_one(family, scan):
    apply, params = split(dataclasses.replace(TOYS[family], scan=scan))
    changed = TOKENS.at[:, 7].set((TOKENS[:, 7] + 1) % V)
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)).min() > 1e-6


def test_rotation_depends_on_the_difference_of_positions():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turns = llama.angles(jnp.arange(30), 8)

    def product(i, j):
        at_i, at_j = (llama.rotate(x, turns[n][None]) for x, n in ((q, i), (k, j)))
        return float((at_i * at_j).sum())

    assert product(3, 1) == pytest.approx(product(20, 18), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-2)
    assert product(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_rotation_by_hand():
    # K = 4: the pairs (0, 2) and (1, 3) turn by t and t / 100 radians at position t.
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    turned = llama.rotate(x, llama.angles(jnp.arange(4), 4)[3][None])[0, 0, 0]
    expected = [np.cos(3), -2 * np.sin(0.03), np.sin(3), 2 * np.cos(0.03)]
    np.testing.assert_allclose(turned, expected, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_rms_norm(dtype, rtol):
    layer = llama.norm(6, jnp.dtype(dtype), nnx.Rngs(0))
    layer.scale[...] = jnp.arange(1.0, 7.0)
    x = jax.random.normal(jax.random.key(0), (3, 6))
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * np.arange(1, 7)[None]
    np.testing.assert_allclose(np.asarray(layer(x), np.float32), expected, rtol=rtol)
    assert layer(x).dtype == dtype


def test_swiglu():
    mlp = llama.MLP(LLAMA, nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (1, 2, 16)), np.float64)
    gate, up, down = (np.asarray(m.kernel[...], np.float64) for m in (mlp.gate, mlp.up, mlp.down))
    gated = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), gated @ down, atol=1e-7)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", TOYS)
def test_bfloat16_keeps_float32_parameters(family, scan):
    config = dataclasses.replace(TOYS[family], scan=scan, compute_dtype="bfloat16")
    apply, params = split(config)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert "bf16[" in str(jax.make_jaxpr(apply)(params, TOKENS))
    exact, _ = split(dataclasses.replace(config, compute_dtype="float32"))
    logits = apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa, of logits near 0.1.
    np.testing.assert_allclose(logits, exact(params, TOKENS), atol=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_head": 3}, "cannot be cut into 3 heads"),
        ({"family": "llama", "n_head": 16}, "gives 1 numbers a head"),
        ({"d_ff": 0}, "--model.d-ff is 0"),
    ],
)
def test_shapes_that_cannot_be(change, words):
    with pytest.raises(UserError, match=words):
        check(dataclasses.replace(TOY, **change))


# On a mesh, in the trainer

# With stacked blocks, as the recipes have them; test_trainer_sharding.py has lists of blocks.
LLAMA_FIELDS = {"family": "llama", "tied": False}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", TOYS)
def test_every_parameter_has_a_place(family, scan):
    params = shapes(dataclasses.replace(TOYS[family], tied=False, scan=scan))
    mesh = sharding.make_mesh(CUBE, jax.devices())
    placed = leaves(sharding.of_params(params, mesh))
    up = placed["blocks/mlp/up/kernel" if scan else "blocks/0/mlp/up/kernel"].spec
    assert up == jax.P(*[None][: int(scan)], "fsdp", "tensor")
    if family == "llama":
        gate = placed["blocks/mlp/gate/kernel" if scan else "blocks/2/mlp/gate/kernel"].spec
        assert gate == up
    assert not sharding.uncut(params, mesh)


def test_llama_on_eight_devices_is_that_on_one(text):
    one, eight = (
        curve(job(text, *mesh, scan=True, n_layer=2, **LLAMA_FIELDS))
        for mesh in (("", 1), (CUBE, 8))
    )
    assert one == pytest.approx(eight, abs=1e-5)


def test_remat_of_llama_saves_memory(text):
    size = {"n_layer": 4, "context": 64, "d_model": 32, "scan": True, **LLAMA_FIELDS}
    plain, remat = (job(text, "", 1, remat=on, optimizer=ADAMW, **size) for on in (False, True))
    # By default the CPU schedules for concurrency, and computes again long before it has to.
    scheduler = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    memory = [
        compiled_step(toy, **scheduler).memory_analysis().temp_size_in_bytes
        for toy in (plain, remat)
    ]
    assert memory[1] < 0.8 * memory[0]


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
