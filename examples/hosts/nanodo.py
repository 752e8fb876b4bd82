"""Muon+ in nanodo: a name for ``cfg.opt.optimizer``, and nanodo's own ``Trainer``.

nanodo knows the names adafactor, adamw and lion; ``_get_base_optimizer`` is the function to extend,
here from outside. Schedule, clipping and accumulation stay nanodo's.

Install: a checkout of github.com/google-deepmind/nanodo on ``PYTHONPATH``, and ``pip install flax
clu grain ml_collections sentencepiece tensorflow-cpu tensorflow-datasets tensorboard`` (tried:
commit 10aefde, Flax 0.12.8, jax 0.10.2, Python 3.11).
Run: ``python -m examples.hosts.nanodo``.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from nanodo import model_factory, optimizer
from nanodo import train as nanodo_train
from nanodo.configs import default

import optax_muonplus as omp

VOCABULARY = 64
nanodo_own = optimizer._get_base_optimizer


def base_optimizer(c):
    """What a user adds: one more name."""
    schedule = optimizer.get_learning_rate_schedule(c)
    if c.optimizer == "muonplus":
        return omp.muonplus(
            schedule,
            weight_decay=c.weight_decay,
            adam_learning_rate=lambda step: c.adam_share * schedule(step),
        )
    if c.optimizer == "contrib.muon":
        return optax.contrib.muon(
            schedule, adam_learning_rate=lambda step: c.adam_share * schedule(step)
        )
    return nanodo_own(c)


optimizer._get_base_optimizer = base_optimizer


def config(name, rate, steps):
    """The default configuration, made tiny."""
    c = default.get_config()
    c.model.update({"D": 32, "H": 4, "L": 16, "N": 2, "F": 128, "dtype": "float32"})
    c.model.fsdp_enabled = False
    c.opt.update({"optimizer": name, "num_train_steps": steps, "warmup_steps": 5})
    c.opt.update({"peak_learning_rate": rate, "init_learning_rate": 0.0})
    c.opt.final_learning_rate = 0.1 * rate
    c.opt.adam_share = 0.25
    c.log_internal_metrics = False
    return c


def batches(steps, rows=32, length=16):
    """Texts in which each token has one successor; token 0 is padding."""
    rng = np.random.default_rng(0)
    successor = 1 + rng.permutation(VOCABULARY - 1)
    for _ in range(steps):
        tokens = [1 + rng.integers(VOCABULARY - 1, size=rows)]
        for _ in range(length - 1):
            tokens.append(successor[tokens[-1] - 1])
        yield np.stack(tokens, axis=1)


def train(name, rate, steps=40):
    """With nanodo's Trainer: it, and the loss of each step."""
    c = config(name, rate, steps)
    model, get_loss_fn = model_factory.get_model_and_loss(c, VOCABULARY)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    shardings, state = nanodo_train._init_train_state(c, model, jax.random.key(0), mesh)
    trainer = nanodo_train.Trainer(c, nn.unbox(state), mesh, shardings, get_loss_fn)
    losses = [trainer.do_step(i, x)["train_loss"] for i, x in enumerate(batches(steps))]
    return trainer, [float(loss) for loss in losses]


if __name__ == "__main__":
    trainer, losses = train("muonplus", 0.02)
    print(omp.describe(trainer.state.params))
    print("Muon+", *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
    for name, rate in [("adamw", 5e-3), ("contrib.muon", 0.02)]:
        losses = train(name, rate)[1]
        print(name, *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
