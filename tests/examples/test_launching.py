"""Files that one submits to a cluster: they name flags that exist."""

import os
import re
import subprocess

import pytest

from examples.trainer.models import sharding
from examples.trainer.settings import command_line
from tests.support.trainer import ROOT

LAUNCH = ROOT / "examples" / "launch"


def started_by(folder, *arguments, **variables):
    """The words that `start_or_resume.sh` starts Python with."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", LAUNCH / "start_or_resume.sh", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_run_is_started_and_then_resumed(tmp_path):
    runs = tmp_path / "my runs"
    arguments = ("x", "llama-7b --accumulate 2", "--distributed", "--mesh", "data=8,fsdp=8")
    words = started_by(tmp_path, *arguments, RUNS=str(runs))
    assert words[:2] == ["-m", "examples.train"]
    new, _ = command_line.parse(words[2:])
    assert new.config.name == "x" and new.config.runs_dir == str(runs)
    assert new.machine.mesh == "data=8,fsdp=8" and new.config.accumulate == 2
    (runs / "x").mkdir(parents=True)
    (runs / "x" / "config.json").write_text("{}")
    again, _ = command_line.parse(started_by(tmp_path, *arguments, RUNS=str(runs))[2:])
    assert again.resume == runs / "x" and again.machine == new.machine


@pytest.mark.parametrize(("name", "devices"), [("slurm.sbatch", 64), ("tpu_pod.sh", 16)])
def test_files_name_flags_that_exist(name, devices):
    """The rows of a step are dealt out evenly to the devices of the mesh."""
    found = re.search(r'"(llama-\w+ [^"]*)" \\\n\s*([^>\n]*)', (LAUNCH / name).read_text())
    asked, _ = command_line.parse([*found[1].split(), *found[2].split()])
    mesh = asked.machine.mesh
    sizes = sharding.parse(mesh) if mesh else {"fsdp": devices}
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1) * asked.config.accumulate
    assert asked.machine.distributed and asked.config.batch_size % shards == 0
