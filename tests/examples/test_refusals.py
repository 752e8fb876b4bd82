"""What a person can get wrong when training: a sentence, and no run is left behind."""

import signal

import pytest

from examples.train import main
from examples.trainer.runs import launch
from examples.trainer.settings import command_line
from tests.support.trainer import (
    TOY,
    stop_at,
    train,
)

LLAMA = "--model.family llama"


def error_of(capsys, argv):
    assert main(argv) == 2
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
    ("--data.val-fraction 1", "--data.val-fraction is 1"),
    ("--optimizer.learning-rate nan", "--optimizer.learning-rate is nan"),
    ("--optimizer.clip-norm nan", "--optimizer.clip-norm is nan"),
    ("--optimizer.ns-coeffs you --optimizer.ns-steps 9", "ns_steps"),
    # Networks
    ("--model.d-model 17", "--model.n-head"),
    ("--model.n-head 3", "cannot be cut into 3 heads"),
    (f"{LLAMA} --model.n-head 16", "gives 1 numbers a head"),
    (f"{LLAMA} --model.final-norm layer", "all norms of llama are RMSNorm"),
    # Flags that the rule does not take
    ("--optimizer.name muon --optimizer.norm row", "norm row would change nothing under muon"),
    ("--optimizer.name adamw --optimizer.polar gram", "--optimizer.polar gram would change"),
    # The machine
    ("--mesh model=8", "'model=8' is none of its parts"),
    ("--mesh data=2,fsdp=2", "is for 4 devices, but there are 8: --mesh fsdp=8 fits"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_flags_that_make_no_sense(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(launch, "prepare", lambda *_: pytest.fail("a text was read"))
    monkeypatch.setattr(launch, "make_functions", lambda *_: pytest.fail("something was built"))
    assert words in error_of(capsys, [*TOY, *flags.split()])


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
        (b"short", "too little text"),
        (b"word " * 50, "too little training text"),
    ],
)
def test_unusable_text_is_refused_and_leaves_no_run(tmp_path, capsys, content, words):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    shown = refusal(capsys, *TOY, "--data.paths", str(path), "--runs-dir", str(tmp_path / "runs"))
    assert words in shown
    assert not (tmp_path / "runs").exists()  # a failed start leaves no run behind


def test_resume_refuses_another_text(tmp_path, text, capsys):
    own = tmp_path / "own.txt"
    own.write_bytes(text.read_bytes())
    with stop_at(3, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(own, tmp_path, "--name", "x") == 130
    own.write_bytes(text.read_bytes() + b"more")
    assert "the text is not the one" in refusal(capsys, "--resume", str(tmp_path / "x"))
