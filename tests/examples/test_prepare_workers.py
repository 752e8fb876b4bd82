"""Workers that tokenize files: none outlives its command, and one that was ended is said."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.trainer.data import tokenizer
from tests.support.trainer import PATIENCE, ROOT, wait_for

WORD = "a word of a text "
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


@pytest.fixture
def command(tmp_path):
    """A command with two workers, each of which waits for the content of a file."""
    tokenizer.train([WORD * 99], 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    for number in range(2):
        (tmp_path / "texts" / f"{number}.txt").write_text(WORD * 400_000)
    given = ["--out", str(tmp_path / "out"), "--paths", str(tmp_path / "texts")]
    given += ["--tokenizer", str(tmp_path / "tokenizer.json"), "--workers", "2"]
    started = subprocess.Popen(
        [sys.executable, "-m", "examples.data", "prepare", *given],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    parts = tmp_path / "out" / "parts"
    try:
        wait_for(lambda: parts.is_dir() and len(workers(started.pid)) == 2, started, seconds=60)
        yield started
    finally:
        started.kill()
        started.communicate()


def workers(parent):
    """The processes that a command has spawned to work, and that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, above = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            args = (folder / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        if int(above) == parent and "spawn_main" in args and state != "Z":
            found.append(int(folder.name))
    return found


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_command(command, number):
    found = workers(command.pid)
    command.send_signal(number)
    command.communicate(timeout=PATIENCE)
    wait_for(lambda: not any(map(is_there, found)), seconds=60)


def test_a_worker_that_was_ended_is_said(command):
    os.kill(workers(command.pid)[0], signal.SIGKILL)
    shown, _ = command.communicate(timeout=PATIENCE)
    assert command.returncode == 2 and "Traceback" not in shown
    assert "a worker was ended from outside" in shown
