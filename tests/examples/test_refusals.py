"""What a person can get wrong when training: a sentence, and no run is left behind."""

import json
import signal

import pytest

from examples import sweep
from examples.train import main
from examples.trainer.runs import launch
from examples.trainer.settings import command_line
from examples.trainer.training import program
from tests.support.trainer import (
    TOY,
    on_devices,
    stop_at,
    train,
)

LLAMA = "--model.family llama"


def error_of(capsys, argv, command=main):
    assert command(argv) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err and not shown.out
    return shown.err


def refusal(capsys, *argv):
    """The sentence of a command that may have said something before."""
    assert main(list(argv)) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


REFUSED = [
    # Numbers out of their range; a value that the library refuses is named by its flag.
    ("--steps 0", "--steps is 0"),
    ("--data.tokens nan", "--data.tokens is nan"),
    ("--data.tokens 0.5", "--data.tokens is 0.5"),
    ("--data.val-fraction 1", "--data.val-fraction is 1"),
    ("--data.vocab-size 100", "--data.vocab-size is 100"),
    ("--optimizer.learning-rate nan", "--optimizer.learning-rate is nan"),
    ("--optimizer.clip-norm 0", "--optimizer.clip-norm is 0"),
    ("--optimizer.clip-norm nan", "--optimizer.clip-norm is nan"),
    ("--optimizer.hold-share -0.1", "--optimizer.hold-share is -0.1: it should be"),
    ("--optimizer.ns-coeffs you --optimizer.ns-steps 9", "ns_steps"),
    ("--optimizer.ns-steps 2000", "--optimizer.ns-steps"),
    # Networks
    ("--model.d-model 17", "--model.n-head"),
    ("--model.n-head 3", "cannot be cut into 3 heads"),
    (f"{LLAMA} --model.n-head 16", "gives 1 numbers a head"),
    (f"{LLAMA} --model.final-norm layer", "all norms of llama are RMSNorm"),
    # Flags that the rule does not take
    ("--optimizer.name muon --optimizer.norm row", "norm row would change nothing under muon"),
    ("--optimizer.name turbo_muon --optimizer.polar gram", "--optimizer.polar gram would change"),
    # The machine
    ("--mesh model=8", "'model=8' is none of its parts"),
    ("--mesh data=4,data=2", "'data=2' is none"),
    ("--mesh fsdp=0", "give 1 or more"),
    ("--mesh data=2,fsdp=2", "is for 4 devices, but there are 8: --mesh fsdp=8 fits"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_flags_that_make_no_sense(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(launch, "prepare", lambda *_: pytest.fail("a text was read"))
    monkeypatch.setattr(program, "make_program", lambda *_: pytest.fail("something was built"))
    assert words in error_of(capsys, [*TOY, *flags.split()])


def test_a_mesh_of_another_number_of_devices_than_the_one(capsys):
    with on_devices(1):
        shown = error_of(capsys, ["--mesh", "fsdp=3", "--steps", "1"])
    assert "--mesh fsdp=3 is for 3 devices, but there is 1: --mesh fsdp=1 fits" in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optimizer.learning-rate 0.1", "values with --grid.rates"),
        ("--optimizer.name adamw", "values with --grid.optimizers"),
        ("--seed 7", "give their number as --grid.seeds"),
        ("--grid.orthos jordan-0", "--grid.orthos jordan-0: give jordan, you"),
        ("--grid.rates 0", "--grid.rates is 0.0: it should be greater than 0"),
        ("--model.n-head 3", "--model.n-head"),
    ],
)
def test_impossible_grids_are_refused(flags, words, capsys):
    assert words in error_of(capsys, [*TOY, *flags.split()], sweep.main)


@pytest.mark.parametrize(
    "flags",
    [
        "--seed 2147483647",
        "--optimizer.learning-rate 0",
        "--optimizer.clip-norm None",
        "--optimizer.clip-norm inf",
        "--optimizer.ns-coeffs you --optimizer.ns-steps 6",
        "--optimizer.polar gram --optimizer.compute-dtype bfloat16",
    ],
)
def test_flags_at_their_limits_are_taken(flags):
    program.check_settings(command_line.parse([*TOY, *flags.split()])[0].config)


def test_settings_of_a_recipe_that_the_rule_does_not_take():
    """The norm of gpt-base is of Muon+."""
    assert command_line.parse(["gpt-base", "--optimizer.name", "muon"])[0].config


# Texts, folders and files


def test_existing_run_folder_is_refused(tmp_path, text, capsys):
    (tmp_path / "taken").mkdir()
    assert train(text, tmp_path, "--name", "taken") == 2
    shown = capsys.readouterr().err
    assert str(tmp_path / "taken") in shown and "--name" in shown and "--resume" in shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory: '"),
        (b"", "too little text"),
        (b" \n\n ", "too little text"),
        (b"caf\xe9 " * 1000, "not UTF-8"),
        (b"short", "too little text"),
        (b"word " * 500, "too little validation text"),
    ],
)
def test_unusable_text_is_refused_and_leaves_no_run(tmp_path, capsys, content, words):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    shown = refusal(capsys, *TOY, "--data.paths", str(path), "--runs-dir", str(tmp_path / "runs"))
    assert words in shown
    assert not (tmp_path / "runs").exists()  # a failed start leaves no run behind


def test_impossible_setting_of_a_run_names_its_file(trained_run, tmp_path, capsys):
    written = json.loads((trained_run / "config.json").read_text())
    written["config"]["optimizer"]["beta"] = 2
    (tmp_path / "config.json").write_text(json.dumps(written))
    shown = refusal(capsys, "--resume", str(tmp_path))
    assert f"{tmp_path}/config.json was not written by this version: optimizer.beta is 2" in shown


def test_resume_refuses_a_folder_that_is_no_run(tmp_path, capsys):
    assert "no config.json" in refusal(capsys, "--resume", str(tmp_path))
    (tmp_path / "config.json").write_text('{"config": {"colour": 1}}')
    assert "not written by this version" in refusal(capsys, "--resume", str(tmp_path))


def test_resume_refuses_another_text(tmp_path, text, capsys):
    own = tmp_path / "own.txt"
    own.write_bytes(text.read_bytes())
    with stop_at(3, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(own, tmp_path, "--name", "x") == 130
    own.write_bytes(text.read_bytes() + b"more")
    assert "the text is not the one" in refusal(capsys, "--resume", str(tmp_path / "x"))


def test_unwritable_cache_is_named(tmp_path, text, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert str(tmp_path / "file") in refusal(capsys, *TOY, "--data.paths", str(text))
