"""Every argument of every optimizer and link is checked by its kind when built or initialised."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support.argument_kinds import FACTORIES, KIND_OF, NO_NUMBER, REFUSED, cases, forms
from tests.support.trees import SHAPES, assert_trees_close, random_tree


def test_every_argument_has_a_kind():
    for make in FACTORIES.values():
        assert set(inspect.signature(make).parameters) <= KIND_OF.keys()


@pytest.mark.parametrize(
    "factory, name, kind",
    [case for case in cases() if case[2] not in ("tree", "value")],
    ids=lambda x: x,
)
def test_what_is_not_of_the_kind_is_refused_when_built_and_named(factory, name, kind):
    """All values by the first that has the argument, and two by the others, which check it too."""
    first = next(x for x, argument, _ in cases() if argument == name)
    for value in REFUSED[kind][: None if factory == first else 2]:
        # A word that is no dtype is NumPy's to refuse.
        own = kind != "dtype"
        error = ValueError if own else (ValueError, TypeError)
        with pytest.raises(error, match=rf"\b{name}\b" if own else ".") as caught:
            FACTORIES[factory](**{name: value})
        shown = str(caught.value)
        assert not own or "must" in shown or "Known" in shown, (value, shown)


def test_numbers_are_checked_through_inject_hyperparams():
    """Outside of jit, where their values are known; complex if a parameter is."""
    make = optax.inject_hyperparams(omp.muonplus)
    params = random_tree(SHAPES)
    with pytest.raises(ValueError, match=r"adam_b2 must be in \[0, 1\), got 1.0"):
        make(0.1, adam_b2=1.0).init(params)
    with pytest.raises(ValueError, match="learning_rate must be a finite number, not negative"):
        make(float("nan")).init(params)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1.5"):
        make(0.1, beta=lambda count: 1.5 + 0 * count).init(params)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"adam_b2 .* got 1.0\. .*hyperparam_"):
        make(0.1, adam_b2=0.999).init(narrow)  # 0.999 is 1 in bfloat16
    optax.inject_hyperparams(omp.muonplus, hyperparam_dtype=jnp.float32)(0.1).init(narrow)
    mixed = {"w": jnp.ones((4, 6), jnp.complex64), "v": jnp.ones((4, 6))}
    make(0.1).init(mixed)


def test_numbers_of_every_form_give_one_update():
    """Python's, NumPy's and JAX's, known or traced."""
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    names = {"beta": 0.5, "eps": 0.25, "norm_eps": 0.125, "consistent_rms": 0.25, "adam_b1": 0.5,
             "adam_b2": 0.75, "adam_eps_root": 0.25, "weight_decay": 0.25,
             "adam_weight_decay": 0.5, "adam_learning_rate": 0.125}  # fmt: skip

    def updates(rate, **numbers):
        tx = omp.muonplus(rate, adaptive=True, **numbers)
        return tx.update(grads, tx.init(params), params)[0]

    expected = updates(0.5, **names)
    for i in range(len(forms(0))):
        assert_trees_close(
            updates(forms(0.5)[i], **{k: forms(v)[i] for k, v in names.items()}), expected
        )
    traced = jax.jit(lambda rate, numbers: updates(rate, **numbers))(0.5, names)
    assert_trees_close(traced, expected)
    many = jax.tree.map(lambda x: jnp.full(2, x), names)
    vmapped = jax.vmap(lambda rate, numbers: updates(rate, **numbers))(jnp.full(2, 0.5), many)
    assert_trees_close(jax.tree.map(lambda x: x[1], vmapped), expected)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda value: omp.polar.Orthogonalize(eps=value), "eps"),
        (lambda value: omp.matrices.Normalize(norm_eps=value), "norm_eps"),
        (lambda value: omp.matrices.ScaleByShape(consistent_rms=value), "consistent_rms"),
        (lambda value: omp.describe({}, consistent_rms=value), "consistent_rms"),
        (lambda value: omp.describe({}, eps=value), "eps"),
    ],
)
def test_functions_on_arrays_check_them_too(call, name):
    for value in [*NO_NUMBER, -1.0]:
        with pytest.raises(ValueError, match=f"{name} must be"):
            call(value)


def test_traced_values_that_cannot_be_are_refused_by_their_types():
    def build(**arguments):
        jax.eval_shape(lambda x: omp.muonplus(0.1, **x) and 0, arguments)

    with pytest.raises(ValueError, match=r"beta must be .*float32\[3\]"):
        build(beta=jnp.full(3, 0.5))
    with pytest.raises(ValueError, match=r"eps must be .*bool\[\]"):
        build(eps=jnp.array(True))
    with pytest.raises(ValueError, match=r"nesterov must be .*static_args=\('nesterov',\)"):
        build(nesterov=jnp.array(True))


