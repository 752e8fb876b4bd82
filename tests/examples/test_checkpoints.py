"""Checkpoints: what they hold, when they are complete, and where they can be resumed."""

import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train import main
from examples.trainer.data.placement import place_batch
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.metrics import Metrics
from examples.trainer.training import sharding
from examples.trainer.training.step import TrainState
from tests.support.trainer import (
    CUBE,
    PATIENCE,
    ROOT,
    STEPS,
    TOY,
    assemble_toy,
    losses,
    on_devices,
    run_shell,
    saved_step,
    stop_at,
    train,
    wait_for,
)


def equal(a, b):
    """Bit for bit, keys included."""
    raw = [
        jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))
        for state in (a, b)
    ]
    jax.tree.map(np.testing.assert_array_equal, *raw)


def about(step):
    return {"step": step}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run on eight devices that was never stopped."""
    root = tmp_path_factory.mktemp("runs")
    assert train(text, root, "--name", "whole", "--mesh", CUBE) == 0
    return root / "whole"


def test_checkpoint_holds_its_step_though_later_steps_reuse_the_memory(tmp_path):
    # The state is large, so that it is still being written while the next steps, which are given
    # its memory, run. The CPU has no copy of it: device and host memory are the same.
    add_one = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = add_one((jnp.zeros((1 << 23,)), jnp.zeros(3)))
    overlapped = 0
    with Checkpoints(tmp_path / "c", about) as checkpoints:
        checkpoints.save(1, TrainState(*state, jax.random.key(7)))
        for _ in range(5):
            state = add_one(state)
            overlapped += checkpoints.manager.is_saving_in_progress()
        jax.block_until_ready(state)
        checkpoints.wait_until_saved()
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            TrainState(*state, jax.random.key(7)),
        )
        restored = checkpoints.restore(1, abstract)
    assert overlapped, "the save was over before a step came: enlarge the state"
    assert float(state[0][0]) == 6
    assert float(restored.params.min()) == float(restored.params.max()) == 1
    assert jax.random.key_data(restored.key).tolist() == [0, 7]


def test_checkpoints_saved_during_training_restore_on_any_mesh(tmp_path, text):
    toy = assemble_toy(text)
    state = toy.init()
    kept = {}
    with Checkpoints(tmp_path / "c", about) as checkpoints:
        for step in range(1, 4):
            batch = place_batch(toy.loader, step - 1, sharding.of_batch(toy.mesh))
            state, _ = toy.train_step(state, *batch)
            kept[step] = jax.tree.map(lambda x: x.copy(), state)
            checkpoints.save(step, state)
        checkpoints.wait_until_saved()
        for step in (2, 3):  # two are kept
            equal(checkpoints.restore(step, toy.program.abstract), kept[step])
        elsewhere = assemble_toy(text, "tensor=2", 2).program.abstract
        restored = checkpoints.restore(3, elsewhere)
    equal(restored, kept[3])
    places = [x.sharding for x in jax.tree.leaves(restored.params)]
    assert places == [x.sharding for x in jax.tree.leaves(elsewhere.params)]


def test_checkpoint_metadata_has_settings_step_and_rows(finished):
    written = json.loads((finished / f"checkpoints/{STEPS}/about/metadata").read_text())
    config = json.loads((finished / "config.json").read_text())
    own = {"step": STEPS, "rows": STEPS * 8, "tokenizer_sha256": unittest.mock.ANY}
    assert written == {**config, **own}
    assert "mesh" not in written["config"]  # nor does anything else say where it was computed


def test_sigterm_then_resume_on_any_mesh_gives_the_same_losses(tmp_path, text, finished, capsys):
    with stop_at(11, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train(text, tmp_path, "--name", "x", "--mesh", CUBE) == 143
    folder = tmp_path / "x"
    assert 11 <= saved_step(folder) <= 12
    assert f"python -m examples.train --resume {folder}" in capsys.readouterr().out
    elsewhere = shutil.copytree(folder, tmp_path / "y")
    assert main(["--resume", str(folder), "--mesh", CUBE]) == 0
    for kind in ("train_loss", "val_loss"):
        assert losses(folder, kind) == losses(finished, kind)
    assert (folder / "sample.txt").read_text() == (finished / "sample.txt").read_text()
    with on_devices(2):
        assert main(["--resume", str(elsewhere), "--mesh", "data=2"]) == 0
    assert "mesh   2 cpu devices, data=2 fsdp=1 tensor=1" in capsys.readouterr().out
    one, other = losses(elsewhere), losses(finished)
    assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-5)


def test_resume_refuses_flags_of_the_run(finished, capsys):
    with pytest.raises(SystemExit):
        main(["--resume", str(finished), "--seed", "3"])
    assert "--seed" in capsys.readouterr().err
    assert main(["--resume", str(finished), "--optimizer.name=muon"]) == 2
    assert "--optimizer.name cannot be given" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--resume", "--help"])
    shown = capsys.readouterr().out
    assert "--mesh" in shown and "--coordinator" in shown and "--batch-size" not in shown


def test_checkpoint_with_truncated_arrays_is_named(tmp_path, finished):
    # In a process of its own, since TensorStore's threads complain when Orbax stops at an error.
    folder = tmp_path / "x"
    shutil.copytree(finished, folder)
    state = folder / "checkpoints" / str(STEPS) / "state"
    for path in state.glob("**/d/*"):
        path.write_bytes(path.read_bytes()[:100])
    process = run_shell("--resume", str(folder))
    shown, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, shown
    assert f"the checkpoint {state.parent} of step {STEPS} is damaged" in shown
    assert (
        "Remove that folder: the run then resumes from the checkpoint before it, of step " in shown
    )
    shutil.rmtree(state.parent)
    assert saved_step(folder) < STEPS
    with on_devices(1):
        assert main(["--resume", str(folder)]) == 0
    assert list(losses(folder)) == list(range(1, STEPS + 1))


def test_edited_config_is_refused(tmp_path, finished, capsys):
    path = shutil.copytree(finished, tmp_path / "x") / "config.json"
    written = path.read_text()
    for name, was, now in [("batch_size", "8", "16"), ("name", '"muonplus"', '"adamw"')]:
        path.write_text(written.replace(f'"{name}": {was}', f'"{name}": {now}'))
        assert main(["--resume", str(tmp_path / "x")]) == 2
        shown = capsys.readouterr().err.replace("'", '"')
        assert "config.json and" in shown and f"{name} was {was}, and is {now}" in shown


def saving_after(folder, step):
    """Whether a checkpoint after `step` is being written."""
    names = os.listdir(folder) if folder.exists() else []
    return any(int(n.split(".")[0]) > step for n in names if "orbax-checkpoint-tmp" in n)


def test_killed_while_saving_then_resume_gives_the_same_losses(tmp_path, text, trained_run):
    # With a checkpoint after each step a save is nearly always under way.
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--checkpoint-every=1"]
    folder = tmp_path / "killed"
    command = [*flags, "--name", "killed"]
    for step in (0, 8):
        process = run_shell(*command)
        wait_for(lambda step=step: saving_after(folder / "checkpoints", step), process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        command = ["--resume", str(folder)]
    with on_devices(1):
        assert main(["--resume", str(folder)]) == 0
    for kind in ("train_loss", "val_loss"):
        assert losses(folder, kind) == losses(trained_run, kind)
    assert not list((folder / "checkpoints").glob("*tmp*"))


def test_full_disk_keeps_the_last_checkpoint(tmp_path, text):
    # A limit on the size of files stands for it: enough for losses, too little for arrays.
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "x"]
    process = run_shell(*flags, "--steps", "120", "--max-skipped", "3")
    wait_for(lambda: (tmp_path / "x" / "checkpoints" / "8").exists())
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    shown, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert f"cannot save to {tmp_path}/x/checkpoints" in shown and "make room" in shown
    assert 8 <= saved_step(tmp_path / "x") < 120
    with on_devices(1):
        assert main(["--resume", str(tmp_path / "x")]) == 0
    assert saved_step(tmp_path / "x") == 120
    assert list(losses(tmp_path / "x")) == list(range(1, 121))


def test_unwritable_metrics_are_reported_and_resumable(tmp_path, text, capsys):
    def fill_up():
        os.dup2(full, metrics[0].file.fileno())

    metrics, create = [], Metrics.__init__

    def remember(self, *args):
        create(self, *args)
        metrics.append(self)

    full = os.open("/dev/full", os.O_WRONLY)
    with unittest.mock.patch.object(Metrics, "__init__", remember), stop_at(9, fill_up):
        assert train(text, tmp_path, "--name", "x", "--mesh", CUBE) == 2
    os.close(full)
    shown = capsys.readouterr().err
    assert f"cannot write {tmp_path}/x/metrics.jsonl: No space left" in shown
    assert saved_step(tmp_path / "x") == 8
    assert main(["--resume", str(tmp_path / "x"), "--mesh", CUBE]) == 0
    assert list(losses(tmp_path / "x")) == list(range(1, STEPS + 1))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(("own", "heaps"), [({}, 2), ({"MALLOC_ARENA_MAX": "3"}, 3)])
def test_threads_share_heaps(own, heaps):
    program = """
import ctypes, threading
from examples.trainer.runs import checkpoint
libc, both = ctypes.CDLL(None), threading.Barrier(8)
def allocate():
    libc.malloc(1000)
    both.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for step in "start", "join":
    for thread in threads:
        getattr(thread, step)()
libc.malloc_stats()
"""
    environment = {k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"} | own
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert len(re.findall(r"^Arena \d+:", done.stderr, re.M)) == heaps
