"""tunix: `PeftTrainer` on its Qwen3. Skipped where google-tunix is not installed."""

import warnings

import jax
import numpy as np
import pytest
from flax import nnx

import optax_muonplus as omp
from tests.support.hosts import assert_falls, readings

pytest.importorskip("tunix", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    host = pytest.importorskip("examples.hosts.tunix")

pytestmark = pytest.mark.filterwarnings("ignore")

JUDGED = {
    "embedder/input_embedding": "adam",
    "final_norm/w": "adam",
    "layers/{0..1}/attn/k_norm/w": "adam",
    "layers/{0..1}/attn/k_proj/w": "16x32x1",
    "layers/{0..1}/attn/o_proj/w": "32x32x1",
    "layers/{0..1}/attn/q_norm/w": "adam",
    "layers/{0..1}/attn/q_proj/w": "32x32x1",
    "layers/{0..1}/attn/v_proj/w": "16x32x1",
    "layers/{0..1}/input_layernorm/w": "adam",
    "layers/{0..1}/mlp/down_proj/kernel": "32x96x1",
    "layers/{0..1}/mlp/gate_proj/kernel": "96x32x1",
    "layers/{0..1}/mlp/up_proj/kernel": "96x32x1",
    "layers/{0..1}/post_attention_layernorm/w": "adam",
    "lm_head/w": "adam",
}


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which tunix needs
        yield


def assert_all_arrays(optimizer):
    """No Variable of the state holds a MaskedNode, which tunix would ask for its dtype."""
    state = nnx.state(optimizer, nnx.optimizer.OptState)
    for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        assert isinstance(leaf.get_value(), jax.Array), leaf


def test_the_example_trains_by_the_name_in_a_configuration():
    from tunix.cli.config import HyperParameters

    model = host.qwen3()
    assert readings(nnx.state(model, nnx.Param)) == JUDGED
    # The part of tunix' command line that makes the optimizer, without the files that it reads.
    settings = HyperParameters.__new__(HyperParameters)
    settings.config = {
        "optimizer_config": {
            "opt_type": "muonplus",
            "schedule_type": "warmup_cosine_decay_schedule",
            "init_value": 0.0,
            "peak_value": 0.02,
            "warmup_steps": 2,
            "decay_steps": 20,
            "adam_learning_rate": 5e-3,
        }
    }
    trainer, losses = host.train(settings.create_optimizer("optimizer_config"), model, steps=20)
    assert_falls(losses, to=0.5)
    assert_all_arrays(trainer.optimizer)
    rates = trainer.metrics_logger.get_metric_history("", "learning_rate", "train")
    assert max(rates) == pytest.approx(0.02) and rates[-1] < 0.01


def test_adapters_alone_are_trained():
    """LoRA by Qwix: the trainer asks for LoRAParam, of which each is a matrix."""
    import qwix

    provider = qwix.LoraProvider(module_path=".*(q_proj|o_proj|gate_proj)", rank=4, alpha=4.0)
    batch = next(host.batches(1))
    model = qwix.apply_lora_to_model(
        host.qwen3(),
        provider,
        batch["input_tokens"],
        batch["positions"],
        None,
        batch["attention_mask"],
    )
    found = readings(nnx.state(model, nnx.LoRAParam))
    assert len(found) == 6 and set(found.values()) == {"adam"}
    frozen = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(host.qwen3(), nnx.Param)))
    trainer, losses = host.train(omp.muonplus(0.1), model, steps=8)
    assert_falls(losses, to=0.97)
    assert_all_arrays(trainer.optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.filterlib.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, after), frozen)


def test_its_experts_are_asked_for():
    config = host.ModelConfig(
        1, 64, 32, 96, 4, 8, 2, 10_000, 1e-6, num_experts=4, num_experts_per_tok=2
    )
    params = nnx.state(host.Qwen3(config, rngs=nnx.Rngs(0)), nnx.Param)
    assert readings(params)["layers/0/mlp/gate_proj"] == "?"
    suggested = r"mlp/gate_proj\$', omp.MuonDimensionNumbers\(-2, -1\), 3\)"
    with pytest.raises(ValueError, match=suggested):
        omp.muonplus(0.02).init(params)
    rules = [("mlp/(gate|up|down)_proj$", omp.MuonDimensionNumbers(-2, -1))]
    found = readings(params, lambda p: omp.muon_dimension_numbers(p, rules=rules))
    assert found["layers/0/mlp/gate_proj"] == "96x32x4"
    assert found["layers/0/mlp/down_proj"] == "32x96x4"
    assert found["layers/0/mlp/router/kernel"] == "4x32x1"
