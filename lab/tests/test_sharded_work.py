"""What each device of a mesh computes and receives in a training step of the trainer."""

import functools
import re

import pytest

from examples.trainer.settings.run import OptimizerConfig
from lab.compiled_programs import hlo, walk
from lab.compiled_programs import products as compiled_products
from tests.support.trainer import ADAMW_RULE, assemble_toy, compiled_step, first_losses

# A micro-batch has 8 rows of 24 tokens. The 45 numbers inside an MLP are not divided by 2.
STACKED = {
    **{"family": "llama", "tied": False, "n_layer": 3, "n_head": 2, "context": 24, "d_ff": 45},
    **{"scan": True, "remat": "full", "accumulate": 2, "batch_size": 16, "optimizer": ADAMW_RULE},
}


@pytest.fixture(scope="module")
def alone(text):
    """What one device does: operations of products in a step, and the first losses."""
    toy = assemble_toy(text, "", 1, **STACKED)
    return products(compiled_step(toy)), first_losses(toy)


def work_of(step):
    program = hlo.read_program(step)
    cost = functools.partial(compiled_products.cost, program)
    return walk.most_work(program, cost, "operations")


def products(step):
    """Operations of products on the device that has most of them."""
    return walk.total(work_of(step), "operations")


@pytest.mark.parametrize("mesh", ["data=2,fsdp=4", "fsdp=4,tensor=2"])
def test_devices_share_the_work_of_stacked_blocks(mesh, alone, text):
    toy = assemble_toy(text, mesh, **STACKED)
    step = compiled_step(toy)
    operations, losses = alone
    # With tensor=2 each device has 23 of the 45 numbers: 1% more.
    assert 8 * products(step) <= 1.02 * operations
    program = step.as_text()
    assert "f32[8,24,16]" not in program  # all rows
    assert "f32[3,16,45]" not in program  # all layers, which fsdp shards
    # The same terms in another order, as in the tests of blocks that are not stacked.
    assert first_losses(toy) == pytest.approx(losses, abs=1e-5)


def test_no_device_needs_the_heads_of_another(text):
    """Whole heads lie on each device: attention moves no queries, keys or values."""
    toy = assemble_toy(text, "data=4,tensor=2", n_layer=1, optimizer=OptimizerConfig(name="adamw"))
    found = walk.of_kinds(work_of(compiled_step(toy)), "collectives")
    # No parameter is on fsdp, so the embeddings alone are gathered, and nothing changes places.
    assert found and not re.search("all-to-all|collective-permute", " ".join(found))
