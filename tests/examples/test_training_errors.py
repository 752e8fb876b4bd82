"""Messages for what a person can get wrong when training."""

import dataclasses
import json
import signal
import unittest.mock
from pathlib import Path

import pytest

from examples.train import main
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import launch
from examples.trainer.settings import command_line
from examples.trainer.settings.run import DataConfig, OptimizerConfig, RunConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.training import program
from tests.support.trainer import (
    TOY,
    stop_at,
    train,
)

pytestmark = pytest.mark.usefixtures("one_device")


def error_of(capsys, *argv):
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_existing_run_folder_is_refused(tmp_path, text, capsys):
    (tmp_path / "taken").mkdir()
    assert train(text, tmp_path, "--name", "taken") == 2
    assert "is no run, as it has no config.json: choose another --name" in capsys.readouterr().err
    (tmp_path / "taken" / "config.json").write_text("")
    assert train(text, tmp_path, "--name", "taken") == 2
    shown = capsys.readouterr().err
    assert str(tmp_path / "taken") in shown and "--name" in shown and "--resume" in shown


def test_default_folder_is_the_first_unused_name(tmp_path):
    config = RunConfig(runs_dir=str(tmp_path))
    for expected in ("p-muonplus", "p-muonplus-2", "p-muonplus-3"):
        folder = run_folder.choose_folder(config, "p")
        assert folder == tmp_path / expected
        folder.mkdir()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"caf\xe9 " * 1000, "not UTF-8"),
        (b"short", "too little text"),
        (b"word " * 500, "too little validation text"),
    ],
)
def test_unusable_text_is_refused_and_leaves_no_run(tmp_path, capsys, content, words):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    shown = error_of(capsys, *TOY, "--data.paths", str(path), "--runs-dir", str(tmp_path / "runs"))
    assert words in shown
    assert not (tmp_path / "runs").exists()  # a failed start leaves no run behind


def test_too_little_training_text_is_refused(tmp_path, capsys):
    path = tmp_path / "given.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(100)))
    shown = error_of(capsys, *TOY, "--data.paths", str(path), "--data.val-fraction", "0.7")
    assert "too little training text" in shown


def test_folder_without_text_is_refused(tmp_path, capsys):
    (tmp_path / "image.bin").write_bytes(b"123")
    assert "holds no .txt" in error_of(capsys, *TOY, "--data.paths", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.d-model", "17"], "--model.n-head"),
        (["--steps", "0"], "--steps is 0"),
        (["--optimizer.record-every", "-1"], "--optimizer.record-every is -1"),
        (["--data.val-fraction", "1"], "--data.val-fraction"),
        (["--data.vocab-size", "100"], "--data.vocab-size"),
    ],
)
def test_impossible_settings_are_refused(flags, words, capsys):
    assert words in error_of(capsys, *TOY, *flags)


SENSELESS = [
    ("--seed", "-1"),
    ("--seed", str(2**31)),
    ("--steps", str(2**31)),
    ("--max-skipped", "-1"),
    ("--data.tokens", "nan"),
    ("--data.tokens", "0.5"),
    ("--optimizer.learning-rate", "nan"),
    ("--optimizer.learning-rate", "-0.1"),
    ("--optimizer.adam-learning-rate", "inf"),
    ("--optimizer.weight-decay", "nan"),
    ("--optimizer.adam-weight-decay", "-1"),
    ("--optimizer.clip-norm", "0"),
    ("--optimizer.clip-norm", "nan"),
    ("--optimizer.adam-b1", "1"),
    ("--optimizer.adam-b2", "2"),
]
OF_MUONPLUS = [
    ("--optimizer.beta", "1"),
    ("--optimizer.ns-steps", "9"),
    ("--optimizer.ns-steps", "2000"),
]


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        *(("muonplus", *given) for given in (*SENSELESS, *OF_MUONPLUS)),
        *((name, *SENSELESS[-1]) for name in ("adamw", "mano")),
    ],
)
def test_flag_that_makes_no_sense_is_refused_by_name(name, flag, value, capsys, monkeypatch):
    unused = unittest.mock.Mock(side_effect=AssertionError("something was built"))
    monkeypatch.setattr(launch, "prepare", unused)
    rule = ["--optimizer.name", name, "--optimizer.ns-coeffs", "you"]
    shown = error_of(capsys, *TOY, *rule, flag, value)
    assert flag in shown and value.lstrip("-") in shown


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seed", str(2**31 - 1)),
        ("--optimizer.learning-rate", "0"),
        ("--optimizer.clip-norm", "None"),
        ("--optimizer.clip-norm", "inf"),
        ("--optimizer.beta", "0"),
        ("--optimizer.ns-steps", "6"),
    ],
)
def test_flag_at_its_limit_is_taken(flag, value):
    asked, _ = command_line.parse([*TOY, "--optimizer.ns-coeffs", "you", flag, value])
    program.check_settings(asked.config)


def test_impossible_setting_of_a_run_names_its_file(trained_run, tmp_path, capsys):
    written = json.loads((trained_run / "config.json").read_text())
    written["config"]["optimizer"]["beta"] = 2
    (tmp_path / "config.json").write_text(json.dumps(written))
    shown = error_of(capsys, "--resume", str(tmp_path))
    assert f"{tmp_path}/config.json was not written by this version: optimizer.beta is 2" in shown


def test_unknown_preset_is_refused_with_a_suggestion(capsys):
    assert "did you mean gpt-small" in error_of(capsys, "gpt-smal", "--steps", "3")
    assert "--help lists them" in error_of(capsys, "colour")


def test_resume_refuses_a_folder_that_is_no_run(tmp_path, capsys):
    assert "no config.json" in error_of(capsys, "--resume", str(tmp_path))
    (tmp_path / "config.json").write_text('{"config": {"colour": 1}}')
    assert "not written by this version" in error_of(capsys, "--resume", str(tmp_path))


def test_resume_refuses_another_text(tmp_path, text, capsys):
    own = tmp_path / "own.txt"
    own.write_bytes(text.read_bytes())
    with stop_at(3, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(own, tmp_path, "--name", "x") == 130
    own.write_bytes(text.read_bytes() + b"more")
    assert "the text is not the one" in error_of(capsys, "--resume", str(tmp_path / "x"))


def test_config_survives_json():
    config = RunConfig(data=DataConfig(paths=("a", "b")), optimizer=OptimizerConfig(clip_norm=None))
    written = json.dumps(dataclasses.asdict(config))
    assert from_dict(RunConfig, json.loads(written)) == config


def test_unreadable_file_is_named(tmp_path, text, capsys):
    denied = PermissionError(13, "Permission denied")  # patched, since root may read all files
    with unittest.mock.patch.object(Path, "open", side_effect=denied):
        shown = error_of(capsys, *TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path))
    assert f"cannot read {text}: Permission denied" in shown


def test_unwritable_cache_is_named(tmp_path, text, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in error_of(capsys, *TOY, "--data.paths", str(text))
