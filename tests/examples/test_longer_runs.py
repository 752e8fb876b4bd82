"""Runs that are extended, branched, or of earlier versions: their losses, rates and sentences."""

import dataclasses
import json
import shutil
import signal

import numpy as np
import pytest

from examples import report, sweep
from examples.experiments.sweeps import command_line
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.runs import checkpoint, folder
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.training import optimizers
from tests.support.trainer import ROOT, STEPS, TOY, losses, saved_step, stop_at, train

pytestmark = pytest.mark.usefixtures("one_device")

MORE = 32


# A rule that is traced in a moment, since each number of steps has a program of its own.
RULE = ("--optimizer.name", "adamw", "--optimizer.learning-rate", "0.02")


def rates(run):
    return losses(run, "optim/learning_rate")


def rate(**settings):
    rule = OptimizerConfig(learning_rate=1.0, **settings)
    return lambda step, steps: float(optimizers.schedule(rule, 1.0, steps)(step))


@pytest.fixture(scope="module")
def short(one_device, tmp_path_factory, text):
    """A finished run of 24 steps, with checkpoints of steps 16 and 24."""
    root = tmp_path_factory.mktemp("short")
    assert train(text, root, "--name", "x", *RULE) == 0
    return root / "x"


@pytest.fixture
def finished(short, tmp_path):
    """A copy of that run."""
    return shutil.copytree(short, tmp_path / "x")


def test_a_stretched_run_has_the_rates_of_a_long_one(finished, tmp_path, text, capsys):
    assert main(["--resume", str(finished), "--steps", str(MORE)]) == 0
    shown = capsys.readouterr().out
    assert "extended from 24 to 32 steps, from step 24 on with --extend stretch" in shown
    assert "the rate of the matrices goes from 0 to 0.008" in shown  # 0.02 x 8 / 20
    found = rates(finished)
    assert list(found) == list(range(1, MORE + 1)) and saved_step(finished) == MORE
    assert found[25] == pytest.approx(0.02 * 8 / 20)
    config, _ = folder.reopen(finished)
    assert config.steps == MORE and config.earlier_steps == (STEPS,)
    assert (finished / "losses.png").exists()


def test_a_run_extended_before_its_rates_fell_is_one_long_run(tmp_path, text):
    """Up to the end of the constant part of the short run, both runs are the same."""
    hold = (*RULE, "--optimizer.hold-share", "0.5")
    assert train(text, tmp_path, "--name", "long", *hold, "--steps", "32") == 0
    with stop_at(8, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train(text, tmp_path, "--name", "short", *hold) == 143
    assert saved_step(tmp_path / "short") < 12
    assert main(["--resume", str(tmp_path / "short"), "--steps", "32"]) == 0
    assert losses(tmp_path / "short") == losses(tmp_path / "long")
    assert rates(tmp_path / "short") == rates(tmp_path / "long")


def test_a_run_that_begins_again_goes_to_the_peak_and_falls(finished, capsys):
    given = ["--resume", str(finished), "--steps", "44", "--extend", "again"]
    assert main(given) == 0
    assert "goes from 0 to 0.02" in capsys.readouterr().out
    found = rates(finished)
    assert [found[step] for step in range(25, 34)] == pytest.approx([0.02] * 9)  # 0.4 x 20 + 1
    fall = [found[step] for step in range(33, 45)]
    np.testing.assert_allclose(np.diff(fall), -0.02 / 12, rtol=1e-4)
    assert main(["--resume", str(finished), "--steps", "48"]) == 0  # and once more
    assert list(losses(finished)) == list(range(1, 49))
    assert folder.reopen(finished)[0].earlier_steps == (STEPS, 44)


def test_the_schedule_that_begins_again():
    again = rate(schedule="warmup_cosine", schedule_from=10, hold_share=0.5, schedule_floor=0.1)
    assert [again(step, 20) for step in (10, 14, 15, 16, 19, 20)] == pytest.approx(
        [1, 1, 1, 0.8, 0.2, 0.1]
    )
    plain = rate(hold_share=0.5)
    assert plain(12, 16) == rate(hold_share=0.5, schedule_from=0)(12, 16) == 0.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", str(STEPS)], "has 24 steps, and --steps 24 is no more: give a larger"),
        (["--extend", "again"], "--extend goes with --steps"),
    ],
)
def test_extensions_that_make_no_sense(finished, capsys, flags, words):
    before = (finished / "config.json").read_bytes()
    assert main(["--resume", str(finished), *flags]) == 2
    assert words in capsys.readouterr().err
    assert (finished / "config.json").read_bytes() == before


