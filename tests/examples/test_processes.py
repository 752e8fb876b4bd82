"""Training in several processes: two real ones on this machine, and what they agree on."""

import re
import signal
import socket

import pytest

from examples.train import main
from tests.support.trainer import (
    PATIENCE,
    TOY,
    losses,
    on_devices,
    run_shell,
    saved_step,
    train,
    wait_for,
)

MESH = ("--mesh", "data=2,fsdp=2")
# JAX tells the processes of a signal in up to a second.
MANY = ("--steps", "400", "--eval-every", "200", "--checkpoint-every", "50")


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


def test_stopped_and_killed_in_two_processes_then_resumed_in_one(tmp_path, text, start):
    folder = tmp_path / "two"
    flags = [*TOY, *MANY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "two"]
    pair = start(*flags, *MESH)
    wait_for(lambda: last_step(folder) >= 5, *pair)
    pair[1].send_signal(signal.SIGTERM)  # and process 0, which got none, stops at the same step
    statuses, shown = ended(pair)
    assert statuses == [143, 143], shown
    stopped = saved_step(folder)
    assert 5 <= stopped == last_step(folder) < 400
    assert "mesh   4 cpu devices in 2 processes, data=2 fsdp=2 tensor=1" in shown[0]
    assert f"stopped after step {stopped}; the run is saved." in shown[0]
    [listed] = folder.glob(f"checkpoints/{stopped}/about/checksums.json")
    assert all(f'"ocdbt.process_{i}/d/' in listed.read_text() for i in (0, 1))

    pair = start("--resume", str(folder), *MESH)
    wait_for(lambda: saved_step(folder) > stopped, *pair)
    for process in pair:
        process.kill()
    assert ended(pair)[0] == [-signal.SIGKILL] * 2
    with on_devices(1):
        assert main(["--resume", str(folder)]) == 0
        assert train(text, tmp_path, *MANY, "--name", "one") == 0
    for kind in ("train_loss", "val_loss"):
        two, one = (losses(run, kind) for run in (folder, tmp_path / "one"))
        assert two.keys() == one.keys()
        assert list(two.values()) == pytest.approx(list(one.values()), abs=1e-3)


def test_processes_with_different_flags_are_refused(tmp_path, text, start):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path)]
    statuses, shown = ended(start(*flags, own=(("--seed", "1"), ("--seed", "2"))))
    assert statuses == [2, 2], shown
    assert all("the processes differ in their flags" in one for one in shown)
    assert not list(tmp_path.iterdir())
