"""Wrong uses of links, states and gradients: none is silent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
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
        (omp.momentum(bias_correction=True), r"unknown 0/count\."),
        (optax.trace(0.9), "missing 0/mu/w; unknown 0/trace/w.*take_over"),
    ],
)
def test_states_of_other_links_are_refused(other, message):
    tx, matrices = omp.scale_by_muonplus(), {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=message):
        tx.update(matrices, (other.init(matrices), optax.EmptyState()), matrices)


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
STRANGERS = {
    "None": (lambda p: None, "NoneType in place of PartitionState"),
    "adamw": (optax.adamw(0.1).init, "tuple in place of PartitionState"),
    "chain": (optax.chain(omp.muonplus(0.1)).init, "tuple in place of PartitionState"),
    "inject": (optax.inject_hyperparams(omp.muonplus)(0.1).init, "InjectStateful.*in place of"),
    "a checkpoint": (lambda p: {"inner_states": omp.muonplus(0.1).init(p)[0]}, "dict in place of"),
    "contrib": (optax.contrib.muon(0.1).init, "missing .*muon/inner_state/0/0/mu/dense/kernel"),
    "bias correction": (omp.muonplus(0.1, bias_correction=True).init, "unknown .*0/0/count"),
    "schedule": (omp.muonplus(SCHEDULE).init, "unknown .*muon/inner_state/2/count"),
    "others": (omp.muonplus(0.1, others=optax.lion(0.1)).init, "missing .*0/nu/dense/bias"),
    "mask": (
        omp.muonplus(0.1, weight_decay=0.1, weight_decay_mask={"dense": True, "out": True}).init,
        "missing .*muon/inner_state/1; unknown .*muon/inner_state/1/inner_state",
    ),
    "a shorter chain": (omp.muonplus(0.1, others=optax.adam(0.1)).init, "missing .*adam.*/2"),
    "fewer": (omp.muonplus(0.1, rules=RULES).init, "missing [^;]*muon[^;]*mu/dense/kernel;"),
    "int8": (omp.muonplus(0.1, mu_dtype="int8").init, "missing .*/mu/.*unknown .*/codes/"),
}


def test_states_of_other_optimizers_are_refused_both_ways():
    """With the words, eager and traced; ours of other options refuse that of the default too."""
    tx = omp.muonplus(0.1)
    for init, message in STRANGERS.values():
        with pytest.raises(ValueError, match=rf"of another optimizer.*{message}.*take_over"):
            tx.update(PARAMS, init(PARAMS), PARAMS)
        with pytest.raises(ValueError, match=message):
            jax.jit(tx.update, donate_argnums=1)(PARAMS, init(PARAMS), PARAMS)
    options = {"bias_correction": True}, {"others": optax.sgd(0.1)}, {"rules": RULES}
    for given in options:
        with pytest.raises(ValueError, match=r"of another optimizer.*take_over"):
            omp.muonplus(SCHEDULE, **given).update(PARAMS, tx.init(PARAMS), PARAMS)


WRAPPED = {
    "inject": optax.inject_hyperparams(omp.muonplus),
    "MultiSteps": lambda rate: optax.MultiSteps(omp.muonplus(rate), 2),
    "masked": lambda rate: optax.masked(omp.muonplus(rate), {"dense": True, "out": False}),
    "int8": lambda rate: omp.muonplus(rate, mu_dtype="int8"),
    "momentum": lambda rate: optax.chain(omp.momentum(), optax.scale(-rate)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_own_states_are_taken_however_they_are_held(name):
    """As NumPy arrays, as shapes while tracing, and in a scan."""
    tx = WRAPPED[name](0.1)
    state = tx.init(PARAMS)
    expected = tx.update(PARAMS, state, PARAMS)
    found = tx.update(PARAMS, jax.tree.map(np.asarray, state), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    shapes = jax.eval_shape(tx.update, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(expected)
    jax.lax.scan(lambda s, _: tx.update(PARAMS, s, PARAMS)[::-1], state, length=2)


def test_a_count_by_name_is_named_or_taken():
    """``tree_set`` also fills a count that is None."""
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=r"unknown inner_states/muon/inner_state/0/0/count\."):
        tx.update(PARAMS, optax.tree.set(tx.init(PARAMS), count=20), PARAMS)
    tx = omp.muonplus(0.1, bias_correction=True)
    _, state = tx.update(PARAMS, optax.tree.set(tx.init(PARAMS), count=20), PARAMS)
    assert omp.transforms.find_momentum(state).count == 21


def changed(state, part, change):
    """Applies a function to the arrays whose path has that part."""
    return jax.tree.map_with_path(
        lambda keys, x: change(x) if part in jax.tree_util.keystr(keys) else x, state
    )


ARRAYS = {
    "integers": ("muon'].inner_state[0][0].mu", lambda x: x.astype(int), "int32 for float32"),
    "one row": ("muon'].inner_state[0][0].mu", lambda x: x[:1], r"\(1, 6\) for \(4, 6\)"),
    "AdamW": (".nu", lambda x: x[:1], r"nu/dense/bias \(\(1,\) for \(6,\)\)"),
    "count": ("adam'].inner_state[0].count", lambda x: x[None], r"0/count \(\(1,\) for"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_another_shape_or_kind_are_named(name):
    part, change, message = ARRAYS[name]
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=rf"misfit .*{message}"):
        tx.update(PARAMS, changed(tx.init(PARAMS), part, change), PARAMS)


def test_a_momentum_of_another_dtype_than_mu_dtype_is_refused():
    state = omp.muonplus(0.1).init(PARAMS)
    tx = omp.muonplus(0.1, mu_dtype="bfloat16")
    with pytest.raises(ValueError, match="momentum in float32, and mu_dtype is bfloat16"):
        tx.update(PARAMS, state, PARAMS)
    tx.update(PARAMS, omp.take_over(state, tx.init(PARAMS), PARAMS)[0], PARAMS)


def test_a_module_may_have_the_name_of_a_field():
    """Its path ends like that of a leaf that is not trained."""
    params = {"kernel": None, "mu": {"kernel": jnp.ones((4, 6))}}
    for mu_dtype in (None, "int8"):
        tx = omp.muonplus(0.1, mu_dtype=mu_dtype)
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["kernel"] is None and np.any(updates["mu"]["kernel"])


def test_states_of_another_reading_are_refused():
    """NumPy would broadcast a mean of each row to one for each entry, or to that of a matrix."""

    class Mean:
        def init(self, params, leaves):
            return {"nu": jnp.zeros((4, 1))}

        def update(self, updates, state, params, leaves):
            return updates, {"nu": state["nu"] + updates["w"] ** 2}

    tx, matrices = omp.matrix_chain(Mean()), {"w": jnp.ones((4, 6))}
    _, state = tx.update(matrices, tx.init(matrices), matrices)
    with pytest.raises(
        ValueError, match=r"parameters: misfit nu \(\(4, 6\) for \(4, 1\)\).*take_over"
    ):
        tx.update(matrices, state, matrices)
    square = {"w": jnp.ones((4, 4))}
    row, long = (omp.optimizer(omp.contrib.NorMuon(side=x), 0.1) for x in ("row", "long"))
    with pytest.raises(ValueError, match=r"nu/w \(\(1, 4\) for \(1, 1\)\)"):
        long.update(square, row.init(square), square)
    one, other = (
        omp.optimizer(omp.contrib.NorMuon(), 0.1, rules=[("w", omp.MuonDimensionNumbers(*x))])
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


@pytest.mark.parametrize("shape", [(4, 5), (24,), (6, 4)])
def test_without_parameters_a_wrong_gradient_and_a_wrong_state_are_both_possible(shape):
    params, gradients = {"w": jnp.ones((4, 6))}, {"w": jnp.ones(shape)}
    for tx in (omp.muonplus(0.1), omp.momentum()):
        state = tx.init(params)
        with pytest.raises(ValueError, match="or a gradient does not have its parameter's shape"):
            tx.update(gradients, state)
        with pytest.raises(ValueError, match=r"^Gradients do not fit: w is \("):
            tx.update(gradients, state, params)
        with pytest.raises(ValueError, match="or of another reading of the parameters: "):
            tx.update(params, optax.EmptyState(), params)
