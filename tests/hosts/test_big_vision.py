"""big_vision: its own program on its ViT. Skipped where big_vision is not on the path."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from tests.support.hosts import assert_falls, readings

pytest.importorskip("big_vision", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    host = pytest.importorskip("examples.hosts.big_vision")

pytestmark = pytest.mark.filterwarnings("ignore")

ATTENTION = "MultiHeadDotProductAttention_0"
BLOCK = {
    "LayerNorm_{0..1}/bias": "adam",
    "LayerNorm_{0..1}/scale": "adam",
    "MlpBlock_0/Dense_0/bias": "adam",
    "MlpBlock_0/Dense_0/kernel": "64x32",
    "MlpBlock_0/Dense_1/bias": "adam",
    "MlpBlock_0/Dense_1/kernel": "32x64",
    **{f"{ATTENTION}/{name}/bias": "adam" for name in ("key", "out", "query", "value")},
    **{f"{ATTENTION}/{name}/kernel": "32x32" for name in ("key", "out", "query", "value")},
}
REST = {
    "Transformer/encoder_norm/bias": "adam",
    "Transformer/encoder_norm/scale": "adam",
    "embedding/bias": "adam",
    "embedding/kernel": "32x48x1",  # patches of 4 x 4 x 3
    "head/bias": "adam",
    "head/kernel": "adam",
    "pos_embedding": "adam",
}


@pytest.fixture(autouse=True)
def as_users_have_it():
    """JAX's defaults, and what big_vision.train sets for the whole process when imported."""
    before = jax.config.jax_transfer_guard, jax.config.jax_threefry_partitionable
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_transfer_guard", before[0])
    jax.config.update("jax_threefry_partitionable", before[1])


def vit(**settings):
    from big_vision.models import vit

    model = vit.Model(num_classes=4, **host.get_config().model, **settings)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]


def blocks(name, layers):
    found = {f"Transformer/{name}/{path}": read for path, read in BLOCK.items()}
    return {path: read if read == "adam" else f"{read}x{layers}" for path, read in found.items()}


def test_every_leaf_is_read_as_judged():
    assert readings(vit()) == blocks("encoderblock_{0..1}", 1) | REST


def test_scanned_layers_are_read_when_their_axis_is_said():
    params = vit(scan=True)
    with pytest.raises(ValueError, match=r"layer_axes=\{'encoderblock': 0\}"):
        omp.muonplus(0.02).init(params)
    found = readings(
        params, lambda p: omp.muon_dimension_numbers(p, layer_axes={"encoderblock/": 0})
    )
    assert found == blocks("encoderblock", 2) | REST


def test_its_program_trains_with_the_name_in_its_configuration():
    assert_falls(host.train("muonplus"), to=0.4)
