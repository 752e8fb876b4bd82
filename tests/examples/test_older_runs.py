"""Runs and sweeps from before there was a choice of the network stay what they were."""

import dataclasses
import json
import shutil
import signal

import jax
import pytest

from examples import generate, report, sweep
from examples.experiments.sweeps import command_line
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.validation import from_dict
from tests.support.trainer import ROOT, STEPS, TOY, losses, stop_at, train

pytestmark = pytest.mark.usefixtures("one_device")

OLDER = ["--model.qkv", "separate", "--model.final-norm", "layer"]
OLDER += ["--model.depth-scaled-init", "False", "--model.norm-epsilon", "1e-6"]
ADDED = ("qkv", "final_norm", "depth_scaled_init", "norm_epsilon")
EXPERIMENTS = ROOT / "results" / "experiments"
# Those whose settings have no field for the projections were made before there was one.
KEPT = [x for x in sorted(EXPERIMENTS.glob("*/sweep.json")) if '"qkv"' not in x.read_text()]


def without_added(path, *keys):
    """Rewrites a file of settings as an earlier version wrote it."""
    written = json.loads(path.read_text())
    model = written
    for key in keys:
        model = model[key]
    for name in ADDED:
        del model[name]
    path.write_text(json.dumps(written))


def test_absent_fields_mean_the_older_network():
    older = from_dict(ModelConfig, {"family": "gpt", "n_layer": 2})
    assert older == ModelConfig(
        n_layer=2, qkv="separate", final_norm="layer", depth_scaled_init=False, norm_epsilon=1e-6
    )
    llama = from_dict(ModelConfig, {"family": "llama"})
    assert llama == ModelConfig(family="llama", norm_epsilon=1e-6)
    now = dataclasses.asdict(ModelConfig())
    assert from_dict(ModelConfig, now) == ModelConfig()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run of the older network that was never stopped."""
    root = tmp_path_factory.mktemp("older")
    assert train(text, root, "--name", "x", *OLDER) == 0
    return root / "x"


def test_older_run_resumes_as_it_began(finished, tmp_path, text):
    with stop_at(11, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(text, tmp_path, "--name", "x", *OLDER) == 130
    without_added(tmp_path / "x" / "config.json", "config", "model")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x")[STEPS] == losses(finished)[STEPS]


def test_older_run_is_sampled_as_the_network_that_it_is(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "x")
    without_added(tmp_path / "x" / "config.json", "config", "model")
    model = trained.load(CheckpointRef(tmp_path / "x"))
    assert model.config.model.norm_epsilon == 1e-6
    assert "bias" in model.params["ln_f"] and "query" in model.params["blocks"][0]["attn"]
    own = trained.load(CheckpointRef(finished))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), model.params, own.params))
    assert generate.main([str(tmp_path / "x"), "--tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()


def test_sweep_of_the_older_network_continues_with_its_flags_only(tmp_path, text, capsys):
    toy = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "s"]
    toy += ["--grid.optimizers", "muonplus", "--grid.norms", "col_row", "--grid.rates", "0.01"]
    assert sweep.main([*toy, *OLDER]) == 0
    without_added(tmp_path / "s" / "sweep.json", "base", "model")
    assert sweep.main([*toy, *OLDER]) == 0
    assert "1 runs, 1 of them done" in capsys.readouterr().out
    assert sweep.main(toy) == 2
    assert "has another base.model.qkv ('separate')" in capsys.readouterr().err


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_kept_sweeps_are_of_the_older_network(path):
    model = from_dict(ModelConfig, command_line.read(path)["base"]["model"])
    assert model.norm_epsilon == 1e-6
    assert model.qkv == ("separate" if model.family == "gpt" else None)


def test_kept_sweeps_are_reported(tmp_path):
    kept = [str(EXPERIMENTS / name) for name in ("map-gpt-base", "map-llama-base")]
    assert report.main([*kept, "--out", str(tmp_path)]) == 0
    assert "map-gpt-base: each method" in (tmp_path / "report.md").read_text()
