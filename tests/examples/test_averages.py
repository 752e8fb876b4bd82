"""The moving average of weights: its values, its place in a run, and who can use it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import export
from examples.perplexity import main as perplexity
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.settings.model import LoRAConfig
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training.averages import averaged
from tests.support.trainer import STEPS, assemble_toy, losses, on_devices, train

DECAY = 0.8


def test_the_average_is_the_mean_with_weights_that_fall():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "frozen": optax.MaskedNode()}
    rule = averaged(optax.sgd(0.3), DECAY)
    state, seen = rule.init(params), []
    np.testing.assert_array_equal(state.average["w"], params["w"])
    for _ in range(5):
        gradients = {
            "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
            "frozen": params["frozen"],
        }
        updates, state = rule.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["w"], np.float64))
        weights = DECAY ** np.arange(len(seen))[::-1]
        expected = np.tensordot(weights / weights.sum(), np.stack(seen), 1)
        np.testing.assert_allclose(state.average["w"], expected, rtol=1e-5, atol=1e-6)


def test_half_precision_weights_have_an_average_in_float32():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    state = averaged(optax.sgd(0.1), 0.999).init(params)
    assert state.average["w"].dtype == jnp.float32


@pytest.mark.several_devices
def test_averages_lie_as_their_parameters(text):
    setup = assemble_toy(text, optimizer=OptimizerConfig(ema=DECAY), scan=True)
    state = setup.program.abstract
    places = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state.average))
    assert places[0] == places[1]


def test_a_run_without_it_has_the_state_that_it_had(text):
    plain = assemble_toy(text, "", 1).program.abstract.opt_state
    with_it = assemble_toy(text, "", 1, optimizer=OptimizerConfig(ema=DECAY)).program.abstract
    assert jax.tree.structure(plain) == jax.tree.structure(with_it.opt_state.rule)


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    root = tmp_path_factory.mktemp("ema")
    with on_devices(1):
        assert train(text, root, "--name", "x", "--ema", "0.9", "--model.final-norm", "layer") == 0
    return root / "x"


def test_it_is_evaluated_loaded_and_exported(run, text, tmp_path, capsys):
    with on_devices(1):
        last, mean = (trained.load(CheckpointRef(run, weights=x)).params for x in ("last", "ema"))
        apart = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), last, mean)
        assert all(x > 0 for x in jax.tree.leaves(apart))
        assert losses(run, "val_loss_ema")[STEPS] != losses(run, "val_loss")[STEPS]
        capsys.readouterr()
        assert perplexity([str(run), "--texts", str(text), "--weights", "ema"]) == 0
        shown = capsys.readouterr().out
        assert perplexity([str(run), "--texts", str(text)]) == 0
        assert capsys.readouterr().out != shown
        assert export.main([str(run), str(tmp_path / "hf"), "--weights", "ema"]) == 0
    np_file = pytest.importorskip("safetensors.numpy").load_file(
        tmp_path / "hf" / "model.safetensors"
    )
    np.testing.assert_array_equal(np_file["transformer.wte.weight"], mean["wte"]["embedding"])


def test_training_is_the_same_with_it(run, text, tmp_path):
    with on_devices(1):
        assert train(text, tmp_path, "--name", "y", "--model.final-norm", "layer") == 0
    assert losses(tmp_path / "y") == losses(run)


def test_adapters_have_averages_too(text, trained_run):
    config = json.loads((trained_run / "config.json").read_text())["config"]
    assert config["optimizer"]["ema"] is None
    with pytest.raises(Exception, match="no averages"):
        trained.load(CheckpointRef(trained_run, weights="ema"))
    given = {"optimizer": OptimizerConfig(ema=DECAY), "lora": LoRAConfig(rank=2)}
    state = assemble_toy(text, "", 1, **given).program.abstract.opt_state
    assert len(jax.tree.leaves(state.average)) == 8
