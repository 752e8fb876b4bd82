"""Files that one submits to a cluster, and which GPUs a task of SLURM takes."""

import os
import re
import shutil
import subprocess
import sys
import unittest.mock

import jax
import pytest
import yaml
from jax._src import distributed

from examples.trainer.runs import processes
from examples.trainer.settings import command_line, machines
from examples.trainer.settings.machines import MachineConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import ROOT

LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))


def task(local=3, tasks="8", gpus="0,1,2,3,4,5,6,7", **more):
    """The variables that SLURM gives a task of a job on two hosts; `gpus` are those it sees."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": str(local),
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
        "CUDA_VISIBLE_DEVICES": gpus,
        **more,
    }


def told(monkeypatch, variables):
    """Where JAX looks for GPUs and for process 0 once the processes have joined."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "JAX_LOCAL")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    jax.devices()  # those of this process, which a first use while it is connected would not give
    state = distributed.State()
    monkeypatch.setattr(distributed, "global_state", state)
    bridge = distributed.xla_bridge
    monkeypatch.setattr(bridge, "backends_are_initialized", lambda: False)
    service = jax.config.jax_enable_preemption_service
    try:
        with unittest.mock.patch.object(distributed, "_jax") as client:
            processes.join(MachineConfig(distributed=True, init_timeout=1200))
        connected = client.get_distributed_runtime_client.call_args
        assert connected.kwargs["init_timeout"] == 1200
        return bridge.CUDA_VISIBLE_DEVICES.value, connected.args
    finally:
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, "all")
        jax.config.update("jax_enable_preemption_service", service)


@pytest.mark.parametrize(
    ("variables", "taken"),
    [
        (task(), "3"),  # --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none
        (task(gpus="5"), "0"),  # --gpus-per-task=1: the task's own GPU is its number 0
        (task(local=0, tasks="1"), "0,1,2,3,4,5,6,7"),  # one task on each host
        (task(local=1, tasks="2"), "4,5,6,7"),
        (task(local=1, tasks="2", gpus="0,1,2,3", SLURM_GPUS_PER_TASK="4"), "0,1,2,3"),
        (task(local=1, tasks="2", gpus="4,5,6,7", SLURM_GPUS_ON_NODE="8"), "0,1,2,3"),
        (task(JAX_LOCAL_DEVICE_IDS="6"), "6"),
    ],
)
def test_a_task_of_slurm_takes_its_gpus(monkeypatch, variables, taken):
    visible, (address, process) = told(monkeypatch, variables)
    assert (visible, process) == (taken, int(variables["SLURM_LOCALID"]))
    assert re.fullmatch(r"host1:\d+", address)


def test_gpus_that_tasks_cannot_share_evenly_are_refused():
    with pytest.raises(UserError, match="3 tasks of SLURM share the 8 GPUs"):
        processes.local_devices(task(local=0, tasks="3"))


@pytest.mark.parametrize(
    "variables",
    [{"CUDA_VISIBLE_DEVICES": "0,1"}, task(gpus=""), task(gpus="NoDevFiles")],
    ids=["outside", "none", "cpus"],
)
def test_without_slurm_or_gpus_the_choice_is_that_of_jax(variables):
    assert processes.local_devices(variables) is None


def test_tasks_of_hosts_are_counted_by_their_place():
    lists = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}
    found = [processes.tasks_on_host({**lists, "SLURM_NODEID": str(i)}) for i in range(3)]
    assert found == [8, 8, 4]


# Files to submit


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


def test_sbatch_asks_for_a_task_for_each_gpu_which_sees_all():
    text = (LAUNCH / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.M))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == "8"
    assert asked["gpu-bind"] == "none" and "gpus-per-task" not in asked
    assert asked["signal"] == "TERM@600" and "requeue" in asked


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
