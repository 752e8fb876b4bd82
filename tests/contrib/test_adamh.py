"""AdamH: its published code, norms that are kept, and derivatives where a gradient is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support import reference_contrib
from tests.support.contrib import run, trees

SHAPES = {"head": (12, 20), "stack": (2, 6, 8)}


def test_parameters_are_those_of_the_published_code():
    params, grads = trees(shapes=SHAPES)
    seen, _ = run(omp.contrib.adamh(0.05), params, grads)
    for name, parts in (("head", [...]), ("stack", [0, 1])):
        for part in parts:
            w, state = params[name][part].astype(float), None
            for step, g in enumerate(grads):
                g = g[name][part].astype(float)
                update, state = reference_contrib.adamh_step(w, state, g, learning_rate=0.05)
                w = w + update
                np.testing.assert_allclose(seen[step][name][part], w, rtol=0, atol=2e-5)
            norm = np.linalg.norm(params[name][part])
            assert np.linalg.norm(seen[-1][name][part]) == pytest.approx(norm, rel=1e-6)


def test_it_is_for_heads_beside_a_rule_for_matrices():
    """Marin's MuonH, whose other parameters have AdamW."""
    params = {"head": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    params = {**params, "up": {"kernel": jnp.ones((4, 6)) + jnp.eye(4, 6)}}
    labels = lambda tree: {k: "head" if k == "head" else "rest" for k in tree}  # noqa: E731
    others = optax.partition({"head": omp.contrib.adamh(0.02), "rest": optax.adamw(6e-4)}, labels)
    where = omp.Matrices(rules=[("head", None)])
    tx = omp.contrib.hyperball(0.02, others=others, where=where)
    grads = jax.tree.map(jnp.sin, params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    for name, w in (("head", params["head"]), ("up", params["up"]["kernel"])):
        moved = w + (updates["head"] if name == "head" else updates["up"]["kernel"])
        assert jnp.linalg.norm(moved) == pytest.approx(float(jnp.linalg.norm(w)), rel=1e-6)


def test_parameters_of_zeros_and_updates_without_parameters_are_refused():
    tx = omp.contrib.adamh(0.1)
    with pytest.raises(ValueError, match="head has a matrix of zeros"):
        tx.init({"head": jnp.zeros((4, 6))})
    params = {"head": jnp.ones((4, 6))}
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="eps_root must be"):
        omp.contrib.adamh(0.1, eps_root=-1.0)


@pytest.mark.parametrize("zero", [np.s_[:], np.s_[1], np.s_[:, 2], np.s_[1, 2]])
def test_derivatives_are_numbers_with_an_epsilon_inside_the_root(zero):
    """As Optax says of its Adam."""
    params = {"head": jnp.sin(jnp.arange(24.0)).reshape(4, 6)}
    tx = omp.contrib.adamh(0.05, eps_root=1e-16)

    def loss(g):
        updates, _ = tx.update({"head": g}, tx.init(params), params)
        return jnp.sum(updates["head"] ** 2)

    g = jnp.cos(jnp.arange(24.0)).reshape(4, 6).at[zero].set(0)
    assert np.all(np.isfinite(jax.grad(loss)(g)))
