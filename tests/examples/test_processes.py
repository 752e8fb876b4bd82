"""Training in several processes: two real ones on this machine, and what they agree on."""

import re
import signal
import socket
import unittest.mock

import jax
import pytest
from jax._src import distributed

from examples.train import main
from examples.trainer.runs import processes
from examples.trainer.runs.stops import StopRequests
from examples.trainer.settings.machines import MachineConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import (
    PATIENCE,
    STEPS,
    TOY,
    losses,
    on_devices,
    run_shell,
    saved_step,
    wait_for,
)

MESH = ("--mesh", "data=2,fsdp=2")


def free_address():
    """An address for JAX's coordinator."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture
def start():
    """Starts two processes of two devices each; none outlives its test."""
    started = []

    def start(*flags, own=((), ())):
        group = ["--coordinator", free_address(), "--num-processes", "2"]
        pair = [
            run_shell(*flags, *group, "--process-id", str(i), *own[i], devices=2) for i in (0, 1)
        ]
        started.extend(pair)
        return pair

    yield start
    for process in started:
        process.kill()
        process.communicate()


# Gloo, which moves the data, writes its lines in these pieces and numbers, from several threads:
# one thread's number may stand on a line of its own, after the other's whole line.
OF_GLOO = re.compile(
    r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
)


def own_lines(shown):
    """What the trainer has printed."""
    lines = OF_GLOO.sub("", shown).splitlines()
    return "\n".join(line for line in lines if line and not line.isdigit())


def ended(pair):
    """Exit statuses and what was shown."""
    shown = [own_lines(process.communicate(timeout=PATIENCE)[0]) for process in pair]
    return [process.returncode for process in pair], shown


def last_step(folder):
    return max(losses(folder), default=0) if folder.exists() else 0


def test_stopped_and_killed_in_two_processes_then_resumed_in_one(
    tmp_path, text, start, trained_run
):
    folder = tmp_path / "two"
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "two"]
    pair = start(*flags, "--checkpoint-every", "4", *MESH)
    wait_for(lambda: last_step(folder) >= 5, *pair)
    pair[1].send_signal(signal.SIGTERM)  # and process 0, which got none, stops at the same step
    statuses, shown = ended(pair)
    assert statuses == [143, 143], shown
    stopped = saved_step(folder)
    assert 5 <= stopped == last_step(folder) < STEPS
    assert "mesh   4 cpu devices in 2 processes, data=2 fsdp=2 tensor=1" in shown[0]
    assert f"stopped after step {stopped}; the run is saved." in shown[0]
    assert shown[1] == ""
    [listed] = folder.glob(f"checkpoints/{stopped}/about/checksums.json")
    assert all(f'"state/ocdbt.process_{i}/d/' in listed.read_text() for i in (0, 1))

    pair = start("--resume", str(folder), *MESH)
    wait_for(lambda: saved_step(folder) > stopped, *pair)
    for process in pair:
        process.kill()
    assert ended(pair)[0] == [-signal.SIGKILL] * 2
    with on_devices(1):
        assert main(["--resume", str(folder)]) == 0
    for kind in ("train_loss", "val_loss"):
        two, one = (losses(run, kind) for run in (folder, trained_run))
        assert two.keys() == one.keys()
        assert list(two.values()) == pytest.approx(list(one.values()), abs=1e-5)


def test_processes_with_different_flags_are_refused(tmp_path, text, start):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path)]
    statuses, shown = ended(start(*flags, own=(("--seed", "1"), ("--seed", "2"))))
    assert statuses == [2, 2], shown
    for i, text_of_process in enumerate(shown):
        assert f"error (process {i}): processes 1 differ from process 0" in text_of_process
    assert not list(tmp_path.iterdir())


def joined_with(monkeypatch, machine, **variables):
    """What `jax.distributed.initialize` is called with."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        unittest.mock.patch.object(jax.distributed, "initialize") as initialize,
        unittest.mock.patch.object(jax.config, "update"),
        unittest.mock.patch.object(processes, "from_all") as meet,
    ):
        processes.join(machine)
    assert meet.called == initialize.called  # before one of them is late
    return initialize.call_args and initialize.call_args.args


def test_join_passes_flags_or_variables_to_jax(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert joined_with(monkeypatch, MachineConfig(mesh="data=2")) is None
    alone = joined_with(monkeypatch, MachineConfig(distributed=True))
    assert alone == (None, None, None, None)  # JAX asks SLURM, Open MPI, TPU or Kubernetes
    given = MachineConfig(coordinator="a:1", num_processes=2, process_id=0)
    assert joined_with(monkeypatch, given) == ("a:1", 2, 0, None)
    variables = {"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    read = joined_with(monkeypatch, MachineConfig(distributed=True), **variables)
    assert read == (None, 3, 2, None)  # and JAX reads JAX_COORDINATOR_ADDRESS
    with pytest.raises(UserError, match="JAX_PROCESS_ID is 'one'"):
        joined_with(monkeypatch, MachineConfig(distributed=True), JAX_PROCESS_ID="one")


def task(local=3, tasks="8(x2)", gpus="0,1,2,3,4,5,6,7", **more):
    """The variables that SLURM gives a task; `gpus` are those that it sees."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "CUDA_VISIBLE_DEVICES": gpus,
        **more,
    }


@pytest.mark.parametrize(
    ("variables", "taken"),
    [
        (task(), [3]),  # --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none
        (task(gpus="5"), [0]),  # --gpus-per-task=1: the task's own GPU is its number 0
        (task(local=0, tasks="1(x2)"), [*range(8)]),  # one task on each host
        (task(local=1, tasks="2(x2)"), [4, 5, 6, 7]),
        (task(local=1, tasks="8(x2),4", SLURM_NODEID="2"), [2, 3]),  # of the third host
        (task(local=1, tasks="2", gpus="0,1,2,3", SLURM_GPUS_PER_TASK="4"), [0, 1, 2, 3]),
        (task(local=1, tasks="2", gpus="4,5,6,7", SLURM_GPUS_ON_NODE="8"), [0, 1, 2, 3]),
        # The choice is that of JAX.
        (task(JAX_LOCAL_DEVICE_IDS="6"), None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (task(gpus="NoDevFiles"), None),
    ],
)
def test_a_task_of_slurm_takes_its_gpus(variables, taken):
    assert processes.local_devices(variables) == taken


def test_gpus_of_slurm_reach_jax_or_are_refused(monkeypatch):
    found = joined_with(monkeypatch, MachineConfig(distributed=True), **task())
    assert found == (None, None, None, [3])
    with pytest.raises(UserError, match="3 tasks of SLURM share the 8 GPUs"):
        processes.local_devices(task(local=0, tasks="3"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--distributed"], "coordinator_address should be defined"),
        (["--coordinator", "localhost:1"], "Number of processes must be defined"),
        (["--coordinator", "localhost", "--num-processes=2", "--process-id=0"], "HOST:PORT"),
        (["--num-processes", "2", "--process-id", "2", "--coordinator", "localhost:1"], "N-1"),
    ],
)
def test_impossible_joins_are_refused(flags, words, capsys, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    # Other tests have made arrays in this process, which would be the first complaint.
    monkeypatch.setattr(distributed.xla_bridge, "backends_are_initialized", lambda: False)
    assert main([*TOY, *flags]) == 2
    shown = capsys.readouterr().err
    assert words in shown and "--process-id" in shown


def test_signals_become_requests_and_a_second_ctrl_c_interrupts():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequests(agree=lambda numbers, wait: tuple(numbers)) as requests:
        assert not requests.stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # schedulers send it again
        assert requests.stop() and requests.agreed == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
