"""Checkpoints whose files are not as they were written are refused, by name."""

import itertools
import json
import os
import shutil
import sys
import tracemalloc
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from examples.trainer.runs import integrity
from examples.trainer.runs.checkpoint import Checkpoints, restore_part, without_leftovers
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


def test_every_file_of_a_checkpoint_is_verified(folder):
    parts = [folder / "5" / part for part in ("state", "about")]
    for part in parts:
        assert integrity.verify(part)
        paths = [p for p in integrity.files(part) if p.name != "commit_success.txt"]
        assert len(paths) > 1
        for path in paths:
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
                    integrity.verify(part)
                # A list with a bit flipped names the file whose line it is in.
                assert path.name in str(caught.value) or path.parent.name == integrity.LISTS
            path.unlink()
            with pytest.raises(integrity.Damaged, match=rf"{path.name}.* No such file"):
                integrity.verify(part)
            path.write_bytes(content)
        assert integrity.verify(part)


def test_damaged_checkpoint_names_its_file_its_step_and_the_one_before(folder):
    path = next(iter(folder.glob("5/state/ocdbt.process_0/d/*")))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for read in (
        lambda: restore(folder),
        lambda: restore_part(folder, None, "params", abstract().params, about),
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
    shutil.rmtree(folder / "5" / "about" / integrity.LISTS)
    with pytest.raises(UserError, match="checksums of a part of it are missing"):
        restore(folder)
    shutil.rmtree(folder / "5" / "state" / integrity.LISTS)
    assert float(restore(folder, said).params["a"][0, 0]) == 5
    assert len(said) == 1 and f"{folder}/5 is not verified" in said[0]


def test_old_checkpoint_that_cannot_be_read_is_named(folder):
    for part in ("state", "about"):
        shutil.rmtree(folder / "5" / part / integrity.LISTS)
    (folder / "5" / "state" / "_METADATA").write_text("{")
    with pytest.raises(UserError, match=r"/5 cannot be read(.|\n)*before it, of step 3"):
        restore(folder)


def test_what_outlives_the_first_error_is_not_printed(monkeypatch):
    passed = []
    monkeypatch.setattr(sys, "unraisablehook", passed.append)
    closed, other = (Mock(exc_value=RuntimeError(x)) for x in ("Event loop is closed", "other"))
    with pytest.raises(UserError), without_leftovers():
        raise UserError("the first")
    for unraisable in (closed, other):
        sys.unraisablehook(unraisable)
    assert passed == [other]


def test_lists_of_earlier_versions_are_read_and_processes_share_the_verification(tmp_path):
    for process in range(3):
        own = tmp_path / f"ocdbt.process_{process}" / "d"
        own.mkdir(parents=True)
        (own / "data").write_bytes(os.urandom(10 + process))
    integrity.write_checksums(tmp_path)
    rest = tmp_path / "checksums" / "rest.json"
    sums = json.loads(rest.read_text())
    [first, *others] = sorted(sums)
    (tmp_path / "checksums" / "process_0.json").write_text(json.dumps({first: sums[first]}))
    rest.write_text(json.dumps({name: sums[name] for name in others}))
    for parts, name in itertools.product((2, 3, 4), sums):
        found = damage_found(tmp_path, name, parts)
        assert len(found) == 1 and name in found[0]


def damage_found(folder, name, parts):
    """The errors of all processes that verify a folder with one file damaged, which is mended."""
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b" ")
    found = []
    for part in range(parts):
        try:
            assert integrity.verify(folder, part, parts)
        except integrity.Damaged as error:
            found.append(str(error))
    (folder / name).write_bytes(content)
    return found


def test_checksums_hold_one_block_of_a_file(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(64 * integrity.BLOCK)
    tracemalloc.start()
    try:
        assert integrity.checksum(path)[0] == 64 * integrity.BLOCK
        assert tracemalloc.get_traced_memory()[1] < 3 * integrity.BLOCK
    finally:
        tracemalloc.stop()


def test_folder_that_is_gone_is_named_before_a_save(folder):
    with Checkpoints(folder, about) as checkpoints:
        shutil.rmtree(folder)
        with pytest.raises(UserError, match=f"{folder} is gone"):
            checkpoints.save(7, state_of(7))
        assert not folder.exists()