def test_a_branch_without_changes_is_the_run(finished, tmp_path):
    branch = ["--from-run", f"{finished}:16", "--name", "b", "--runs-dir", str(tmp_path)]
    assert main(branch) == 0
    own, other = losses(tmp_path / "b"), losses(finished)
    assert own == {step: other[step] for step in range(17, STEPS + 1)}
    config, _ = folder.reopen(tmp_path / "b")
    assert config.from_run == f"{finished}:16" and config.model == folder.reopen(finished)[0].model
    assert losses(finished) == other


def test_a_branch_has_its_own_flags_and_needs_the_run_no_more(finished, tmp_path):
    branch = ["--from-run", str(finished), "--name", "b", "--runs-dir", str(tmp_path)]
    more = ["--steps", str(MORE), "--optimizer.schedule-from", str(STEPS)]
    with stop_at(26, lambda: signal.raise_signal(signal.SIGTERM)):
        assert main([*branch, *more, "--optimizer.learning-rate", "0.01"]) == 143
    assert STEPS in checkpoint.saved_steps(tmp_path / "b" / "checkpoints")  # from the beginning
    shutil.rmtree(finished)
    assert main(["--resume", str(tmp_path / "b")]) == 0
    found = rates(tmp_path / "b")
    assert list(found) == list(range(STEPS + 1, MORE + 1)) and found[25] == 0.01


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--from-run makes a new run: give it a name with --name"),
        (["--name", "b"], "leaves nothing to train: give a larger --steps"),
        (
            ["--name", "b", "--steps", "32", "--model.n-layer", "2"],
            "does not fit the flags: .para",
        ),
        (["--name", "b", "--steps", "32", "--optimizer.name", "normuon"], "does not fit the fla"),
        (["--name", "b", "--steps", "32", "--data.vocab-size", "290"], "the tokenizer of this te"),
    ],
)
def test_branches_that_make_no_sense(finished, tmp_path, capsys, flags, words):
    assert main(["--from-run", str(finished), "--runs-dir", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"x"}


def test_a_branch_of_a_step_that_is_not_there(finished, tmp_path, capsys):
    given = ["--name", "b", "--runs-dir", str(tmp_path)]
    assert main(["--from-run", f"{finished}:8", *given]) == 2
    said = capsys.readouterr().err
    assert "has no checkpoint of step 8: there are those of 16, 24; a run keeps" in said
    assert main(["gpt-micro", "--from-run", str(finished), *given]) == 2
    assert "leave out gpt-micro" in capsys.readouterr().err
    assert main(["--from-run", str(tmp_path / "y"), *given]) == 2
    assert "cannot read" in capsys.readouterr().err


# Runs and sweeps from before there was a choice of the network


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


def test_kept_sweeps_are_reported(capsys):
    kept = [str(EXPERIMENTS / name) for name in ("map-gpt-base", "map-llama-base")]
    assert report.main(kept) == 0
    assert "| map-gpt-base" in capsys.readouterr().out


def test_an_older_run_goes_on_as_it_began(tmp_path, text, capsys):
    assert train(text, tmp_path, "--name", "whole", *OLDER) == 0
    with stop_at(11, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(text, tmp_path, "--name", "x", *OLDER) == 130
    without_added(tmp_path / "x" / "config.json", "config", "model")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x")[STEPS] == losses(tmp_path / "whole")[STEPS]
    model = trained.load(CheckpointRef(tmp_path / "x"))
    assert model.config.model.norm_epsilon == 1e-6
    assert "bias" in model.params["ln_f"] and "query" in model.params["blocks"][0]["attn"]
