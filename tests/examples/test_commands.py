"""How commands end: into a pipe that nobody reads, and after a collective that failed."""

import os
import signal
import subprocess
import sys

import jax
import pytest

from examples import train
from examples.trainer.runs import launch, processes
from examples.trainer.system import exit_status
from tests.support.trainer import ROOT

CODE = """
import sys
from {module} import main
status = main({argv})
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("examples.data", ["prepare", "--help"]),
        ("examples.data", ["--paths", "{text}", "--vocab-size", "300"]),
        ("examples.generate", ["--help"]),
        ("examples.parity", ["--help"]),
    ],
)
def test_a_pipe_that_nobody_reads_ends_a_command(module, argv, text):
    read, write = os.pipe()
    os.close(read)
    argv = [word.format(text=text) for word in argv]
    ended = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module, argv=argv)],
        stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    os.close(write)
    assert ended.stderr == ""
    assert ended.returncode == 128 + signal.SIGPIPE


JOINT = [
    ValueError("UNKNOWN: Gloo all-reduce failed: [external/gloo/pair.cc:1] Connection closed"),
    RuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: 7"),
    jax.errors.JaxRuntimeError("INTERNAL: anything"),
]
OTHER = [ValueError("operands could not be broadcast"), TimeoutError("of a socket"), KeyError("x")]


@pytest.mark.parametrize("error", [*JOINT, *OTHER], ids=repr)
def test_one_of_several_processes_ends_at_once(error, monkeypatch, capsys):
    def left(status):
        raise SystemExit(status)

    def fail(*asked):
        raise error

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(exit_status, "leave_at_once", left)
    monkeypatch.setattr(processes, "join", lambda machine: None)
    monkeypatch.setattr(launch, "launch", fail)
    with pytest.raises(SystemExit, match="1"):
        train.main([])
    shown = capsys.readouterr().err
    sentence = "error (process 0): a computation of all processes failed"
    assert (sentence in shown) == (error in JOINT)
    assert ("Traceback" in shown) == (error in OTHER)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["--optimizer.nmae", "muon"], "--optimizer.name"),
        (["llama-tiny", "--stepz=3"], "--steps"),
        (["--model.n-layers", "2", "--steps", "3"], "--model.n-layer"),
    ],
)
def test_a_flag_that_is_none_is_one_line(argv, meant, capsys):
    assert train.main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: there is no flag") and shown.count("\n") == 1
    assert f"did you mean {meant}" in shown
