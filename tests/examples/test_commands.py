"""How commands end: into a pipe that nobody reads, and after a collective that failed."""

import os
import signal
import subprocess
import sys

import pytest

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
