"""Wrong uses of links, states and gradients: none is silent."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp

PART = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}}
PARAMS = {**PART, "out": {"w": jnp.ones((6, 2))}}
RULES = [("dense/kernel", None)]


def test_a_list_as_a_link_is_refused():
    with pytest.raises(TypeError, match=r"matrix_chain got \["):
        omp.matrix_chain([omp.momentum(), jnp.sign])


SCALED = {"w": jnp.ones((4, 4)), "scale": jnp.ones(())}


@pytest.mark.parametrize(
    ("params", "grads"), [(PARAMS, PART), (SCALED, {"w": SCALED["w"]}), (PART, PARAMS)]
)
@pytest.mark.parametrize("given", [True, False])
def test_gradients_of_other_parameters_are_never_silent(params, grads, given):
    """JAX and Optax name the structures."""
    tx = omp.muonplus(0.1)
    with pytest.raises((ValueError, TypeError, KeyError)):
        tx.update(grads, tx.init(params), params if given else None)


@pytest.mark.parametrize("mu_dtype", [None, "int8"])
@pytest.mark.parametrize("name", ["out", "dense"])
@pytest.mark.parametrize("given", [True, False])
def test_none_gradients_are_refused_before_anything_else(mu_dtype, name, given):
    """Of matrices and of AdamW's parameters, with parameters and without."""
    tx = omp.muonplus(0.1, mu_dtype=mu_dtype)
    leaf = {"out": "w", "dense": "bias"}[name]
    grads = {**PARAMS, name: {**PARAMS[name], leaf: None}}
    with pytest.raises(ValueError, match=rf"^Gradients are None for {name}/{leaf}, for which"):
        tx.update(grads, tx.init(PARAMS), PARAMS if given else None)


def test_messages_fold_the_paths_of_equal_layers():
    params = {"layers": [{"k": jnp.ones((4, 4))} for _ in range(48)]}
    integers = jax.tree.map(lambda x: x.astype(int), params)
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=r"got layers/\{0\.\.47\}/k \(int32\)\. Keep"):
        tx.init(integers)
    with pytest.raises(ValueError, match=r"fit: layers/\{0\.\.47\}/k is int32, not floating"):
        tx.update(integers, tx.init(params), params)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (omp.momentum(bias_correction=True), "it has other parts after an update"),
        (optax.trace(0.9), "it has TraceState, where MomentumState should be.*take_over"),
    ],
)
def test_states_of_other_links_are_refused(other, message):
    tx, matrices = omp.scale_by_muonplus(), {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=message):
        tx.update(matrices, (other.init(matrices), optax.EmptyState()), matrices)


def test_states_of_another_reading_are_refused():
    """NumPy would broadcast a mean of each row to one for each entry."""

    class Mean:
        def init(self, params, leaves):
            return {"nu": jnp.zeros((4, 1))}

        def update(self, updates, state, params, leaves):
            return updates, {"nu": state["nu"] + updates["w"] ** 2}

    tx, matrices = omp.matrix_chain(Mean()), {"w": jnp.ones((4, 6))}
    with pytest.raises(ValueError, match=r"another reading: nu is \(4, 1\), \(4, 6\) .*take_over"):
        tx.update(matrices, tx.init(matrices), matrices)
    one, other = (
        omp.contrib.normuon(0.1, where=omp.Matrices(rules=[("w", omp.MuonDimensionNumbers(*x))]))
        for x in ((0, 1), (1, 0))
    )
    for before, now in ((one, other), (other, one)):
        with pytest.raises(ValueError, match="another reading"):
            now.update(matrices, before.init(matrices), matrices)
        now.update(matrices, now.init(matrices), matrices)


@pytest.mark.parametrize(
    "numbers",
    [
        functools.partial(omp.muon_dimension_numbers, rules=RULES),
        lambda params: omp.muon_dimension_numbers(params, RULES),
        omp.per_head(2),
    ],
)
def test_injected_dimension_numbers_ask_for_static_args(numbers):
    inject = optax.inject_hyperparams(omp.muonplus)
    with pytest.raises(ValueError, match=r"static_args=\('muon_weight_dimension_numbers',\)"):
        inject(0.1, muon_weight_dimension_numbers=numbers).init(PARAMS)
    inject(0.1, rules=RULES).init(PARAMS)


def test_an_error_of_a_users_link_is_its_own():
    class Mine:
        def init(self, params, leaves):
            return optax.EmptyState()

        def update(self, updates, state, params, leaves):
            raise KeyError("mine")

    tx = omp.matrix_chain(omp.momentum(), Mine())
    matrices = {"w": jnp.ones((4, 4))}
    with pytest.raises(KeyError, match="mine"):
        tx.update(matrices, tx.init(matrices), matrices)


def test_a_rule_returns_as_many_arrays_as_it_says():
    class Mine:
        def init(self, params, leaves):
            return optax.EmptyState()

        def update(self, updates, state, params, leaves):
            rule = lambda layout, u: (u,)  # noqa: E731
            return omp.transforms.map_blocks(rule, leaves, updates, n_results=2), state

    tx = omp.matrix_chain(Mine())
    matrices = {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="zip"):
        tx.update(matrices, tx.init(matrices), matrices)
