"""Training on a mesh: where arrays are, and that a mesh changes no loss."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.train import main
from examples.trainer.data.loader import Loader
from examples.trainer.data.placement import place_batch
from examples.trainer.settings.presets import PRESETS
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.step import make_init_params
from tests.support.trainer import (
    ADAMW_RULE,
    CUBE,
    assemble_toy,
    compiled_step,
    first_losses,
    losses,
    on_devices,
    train,
)


@pytest.mark.parametrize(
    ("flag", "sizes"),
    [("", (1, 8, 1)), ("fsdp=8", (1, 8, 1)), ("tensor=4, data=2", (2, 1, 4)), (CUBE, (2, 2, 2))],
)
def test_mesh_flag_gives_axis_sizes(flag, sizes):
    assert tuple(sharding.make_mesh(flag, jax.devices()).shape.values()) == sizes


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("model=8", "names no axis"),
        ("data=4,data=2", "data is given twice"),
        ("fsdp=0", "give 1 or more"),
        ("fsdp=-8", "give 1 or more"),
        ("fsdp", "give 1 or more"),
        ("data=2,fsdp=2", "is for 4 devices, but there are 8: --mesh data=2,fsdp=4 fits"),
        ("tensor=3,fsdp=2", "is for 6 devices, but there are 8: --mesh fsdp=8 fits"),
    ],
)
def test_impossible_mesh_is_refused(flag, words):
    with pytest.raises(UserError, match=re.escape(words)):
        sharding.make_mesh(flag, jax.devices())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mesh", "model=8"], "names no axis"),
        (["--batch-size", "12"], "data x fsdp = 8 devices: give a multiple of 8"),
        (["--accumulate", "2"], "in --accumulate 2 pieces: give a multiple of 16"),
    ],
)
def test_batch_or_mesh_that_does_not_divide_leaves_no_run(flags, words, text, tmp_path, capsys):
    assert train(text, tmp_path, *flags) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", ["gpt-tiny", "gpt-micro"])  # others: test_model_parameters.py
def test_every_parameter_of_a_preset_is_sharded(preset):
    model = dataclasses.replace(PRESETS[preset][1].model, tied=False)
    mesh = sharding.make_mesh(CUBE, jax.devices())
    params = jax.eval_shape(make_init_params(model, 512), 0)
    placed = sharding.of_params(params, mesh)
    block = placed["blocks"][0]
    assert block["attn"]["qkv"]["kernel"].spec == P("fsdp", "tensor")
    assert block["attn"]["out"]["kernel"].spec == P("tensor", "fsdp")
    assert placed["wte"]["embedding"].spec == P("tensor", "fsdp")
    assert placed["lm_head"]["kernel"].spec == P("fsdp", "tensor")
    assert placed["ln_f"]["scale"].spec == P(None)
    assert not sharding.undivided(params, mesh)


def test_moments_are_sharded_like_their_parameters(text):
    abstract = assemble_toy(text).program.abstract
    kernel = ["blocks/0/mlp/up/kernel", P("fsdp", "tensor")]
    found = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), x.sharding.spec)
        for path, x in jax.tree.leaves_with_path(abstract)
    ]
    assert sum(path.endswith(kernel[0]) for path, _ in found) == 2  # itself and its momentum
    assert all(spec == kernel[1] for path, spec in found if path.endswith(kernel[0]))
    assert sum(spec == P() for _, spec in found) >= 2  # counters and the key


def test_parameter_without_a_row_is_an_error():
    mesh = sharding.make_mesh("", jax.devices())
    with pytest.raises(UserError, match=r"router/kernel of shape .* has no row in LOGICAL_AXES"):
        sharding.of_params({"router": {"kernel": jnp.zeros((8, 8))}}, mesh)


def test_parameters_are_never_whole_on_a_device(text):
    shapes = set(
        re.findall(
            r"f32\[(\d+,\d+)\]", assemble_toy(text).program.init.lower(0).compile().as_text()
        )
    )
    assert "150,8" in shapes and "8,32" in shapes  # of wte (300, 16) and up/kernel (16, 64)
    assert not shapes & {"300,16", "16,64", "64,16", "16,16"}


def test_first_state_does_not_depend_on_the_mesh(text):
    first = [assemble_toy(text, *mesh).init() for mesh in (("", 1), (CUBE, 8))]
    np.testing.assert_array_equal(*(jax.random.key_data(state.key) for state in first))
    jax.tree.map(np.testing.assert_array_equal, *(state.params for state in first))


def test_dimensions_that_do_not_divide_are_reported(tmp_path, text, capsys):
    flags = ["--mesh", CUBE, "--data.vocab-size", "301", "--steps", "1", "--model.no-tied"]
    assert train(text, tmp_path, *flags, "--optimizer.name", "adamw") == 0
    shown = capsys.readouterr().out
    assert "mesh   8 cpu devices, data=2 fsdp=2 tensor=2" in shown
    assert (
        "vocab dimensions of 301 are not sharded, as tensor=2 does not divide them: "
        "whole in lm_head/kernel and 1 more"
    ) in shown


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


# Losses are the same in float32 to 1e-5: a step adds the same terms in another order (1e-7 of a
# loss near 6 each), and 24 steps of training let that grow.


def test_losses_on_eight_devices_equal_those_on_one(tmp_path, text):
    assert train(text, tmp_path, "--name", "cube", "--mesh", CUBE) == 0
    with on_devices(1):
        assert train(text, tmp_path, "--name", "one") == 0
    for kind in ("train_loss", "val_loss"):
        one, eight = (losses(tmp_path / name, kind) for name in ("one", "cube"))
        assert one.keys() == eight.keys()
        assert list(one.values()) == pytest.approx(list(eight.values()), abs=1e-5)


def test_per_head_on_a_mesh_trains_as_on_one_device(text):
    """LLaMA's heads, scanned as the recipes do."""
    rule = OptimizerConfig(per_head=True, learning_rate=0.2)
    changes = {"family": "llama", "n_layer": 2, "scan": True, "optimizer": rule}
    eight, one = (
        first_losses(assemble_toy(text, *mesh, **changes), 4) for mesh in ((CUBE, 8), ("", 1))
    )
    assert eight == pytest.approx(one, abs=1e-5)
    assert one[-1] < one[0] - 0.1


