"""The moving average of weights: its values, its place in a run, and who can use it."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import export
from examples.perplexity import main as perplexity
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training.transformations import with_average
from tests.support.trainer import STEPS, assemble_toy, losses, on_devices, stop_at, train

DECAY = 0.8
KEEP = ("--keep-every", "1")  # all checkpoints
# A network that can be exported, and a rule that is traced in a moment.
GIVEN = ("--model.final-norm", "layer", "--optimizer.name", "adamw")


@pytest.mark.parametrize(
    ("averages", "weights_of"),
    [
        ({"ema": DECAY}, lambda t: DECAY ** np.arange(t)[::-1]),
        ({"tail": 3.0}, lambda t: np.arange(1, t + 1) > min(2, t - 1)),  # before: the last weights
    ],
    ids=["ema", "tail"],
)
def test_the_average_is_a_mean_of_the_weights(averages, weights_of):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "frozen": optax.MaskedNode()}
    rule = with_average(optax.sgd(0.3), OptimizerConfig(**averages), 5)
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
        weights = weights_of(len(seen)).astype(np.float64)
        expected = np.tensordot(weights / weights.sum(), np.stack(seen), 1)
        np.testing.assert_allclose(state.average["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.several_devices
def test_averages_lie_as_their_parameters(text):
    setup = assemble_toy(text, optimizer=OptimizerConfig(ema=DECAY), scan=True)
    state = setup.program.abstract
    places = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state.average))
    assert places[0] == places[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    root = tmp_path_factory.mktemp("ema")
    with on_devices(1):
        assert train(text, root, "--name", "x", "--ema", "0.9", *GIVEN) == 0
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
        assert train(text, tmp_path, "--name", "y", *GIVEN) == 0
    assert losses(tmp_path / "y") == losses(run)
    with pytest.raises(UserError, match="this run has no such averages"):
        trained.load(CheckpointRef(tmp_path / "y", weights="ema"))


@pytest.mark.several_devices
def test_the_tail_of_a_run_that_was_stopped_is_the_mean_of_its_last_steps(text, tmp_path):
    run = tmp_path / "x"
    with on_devices(2):
        with stop_at(STEPS - 4, lambda: signal.raise_signal(signal.SIGINT)):
            flags = ["--name", "x", "--tail", "0.25", *GIVEN, *KEEP]
            assert train(text, tmp_path, *flags) == 130
        assert main(["--resume", str(run), *KEEP]) == 0
        tail = range(STEPS - 5, STEPS + 1)
        each = [trained.load(CheckpointRef(run, step=i)).params for i in tail]
        mean = trained.load(CheckpointRef(run, weights="tail")).params
        with pytest.raises(UserError, match=rf"after {tail[0] - 1}, and .* of step {tail[0] - 1}"):
            trained.load(CheckpointRef(run, step=tail[0] - 1, weights="tail"))
        assert export.main([str(run), str(tmp_path / "hf"), "--weights", "tail"]) == 0

    def expected(*weights):
        return np.mean([np.asarray(x, np.float64) for x in weights], axis=0)

    jax.tree.map(
        lambda x, *weights: np.testing.assert_allclose(x, expected(*weights), rtol=1e-5, atol=1e-6),
        mean,
        *each,
    )
    assert list(losses(run, "val_loss_tail")) == [20, STEPS]
