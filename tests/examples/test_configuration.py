"""Settings from files: YAML, TOML, and those of a run; flags that win; names and types."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from examples.trainer.settings import command_line
from examples.trainer.settings.hugging_face import check_expressible
from examples.trainer.settings.presets import COMPARED, DEFAULT_PRESET, PRESETS
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError

YAML = """
steps: 30
optimizer: {learning_rate: 1e-3, clip_norm: null}
data:
  paths: [a, b]
"""
TOML = """
steps = 30
optimizer.learning_rate = 1e-3
[data]
paths = ["a", "b"]
"""


def parse(*argv):
    return command_line.parse(argv)[0].config


def written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.yml", YAML), ("c.toml", TOML)])
def test_a_file_changes_a_preset_and_flags_win(tmp_path, name, text):
    path = str(written(tmp_path / name, text))
    preset = PRESETS["llama-tiny"][1]
    found = parse("llama-tiny", "--config", path, "--steps", "40")
    assert found.model == preset.model and found.batch_size == preset.batch_size
    assert found.steps == 40 and found.data.paths == ("a", "b")
    assert found.optimizer.learning_rate == 1e-3
    assert found.optimizer.schedule == "warmup_cosine"
    assert found.optimizer.clip_norm == (1.0 if name == "c.toml" else None)  # TOML has no null
    assert parse("--config", path).steps == 30


def test_the_configuration_of_a_run(tmp_path):
    own = dataclasses.replace(PRESETS["llama-micro"][1], name="x", seed=5, earlier_steps=(7,))
    run = {"config": dataclasses.asdict(own), "data": "0123"}
    path = written(tmp_path / "config.json", json.dumps(run))
    expected = dataclasses.replace(own, name="", earlier_steps=(), seed=6)
    assert parse("--config", str(path), "--seed", "6") == expected
    del run["config"]["model"]["norm_epsilon"]  # as a run of an earlier version
    path.write_text(json.dumps(run))
    assert parse("--config", str(path)).model.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "optimizer: {learning_rte: 1}", "no setting optimizer.learning_rte: did you "
         "mean optimizer.learning_rate or"),
        ("c.yaml", "learning_rate: 1", "no setting learning_rate: did you mean optimizer.learn"),
        ("c.yaml", "optimiser: {beta: 1}", "no setting optimiser: did you mean optimizer"),
        ("c.yaml", "zebra: 1", "no setting zebra: --help lists"),
        ("c.yaml", "steps: many", "steps is 'many': it should be a valid integer. Change it"),
        ("c.yaml", "optimizer: {beta: '0.9'}", "optimizer.beta is '0.9': it should be a valid n"),
        ("c.yaml", "optimizer: 3", "optimizer is 3: "),
        ("c.yaml", "steps: 0", "steps is 0: it should be greater than or equal to 1"),
        ("c.yaml", "steps: 3\nsteps: 4", "cannot be read as yaml: steps stands there twice"),
        ("c.json", '{"model": {"n_head": 1, "n_head": 2}}', "json: n_head stands there twice"),
        ("c.toml", "steps = 3\nsteps = 4", "cannot be read as toml: Cannot overwrite"),
        ("c.yaml", "a: [", "cannot be read as yaml: while parsing"),
        ("c.yaml", "- 3", "has no settings: give some"),
        ("c.toml", "steps = ", r"cannot be read as toml: Invalid value"),
        ("c.json", "{", "cannot be read as json: Expecting"),
        ("c.ini", "", "give a file that ends in .yaml, .yml, .toml, .json"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit(tmp_path, name, text, words):
    path = written(tmp_path / name, text)
    with pytest.raises(UserError, match=words) as error:
        command_line.read_config_file(path, RunConfig())
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*c.yaml: No such file"):
        parse("--config", str(tmp_path / "c.yaml"))


# Flags


@pytest.mark.parametrize(("part", "argv"), [(0, ["gpt-tiny"]), (1, ["--resume", "x"])])
def test_flags_keep_their_names(capsys, monkeypatch, part, argv):
    """Scripts of users have them. A new flag comes into the file; none leaves it."""
    monkeypatch.setenv("COLUMNS", "300")
    content = Path(__file__).with_name("flags.txt").read_text().split("\n\n")[part]
    with pytest.raises(SystemExit):
        command_line.parse([*argv, "--help"])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    found = set(re.findall(r"^[│\s]*(?:-h, )?(--[a-z][\w.-]*\w)(?=[\s,]|$)", shown, re.MULTILINE))
    assert found == set(re.findall(r"^--\S+", content, re.MULTILINE))


def test_the_default_run_has_its_best_rate_and_a_model_that_can_be_exported(tmp_path):
    """What was taken from an earlier run, other rules and sweeps keep what they had."""
    default = parse()
    check_expressible(default.model)
    assert default.optimizer.learning_rate == 0.01
    assert parse("gpt-tiny", "--optimizer.learning-rate", "0.5").optimizer.learning_rate == 0.5
    run = written(tmp_path / "c.json", json.dumps({"config": dataclasses.asdict(RunConfig())}))
    for flags in (["--optimizer.name", "adamw"], ["--config", str(run)], ["gpt-micro"]):
        assert parse(*flags).optimizer.learning_rate is None
    assert COMPARED[DEFAULT_PRESET][1] == RunConfig()
