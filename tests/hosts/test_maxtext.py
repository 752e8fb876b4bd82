"""MaxText: its own training loop and models. Skipped where maxtext is not installed."""

import re
import warnings

import jax
import pytest
from flax import nnx

import optax_muonplus as omp
from tests.support.compilation import collectives
from tests.support.hosts import assert_falls, readings

with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    pytest.importorskip("maxtext.optimizers.optimizers", exc_type=ImportError)
    host = pytest.importorskip("examples.hosts.maxtext", exc_type=ImportError)
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils
    from maxtext.utils.muon_utils import get_muon_weight_dimension_numbers

pytestmark = pytest.mark.filterwarnings("ignore")

# By model, settings, and what a person says of each leaf where layers are scanned on axis 1.
ATTENTION = {"query": "32x32x2", "key": "16x32x2", "value": "16x32x2", "out": "32x32x2"}
LLAMA = {
    "decoder/decoder_norm/scale": "adam",
    "decoder/layers/mlp/wi_{0..1}/kernel": "96x32x2",
    "decoder/layers/mlp/wo/kernel": "32x96x2",
    "decoder/layers/post_self_attention_layer_norm/scale": "adam",
    "decoder/layers/pre_self_attention_layer_norm/scale": "adam",
    **{f"decoder/layers/self_attention/{k}/kernel": kind for k, kind in ATTENTION.items()},
    "decoder/logits_dense/kernel": "adam",
    "token_embedder/embedding": "adam",
}
DEEPSEEK = [
    "model_name=deepseek3-tiny",
    "override_model_config=True",
    "base_num_decoder_layers=3",
    "first_num_dense_layers=1",
    "vocab_size=80",
]
LATENT = {  # multi-head latent attention, of one layer
    "kv_norm/scale": "adam",
    "q_norm/scale": "adam",
    "wq_a/kernel": "32x64",
    "wq_b/kernel": "768x32",
    "wkv_a/kernel": "80x64",
    "wkv_b/kernel": "1024x16",
    "out/kernel": "64x512",
}
DENSE = {f"mlp/{name}/kernel": "64x64" for name in ("wi_{0..1}", "wo")}
EXPERTS = {
    "DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel": "16x64",
    "DeepSeekMoeBlock_0/shared_experts/wi_{0..1}/kernel": "64x64",
    "DeepSeekMoeBlock_0/shared_experts/wo/kernel": "64x64",
}

ZERO_1 = [  # MaxText's own: the state, and the parameters that it updates, over data
    "shard_optimizer_over_data=True",
    "ici_data_parallelism=4",
    "ici_fsdp_parallelism=1",
    "ici_tensor_parallelism=2",
]


def layers(prefix, count, *parts):
    """Readings of the leaves of a stack, from those of one of its layers."""
    one = {f"{side}_self_attention_layer_norm/scale": "adam" for side in ("pre", "post")}
    one |= {f"self_attention/{path}": kind for path, kind in LATENT.items()}
    for part in parts:
        one |= part
    return {
        f"{prefix}/{path}": kind if kind == "adam" else f"{kind}x{count}"
        for path, kind in one.items()
    }


def deepseek(scanned):
    dense, moe = ("", "") if scanned else ("_0", "_{0..1}")
    block = f"decoder/moe_layers{moe}/DeepSeekMoeBlock_0/MoeBlock_0"
    experts = f"64x64x{32 if scanned else 16}"
    return {
        "decoder/decoder_norm/scale": "adam",
        **layers(f"decoder/dense_layers{dense}", 1, DENSE),
        **layers(f"decoder/moe_layers{moe}", 2 if scanned else 1, EXPERTS),
        f"{block}/wi_{{0..1}}": experts,
        f"{block}/wo": experts,
        "decoder/logits_dense/kernel": "adam",
        "token_embedder/embedding": "adam",
    }


def unscanned(judged):
    return {
        path.replace("layers/", "layers_{0..1}/"): re.sub("x2$", "x1", kind)
        for path, kind in judged.items()
    }


MODELS = {
    "llama2": (host.MODEL, LLAMA),
    "llama2, not scanned": ([*host.MODEL, "scan_layers=False"], unscanned(LLAMA)),
    "deepseek3": (DEEPSEEK, deepseek(scanned=True)),
    "deepseek3, not scanned": ([*DEEPSEEK, "scan_layers=False"], deepseek(scanned=False)),
}


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """JAX's default ranks and random numbers, and MaxText's own Muon after the test."""
    monkeypatch.setattr(host.optimizers, host.NAME, host.OPTAX_MUON)
    monkeypatch.setattr(host.optimizers, "get_optimizer", host.optimizers.get_optimizer)
    prng = jax.config.jax_default_prng_impl
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_default_prng_impl", prng)


def abstract_model(settings):
    config = pyconfig.initialize(["", host.BASE, *host.TRAINING, "run_name=tiny", *settings])
    mesh = maxtext_utils.get_mesh_from_config(config)
    return config, mesh, model_creation_utils.create_nnx_abstract_model(config, mesh)[1]


@pytest.mark.parametrize("model", MODELS)
def test_every_leaf_is_read_as_a_person_would(model):
    """By MaxText's own dimension numbers, and by the rules for it with the axis of the layers."""
    settings, judged = MODELS[model]
    config, _, abstract = abstract_model(settings)
    params = nnx.state(abstract, nnx.Param)
    assert readings(params, get_muon_weight_dimension_numbers(abstract, config)) == judged
    axes = None if "scan_layers=False" in settings else {"layers/": 1}
    assert readings(params, rules=omp.rules.MAXTEXT, layer_axes=axes) == judged


@pytest.mark.parametrize(("flags", "axis"), [([], "fsdp"), (ZERO_1, "data")])
def test_the_example_trains_on_a_mesh(flags, axis):
    """All devices share the parameters, and momentum lies where its parameter lies."""
    host.install_for_a_mesh()
    state, losses = host.train(*host.MUON, "steps=12", "per_device_batch_size=1", *flags)
    assert_falls(losses, to=0.9)
    params = nnx.to_pure_dict(nnx.state(state.model, nnx.Param))
    momentum = nnx.to_pure_dict(nnx.state(state.optimizer))["opt_state"]["inner_states"]["muon"]
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/").partition("/mu/")[2]: x.sharding
        for path, x in jax.tree.leaves_with_path(momentum)
        if x.ndim > 1
    }
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.sharding
        for path, x in jax.tree.leaves_with_path(params)
    }
    assert sorted(found) == sorted(
        path for path in expected if "layers/" in path and "norm" not in path
    )
    for path, sharding in found.items():
        assert sharding == expected[path] and axis in str(sharding.spec), path


@pytest.mark.parametrize("flags", [[], ZERO_1])
def test_on_a_mesh_a_matrix_moves_once_there_and_once_back(flags):
    """Without shardings the compiler gathers in each step of the iteration."""
    config, mesh, model = abstract_model([*host.MODEL, *flags])
    where = host.where_parameters_lie(config, model, mesh)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, where
    )
    dims = get_muon_weight_dimension_numbers(model, config)
    tx = omp.muonplus(0.02, muon_weight_dimension_numbers=dims, sharding=where)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init).lower(params).out_info
        program = jax.jit(tx.update, out_shardings=(where, None)).lower(params, state, params)
    assert collectives(program.compile()) == ["all-to-all", "all-to-all"]
