"""Settings from flags, files and machines: names, types, and what wins."""

import dataclasses
import json
import math
import re

import pytest

from examples.trainer.data import corpus
from examples.trainer.settings import command_line
from examples.trainer.settings.command_line import PRESETS, read_config_file
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.weights import check_expressible

TOML = """
steps = 30
optimizer = {learning_rate = 1e-3, clip_norm = inf}
[data]
paths = ["a", "b"]
"""


def parse(*argv):
    return command_line.parse(argv)[0].config


def written(path, text):
    path.write_text(text)
    return path


def test_a_file_changes_a_preset_and_flags_win(tmp_path):
    path = str(written(tmp_path / "c.toml", TOML))
    preset = PRESETS["llama-tiny"][1]
    found = parse("llama-tiny", "--config", path, "--steps", "40")
    assert found.model == preset.model and found.batch_size == preset.batch_size
    assert found.steps == 40 and found.data.paths == ("a", "b")
    assert found.optimizer.learning_rate == 1e-3
    assert found.optimizer.schedule == "warmup_cosine"
    assert found.optimizer.clip_norm == math.inf
    assert parse("--config", path).steps == 30


def test_the_configuration_of_a_run(tmp_path):
    own = dataclasses.replace(PRESETS["llama-micro"][1], name="x", seed=5)
    run = {"config": dataclasses.asdict(own), "data": "0123"}
    path = written(tmp_path / "config.json", json.dumps(run))
    expected = dataclasses.replace(own, name="", seed=6)
    assert parse("--config", str(path), "--seed", "6") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer.learning_rte = 1", "optimizer.learning_rte is 1: there is no such setting"),
        ("steps = 0", "steps is 0: it should be greater than or equal to 1"),
        ("a = [", "cannot be read as TOML"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path, text, words):
    path = written(tmp_path / "c.toml", text)
    with pytest.raises(UserError, match=words) as error:
        read_config_file(path, RunConfig())
    assert str(path) in str(error.value)


# Flags


def test_the_default_run_can_be_exported_and_reads_paths_where_they_are_given(text):
    default = parse()
    check_expressible(default.model)
    assert default.optimizer == RunConfig().optimizer and default.data.source == "documentation"
    prose = corpus.read(default.data)
    assert sum(map(len, prose)) > 500_000 and len(set(prose)) == len(prose)
    own = corpus.read(parse("--data.paths", str(text)).data)
    assert "".join(sorted(own)) == "".join(
        sorted(corpus.read(parse("gpt-micro", "--data.paths", str(text)).data))
    )


def test_each_setting_has_a_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        command_line.parse(["gpt-tiny", "--help"])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    found = set(re.findall(r"(?<![\w`-])--[a-z][\w.-]*\w(?= +[A-Z{\[]|, --[a-z.]*no-)", shown))
    known = dataclasses.asdict(RunConfig())
    parts = {f"{name}.{field}" for name, x in known.items() if isinstance(x, dict) for field in x}
    names = parts | {name for name, x in known.items() if not isinstance(x, dict)}
    assert {f"--{name.replace('_', '-')}" for name in names} <= found


def test_an_underscore_in_the_name_of_a_recipe():
    assert command_line.parse(["gpt_micro"])[1] == "gpt-micro"


def test_a_run_that_is_resumed_keeps_its_settings():
    with pytest.raises(UserError, match=r"--optimizer.learning-rate does not go with --resume"):
        parse("--resume", "runs/x", "--optimizer.learning-rate", "0.1")
