"""Files that one submits to a cluster: they are shell, and name flags that exist."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from examples.trainer.settings import command_line, machines
from tests.support.trainer import ROOT

LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_shell(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, LAUNCH / name], check=True)


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
    arguments = ("x", "llama-7b --machine h100-64", "--distributed", "--mesh", "data=8,fsdp=8")
    words = started_by(tmp_path, *arguments, RUNS=str(runs))
    assert words[:2] == ["-m", "examples.train"]
    new, _ = command_line.parse(words[2:])
    assert new.config.name == "x" and new.config.runs_dir == str(runs)
    assert new.machine.mesh == "data=8,fsdp=8" and new.config.accumulate == 1
    (runs / "x").mkdir(parents=True)
    (runs / "x" / "config.json").write_text("{}")
    again, _ = command_line.parse(started_by(tmp_path, *arguments, RUNS=str(runs))[2:])
    assert again.resume == runs / "x" and again.machine == new.machine


@pytest.mark.parametrize("name", [path.name for path in LAUNCH.iterdir() if path.is_file()])
def test_files_name_flags_that_exist(name):
    """Every recipe fits its machine, and the mesh that is given again is the machine's."""
    text = (LAUNCH / name).read_text()
    if name == "start_or_resume.sh":
        return
    text = re.sub(r"^ *- ", "", text, flags=re.M) if name.endswith("jobset.yaml") else text
    recipe, machine = re.search(r"(llama-\w+) --machine ([\w-]+)", text).groups()
    mesh = re.search(r"--mesh\s+([\w=,]+)", text)[1]
    assert machines.fit(recipe, machine) and machines.mesh_of_machine(machine) == mesh
    devices = machines.devices_of_machine(machine)
    sizes = dict(axis.split("=") for axis in mesh.split(","))
    assert devices == eval("*".join(sizes.values()))


def test_jobset_gives_each_host_what_the_trainer_reads():
    jobs = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    [hosts] = jobs["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    name = jobs["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    address = f"{name}-{hosts['name']}-0-0.{name}:{port}"
    assert variables["JAX_COORDINATOR_ADDRESS"] == address
    assert job["parallelism"] == job["completions"] == int(variables["JAX_NUM_PROCESSES"])
    assert variables["JAX_PROCESS_ID"] is None and job["completionMode"] == "Indexed"
    assert {x["name"] for x in container["volumeMounts"]} == {x["name"] for x in pod["volumes"]}
    command_line.parse([*container["args"][1].split(), *container["args"][2:]])


def test_skypilot_task_has_the_fields_that_its_schema_knows():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and "SKYPILOT_NODE_RANK" in task["run"]
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)
    sky = pytest.importorskip("sky")
    sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))


def test_ray_starts_a_process_on_each_host_and_ends_with_the_first_error(tmp_path):
    pytest.importorskip("ray")
    script = (
        "import sys, pathlib; i = sys.argv[-1];"
        f"pathlib.Path('{tmp_path}', i).write_text(' '.join(sys.argv[1:]));"
        "sys.exit(2 * (i == '0'))"
    )
    command = ["--hosts", "1", "--gpus", "0", "--", sys.executable, "-c", script]
    done = subprocess.run([sys.executable, LAUNCH / "ray_hosts.py", *command], timeout=300)
    assert done.returncode == 2
    words = (tmp_path / "0").read_text().split()
    assert words[0] == "--coordinator" and words[2:] == [
        "--num-processes",
        "1",
        "--process-id",
        "0",
    ]
