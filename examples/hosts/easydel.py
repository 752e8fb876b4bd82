"""Muon+ in EasyDeL: a builder registered with eformer, from which EasyDeL takes its optimizers.

EasyDeL's ``TrainingArguments(optimizer="muonplus", learning_rate=..., scheduler=...)`` asks
eformer's ``OptimizerFactory`` for this name; arguments of ``MuonPlusConfig`` go in its
``extra_optimizer_kwargs``. Here the factory's optimizer trains a small network.

Install: ``pip install eformer`` (tried: 0.0.101, jax 0.10.2, Python 3.11); EasyDeL brings it.
Run: ``python -m examples.hosts.easydel``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from eformer.optimizers import (
    OptimizerBuilder,
    OptimizerFactory,
    SchedulerConfig,
    register_optimizer,
)

import optax_muonplus as omp


# What a user adds, anywhere before the optimizer is made.
@dataclasses.dataclass
class MuonPlusConfig:
    """What can be said of it by name; the rate of the other group is a share of the schedule."""

    norm: Any = "col_row"
    beta: float = 0.95
    adam_share: float = 0.25


@register_optimizer("muonplus")
@dataclasses.dataclass
class MuonPlus(OptimizerBuilder):
    """eformer gives it the schedule, and adds clipping, decay and accumulation itself."""

    config: MuonPlusConfig

    def build(self, scheduler):
        """The transformation."""
        c = self.config
        return omp.muonplus(
            scheduler,
            norm=c.norm,
            beta=c.beta,
            adam_learning_rate=lambda step: c.adam_share * scheduler(step),
        )


def init(key):
    """A residual network on embedded tokens, with EasyDeL's names and its layout (in, out)."""
    shapes = {"up_proj": (32, 128), "down_proj": (128, 32), "lm_head": (32, 64)}
    keys = jax.random.split(key, 4)
    return {
        "embed_tokens": {"embedding": jax.random.normal(keys[3], (64, 32))},
        "norm": {"kernel": jnp.ones(32)},
        **{
            name: {"kernel": jax.random.normal(key, shape) / shape[0] ** 0.5}
            for (name, shape), key in zip(shapes.items(), keys, strict=False)
        },
    }


def loss_fn(params, tokens, targets):
    """Cross entropy of the next tokens."""
    x = params["embed_tokens"]["embedding"][tokens]
    y = x * params["norm"]["kernel"] @ params["up_proj"]["kernel"]
    logits = (x + jax.nn.silu(y) @ params["down_proj"]["kernel"]) @ params["lm_head"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(name, rate, steps=40, **settings):
    """With the factory's chain: the parameters, and the loss of each step."""
    cosine = SchedulerConfig(
        scheduler_type="cosine", learning_rate=rate, steps=steps, warmup_steps=5
    )
    tx, _ = OptimizerFactory.create(name, cosine, clip_grad=1.0, weight_decay=0.01, **settings)
    params, rng = init(jax.random.key(0)), np.random.default_rng(0)
    state, successor, losses = tx.init(params), rng.permutation(64), []

    @jax.jit
    def step(params, state, tokens, targets):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(steps):
        tokens = rng.integers(64, size=256)
        params, state, loss = step(params, state, tokens, successor[tokens])
        losses.append(float(loss))
    return params, losses


if __name__ == "__main__":
    params, losses = train("muonplus", 0.02)
    print(omp.describe(params))
    for name, found in [
        ("Muon+", losses),
        ("AdamW", train("adamw", 5e-3)[1]),
        ("Muon", train("muon", 0.02)[1]),
    ]:
        print(name, *(f"{loss:.3f}" for loss in [*found[::8], found[-1]]))
