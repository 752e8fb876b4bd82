"""Muon+ in MaxText: one line before its trainer starts, and ``opt_type=muon`` as for Optax's Muon.

Optax's Muon is ``optax_muon`` in MaxText's module of optimizers, and ``muon`` in older versions.
MaxText passes its own dimension numbers and one learning rate for all; give what only Muon+ has by
``functools.partial(omp.muonplus, norm="col_row")``. With ``muon_consistent_rms=0.2`` the one rate
is an AdamW's. Here a tiny LLaMA with scanned layers learns one batch by heart, in MaxText's loop.

Install: ``pip install "maxtext[tpu]"``, on CPUs too (tried: 0.2.5, Flax 0.12.12, optax 0.2.8, jax
0.12.0.1, Python 3.12).
Run: ``python -m examples.hosts.maxtext``, with settings of MaxText behind it if you like.
"""

import functools
import json
import pathlib
import sys
import tempfile

import jax
import maxtext.optimizers.optimizers as optimizers
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils.globals import MAXTEXT_PKG_DIR
from maxtext.utils.sharding import add_data_to_sharding, nnx_construct_named_sharding

import optax_muonplus as omp

NAME = "optax_muon" if hasattr(optimizers, "optax_muon") else "muon"
OPTAX_MUON = getattr(optimizers, NAME)
BASE = str(pathlib.Path(MAXTEXT_PKG_DIR) / "configs" / "base.yml")

MODEL = [
    "model_name=llama2-7b",
    "override_model_config=True",
    "base_emb_dim=32",
    "base_mlp_dim=96",
    "base_num_decoder_layers=2",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=8",
    "vocab_size=64",
]
MUON = ["opt_type=muon", "muon_consistent_rms=0.2"]  # what a user sets
TRAINING = [
    "learning_rate=0.03",
    "steps=40",
    "max_target_length=32",
    "per_device_batch_size=8",
    "dataset_type=synthetic",
    "reuse_example_batch=1",
    "enable_checkpointing=False",
    "enable_goodput_recording=False",
    "monitor_goodput=False",
    "hardware=cpu",
    "attention=dot_product",
    "skip_jax_distributed_system=True",
    "log_period=1",
]


def install(muon=omp.muonplus):
    """What a user adds: ``optimizers.optax_muon = omp.muonplus``."""
    setattr(optimizers, NAME, muon)


def install_for_a_mesh():
    """What a user adds on many devices: each matrix is then moved once there, and once back."""
    theirs = optimizers.get_optimizer

    def get_optimizer(config, schedule, model=None, mesh=None):
        install(functools.partial(omp.muonplus, sharding=where_parameters_lie(config, model, mesh)))
        return theirs(config, schedule, model, mesh)

    optimizers.get_optimizer = get_optimizer


def where_parameters_lie(config, model, mesh):
    """By the names that MaxText gives to axes; with ZeRO-1 the updated ones lie as the state."""
    params = nnx.state(model, nnx.Param)
    with logical_axis_rules(config.logical_axis_rules):
        where = nnx.to_pure_dict(nnx_construct_named_sharding(params, mesh))
    if not config.shard_optimizer_over_data:
        return where
    add = functools.partial(add_data_to_sharding, mesh)
    return jax.tree.map_with_path(add, nnx.to_pure_dict(params), where)


def train(*settings):
    """MaxText's own loop, as ``python -m maxtext.trainers.pre_train.train``: state and losses."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        files = [f"base_output_directory={folder}", "run_name=tiny", f"metrics_file={metrics}"]
        arguments = ["", BASE, *MODEL, *TRAINING, *files, *settings]
        state = pre_train.train_loop(*pre_train.initialize(arguments))
        lines = metrics.read_text(encoding="utf-8").splitlines()
    return state, [json.loads(line)["learning/loss"] for line in lines]


if __name__ == "__main__":
    for name, muon, chosen in [
        ("Muon+", omp.muonplus, MUON),
        ("AdamW", OPTAX_MUON, ["opt_type=adamw"]),
        ("Muon", OPTAX_MUON, MUON),
    ]:
        install(muon)
        losses = train(*chosen, *sys.argv[1:])[1]
        print(name, *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
