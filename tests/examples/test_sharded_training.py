"""Training on a mesh: where arrays are, what moves, and that a mesh changes no loss."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.data.loader import Loader, place_batch
from examples.trainer.models import sharding
from examples.trainer.system.errors import UserError
from tests.support.trainer import (
    ADAMW_RULE,
    CUBE,
    assemble_toy,
    compiled_step,
    first_losses,
    train,
)


@pytest.mark.parametrize(("flag", "sizes"), [(CUBE, (2, 2, 2)), ("data=2,fsdp=4", (2, 4, 1))])
def test_mesh_flag_gives_axis_sizes(flag, sizes):
    assert tuple(sharding.make_mesh(flag, jax.devices()).shape.values()) == sizes


def test_a_batch_that_does_not_divide_leaves_no_run(text, tmp_path, capsys):
    assert train(text, tmp_path, "--accumulate", "2") == 2
    assert "in --accumulate 2 pieces: give a multiple of 16" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_moments_are_sharded_like_their_parameters(text):
    abstract = assemble_toy(text).functions.abstract
    kernel = ["blocks/0/mlp/up/kernel", P("fsdp", "tensor")]
    found = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), x.sharding.spec)
        for path, x in jax.tree.leaves_with_path(abstract)
    ]
    assert sum(path.endswith(kernel[0]) for path, _ in found) == 2  # itself and its momentum
    assert all(spec == kernel[1] for path, spec in found if path.endswith(kernel[0]))
    assert sum(spec == P() for _, spec in found) >= 2  # counters and the key


def test_only_the_width_within_a_block_is_cut_unevenly():
    mesh = sharding.make_mesh("data=2,tensor=4", jax.devices())
    axes = (sharding.BATCH, None, "tensor")
    assert sharding.spec(axes, (33, 16, 65), mesh, uneven=True) == P(None, None, "tensor")
    assert sharding.spec(axes, (34, 16, 63), mesh, uneven=True) == P(sharding.BATCH, None, None)
    assert sharding.spec(axes, (34, 16, 65), mesh) == P(sharding.BATCH, None, None)


def test_parameter_without_a_row_is_an_error():
    mesh = sharding.make_mesh("", jax.devices())
    with pytest.raises(UserError, match=r"router/kernel of shape .* has no row in PARAMETERS"):
        sharding.of_params({"router": {"kernel": jnp.zeros((8, 8))}}, mesh)


def test_parameters_are_never_whole_on_a_device(text):
    shapes = set(
        re.findall(
            r"f32\[(\d+,\d+)\]", assemble_toy(text).functions.init.lower(0).compile().as_text()
        )
    )
    assert "150,8" in shapes and "8,32" in shapes  # of wte (300, 16) and up/kernel (16, 64)
    assert not shapes & {"300,16", "16,64", "64,16", "16,16"}


def test_rows_of_a_batch_do_not_move(text):
    given = {"batch_size": 16, "accumulate": 2, "optimizer": ADAMW_RULE}
    program = compiled_step(assemble_toy(text, "data=2,fsdp=4", **given)).as_text()
    moved = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute)\(", program)
    assert moved and not [shape for shape in moved if "s32[" in shape]
    # (B, T, D); there is one row of positions
    assert not [shape for shape in moved if re.match(r"f32\[([2-9]|\d\d),16,\d+\]", shape)]


def test_process_reads_only_its_own_rows():
    class Half(NamedSharding):  # what the second of two processes sees of `data`
        def addressable_devices_indices_map(self, shape):
            everything = super().addressable_devices_indices_map(shape)
            return {d: index for d, index in everything.items() if index[0].start >= 4}

    class Reader(Loader):
        def batch(self, step, rows=None):
            seen.append(rows)
            return super().batch(step, rows)

    seen = []
    mesh = sharding.make_mesh("data=4,tensor=2", jax.devices())
    loader = Reader(np.arange(1000), context=4, batch_size=8, seed=0)
    with pytest.raises(jax.errors.JaxRuntimeError):  # there is no process with the other half
        place_batch(loader, 0, Half(mesh, P("data")))
    assert sorted(seen, key=min) == [range(4, 6), range(6, 8)]
    whole = place_batch(loader, 3, sharding.of_batch(mesh))
    jax.tree.map(np.testing.assert_array_equal, whole, Loader.batch(loader, 3))


def test_accumulation_changes_no_loss(text):
    mesh = ("data=2,fsdp=2", 4)
    once, micro_batches = (
        first_losses(assemble_toy(text, *mesh, accumulate=n, optimizer=ADAMW_RULE)) for n in (1, 2)
    )
    assert once == pytest.approx(micro_batches, abs=1e-5)


def test_accumulation_and_remat_save_memory(text):
    # Long rows, so that activations outweigh everything else.
    # Stacked: a CPU computes separate blocks again long before it has to, and saves nothing.
    size = {"n_layer": 4, "context": 64, "d_model": 32, "scan": True, "optimizer": ADAMW_RULE}
    size |= {"family": "llama", "tied": False}
    memory = {}
    for name, changes in {
        "plain": {},
        "remat": {"remat": "full"},
        "pieces": {"accumulate": 4},
    }.items():
        toy = assemble_toy(text, "", 1, **size, **changes)
        memory[name] = compiled_step(toy).memory_analysis().temp_size_in_bytes
    # What is left: logits and the activations of one block; a quarter of all.
    assert memory["remat"] < 0.4 * memory["plain"]
    assert memory["pieces"] < 0.4 * memory["plain"]


def test_a_mesh_is_described_as_it_is(text, tmp_path, capsys):
    """No line asks for what the run does, and heads that do not divide are named."""
    flags = ("--mesh", "data=2,tensor=4", "--steps", "1", "--optimizer.name", "muon")
    assert train(text, tmp_path, "--name", "x", *flags) == 0
    shown = capsys.readouterr().out
    assert "matrices shared out among 8 devices" in shown and "Pass sharding=" not in shown
    assert "tensor=4 does not divide --model.n-head 2" in shown


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_device_keeps_all_layers_whole(remat, text):
    size = {"family": "llama", "tied": False, "n_layer": 3, "context": 24, "d_ff": 45}
    given = {**size, "scan": True, "remat": remat, "optimizer": ADAMW_RULE}
    program = compiled_step(assemble_toy(text, "data=2,fsdp=4", **given)).as_text()
    assert "f32[3,4,45]" in program and "f32[3,16,45]" not in program
