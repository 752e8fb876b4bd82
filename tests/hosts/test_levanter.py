"""Levanter: its own ``Trainer`` and models. Skipped where marin-levanter is not installed."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.hosts.haliax_axes import dimension_numbers
from tests.support.compilation import collectives
from tests.support.hosts import assert_falls, readings

with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    pytest.importorskip("levanter.trainer", exc_type=ImportError)
    host = pytest.importorskip("examples.hosts.levanter")
    hax = host.haliax

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = {
    "transformer/layers/stacked/self_attn/q_proj/weight/0": "32x32x2",
    "transformer/layers/stacked/self_attn/k_proj/weight/0": "16x32x2",
    "transformer/layers/stacked/self_attn/v_proj/weight/0": "16x32x2",
    "transformer/layers/stacked/self_attn/o_proj/weight/0": "32x32x2",
    "transformer/layers/stacked/mlp/gate_proj/weight/0": "96x32x2",
    "transformer/layers/stacked/mlp/up_proj/weight/0": "96x32x2",
    "transformer/layers/stacked/mlp/down_proj/weight/0": "32x96x2",
    "transformer/layers/stacked/input_layernorm/weight/0": "adam",
    "transformer/layers/stacked/post_attention_layernorm/weight/0": "adam",
    "transformer/norm/weight/0": "adam",
    "embeddings/token_embeddings/weight/0": "adam",
    "lm_head/weight/0": "adam",
}
# In-first layers, and a fused QKV that is one matrix; the head is the table of tokens.
GPT2 = {
    "transformer/blocks/stacked/ln_{1..2}/weight/0": "adam",
    "transformer/blocks/stacked/ln_{1..2}/bias/0": "adam",
    "transformer/blocks/stacked/attn/c_attn/weight/0": "96x32x2",
    "transformer/blocks/stacked/attn/c_attn/bias/0": "adam",
    "transformer/blocks/stacked/attn/c_proj/weight/0": "32x32x2",
    "transformer/blocks/stacked/attn/c_proj/bias/0": "adam",
    "transformer/blocks/stacked/mlp/c_fc/weight/0": "128x32x2",
    "transformer/blocks/stacked/mlp/c_fc/bias/0": "adam",
    "transformer/blocks/stacked/mlp/c_proj/weight/0": "32x128x2",
    "transformer/blocks/stacked/mlp/c_proj/bias/0": "adam",
    "transformer/ln_f/weight/0": "adam",
    "transformer/ln_f/bias/0": "adam",
    "embeddings/token_embeddings/weight/0": "adam",
    "embeddings/position_embeddings/weight/0": "adam",
}
MIXTRAL = {path: kind for path, kind in LLAMA.items() if "/mlp/" not in path} | {
    "transformer/layers/stacked/block_sparse_moe/gate/weight/0": "4x32x2",
    "transformer/layers/stacked/block_sparse_moe/experts/w{1,3}/weight/0": "96x32x8",
    "transformer/layers/stacked/block_sparse_moe/experts/w2/weight/0": "32x96x8",
}
UNSCANNED = {
    path.replace("stacked", "blocks/{0..1}"): kind.replace("x2", "x1") if "layers" in path else kind
    for path, kind in LLAMA.items()
}
SIZES = {"max_seq_len": 32, "hidden_dim": 32, "num_layers": 2, "num_heads": 4}
GROUPED = SIZES | {"num_kv_heads": 2, "intermediate_dim": 96}
MODELS = {
    "llama": (GROUPED, LLAMA),
    "llama, not scanned": (GROUPED | {"scan_layers": False}, UNSCANNED),
    "gpt2": (SIZES, GPT2),
    "mixtral": (GROUPED | {"n_routed_experts": 4, "num_experts_per_tok": 2}, MIXTRAL),
}


@pytest.fixture(autouse=True)
def as_users_have_it():
    """JAX's default ranks, which Levanter needs; its trainer's logging goes to a folder removed."""
    handlers = list(logging.getLogger().handlers)
    with jax.numpy_rank_promotion("allow"):
        yield
    logging.getLogger().handlers[:] = handlers


def config(steps=12, **optimizer):
    """That of the example, with a constant rate."""
    constant = {"warmup": 0, "lr_schedule": "constant"}
    settings = {"learning_rate": 0.02, "adam_lr": 5e-3, **constant, **optimizer}
    read = host.read(host.CONFIG, optimizer={"type": "muonplus", **settings})
    read.trainer.num_train_steps = steps
    return read


@pytest.mark.parametrize("model", MODELS)
def test_every_leaf_is_read_as_a_person_would(model):
    settings, judged = MODELS[model]
    kind = model.partition(",")[0]
    read = host.read(host.CONFIG, model={"type": kind, **settings})
    params = host.model_parameters(read)
    assert readings(params, dimension_numbers) == judged


def test_the_example_trains_and_its_trainer_resumes(tmp_path):
    """On a mesh of all devices, over which the trainer shards the axis embed."""
    state, losses = host.train(config(10), tmp_path)
    assert_falls(losses, to=0.6)
    matrices = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 2]
    assert matrices and all("data" in x.sharding.spec for x in matrices)
    rates = {name: float(rate) for name, rate in state.opt_state.hyperparams.items()}
    assert rates == pytest.approx({"learning_rate": 0.02, "adam_lr": 5e-3})

    read = config(14)
    read.trainer.load_checkpoint_path = str(next((tmp_path / "checkpoints").iterdir()))
    state, resumed = host.train(read, tmp_path / "again")
    assert int(state.step) == 14 and len(resumed) == 4
    assert max(resumed) < losses[-1]


def test_schedules_are_levanters():
    optimizer = config(100, warmup=10, lr_schedule="linear", min_lr_ratio=0.5).optimizer
    tx = optimizer.build(100)
    params = {"w": jnp.ones((4, 4))}
    state, update = tx.init(params), jax.jit(tx.update)
    rates = []
    for _ in range(100):
        _, state = update(params, state, params)
        rates.append([float(state.hyperparams[name]) for name in ("learning_rate", "adam_lr")])
    rates = np.array(rates)
    expected = [
        [float(optimizer.lr_scheduler(100, override_lr=rate)(step)) for rate in (0.02, 5e-3)]
        for step in range(100)
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    assert rates[10, 0] == pytest.approx(0.02) and rates[-1, 0] < 0.011


@pytest.mark.parametrize("adam_decay", [None, 0.0, 0.3])
def test_what_levanters_mask_chooses_decays(adam_decay):
    """With gradients of zero, decay is the whole update."""
    read = config(weight_decay=0.1, adam_weight_decay=adam_decay)
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), host.model_parameters(read))
    tx = read.optimizer.build(10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(update)
        for path, update in jax.tree.leaves_with_path(updates)
    }
    assert found.keys() == LLAMA.keys()
    for path, update in found.items():
        expected = 0.0
        if LLAMA[path] != "adam":
            expected = -0.02 * 0.1
        elif path == "lm_head/weight/0":  # no norm and no embedding
            expected = -5e-3 * (0.1 if adam_decay is None else adam_decay)
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=path)


def test_clipping_is_of_all_gradients_together():
    params = {"w": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    grads = jax.tree.map(lambda p: 100 * p, params)
    states = [
        jax.jit(tx.update)(grads, tx.init(params), params)[1]
        for tx in (config(max_grad_norm=norm).optimizer.build(10) for norm in (1.0, None))
    ]
    clipped, free = (optax.tree.get(state, "nu", filtering=None) for state in states)
    np.testing.assert_allclose(clipped["bias"], free["bias"] / (100**2 * 20), rtol=1e-5)


def test_on_a_mesh_a_matrix_moves_once_there_and_once_back(tmp_path):
    """Without the trainer's names of axes the compiler gathers in each step of the iteration."""
    read = config()
    read.trainer.log_dir = tmp_path
    read.trainer.initialize()
    tx = read.optimizer.build(10)

    trainer = host.Trainer(read.trainer, tx, host.loss_function)
    mapping = trainer.parameter_axis_mapping
    with trainer:
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), host.model_parameters(read))
        params = hax.shard(params, mapping)
        jit = hax.named_jit(axis_resources=mapping, out_axis_resources=mapping)
        state = jit(tx.init)(params)
        program = jit(tx.update).lower(params, state, params).compile()
    # One for the norm to clip by, and all matrices there and back: their shapes share the moves.
    assert collectives(program) == ["all-reduce", "all-to-all", "all-to-all"]
