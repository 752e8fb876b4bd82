"""Checkpoints whose files are not as they were written are refused, by name."""

import os
import shutil
import tracemalloc
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from examples.trainer.runs import integrity
from examples.trainer.runs.checkpoint import Checkpoints, restore_parts, without_leftovers
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import TrainState

PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def about(step):
    return {"step": step}


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


def restore(folder, said=None):
    with Checkpoints(folder, about, (said if said is not None else []).append) as checkpoints:
        return checkpoints.restore(5, abstract())


def files(step):
    """All that a checkpoint has in its two parts, but for an empty mark of Orbax."""
    paths = [path for part in ("state", "about") for path in (step / part).rglob("*")]
    return [p for p in paths if p.is_file() and p.name != "commit_success.txt"]


def test_every_file_of_a_checkpoint_is_verified(folder):
    step = folder / "5"
    assert integrity.verify(step) and len(files(step)) > 5
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
    assert integrity.verify(step)


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
        assert f"{folder}/5 of step 5 is damaged: {path} has another content" in str(caught.value)
        assert f"the checkpoint before it, of step 3, {folder}/3." in str(caught.value)
    shutil.rmtree(folder / "3")
    with pytest.raises(UserError, match="There is no checkpoint before it"):
        restore(folder)


def test_checkpoint_without_checksums_restores_and_says_so(folder):
    said = []
    assert float(restore(folder, said).params["a"][0, 0]) == 5
    assert not said
    (folder / "5" / "about" / integrity.LIST).unlink()
    assert float(restore(folder, said).params["a"][0, 0]) == 5
    assert len(said) == 1 and f"{folder}/5 is not verified" in said[0]
    (folder / "5" / "state" / "_METADATA").write_text("{")
    with pytest.raises(UserError, match=r"/5 cannot be read(.|\n)*before it, of step 3"):
        restore(folder)


def test_what_outlives_the_first_error_is_not_printed():
    shown = []
    hook = without_leftovers(shown.append)
    closed, other = (Mock(exc_value=RuntimeError(x)) for x in ("Event loop is closed", "other"))
    for unraisable in (closed, other):
        hook(unraisable)
    assert shown == [other]


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
                assert integrity.verify(step, part, parts)
            except integrity.Damaged as error:
                found.append(str(error))
        path.write_bytes(content)
        assert len(found) == 1 and path.name in found[0]


def test_checksums_hold_one_block_of_a_file(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(64 * integrity.BLOCK)
    tracemalloc.start()
    try:
        assert integrity.checksum(path).startswith(f"{64 * integrity.BLOCK} ")
        assert tracemalloc.get_traced_memory()[1] < 3 * integrity.BLOCK
    finally:
        tracemalloc.stop()


def test_folder_that_is_gone_is_named_before_a_save(folder):
    with Checkpoints(folder, about) as checkpoints:
        shutil.rmtree(folder)
        with pytest.raises(UserError, match=f"{folder} is gone"):
            checkpoints.save(7, state_of(7))
        assert not folder.exists()


# Lists from elsewhere


@pytest.mark.parametrize("content", ["{}", "[]", "3", "[" * 100_000, '{"/etc/hostname": "4 0"}'])
def test_a_list_of_other_files_is_refused(folder, content):
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


def test_a_file_in_no_list_is_refused(folder):
    (folder / "5" / "state" / "more").write_bytes(b"")
    with pytest.raises(integrity.Damaged, match="more is in no list of checksums"):
        integrity.verify(folder / "5")
