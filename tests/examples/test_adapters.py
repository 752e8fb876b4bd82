"""LoRA: its layers, what is trained, merging, and runs from an export to an export."""

import dataclasses
import functools
import json
import re
import shutil
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import export, finetune
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models import adapters
from examples.trainer.settings import command_line
from examples.trainer.settings.model import LoRAConfig, ModelConfig, without_adapters
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, sharding, transformations
from examples.trainer.training.step import make_forward, make_init_params
from examples.trainer.weights.export import write_adapters
from tests.support import hugging_face
from tests.support.trainer import (
    assemble_toy,
    compiled_step,
    first_losses,
    losses,
    on_devices,
    train,
)

V, TOKENS = hugging_face.V, hugging_face.TOKENS


LORA = LoRAConfig(rank=3, alpha=6.0)


GPT = ModelConfig(n_layer=2, n_head=2, d_model=16, context=12, lora=LORA)


LLAMA = dataclasses.replace(GPT, family="llama", tied=False, n_kv_head=1)


NETWORKS = {
    "gpt": GPT,
    "gpt stacked": dataclasses.replace(GPT, scan=True, remat=True),
    "llama": LLAMA,
    "llama stacked, fused": dataclasses.replace(LLAMA, scan=True, qkv="fused", n_kv_head=None),
}


@functools.cache
def first_of(config):
    """The parameters with which a network begins."""
    return jax.jit(make_init_params(config, V))(0)


def params_of(config, size=0.1):
    """Random parameters, of which no B is zero."""
    rng = np.random.default_rng(1)
    noise = functools.partial(rng.standard_normal, dtype=np.float32)
    return jax.tree.map(lambda x: x + size * noise(x.shape), first_of(config))


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


def test_refuses_a_pattern_that_finds_nothing():
    for pattern, words in (("mlp/upp$", "blocks/0/mlp/up"), ("(", "no regular expression")):
        config = dataclasses.replace(GPT, lora=dataclasses.replace(LORA, targets=pattern))
        with pytest.raises(UserError, match=words):
            jax.eval_shape(make_init_params(config, V), 0)
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


# In PEFT


EXPORTED = {
    "gpt": dataclasses.replace(hugging_face.GPT, lora=LORA),
    "gpt stacked, some": dataclasses.replace(
        hugging_face.GPT, scan=True, tied=False, lora=dataclasses.replace(LORA, targets="attn")
    ),
    "llama grouped": dataclasses.replace(hugging_face.LLAMA, n_kv_head=2, lora=LORA),
    "llama stacked, fused": dataclasses.replace(
        hugging_face.LLAMA, scan=True, qkv="fused", lora=LORA
    ),
}


def base_of(params):
    """The parameters as they were before adapters."""
    if not isinstance(params, dict):
        return params
    own = {name: x for name, x in params.items() if name not in (adapters.A, adapters.B)}
    return {name: base_of(x) for name, x in own.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls what transformers renames
@pytest.mark.parametrize("config", EXPORTED.values(), ids=EXPORTED)
def test_peft_computes_the_same(config, tmp_path):
    torch = pytest.importorskip("torch")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    params = params_of(config, 0.2)
    hugging_face.write(tmp_path / "base", without_adapters(config), base_of(params))
    base = str(tmp_path / "base")
    write_adapters(tmp_path / "apart", params, config, base, "float32", False)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.tensor(hugging_face.TOKENS, dtype=torch.long)
    with torch.no_grad():
        plain = model.eval()(tokens).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "apart").eval()
        found = adapted(tokens).logits.numpy()
    np.testing.assert_allclose(found, hugging_face.logits(config, params), atol=1e-4)
    assert np.abs(found - plain).max() > 1e-2


def test_refuses_three_adapters_for_one_layer(tmp_path):
    config = dataclasses.replace(hugging_face.GPT, qkv="separate", lora=LORA)
    with pytest.raises(UserError, match="GPT-2 has one layer"):
        write_adapters(tmp_path / "x", params_of(config), config, "base", "float32", False)
    assert not (tmp_path / "x").exists()


# Runs


SHORT = ["gpt-micro", "--batch-size", "8", "--eval-batches", "2", "--sample-tokens", "4"]


