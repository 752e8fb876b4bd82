"""Wrong uses that JAX or Optax would answer with a raw error, or not at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp

PART = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}}
PARAMS = {**PART, "out": {"w": jnp.ones((6, 2))}}
RULES = [("dense/kernel", None)]


def test_one_function_is_taken_and_a_list_as_a_link_is_refused():
    one, several = (omp.transforms.apply_to_matrices(x) for x in (jnp.sign, [jnp.sign]))
    matrix = {"w": jnp.array([[1.0, -2.0], [3.0, 4.0]])}
    made = [tx.update(matrix, tx.init(matrix))[0]["w"] for tx in (one, several)]
    np.testing.assert_array_equal(*made)
    with pytest.raises(ValueError, match="needs one function at least"):
        omp.transforms.apply_to_matrices([])
    with pytest.raises(TypeError, match=r"Pass its links one by one: matrix_chain\(\*links\)"):
        omp.matrix_chain([omp.momentum(), jnp.sign])


SCALED = {"w": jnp.ones((4, 4)), "scale": jnp.ones(())}


@pytest.mark.parametrize(
    ("params", "grads", "given", "message"),
    [
        (PARAMS, PART, True, r"^Gradients do not fit. Missing: .*out/w\. Call update\(gradients,"),
        (PARAMS, PART, False, r"not fit the gradients. Too many: .*out/w\. Call update\(grad"),
        (SCALED, {"w": SCALED["w"]}, True, r"Gradients do not fit\. Missing: scale\. Call"),
        (PART, PARAMS, True, r"Gradients do not fit\. Too many: out/w"),
    ],
)
def test_gradients_of_other_parameters_are_said(params, grads, given, message):
    """Whether the parameters are given to the update or not, and numbers too."""
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(params), params if given else None)


def test_a_gradient_that_is_none_is_said():
    tx = omp.muonplus(0.1)
    grads = {**PARAMS, "out": {"w": None}}
    with pytest.raises(ValueError, match=r"Some gradients are None: pass zeros there"):
        tx.update(grads, tx.init(PARAMS), PARAMS)


def test_messages_fold_the_paths_of_equal_layers():
    params = {"layers": [{"k": jnp.ones((4, 4))} for _ in range(48)]}
    integers = jax.tree.map(lambda x: x.astype(int), params)
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=r"got layers/\{0\.\.47\}/k \(int32\)\. Keep"):
        tx.init(integers)
    with pytest.raises(ValueError, match=r"fit: layers/\{0\.\.47\}/k is int32, not floating"):
        tx.update(integers, tx.init(params), params)


def test_a_state_of_other_parameters_is_said():
    tx = omp.muonplus(0.1)
    other = tx.init({"a": jnp.ones((4, 4))})
    message = r"The state does not fit the parameters\. Missing: .*dense/kernel.*tx\.init\(param"
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, other, PARAMS)
    link = omp.scale_by_muonplus()
    matrices = {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=r"Too many: .*mu/a"):
        link.update(matrices, link.init({"a": jnp.ones((4, 4))}), matrices)


@pytest.mark.parametrize(
    ("made", "given", "message"),
    [
        (
            {"weight_decay_mask": lambda p: jax.tree.map(lambda x: True, p)},
            omp.muonplus(0.1, weight_decay=0.1),
            r"MaskedState, which a mask makes .* missing \(its other parts are the same, Scale",
        ),
        (
            {},
            optax.adamw(0.1),
            r": MomentumState missing \(it has ScaleByAdamState, where.*take_over",
        ),
        ({}, omp.diagnostics.recorded(omp.muon)(0.1), "it has .*RecordState.*take_over"),
        ({}, optax.contrib.muon(0.1), r": MomentumState missing and MuonState too many \("),
        ({}, optax.chain(optax.clip(1.0), omp.muonplus(0.1)), "a chain of 2, EmptyState too many"),
    ],
)
def test_a_state_of_other_settings_says_what_it_lacks(made, given, message):
    tx = omp.muonplus(0.1, weight_decay=0.1, **made)
    with pytest.raises(ValueError, match=message) as caught:
        tx.update(PARAMS, given.init(PARAMS), PARAMS)
    has, _, should = str(caught.value).partition(", where ")
    assert not should or has.partition("it has ")[2] != should.partition(" should be")[0]


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


def test_an_injected_mask_asks_for_static_args():
    inject = optax.inject_hyperparams(omp.muonplus)
    tx = inject(0.1, weight_decay=0.1, weight_decay_mask=lambda params: jnp.ndim(params) > 1)
    with pytest.raises(ValueError, match=r"static_args=\('weight_decay_mask',\) to it"):
        tx.init(PARAMS)


@pytest.mark.parametrize("reads", [False, True])
def test_an_error_of_a_users_link_is_its_own(reads):
    """It is not one about the state, also where nothing is known of that: init reads arrays."""

    class Mine:
        def init(self, params, leaves):
            return optax.ScaleState() if reads and float(params["w"][0, 0]) else optax.EmptyState()

        def update(self, updates, state, params, leaves):
            raise KeyError("mine")

    tx = omp.matrix_chain(omp.momentum(), Mine())
    matrices = {"w": jnp.ones((4, 4))}
    with pytest.raises(KeyError, match="mine") as caught:
        tx.update(matrices, tx.init(matrices), matrices)
    assert caught.value.__cause__ is None


def test_a_rule_returns_as_many_arrays_as_it_says():
    class Mine:
        def init(self, params, leaves):
            return optax.EmptyState()

        def update(self, updates, state, params, leaves):
            rule = lambda layout, u: (u,)  # noqa: E731
            return omp.transforms.map_blocks(rule, leaves, updates, n_results=2), state

    tx = omp.matrix_chain(Mine())
    matrices = {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=r"n_results=2, and the function returned 1 arrays for w"):
        tx.update(matrices, tx.init(matrices), matrices)
