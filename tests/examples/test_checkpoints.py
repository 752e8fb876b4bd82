"""Checkpoints: what they hold, when they are complete, where they resume, and their damage."""

import json
import os
import resource
import shutil
import signal
import unittest.mock

import jax
import jax.numpy as jnp
import pytest

from examples.train import main
from examples.trainer.runs import integrity
from examples.trainer.runs.checkpoint import Checkpoints, restore_parts
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import TrainState
from tests.support.trainer import (
    CUBE,
    PATIENCE,
    STEPS,
    TOY,
    losses,
    on_devices,
    run_shell,
    saved_step,
    stop_at,
    train,
    wait_for,
)


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


def test_full_disk_keeps_the_last_checkpoint(tmp_path, text):
    # A limit on the size of files stands for it: enough for losses, too little for arrays.
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "x"]
    process = run_shell(*flags, "--steps", "120")
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


# Damage


PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def state_of(step):
    params = {"a": jnp.full((8, 16), step, jnp.float32), "b": jnp.arange(3.0)}
    return TrainState(params, {"mu": jnp.ones((64,))}, jax.random.key(step))


def abstract():
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=PLACE), state_of(0)
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    with Checkpoints(folder, about) as checkpoints:
        for step in (3, 5):
            checkpoints.save(step, state_of(step))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "checkpoints")


def restore(folder):
    with Checkpoints(folder, about) as checkpoints:
        return checkpoints.restore(5, abstract())


def files(step):
    """All that a checkpoint has in its two parts, but for an empty mark of Orbax."""
    paths = [path for part in ("state", "about") for path in (step / part).rglob("*")]
    return [p for p in paths if p.is_file() and p.name != "commit_success.txt"]


def test_every_file_of_a_checkpoint_is_verified(folder):
    step = folder / "5"
    integrity.verify(step)
    assert len(files(step)) > 5
    for path in files(step):
        content = path.read_bytes()
        place = len(content) // 2
        flipped = bytes([content[place] ^ 16])
        for damaged in (
            content[:place] + flipped + content[place + 1 :],
            content[:place],
            content[:place] + bytes(len(content) - place),
            content + b"\0",
        ):
            path.write_bytes(damaged)
            with pytest.raises(integrity.Damaged) as caught:
                integrity.verify(step)
            # A list with a bit flipped names the file whose line it is in.
            assert path.name in str(caught.value) or path.name == integrity.LIST
        path.unlink()
        if path.name != integrity.LIST:
            with pytest.raises(integrity.Damaged, match=f"{path.name} is missing"):
                integrity.verify(step)
        path.write_bytes(content)
    integrity.verify(step)


def test_damaged_checkpoint_names_its_file_its_step_and_the_one_before(folder):
    path = next(iter(folder.glob("5/state/ocdbt.process_0/d/*")))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for read in (
        lambda: restore(folder),
        lambda: restore_parts(folder, None, {"params": abstract().params}, about),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert f"{folder}/5 is damaged: {path} has another content" in str(caught.value)
        assert f"the checkpoint before it, of step 3, {folder}/3." in str(caught.value)
    shutil.rmtree(folder / "3")
    with pytest.raises(UserError, match="There is no checkpoint before it"):
        restore(folder)


@pytest.mark.parametrize("parts", [2, 3, 20])
def test_processes_share_the_verification(folder, parts):
    step = folder / "5"
    for path in files(step):
        content = path.read_bytes()
        if path.name == integrity.LIST:
            continue
        path.write_bytes(content + b" ")
        found = []
        for part in range(parts):
            try:
                integrity.verify(step, part, parts)
            except integrity.Damaged as error:
                found.append(str(error))
        path.write_bytes(content)
        assert len(found) == 1 and path.name in found[0]


@pytest.mark.parametrize("content", ["{}", "[]", "[" * 100_000, '{"/etc/hostname": "4 0"}'])
def test_a_list_of_other_files_is_refused(folder, content):
    (folder / "5" / "state" / "more").write_bytes(b"")
    with pytest.raises(integrity.Damaged, match="more is in no list of checksums"):
        integrity.verify(folder / "5")
    (folder / "5" / "about" / integrity.LIST).write_text(content)
    with pytest.raises(integrity.Damaged, match=r"list of checksums|is missing, or no regular"):
        integrity.verify(folder / "5")


@pytest.mark.parametrize("kind", ["link to a file", "link to a device", "pipe", "link to a folder"])
def test_links_pipes_and_devices_are_not_read(folder, kind):
    step = folder / "5"
    path = step / "state" / "_METADATA"
    secret = folder.parent / "secret"
    if kind == "link to a folder":
        path = step / "state" / "ocdbt.process_0"
        path.rename(secret)
    else:
        path.rename(secret)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "link to a device" else secret)
    with pytest.raises(integrity.Damaged, match="is missing, or no regular file"):
        integrity.verify(step)