def test_inject_hyperparams_keeps_the_fast_form_unless_steps_are_injected():
    """As docs/start/from_optax.md says of `ns_steps`."""
    params = {"up": jnp.ones((16, 64))}

    def products(make, **steps):
        tx = make(learning_rate=0.02, **steps)
        lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
        return lowered.as_text().count("dot_general")

    fast = products(omp.muonplus)
    injected = optax.inject_hyperparams(omp.muonplus)
    static = optax.inject_hyperparams(omp.muonplus, static_args=("ns_steps",))
    assert (
        products(injected) == products(static, ns_steps=5) == fast != products(injected, ns_steps=5)
    )
    for table in ("you", "dion"):  # they take no unknown number
        injected(learning_rate=0.02, ns_coeffs=table).init(params)


def test_a_state_of_bfloat16_keeps_its_dtypes_where_numbers_are_float32():
    """As the message says where a number was rounded, and ``jax.lax.scan`` needs."""
    params = {"up": jnp.ones((4, 6), jnp.bfloat16), "bias": jnp.ones(6, jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"with hyperparam_dtype=jnp\.float32"):
        optax.inject_hyperparams(omp.muonplus)(learning_rate=0.02).init(params)
    made = optax.inject_hyperparams(omp.muonplus, hyperparam_dtype=jnp.float32)
    tx = made(learning_rate=0.02)
    state = tx.init(params)
    step = lambda state, _: (tx.update(params, state, params)[1], None)  # noqa: E731
    after, _ = jax.lax.scan(step, state, None, length=2)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


def test_a_function_for_polar_under_inject_hyperparams_is_to_be_static():
    """Optax takes it for a schedule, and gives what it returns for the count of steps."""
    params = {"up": jnp.ones((4, 6))}
    polar = lambda x: x / jnp.linalg.norm(x)  # noqa: E731
    with pytest.raises(ValueError, match=r"Unknown polar .*static_args=\('polar',\)"):
        optax.inject_hyperparams(omp.muonplus)(0.02, polar=polar).init(params)
    static = optax.inject_hyperparams(omp.muonplus, static_args=("polar",))
    static(0.02, polar=omp.polar.svd).init(params)


@pytest.mark.parametrize("result", [jnp.int32, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn])
def test_functions_that_give_another_kind_of_numbers_are_refused(result):
    if result.dtype.itemsize > 1 or result is jnp.bool_:  # JAX refuses to go on with 8 bits
        tx = omp.muonplus(0.1, polar=lambda x: x.astype(result))
        with pytest.raises(ValueError, match=f"w: a function of matrices .* gave {result.dtype}"):
            tx.init({"w": np.ones((4, 6), np.float32)})
    own = omp.matrix_chain(lambda x: x.astype(result))
    with pytest.raises(ValueError, match=f"gave {result.dtype}"):
        own.init({"w": np.ones((4, 6), np.float32)})


MATRIX = {"up": {"kernel": jnp.ones((4, 6))}}


@pytest.mark.parametrize(
    "params, arguments, message",
    [
        (
            {"count": jnp.zeros((3, 4), jnp.int32)},
            {},
            r"must be floating-point, got count \(int32\)",
        ),
        ({"count": jnp.zeros(3, jnp.int32)}, {}, r"must be floating-point, got count \(int32\)"),
        (MATRIX, {"polar": lambda x: x[..., :1]}, r"up/kernel: .*must keep .*gave .* \(1, 6, 1\)"),
        (
            {"up": {"kernel": jnp.ones((4, 6), jnp.complex64)}},
            {"compute_dtype": "bfloat16"},
            "up/kernel: compute_dtype=bfloat16 does not go with matrices of dtype complex64",
        ),
        (
            {"up": {"kernel": jnp.ones((4, 6), jnp.complex64)}},
            {"mu_dtype": "bfloat16"},
            "mu_dtype=bfloat16 cannot hold the momentum of complex parameters",
        ),
    ],
)
def test_init_names_the_leaf_that_does_not_fit(params, arguments, message):
    with pytest.raises(ValueError, match=message):
        omp.muonplus(0.1, **arguments).init(params)


def test_injected_hyperparameters_may_be_complex():
    """optax.inject_hyperparams gives all of them the dtype of the parameters."""
    params = {"w": jnp.ones((4, 6), jnp.complex64), "v": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    params["complex_bias"] = jnp.ones(6, jnp.complex64)
    options = {"learning_rate": 0.1, "consistent_rms": 0.2}
    injected = optax.inject_hyperparams(omp.muonplus)(**options)
    state = injected.init(params)
    updates, after = injected.update(params, state, params)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)
    plain = omp.muonplus(**options)
    expected, _ = plain.update(params, plain.init(params), params)
    for name in params:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5)


def test_muon_has_the_arguments_of_muonplus_but_for_those_of_a_norm():
    plus = dict(inspect.signature(omp.muonplus).parameters)
    for name in ("norm", "norm_eps", "match_frobenius"):
        with pytest.raises(TypeError, match=name):
            omp.muon(0.1, **{name: plus.pop(name).default})
    assert dict(inspect.signature(omp.muon).parameters) == plus


def test_every_keyword_of_optaxs_muon_is_taken():
    theirs = inspect.signature(optax.contrib.muon).parameters
    ours = inspect.signature(omp.muonplus).parameters
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert set(theirs) <= set(ours)
