"""Processes on CPUs connect before a step is compiled: each group of devices that it has."""

import unittest.mock

import pytest

from examples.compiled_programs import collectives, hlo
from examples.trainer.runs import processes
from examples.trainer.system.errors import UserError
from tests.support.trainer import assemble_toy, compiled_step, train


def groups_of(compiled):
    """The devices that a program's collectives bring together, without pairs that permute."""
    program = hlo.read_program(compiled)
    return {
        frozenset(group)
        for computation in program.computations.values()
        for x in computation.instructions.values()
        if x.opcode.removesuffix("-start") in {*collectives.RECEIVED} - {"collective-permute"}
        for group in collectives.groups(x, program.devices)
        if len(group) > 1
    }


@pytest.mark.cpu_program
def test_all_groups_of_a_step_are_connected_before_it_is_compiled(text):
    toy = assemble_toy(text)
    sums = [total.lower(ones).compile() for total, ones in processes.sums(toy.mesh)]
    assert [len(groups_of(total)) for total in sums] == [4, 4, 4, 2, 2, 2, 1]
    assert groups_of(compiled_step(toy)) <= set().union(*map(groups_of, sums))


def test_a_run_connects_its_mesh_before_it_makes_arrays(tmp_path, text, capsys):
    with unittest.mock.patch.object(processes, "connect", side_effect=UserError("met")) as connect:
        assert train(text, tmp_path, "--mesh", "data=2,fsdp=4") == 2
    assert connect.call_args.args[0].shape == {"data": 2, "fsdp": 4, "tensor": 1}
    assert "met" in capsys.readouterr().err and not list(tmp_path.iterdir())
