"""LoRA: its layers, what is trained, sharding, and merging."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.trainer.models import adapters
from examples.trainer.settings.model import LoRAConfig, ModelConfig, without_adapters
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, sharding, transformations
from examples.trainer.training.step import make_forward, make_init_params
from tests.support.trainer import assemble_toy, compiled_step, first_losses

V = 50
LORA = LoRAConfig(rank=3, alpha=6.0)
GPT = ModelConfig(n_layer=2, n_head=2, d_model=16, context=12, lora=LORA)
LLAMA = dataclasses.replace(GPT, family="llama", tied=False, n_kv_head=1)
NETWORKS = {
    "gpt": GPT,
    "gpt stacked": dataclasses.replace(GPT, scan=True, remat=True),
    "llama": LLAMA,
    "llama stacked, fused": dataclasses.replace(LLAMA, scan=True, qkv="fused", n_kv_head=None),
}
TOKENS = np.random.default_rng(0).integers(0, V, (3, 12), dtype=np.int32)


@functools.cache
def first_of(config):
    """The parameters with which a network begins."""
    return jax.jit(make_init_params(config, V))(0)


def params_of(config):
    """Random parameters, of which no B is zero."""
    rng = np.random.default_rng(1)
    noise = functools.partial(rng.standard_normal, dtype=np.float32)
    return jax.tree.map(lambda x: x + 0.1 * noise(x.shape), first_of(config))


@functools.cache
def forward_of(config):
    return jax.jit(make_forward(config, V, sharding.make_mesh("", jax.devices()[:1])))


def logits(config, params):
    with jax.default_matmul_precision("highest"):
        return np.asarray(forward_of(config)(params, TOKENS, None, 0)[0])


def names(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(tree)
    }


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_begins_as_the_model_without_adapters(config):
    params, base = first_of(config), first_of(without_adapters(config))
    assert names(adapters.merged(params, LORA)) == names(base)
    jax.tree.map(np.testing.assert_array_equal, adapters.merged(params, LORA), base)
    np.testing.assert_array_equal(logits(config, params), logits(without_adapters(config), base))


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_merged_kernels_give_the_same_logits(config):
    params = params_of(config)
    merged = adapters.merged(params, LORA)
    found = logits(without_adapters(config), merged)
    np.testing.assert_allclose(found, logits(config, params), atol=1e-5)
    plain = adapters.merged(jax.tree.map_with_path(without_b, params), LORA)
    assert np.abs(found - logits(without_adapters(config), plain)).max() > 1e-2


def without_b(path, x):
    return jnp.zeros_like(x) if path[-1].key == adapters.B else x


def test_merged_is_the_kernel_and_the_scaled_product():
    params = params_of(NETWORKS["gpt stacked"])
    layer = params["blocks"]["mlp"]["up"]
    merged = adapters.merged(params, LORA)["blocks"]["mlp"]["up"]["kernel"]
    w, a, b = (np.asarray(layer[x], np.float64) for x in ("kernel", "lora_a", "lora_b"))
    np.testing.assert_allclose(merged, w + 6.0 / 3 * (a @ b), rtol=1e-5, atol=1e-6)


def test_only_the_layers_that_are_named_have_adapters():
    lora = dataclasses.replace(LORA, targets="blocks/1/.*up|lm_head")
    config = dataclasses.replace(LLAMA, lora=lora)
    shapes = jax.eval_shape(make_init_params(config, V), 0)
    found = {x for x in names(shapes) if "lora" in x}
    assert found == {f"blocks/1/mlp/up/lora_{x}" for x in "ab"}  # the head is no layer of blocks


@pytest.mark.parametrize("pattern", ["mlp/upp$", "("])
def test_refuses_a_pattern_that_finds_no_layer(pattern):
    config = dataclasses.replace(GPT, lora=dataclasses.replace(LORA, targets=pattern))
    with pytest.raises(UserError, match=r"blocks/0/mlp/up|no regular expression"):
        jax.eval_shape(make_init_params(config, V), 0)


def test_refuses_a_pattern_that_finds_no_parameter():
    with pytest.raises(UserError, match=r"finds no parameter.*blocks/1/mlp/up/kernel"):
        transformations.trained_part(
            params_of(GPT), OptimizerConfig(train_only="blocks/1/mlp/upp/kernel")
        )


@pytest.mark.parametrize(
    ("given", "wanted", "scan"),
    [
        (("", LORA), "lora_[ab]$", True),
        (("mlp/up/kernel|ln_f", LoRAConfig()), "mlp/up/kernel|ln_f", False),
        (("ln_f", LORA), "lora_[ab]$|ln_f", False),
    ],
    ids=["lora", "train-only", "both"],
)
def test_only_the_part_changes_and_has_a_state(text, given, wanted, scan):
    pattern, lora = given
    rule = OptimizerConfig(train_only=pattern)
    setup = assemble_toy(text, "", 1, optimizer=rule, scan=scan, lora=lora)
    state = setup.init()
    before = jax.tree.map(np.asarray, state.params)
    state, _ = setup.train_step(state, *setup.loader.batch(0))
    state, _ = setup.train_step(state, *setup.loader.batch(1))
    changed = jax.tree.map_with_path(lambda p, a, b: not np.array_equal(a, b), before, state.params)
    for path, has_changed in jax.tree.leaves_with_path(changed):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert has_changed == bool(re.search(wanted, name)), name
    for name in names(state.opt_state):
        if "/blocks/" in name or "wte" in name:
            assert re.search(wanted, name), name


def test_frozen_parameters_have_no_gradients_in_memory(text):
    full = compiled_step(assemble_toy(text, "", 1, d_model=64))
    part = compiled_step(assemble_toy(text, "", 1, d_model=64, lora=LORA))
    kernel = "f32[64,256]"
    assert count(full, kernel) > 4 * count(part, kernel)


def count(program, shape):
    return program.as_text().count(shape)


@pytest.mark.several_devices
def test_sharded_training_is_the_same(text):
    given = {"lora": LORA, "scan": True, "d_model": 32}
    losses = {
        mesh: first_losses(assemble_toy(text, mesh, devices, **given))
        for mesh, devices in (("data=2,fsdp=2,tensor=2", 8), ("", 1))
    }
    one, many = losses.values()
    np.testing.assert_allclose(one, many, rtol=1e-5)
    assert one[0] != one[1]


def test_matrices_of_the_rule_are_those_that_the_flag_names():
    part = transformations.trained_part(params_of(GPT), OptimizerConfig())
    for which, wanted in (("b", {"lora_b"}), ("both", {"lora_a", "lora_b"})):
        numbers = optimizers.dimension_numbers(OptimizerConfig(lora_matrices=which), 8)(part)
        found = jax.tree.leaves_with_path(numbers, is_leaf=lambda x: hasattr(x, "reduction_axis"))
        assert {path[-1].key for path, _ in found} == wanted
