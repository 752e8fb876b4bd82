"""Modules in the place of trees: Flax NNX's optimizer, and Equinox's models.

`parameters/test_layers.py` has which sides of their layers are rows.
"""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import optax_muonplus as omp

KEY, RATE = jax.random.key(0), 0.02


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.lm_head = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, x):
        return self.lm_head(self.attention(self.norm(x)))


def test_nnx_training_with_nnx_optimizer():
    """Variables at init, plain arrays at update: one set of rules for both."""
    model = Model(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(
        model, omp.muonplus(RATE, norm="row", match_frobenius=False), wrt=nnx.Param
    )
    # Trainers read the shape and dtype of every variable (tunix does at its first step).
    held = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    arrays = [x for x in held if isinstance(x, nnx.Variable)]
    assert len(arrays) > 2 * len(jax.tree.leaves(params)) - 4  # of matrices one
    assert all(hasattr(x.get_value(), "dtype") for x in arrays)

    @nnx.jit
    def step(model, optimizer):
        x = jax.random.normal(KEY, (4, 6, 8))
        grads = nnx.grad(lambda m: jnp.mean(jnp.sin(9 * m(x))))(model)
        optimizer.update(model, grads)

    old = np.asarray(model.attention.query.kernel[...], np.float64)
    step(model, optimizer)
    # Each unit row moves by the rate, which AdamW does not do. Two weights of size 1, rounded to
    # 6e-8, differ by about 1e-2.
    rows = np.linalg.norm(model.attention.query.kernel[...] - old, axis=0)
    np.testing.assert_allclose(rows, RATE, rtol=1e-4)


def test_a_whole_equinox_model_may_stand_for_its_parameters():
    """Its activation is a leaf without an update. ``optax.adamw`` takes it so too."""
    model = eqx.nn.MLP(4, 3, 8, 1, key=KEY)
    params = eqx.filter(model, eqx.is_inexact_array)
    tx = omp.muonplus(0.1, weight_decay=0.1, adam_weight_decay=0.1)
    expected, _ = tx.update(params, tx.init(params), params)
    updates, _ = tx.update(params, tx.init(params), model)
    chex.assert_trees_all_equal(updates, expected)


def test_callable_modules_as_dimension_numbers_are_trees():
    """Dimension numbers and decay masks in the shape of a module are trees, not functions."""
    params = eqx.filter(eqx.nn.Linear(4, 6, key=KEY), eqx.is_inexact_array)
    dims = omp.muon_dimension_numbers(params)
    assert callable(dims)
    mask = jax.tree.map(lambda x: x.ndim == 2, params)
    options = {"weight_decay": 0.5, "polar": "svd"}
    given = omp.muonplus(1.0, muon_weight_dimension_numbers=dims, weight_decay_mask=mask, **options)
    plain = omp.muonplus(1.0, **options)
    updates, expected = (tx.update(params, tx.init(params), params)[0] for tx in (given, plain))
    np.testing.assert_allclose(updates.weight, expected.weight, rtol=1e-6)
