"""Checkpoints: what they hold, when they are complete, where they resume, and their damage."""

import json
import os
import shutil
import signal
import unittest.mock

import jax
import jax.numpy as jnp
import pytest

from examples import generate
from examples.train import main
from examples.trainer.runs import checkpoint
from examples.trainer.runs.checkpoint import CHECKSUMS, Checkpoints
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import TrainState
from tests.support.trainer import (
    CUBE,
    STEPS,
    losses,
    on_devices,
    saved_step,
    stop_at,
    train,
)

LAST = str(STEPS)


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
    with Checkpoints(tmp_path / "c", {}) as checkpoints:
        checkpoints.save(1, TrainState(*state, jax.random.key(7)))
        for _ in range(5):
            state = add_one(state)
            overlapped += checkpoints.manager.is_saving_in_progress()
        jax.block_until_ready(state)
        checkpoints.manager.wait_until_finished()
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            TrainState(*state, jax.random.key(7)),
        )
        with unittest.mock.patch.object(checkpoint, "check"):  # it has no settings of a run
            restored = checkpoints.restore(1, abstract)
    assert overlapped, "the save was over before a step came: enlarge the state"
    assert float(state[0][0]) == 6
    assert float(restored.params.min()) == float(restored.params.max()) == 1
    assert jax.random.key_data(restored.key).tolist() == [0, 7]


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


# Damage, and files of other runs


@pytest.fixture
def copy(trained_run, tmp_path, one_device):
    """A copy of a finished run with checkpoints of steps 16 and 24."""
    return shutil.copytree(trained_run, tmp_path / "x")


def refusal(capsys, folder, command=main):
    arguments = ["--resume", str(folder)] if command is main else [str(folder)]
    assert command(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error") and "Traceback" not in shown
    return shown


def test_every_file_of_a_state_is_verified(copy):
    step = copy / "checkpoints" / LAST
    metadata = json.loads((step / "about" / "metadata").read_text())
    checkpoint.check(step, metadata)
    paths = [path for path in (step / "state").rglob("*") if path.is_file()]
    assert len(paths) > 4
    for path in [path for path in paths if path.stat().st_size]:
        content = path.read_bytes()
        place = len(content) // 2
        flipped = content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]
        for damaged in (flipped, content[:place], content + b"\0", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"{step} is damaged: state/.*{path.name}"):
                checkpoint.check(step, metadata)
        path.write_bytes(content)
    checkpoint.check(step, metadata)
    assert set(json.loads((step / "about" / CHECKSUMS).read_text())) == {
        path.relative_to(step / "state").as_posix() for path in paths
    }


@pytest.mark.parametrize("name", ["checksums.json", "metadata"])
@pytest.mark.parametrize("content", [None, b"", b'{"state', b"[]", "pipe"])
def test_damage_of_what_is_known_of_a_state_is_named(copy, name, content):
    path = copy / "checkpoints" / LAST / "about" / name
    metadata = json.loads(path.with_name("metadata").read_text())
    path.unlink()
    if content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{path.parents[1]} is damaged.*Remove that folder"):
        checkpoint.check(path.parents[1], metadata)


def test_an_older_checkpoint_under_the_newest_name_is_refused(copy, capsys):
    shutil.rmtree(copy / "checkpoints" / LAST)
    shutil.copytree(copy / "checkpoints" / "16", copy / "checkpoints" / LAST)
    for command in (main, generate.main):
        assert f"checkpoints/{LAST} is of step 16. Remove" in refusal(capsys, copy, command)


def test_without_a_damaged_checkpoint_the_run_resumes_from_the_one_before(copy, capsys):
    path = next(copy.glob(f"checkpoints/{LAST}/state/ocdbt.process_0/d/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for command in (main, generate.main):
        assert "Remove that folder: the run then resumes" in refusal(capsys, copy, command)
    shutil.rmtree(copy / "checkpoints" / LAST)
    assert main(["--resume", str(copy)]) == 0
    assert list(losses(copy)) == list(range(1, STEPS + 1))


def test_a_changed_tokenizer_and_changed_settings_are_refused(copy, capsys):
    path = copy / "tokenizer.json"
    before, content = path.read_text(), json.loads(path.read_text())
    words = content["model"]["vocab"]
    one, other = list(words)[-2:]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(content))
    for command in (main, generate.main):
        assert "with another tokenizer than the run has" in refusal(capsys, copy, command)
    path.write_text(before)
    path = copy / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"]["n_head"], content["config"]["seed"] = 1, 5
    path.write_text(json.dumps(content))
    for command in (main, generate.main):
        assert "with another model, seed than the run has" in refusal(capsys, copy, command)