SHORT += ["--checkpoint-every", "4", "--model.scan"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, text):
    """The folder of an export, and a run with LoRA that begins with it."""
    root = tmp_path_factory.mktemp("adapted")
    given = ["--runs-dir", str(root), "--data.paths", str(text), "--lora.rank", "2"]
    with on_devices(1):
        flags = ("--model.final-norm", "layer", "--model.scan", "--name", "x")
        assert train(text, root, *flags) == 0
        assert export.main([str(root / "x"), str(root / "hf")]) == 0
        from_it = ["--init-from", str(root / "hf"), "--name", "y", "--steps", "8", "--ema", "0.9"]
        assert main([*SHORT, *given, *from_it]) == 0
    return root / "hf", root / "y"


def test_the_base_stays_and_the_adapters_learn(adapted):
    _, run = adapted
    before = trained.load(CheckpointRef(run.parent / "x")).params
    after = trained.load(CheckpointRef(run)).params
    found = dict(jax.tree.leaves_with_path(after))
    for path, x in jax.tree.leaves_with_path(before):
        np.testing.assert_array_equal(found[path], x)
    assert np.any(np.asarray(after["blocks"]["attn"]["qkv"]["lora_b"]))


def test_the_average_of_adapters_is_loaded_with_the_base(adapted):
    _, run = adapted
    last, mean = (trained.load(CheckpointRef(run, weights=x)).params for x in ("last", "ema"))
    found = dict(jax.tree.leaves_with_path(mean))
    for path, x in jax.tree.leaves_with_path(last):
        assert np.array_equal(found[path], x) == ("lora" not in path[-1].key), path


def test_it_resumes_as_if_it_had_not_stopped(adapted, text, tmp_path):
    hf, run = adapted
    given = ["--runs-dir", str(tmp_path), "--data.paths", str(text), "--lora.rank", "2"]
    with on_devices(1):
        assert main([*SHORT, *given, "--init-from", str(hf), "--name", "z", "--steps", "8"]) == 0
        shutil.rmtree(tmp_path / "z" / "checkpoints" / "8")
        assert main(["--resume", str(tmp_path / "z")]) == 0
    assert losses(tmp_path / "z") == losses(run)


def test_an_export_has_the_adapters_in_the_kernels_or_apart(adapted, tmp_path, capsys):
    hf, run = adapted
    with on_devices(1):
        assert export.main([str(run), str(tmp_path / "merged")]) == 0
        assert export.main([str(run), str(tmp_path / "apart"), "--no-merged"]) == 0
        again = ["--init-from", str(tmp_path / "merged"), "--runs-dir", str(tmp_path)]
        rates = ["--optimizer.learning-rate", "0", "--optimizer.adam-learning-rate", "0"]
        config = json.loads((run / "config.json").read_text())["config"]
        paths = ["--data.paths", *config["data"]["paths"], "--steps", "1", "--name", "m"]
        assert main([*SHORT, *again, *rates, *paths]) == 0
    np.testing.assert_allclose(
        losses(tmp_path / "m", "val_loss")[1], losses(run, "val_loss")[8], rtol=1e-5
    )
    values = json.loads((tmp_path / "apart" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(hf) and values["r"] == 2
    assert "transformer.h.0.attn.c_attn" in values["target_modules"]
    assert export.main([str(run.parent / "x"), str(tmp_path / "no"), "--no-merged"]) == 2
    assert "has no adapters" in capsys.readouterr().err


def test_the_worked_example(tmp_path):
    """With the second of both pretrainings and two of three rules, which differ in their flags."""
    for flags in (*finetune.PRETRAINING.values(), *finetune.RULES.values()):
        command_line.parse([*finetune.BOTH, *flags])
    rules = {name: finetune.RULES[name] for name in ("adamw", "muonplus on B")}
    small = ("--model.n-layer", "1", "--eval-every", "10", "--eval-batches", "2")
    both = (*finetune.BOTH, *small, "--sample-tokens", "4")
    one = {"muonplus": finetune.PRETRAINING["muonplus"]}
    with (
        on_devices(1),
        unittest.mock.patch.object(finetune, "BOTH", both),
        unittest.mock.patch.object(finetune, "PRETRAINING", one),
        unittest.mock.patch.object(finetune, "RULES", rules),
    ):
        lines = finetune.compare(
            tmp_path, 12, 30, width=16, rank=2, rates=(0.01,), seeds=(0,)
        ).splitlines()
    assert len(lines) == 2 + len(rules)
    for rule in rules:
        folder = tmp_path / "12-30-steps-width-16-rank-2"
        run = folder / f"muonplus-{rule.replace(' ', '-')}-0.01-0"
        values = losses(run, "val_loss")
        assert values[30] < values[10], rule
        assert losses(run, "throughput/tokens_per_second")
        assert not losses(run, "throughput/gflops_per_second")  # frozen matrices need fewer