def test_accumulation_changes_no_loss(text):
    mesh = ("data=2,fsdp=2", 4)
    once, micro_batches = (
        first_losses(assemble_toy(text, *mesh, accumulate=n, optimizer=ADAMW_RULE)) for n in (1, 2)
    )
    assert once == pytest.approx(micro_batches, abs=1e-5)


def test_accumulation_evaluates_the_same_text(text):
    evaluations = []
    for n in (1, 4):
        toy = assemble_toy(text, "", 1, accumulate=n, optimizer=ADAMW_RULE)
        evaluations.append(toy.evaluate(toy.init().params).val_loss)
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5)


def test_accumulation_and_remat_save_memory(text):
    # Long rows, so that activations outweigh everything else.
    # Stacked: a CPU computes separate blocks again long before it has to, and saves nothing.
    size = {"n_layer": 4, "context": 64, "d_model": 32, "scan": True, "optimizer": ADAMW_RULE}
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


def test_remat_changes_no_loss(text):
    plain, remat = (
        first_losses(assemble_toy(text, "", 1, remat=on, optimizer=ADAMW_RULE))
        for on in ("none", "full")
    )
    assert plain == pytest.approx(remat, abs=1e-6)


def test_bfloat16_keeps_float32_parameters(text):
    toy = assemble_toy(text, compute_dtype="bfloat16")
    dtypes = {
        x.dtype
        for x in jax.tree.leaves((toy.program.abstract.params, toy.program.abstract.opt_state))
    }
    assert dtypes == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert "bf16[" in compiled_step(toy).as_text()
    # 8 bits of mantissa: 0.4 % of activations; the loss is a mean over many.
    assert first_losses(toy) == pytest.approx(first_losses(assemble_toy(text)), abs=0.02)


def test_single_device_gets_a_mesh_of_ones():
    assert dict(sharding.make_mesh("", jax.devices()[:1]).shape) == dict.fromkeys(
        sharding.MESH_AXES, 1
    )


def test_mesh_of_another_number_of_devices_is_refused(capsys):
    with on_devices(1):
        assert main(["--mesh", "fsdp=3", "--steps", "1"]) == 2
    shown = capsys.readouterr().err
    assert "--mesh fsdp=3 is for 3 devices, but there is 1: --mesh fsdp=1 fits" in shown
