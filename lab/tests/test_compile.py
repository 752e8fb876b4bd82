"""`lab.compile`: memory, products and collectives by the machine's own compiler."""

import re

import pytest

from examples.trainer.settings.command_line import parse
from examples.trainer.settings.run import training_flops_per_token
from lab.compile import main, target_of
from lab.compiled_programs import targets
from tests.support.trainer import TOY


@pytest.mark.parametrize("machine", ["cpu:1", "cpu:4", "h100:4", "v5e:2x2"])
def test_a_run_that_fits(machine, capfd):
    target = targets.parse(machine)
    if sentence := targets.missing(target):
        pytest.skip(sentence)
    asked = [*TOY, "--optimizer.name", "adamw"]
    mesh = ["--mesh", "data=2,fsdp=2"] if target.devices == 4 else []
    assert main([*asked, *mesh, "--for", machine]) == 0
    shown = capfd.readouterr().out
    for name in ("training step", "evaluation", "initial state"):
        assert re.search(rf"{name} .* MB, .* MB, .* MB, \d+% of", shown)
    assert "fits        yes" in shown
    assert ("all-reduce" in shown) == (target.devices > 1)
    products = float(re.search(r"products +([\d.]+) GFLOP a device", shown)[1])
    config = parse(asked)[0].config
    tokens = config.batch_size * config.model.context
    expected = tokens * training_flops_per_token(config.model, 300) / 1e9 / target.devices
    assert products == pytest.approx(expected, rel=0.3)  # attention here has no causal half


def test_a_run_that_is_too_large_ends_with_1(capfd):
    large = ["--model.context", "4096", "--model.attention", "plain", "--batch-size", "256"]
    assert main([*TOY, *large, "--model.n-head", "16", "--for", "cpu:1"]) == 1
    assert "fits        no" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["h100", "h100:0", "h100:12", "mi300:8"])
def test_other_machines_are_refused(text, capsys):
    assert main([*TOY, "--for", text]) == 2
    assert f"--for {text}: " in capsys.readouterr().err


def test_a_run_that_is_resumed_is_refused(capsys):
    assert main(["--for", "cpu:1", "--resume", "runs/x"]) == 2
    assert "not --resume" in capsys.readouterr().err


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(targets, "_find", lambda module: False)
    with pytest.raises(Exception, match="libtpu is not installed: pip install"):
        target_of("v5e:4x4")
