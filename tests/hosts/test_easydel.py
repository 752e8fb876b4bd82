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


@pytest.fixture(scope="module")
def easydel():
    """Importing it takes a minute, and its models want PyTorch."""
    return pytest.importorskip("easydel", exc_type=ImportError)


def test_easydel_takes_the_name(easydel):
    arguments = easydel.TrainingArguments(
        model_name="tiny", optimizer="muonplus", learning_rate=0.02, scheduler="cosine"
    )
    tx, schedule = arguments.get_optimizer_and_scheduler(10)
    assert float(schedule(0)) == pytest.approx(0.02)
    params = host.init(jax.random.key(0))
    momenta = omp.transforms.find_momentum(tx.init(params)).mu
    assert momenta["up_proj"]["kernel"].shape == (32, 128)


def test_its_llama_is_read_as_judged(easydel):
    from flax import nnx

    config = easydel.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = easydel.LlamaForCausalLM(config, rngs=nnx.Rngs(0))
    layers = "model/layers/{0..1}"
    assert readings(model.to_state().graphstate) == {
        "lm_head/kernel": "adam",
        "model/embed_tokens/embedding": "adam",
        f"{layers}/input_layernorm/kernel": "adam",
        f"{layers}/mlp/down_proj/kernel": "32x96x1",
        f"{layers}/mlp/gate_proj/kernel": "96x32x1",
        f"{layers}/mlp/up_proj/kernel": "96x32x1",
        f"{layers}/post_attention_layernorm/kernel": "adam",
        f"{layers}/self_attn/k_proj/kernel": "16x32x1",
        f"{layers}/self_attn/o_proj/kernel": "32x32x1",
        f"{layers}/self_attn/q_proj/kernel": "32x32x1",
        f"{layers}/self_attn/v_proj/kernel": "16x32x1",
        "model/norm/kernel": "adam",
    }
