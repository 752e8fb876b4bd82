"""`--machine`: every recipe has machines that it fits, and needs no other flag there."""

import pytest

from examples.compiled_programs import targets
from examples.trainer.settings import command_line, machines, presets
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding

ALL = [(name, fit) for name in presets.ROWS for fit in machines.FITS[name]]


@pytest.mark.parametrize("name", presets.ROWS)
def test_every_recipe_has_a_smallest_h100_and_a_smallest_tpu_slice(name):
    kinds = [fit.kind for fit in machines.FITS[name]]
    assert kinds[0] == "h100" and set(kinds[1:]) & {"v5e", "v5p"}


@pytest.mark.parametrize(("name", "fit"), ALL)
def test_a_machine_sets_mesh_and_micro_batches(name, fit):
    for machine in {fit.smallest, fit.smallest.replace("h100-1", "h100-64")}:
        asked, _ = command_line.parse([f"{name}-muon", "--machine", machine])
        target = targets.parse(machine.replace("-", ":"))  # the same devices to --compile-for
        sizes = sharding.mesh_sizes(asked.machine.mesh, target.devices)
        rows = 512 / (sizes["data"] * sizes["fsdp"] * asked.config.accumulate)
        assert rows == int(rows) and 1 <= rows <= fit.rows
        assert rows == fit.rows or target.devices * fit.rows > 512


@pytest.mark.parametrize(
    ("machine", "mesh"),
    [("a100-8", "fsdp=8"), ("b200-16", "data=2,fsdp=8"), ("v6e-4x4", "fsdp=16")],
)
def test_devices_with_more_memory_are_taken_like_those_that_were_compiled_for(machine, mesh):
    asked, _ = command_line.parse(["llama-7b", "--machine", machine])
    like = "v5e-4x4" if "x" in machine else f"h100-{machine.partition('-')[2]}"
    same, _ = command_line.parse(["llama-7b", "--machine", like])
    assert asked.machine.mesh == same.machine.mesh == mesh
    assert asked.config.accumulate == same.config.accumulate
    target = targets.parse(machine.replace("-", ":"))
    assert target.memory >= targets.parse(like.replace("-", ":")).memory


def test_other_flags_of_the_command_line_win():
    words = ["llama-7b", "--machine=h100-8", "--accumulate", "512", "--mesh", "tensor=8"]
    asked, _ = command_line.parse(words)
    assert (asked.config.accumulate, asked.machine.mesh) == (512, "tensor=8")
    assert asked.config.model.remat == "none"
    asked, _ = command_line.parse([*words, "--model.remat", "full"])
    assert asked.config.model.remat == "full"


@pytest.mark.parametrize(("recipe", "machine"), [("gpt-small", "v5e-1"), ("llama-7b", "h100-64")])
def test_a_device_with_room_for_all_activations_keeps_them(recipe, machine):
    """A loop over layers would copy what it keeps, when it is made and when it is used."""
    asked, _ = command_line.parse([recipe, "--machine", machine])
    assert (asked.config.model.remat, asked.config.model.scan) == ("none", False)
    words = [recipe, "--machine", machine, "--model.scan", "--model.remat", "full"]
    asked, _ = command_line.parse(words)
    assert (asked.config.model.remat, asked.config.model.scan) == ("full", True)


def test_a_device_without_that_room_computes_them_again():
    asked, _ = command_line.parse(["llama-7b", "--machine", "v5e-4x4"])
    assert (asked.config.model.remat, asked.config.model.scan) == ("full", True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-micro", "--machine", "h100-1"], "gpt-micro fits anywhere"),
        (["--machine", "h100-1"], "gpt-tiny fits anywhere"),
        (["llama-1b", "--machine", "h100"], "give h100-1, h100-8"),
        (["llama-1b", "--machine", "h100-12"], "a power of two"),
        (["llama-7b", "--machine", "h100-1"], "not known to fit --machine h100-1: the smallest"),
        (["llama-1b", "--machine", "h100-1024"], "more devices than a step"),
    ],
)
def test_machines_that_are_not_known_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        command_line.parse(words)
