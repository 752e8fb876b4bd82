"""Devices share the work of stacked blocks: products, rows, parameters and losses on any mesh."""

import pytest

from examples.compiled_programs import counts, hlo
from tests.support.trainer import ADAMW_RULE, assemble_toy, compiled_step, first_losses

# A micro-batch has 8 rows of 24 tokens. The 45 numbers inside an MLP are not divided by 2.
TOY = {
    **{"family": "llama", "tied": False, "n_layer": 3, "n_head": 2, "context": 24, "d_ff": 45},
    **{"scan": True, "remat": "full", "accumulate": 2, "batch_size": 16, "optimizer": ADAMW_RULE},
}


@pytest.fixture(scope="module")
def alone(text):
    """What one device does: operations of products in a step, and the first losses."""
    toy = assemble_toy(text, "", 1, **TOY)
    return products(compiled_step(toy)), first_losses(toy)


def products(step):
    """Operations of products on the device that has most of them."""
    return max(device.operations for device in counts.count(hlo.read_program(step)))


@pytest.mark.parametrize("mesh", ["data=2,fsdp=4", "fsdp=4,tensor=2"])
def test_devices_share_the_work_of_stacked_blocks(mesh, alone, text):
    toy = assemble_toy(text, mesh, **TOY)
    step = compiled_step(toy)
    operations, losses = alone
    # With tensor=2 each device has 23 of the 45 numbers: 1% more.
    assert 8 * products(step) <= 1.02 * operations
    program = step.as_text()
    assert "f32[8,24,16]" not in program  # all rows
    assert "f32[3,16,45]" not in program  # all layers, which fsdp shards
    # The same terms in another order, as in the tests of blocks that are not stacked.
    assert first_losses(toy) == pytest.approx(losses, abs=1e-5)
