"""EasyDeL's way to an optimizer: eformer's registry. Skipped where eformer is not installed."""

import warnings

import jax
import pytest

import optax_muonplus as omp
from tests.support.hosts import assert_falls, readings

pytest.importorskip("eformer", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    host = pytest.importorskip("examples.hosts.easydel")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_example_trains_by_its_registered_name():
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        params, losses = host.train("muonplus", 0.02, steps=20)
    assert_falls(losses, to=0.6)
    assert readings(params) == {
        "down_proj/kernel": "32x128x1",
        "embed_tokens/embedding": "adam",
        "lm_head/kernel": "adam",
        "norm/kernel": "adam",
        "up_proj/kernel": "128x32x1",
    }


def test_settings_by_name_reach_the_optimizer():
    """As EasyDeL's `extra_optimizer_kwargs` do: the other norm is another run."""
    with jax.numpy_rank_promotion("allow"):
        default = host.train("muonplus", 0.02, steps=8)[1]
        other = host.train("muonplus", 0.02, steps=8, norm="row")[1]
    assert default[:2] == other[:2] and default[-1] != other[-1]


def test_easydel_takes_the_name():
    """The arguments of its trainers; importing EasyDeL takes a minute."""
    easydel = pytest.importorskip("easydel", exc_type=ImportError)
    arguments = easydel.TrainingArguments(
        model_name="tiny", optimizer="muonplus", learning_rate=0.02, scheduler="cosine"
    )
    tx, schedule = arguments.get_optimizer_and_scheduler(10)
    assert float(schedule(0)) == pytest.approx(0.02)
    params = host.init(jax.random.key(0))
    momenta = omp.transforms.find_momentum(tx.init(params)).mu
    assert momenta["up_proj"]["kernel"].shape == (32, 128)
