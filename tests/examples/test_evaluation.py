"""The evaluation: all of the validation text, whatever the batch and the mesh."""

import pytest

from examples.trainer.runs.loop import evaluate
from tests.support.trainer import CUBE, assemble_toy


def test_all_of_the_validation_text_is_evaluated_whatever_the_batch(text):
    def evaluated(mesh, devices, **sizes):
        setup = assemble_toy(text, mesh, devices, eval_batches=10**6, **sizes)
        loss = setup.functions.loss
        state, before = setup.functions.init(0), loss._cache_size()
        found = evaluate(setup, state.params)
        assert loss._cache_size() <= before + 1  # one shape, also of the last batch
        return found["val_loss"]

    windows = (len(assemble_toy(text, "", 1).dataset.val.ids) - 1) // 16
    # The text is of Python's own source: other versions have another number of windows.
    small, large = (next(n for n in sizes if windows % n) for sizes in ((7, 5, 9), (24, 40, 56)))
    whole = evaluated("", 1, batch_size=windows)
    for mesh, devices, size, parts in (("", 1, small, 1), ("", 1, large, 2), (CUBE, 8, large, 1)):
        found = evaluated(mesh, devices, batch_size=size, accumulate=parts)
        assert found == pytest.approx(whole, rel=1e-6)
