"""Muon+ in big_vision: a configuration that names it, for ``python -m big_vision.train``.

big_vision takes ``optax_name`` from Optax, and applies learning rate, decay and sign itself: the
transformation must have none of them. A tiny ViT learns the colours of images.

Install: a checkout of github.com/google-research/big_vision on ``PYTHONPATH``, and ``pip install
flax clu ml_collections einops overrides sentencepiece tensorflow-cpu`` (tried: commit 0127fb6, jax
0.10.2, Python 3.11).
Run: ``python -m examples.hosts.big_vision``, or as any configuration of big_vision:
``python -m big_vision.train --config examples/hosts/big_vision.py --workdir FOLDER``.
"""

import json
import pathlib
import sys
import tempfile

import ml_collections
import numpy as np
import optax
import tensorflow as tf

import optax_muonplus as omp

# What a user adds. The rate of the other group is a share of config.lr.
optax.muonplus = lambda **settings: optax.chain(
    omp.muonplus(1.0, adam_learning_rate=0.15, **settings), optax.scale(-1.0)
)
optax.muon = lambda **settings: optax.chain(  # the same of Optax' Muon, to compare
    optax.contrib.muon(1.0, adam_learning_rate=0.15, **settings), optax.scale(-1.0)
)
SETTINGS = {
    "muonplus": {"lr": 0.02, "optax": {"norm": "col_row"}},
    "scale_by_adam": {"lr": 0.003, "optax": {}},
    "muon": {"lr": 0.02, "optax": {}},
}


def images(folder, size=16, rows=128):
    """PNG files of four noisy colours, and the list that big_vision reads."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        pixels = rng.integers(96, size=(size, size, 3)) + 60 * (np.arange(3) == i % 4)
        (folder / f"{i}.png").write_bytes(tf.io.encode_png(pixels.astype(np.uint8)).numpy())
        lines.append(json.dumps({"image": f"{i}.png", "label": i % 4}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def get_config(name="muonplus"):
    """A ViT of two layers; ``name`` is what stands behind a colon in ``--config``."""
    folder = pathlib.Path(tempfile.mkdtemp())
    images(folder)
    pp = 'decode|resize(16)|value_range(-1, 1)|onehot(4, key="label", key_result="labels")'
    data = {"name": "bv:jsonl", "fname": str(folder / "train.jsonl")}
    return ml_collections.ConfigDict(
        {
            "num_classes": 4,
            "loss": "softmax_xent",
            "total_steps": 30,
            "log_training_steps": 5,
            "input": {
                "data": {**data, "fopen_keys": {"image": str(folder)}},
                "batch_size": 32,
                "shuffle_buffer_size": 128,
                "pp": pp + '|keep("image", "labels")',
            },
            "model_name": "vit",
            "model": {"width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 4, "patch_size": (4, 4)},
            "optax_name": name,
            **SETTINGS[name],
            "wd": 1e-4,
            "schedule": {"warmup_steps": 5, "decay_type": "cosine"},
            "evals": {},
        }
    )


def train(name):
    """big_vision's own program in this process: the losses that it logs."""
    from absl import flags
    from big_vision import train, utils

    utils.sync = lambda: None  # of several processes, by a class that newer versions of JAX lack
    with tempfile.TemporaryDirectory() as folder:
        flags.FLAGS(["train", f"--config={__file__}:{name}", f"--workdir={folder}"])
        train.main(None)
        lines = (pathlib.Path(folder) / "big_vision_metrics.txt").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["training_loss"] for row in rows if "training_loss" in row]


if __name__ == "__main__":
    for name in sys.argv[1:] or SETTINGS:
        print(name, *(f"{loss:.3f}" for loss in train(name)))
