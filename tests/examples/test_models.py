"""What models compute, the sizes, beginnings, groups and places of their parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_muonplus as omp
from examples.trainer.models.attention import empty_kv_cache
from examples.trainer.models.language_model import MLP, LanguageModel
from examples.trainer.models.layers import ONE_DEVICE
from examples.trainer.settings.model import ModelConfig, hidden_width, training_flops_per_token
from examples.trainer.settings.presets import SIZES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.step import make_forward, make_init_params
from tests.support.model_trees import leaves, stacked
from tests.support.trainer import CUBE

GPT = ModelConfig(n_layer=3, n_head=2, d_model=16, d_ff=40, context=12)


LLAMA = dataclasses.replace(GPT, family="llama", tied=False)


OLDER_GPT = dataclasses.replace(
    GPT, qkv="separate", final_norm="layer", depth_scaled_init=False, norm_epsilon=1e-6
)


FAMILIES = {"gpt": GPT, "older gpt": OLDER_GPT, "llama": LLAMA}


V = 50


TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, V)


@functools.cache
def split(config):
    """The model as a function of parameters and tokens, and its first parameters."""
    graph, state = nnx.split(LanguageModel(config, V, nnx.Rngs(0)))
    apply = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    return apply, nnx.to_pure_dict(state)


@pytest.mark.parametrize(
    ("family", "remats"),
    [("gpt", ["none"]), ("older gpt", ["none"]), ("llama", ["none", "full", "attention"])],
)
def test_scan_and_list_give_the_same(family, remats):
    apply, params = split(FAMILIES[family])

    def loss(apply, params):
        losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, TOKENS), TOKENS)
        return jnp.mean(losses)

    each, grads = jax.jit(jax.value_and_grad(functools.partial(loss, apply)))(params)
    for remat in remats:
        config = dataclasses.replace(FAMILIES[family], scan=True, remat=remat)
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
@pytest.mark.parametrize("family", FAMILIES)
def test_no_position_sees_a_later_one(family, scan):
    apply, params = split(dataclasses.replace(FAMILIES[family], scan=scan))
    changed = TOKENS.at[:, 7].set((TOKENS[:, 7] + 1) % V)
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)).min() > 1e-6


def test_swiglu_in_gpt():
    mlp = MLP(dataclasses.replace(GPT, mlp="swiglu"), ONE_DEVICE, nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (1, 2, 16)), np.float64)
    gate, up, down = (np.asarray(m.kernel[...], np.float64) for m in (mlp.gate, mlp.up, mlp.down))
    gated = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), gated @ down, atol=1e-7)


def test_gelu_and_its_width_for_either_family():
    gpt, llama = (dataclasses.replace(x, d_ff=None) for x in (GPT, LLAMA))
    for config in (gpt, dataclasses.replace(llama, mlp="gelu")):
        mlp = MLP(config, ONE_DEVICE, nnx.Rngs(0))
        assert not mlp.is_gated and mlp.up.kernel[...].shape == (16, 64)
        x = jax.random.normal(jax.random.key(0), (1, 2, 16))
        expected = jax.nn.gelu(x @ mlp.up.kernel[...]) @ mlp.down.kernel[...]
        np.testing.assert_allclose(mlp(x), expected, atol=1e-7)
        assert mlp.up.use_bias == (config.family == "gpt")
    gated = dataclasses.replace(gpt, mlp="swiglu")
    counts = [3 * 16 * hidden_width(gated), 2 * 16 * hidden_width(gpt)]
    assert counts[0] == pytest.approx(counts[1], rel=0.05)
    by_token = [training_flops_per_token(config, 100) for config in (gated, gpt)]
    assert by_token[0] == pytest.approx(by_token[1], rel=0.05)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_keeps_float32_parameters(family, scan):
    config = dataclasses.replace(FAMILIES[family], scan=scan, compute_dtype="bfloat16")
    apply, params = split(config)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert "bf16[" in str(jax.make_jaxpr(apply)(params, TOKENS))
    exact, _ = split(dataclasses.replace(config, compute_dtype="float32"))
    logits = apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa, of logits near 0.1.
    np.testing.assert_allclose(logits, exact(params, TOKENS), atol=0.01)


TWO = ModelConfig(n_layer=2, n_head=3, d_model=24, context=12)


TWO_LLAMA = dataclasses.replace(TWO, family="llama", tied=False)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("config", "scaled"),
    [
        (TWO, True),
        (dataclasses.replace(TWO, qkv="separate"), True),
        (dataclasses.replace(TWO, depth_scaled_init=False), False),
        (TWO_LLAMA, False),
        (dataclasses.replace(TWO_LLAMA, depth_scaled_init=True), True),
    ],
)
def test_output_projections_begin_smaller_in_deeper_models(config, scaled, scan):
    _, params = split(dataclasses.replace(config, d_model=96, scan=scan))  # of two layers
    for path, x in leaves(params).items():
        if path.endswith(("kernel", "embedding")):
            smaller = scaled and path.endswith(("out/kernel", "down/kernel"))
            assert np.std(x) == pytest.approx(0.01 if smaller else 0.02, rel=0.06), path


@pytest.mark.parametrize("config", [TWO, TWO_LLAMA, dataclasses.replace(TWO_LLAMA, n_kv_head=1)])
def test_operations_count_each_weight_that_multiplies(config):
    _, params = split(config)
    weights = sum(x.size for path, x in leaves(params).items() if path.endswith("kernel"))
    weights += V * config.d_model if config.tied else 0  # the head, which is the embedding then
    attention = config.n_layer * config.context * config.d_model
    assert training_flops_per_token(config, V) == 6 * (weights + attention)


# Parameters


KINDS = {
    "gpt": GPT,
    "separate gpt": dataclasses.replace(GPT, qkv="separate"),
    "gated gpt": dataclasses.replace(GPT, mlp="swiglu"),
    "llama": LLAMA,
}


def shapes(config, vocab_size=V):
    """The parameters without their numbers."""
    model = nnx.eval_shape(lambda: LanguageModel(config, vocab_size, nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


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


VOCABULARY = 50_257


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_kernels_of_blocks_are_the_matrices(family, tied, scan):
    params = shapes(dataclasses.replace(KINDS[family], tied=tied, scan=scan))
    numbers = optimizers.matrices if scan else None  # unstacked, by the default rules
    labels = leaves(omp.Matrices(weight_dimension_numbers=numbers).read(params).labels)
    matrices = {path for path, label in labels.items() if label == "muon"}
    assert matrices == {path for path in labels if "blocks" in path and path.endswith("kernel")}
    assert len(matrices) == {"gpt": 4, "separate gpt": 6, "gated gpt": 5, "llama": 7}[family] * (
        1 if scan else 3
    )
    table = optimizers.describe(OptimizerConfig(), params)
    assert (
        f"{len(matrices)} parameters, {3 * len(matrices) // (1 if scan else 3)} matrices" in table
    )
    assert "40x16x3" in table if scan else "40x16x1" in table  # out x in x layers


def test_default_rules_do_not_take_stacked_kernels_for_heads():
    # (layer, in, out) has as many axes as Flax's (in, head, out of a head): only a rule can tell.
    params = shapes(dataclasses.replace(GPT, scan=True))
    qkv = optimizers.matrices(params)["blocks"]["attn"]["qkv"]["kernel"]
    assert qkv == omp.MuonDimensionNumbers(1, 2)
    with pytest.raises(ValueError, match="blocks/mlp"):
        omp.muon_dimension_numbers(params)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_stacked_blocks_are_updated_like_a_list_of_them(family):
    _, params = split(KINDS[family])
    grads = jax.tree.map(lambda x: jnp.sin(1000 * x), params)
    rule = optimizers.build(OptimizerConfig(), steps=10)
    update = jax.jit(lambda grads, params: rule.update(grads, rule.init(params), params)[0])
    each, together = update(grads, params), update(stacked(grads), stacked(params))
    for path, one in leaves(stacked(each)).items():
        np.testing.assert_allclose(one, leaves(together)[path], atol=1e-6, err_msg=path)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_every_parameter_is_sharded(family, scan):
    params = shapes(dataclasses.replace(KINDS[family], tied=False, scan=scan))
    mesh = sharding.make_mesh(CUBE, jax.devices())
    placed = leaves(sharding.of_params(params, mesh))
    up = placed["blocks/mlp/up/kernel" if scan else "blocks/0/mlp/up/kernel"].spec
    assert up == jax.P(*[None][: int(scan)], "fsdp", "tensor")
    assert placed["wte/embedding"].spec == jax.P("tensor", "fsdp")
    assert placed["lm_head/kernel"].spec == jax.P("fsdp", "tensor")
    for path, sharded in placed.items():
        if path.endswith("mlp/gate/kernel"):
            assert sharded.spec == up
        elif path.endswith("attn/out/kernel"):
            assert sharded.spec == jax.P(*[None][: int(scan)], "tensor", "fsdp")
        elif path.endswith(("gate/bias", "up/bias")):
            assert sharded.spec == jax.P(*[None][: int(scan)], "tensor")
    assert not sharding.undivided(params, mesh)


# Fewer heads of keys and values than of queries


WORDS, CONTEXT = 11, 8


GROUPED = ModelConfig(
    family="llama",
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    d_model=16,
    d_ff=24,
    context=CONTEXT,
    tied=False,
)


ROWS = jax.random.randint(jax.random.key(1), (4, CONTEXT), 0, WORDS)


def params_of(config):
    grown = make_init_params(config, WORDS)(0)
    return jax.tree.map(lambda x: x * (10 if x.ndim > 1 else 1), grown)  # so that heads differ


def logits(config, params, devices=1, mesh=""):
    made = sharding.make_mesh(mesh, jax.devices()[:devices])
    placed = jax.device_put(params, sharding.of_params(jax.eval_shape(lambda: params), made))
    return jax.jit(make_forward(config, WORDS, made))(placed, ROWS, None, 0)[0]


def each_served_alone(params):
    """The parameters of a model whose keys and values are repeated for each head of queries."""

    def repeated(path, x):
        if path[-2].key not in ("key", "value"):
            return x
        return np.repeat(np.asarray(x).reshape(16, 2, 4), 2, axis=1).reshape(16, 16)

    return jax.tree.map_with_path(repeated, params)


def test_a_head_of_keys_and_values_serves_those_queries_that_follow_each_other():
    params = params_of(GROUPED)
    assert params["blocks"][0]["attn"]["key"]["kernel"].shape == (16, 8)
    alone = dataclasses.replace(GROUPED, n_kv_head=None)
    expected = logits(alone, each_served_alone(params))
    np.testing.assert_allclose(logits(GROUPED, params), expected, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_the_cache_is_as_small_and_gives_the_same(scan):
    config = dataclasses.replace(GROUPED, scan=scan)
    params, one_device = params_of(config), sharding.make_mesh("", jax.devices()[:1])
    forward = jax.jit(make_forward(config, WORDS, one_device))
    cache = empty_kv_cache(config, rows=4)
    assert {x.shape[-2:] for x in jax.tree.leaves(cache)} == {(2, 4)}
    one_by_one = []
    for i in range(CONTEXT):
        now, cache = forward(params, ROWS[:, i : i + 1], cache, i)
        one_by_one.append(now)
    expected = logits(config, params)
    np.testing.assert_allclose(jnp.concatenate(one_by_one, axis=1), expected, atol=1e-5)


@pytest.mark.several_devices
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4"])
def test_all_meshes_give_the_same(mesh):
    params = params_of(GROUPED)
    expected = logits(GROUPED, params)
    np.testing.assert_allclose(logits(GROUPED, params, 8, mesh), expected, atol=1e-5)
