"""Wrong options of `benchmarks`: a line says what is wrong before anything is measured."""

import jax
import pytest
from jax.sharding import AxisType

from benchmarks import collectives, fewest, meshes, trainer
from benchmarks.yardsticks import tiny_shakespeare
from examples.trainer.system.errors import UserError


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: meshes.simulated("data"), "A mesh is written as data=4,model=2, not as 'data'"),
        (lambda: fewest.main(fewest.Config(lower=0.5)), "must lie between 0 and 1"),
        (lambda: trainer.main(trainer.Config(preset="x")), "There is no preset x. Presets are gpt"),
        (lambda: tiny_shakespeare.main(tiny_shakespeare.Config(seeds=4)), "--seeds begins at 5"),
    ],
    ids=["mesh", "fewest", "preset", "seeds"],
)
def test_wrong_options_are_said(run, words):
    with pytest.raises((SystemExit, UserError), match=words):
        run()


def test_one_device_has_no_collectives(monkeypatch):
    one = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    monkeypatch.setattr(meshes, "simulated", lambda text: one)
    with pytest.raises(SystemExit, match="is one device, on which nothing moves"):
        collectives.main(collectives.Config(spec="data,-"))
