"""Arguments that were taken without a word and meant something else: each is refused by name."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus.contrib import NorMuon, hyperball, scale_by_muon

PARAMS = {"up": {"kernel": jnp.eye(4, 6)}}
DIMS = omp.MuonDimensionNumbers
inject = optax.inject_hyperparams
chain = omp.matrix_chain


def axes_by_shape(params):
    return jax.tree.map(lambda x: DIMS(1, 0) if x.ndim == 2 else None, params)


def one_for_all(params):
    return jax.tree.map(lambda x: DIMS(0, 1), params)


def of_arrays(params):
    return jax.tree.map(lambda x: x.sharding, params)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("muon_weight_dimension_numbers", axes_by_shape),
        ("muon_weight_dimension_numbers", one_for_all),
        ("sharding", of_arrays),
        ("sharding", lambda params: None),
        ("polar", omp.polar.svd),
        ("polar", omp.polar.polar_factor),
        ("mu_dtype", jnp.bfloat16),
        ("weight_decay_mask", lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    ],
)
@pytest.mark.parametrize("make", [omp.muonplus, omp.muon])
def test_functions_under_injection_are_to_be_static(make, name, function):
    decay = {"weight_decay": 0.1} if name == "weight_decay_mask" else {}
    with pytest.raises(ValueError, match=rf"static_args=\('{name}',\)"):
        inject(make)(0.1, **decay, **{name: function}).init(PARAMS)
    inject(make, static_args=(name,))(0.1, **decay, **{name: function}).init(PARAMS)


def test_none_is_the_default_rules_where_nothing_is_injected():
    arguments = {"muon_weight_dimension_numbers": None, "sharding": None}
    expected, found = (
        tx.update(PARAMS, tx.init(PARAMS))[0]
        for tx in (omp.muonplus(jnp.float32(0.1)), omp.muonplus(jnp.float32(0.1), **arguments))
    )
    np.testing.assert_array_equal(found["up"]["kernel"], expected["up"]["kernel"])
    inject(omp.muonplus)(0.1).init(PARAMS)
    inject(omp.muonplus)(0.1, muon_weight_dimension_numbers={"up": DIMS(1, 0)}).init(PARAMS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay_mask": {"up": {"kernel": "no"}}},
        {"weight_decay_mask": "kernel"},
        {"weight_decay_mask": 0.5},
        {"weight_decay_mask": {"up": {"kernel": 1}}},
        {"weight_decay_mask": {"up": {"kernel": jnp.ones((4, 6), bool)}}},
        {"weight_decay_mask": lambda params: jax.tree.map(lambda x: "yes", params)},
        {"weight_decay_mask": lambda params: jax.tree.map(jnp.ndim, params)},
        {"weight_decay": lambda params: jax.tree.map(lambda x: x.ndim > 1, params)},
        {"weight_decay": lambda params: {"up": {"kernel": True}}},
        {"weight_decay": lambda params: None},
        {"adam_weight_decay": lambda params: True},
    ],
)
def test_flags_decide_what_decays_and_numbers_how_much(arguments):
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        omp.muonplus(0.1, **{"weight_decay": 0.1, **arguments}).init(PARAMS)


def test_flags_and_schedules_that_are_right_stay():
    python = lambda count: 0.1 if count < 5 else 0.0  # noqa: E731
    for decay in (0.1, optax.linear_schedule(0.1, 0, 9), lambda count: 0.1, python):
        for mask in (None, {"up": True}, {"up": {"kernel": np.True_}}, lambda p: {"up": False}):
            tx = omp.muonplus(0.1, weight_decay=decay, weight_decay_mask=mask)
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)


UPHILL = [
    optax.adam(0.1),
    optax.adam(optax.warmup_constant_schedule(0.0, 0.1, 9)),
    optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(),
    inject(optax.sgd)(learning_rate=0.1),
    optax.masked(optax.sgd(0.1), {"up": True}),
    optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(0.1)),
    optax.chain(optax.identity(), optax.chain(optax.scale(-1.0))),
]


@pytest.mark.parametrize("link", UPHILL)
@pytest.mark.parametrize(
    "make",
    [
        lambda link: hyperball(0.1, link),
        lambda link: omp.optimizer(link, 0.1),
        lambda link: omp.optimizer(chain(scale_by_muon(), link), optax.constant_schedule(0.1)),
        lambda link: omp.optimizer(chain(chain(link), NorMuon(), jnp.sign), 0.1),
    ],
)
def test_links_that_turn_updates_are_refused_before_a_rate(make, link):
    with pytest.raises(ValueError, match="goes downhill, as the learning rate does"):
        tx = make(link)
        jax.eval_shape(tx.init, PARAMS)


def test_a_rule_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="The rule is multiplied by the learning rate"):
        omp.optimizer(omp.scale_by_muonplus(), None, others=optax.sgd(0.1))
    downhill = chain(omp.scale_by_muonplus(), lambda x: -0.1 * x)
    omp.optimizer(downhill, None, others=optax.sgd(0.1)).init(PARAMS)


RIGHT = [
    optax.trace(0.9),
    optax.scale_by_adam(),
    optax.clip_by_global_norm(1.0),
    optax.adaptive_grad_clip(0.1),
    optax.add_noise(1.0, 0.5, 0),
    optax.scale(3.0),
    optax.centralize(),
    optax.scale_by_lion(),
    optax.ema(0.9),
    optax.scale_by_trust_ratio(),
    optax.set_to_zero(),
    optax.add_decayed_weights(0.1),
    optax.masked(optax.scale(2.0), {"up": True}),
    optax.masked(optax.scale(2.0), lambda tree: jax.tree.map(lambda x: x.ndim > 2, tree)),
    optax.MultiSteps(optax.trace(0.9), 3).gradient_transformation(),
    optax.apply_if_finite(optax.scale_by_adam(), 3),
    optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 10)),
    optax.stateless(lambda updates, params: {"up": {"kernel": updates["up"]["kernel"] * 2}}),
]


@pytest.mark.parametrize("link", RIGHT)
def test_other_transformations_stay(link):
    for tx in (hyperball(0.1, link), omp.optimizer(chain(link, scale_by_muon()), 0.1)):
        state = tx.init(PARAMS)
        jax.eval_shape(tx.init, PARAMS)
        plain = omp.optimizer(chain(link, scale_by_muon()), 0.1)
        assert tx.update(PARAMS, state, PARAMS)[0]["up"]["kernel"].shape == (4, 6)
    assert jax.tree.structure(plain.init(PARAMS)) == jax.tree.structure(state)


DECAYS = [
    optax.add_decayed_weights(0.1),
    optax.add_decayed_weights(lambda count: 0.1),
    optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1, {"up": True})),
]


@pytest.mark.parametrize("link", DECAYS)
def test_a_decay_inside_and_outside_is_refused(link):
    rule = chain(omp.scale_by_muonplus(), link)
    for arguments in ({"weight_decay": 0.1}, {"weight_decay": lambda count: 0.1}):
        for make in (omp.optimizer, inject(omp.optimizer)):
            with pytest.raises(ValueError, match="has a decay too"):
                make(rule, 0.1, **arguments).init(PARAMS)
    omp.optimizer(rule, 0.1).init(PARAMS)
    inject(omp.optimizer)(rule, 0.1).init(PARAMS)
    # Before the momentum it is no decay but a part of the gradient.
    omp.optimizer(chain(link, omp.scale_by_muonplus()), 0.1, weight_decay=0.1).init(PARAMS)


PER_HEAD = "head_size of omp.per_head(head_size) must be an integer from 1"
BOOLS = {"up": DIMS(False, True)}
FLAGS = [("up", omp.MatrixSpec(0, 1, (True, 5)))]
SPLIT = [("up", omp.MatrixSpec(0, 1, (2, 4), split_axis=True))]
# Calls, and what their errors say.
MISTAKES = [
    (lambda: omp.muonplus(0.1, muon_weight_dimension_numbers=BOOLS).init(PARAMS), "reduction_axis"),
    (lambda: omp.muonplus(0.1, rules=FLAGS).init(PARAMS), "split_sizes (True, 5) must be"),
    (lambda: omp.muonplus(0.1, rules=SPLIT).init(PARAMS), "split_axis of"),
    (lambda: omp.per_head(True), PER_HEAD),
    (lambda: omp.per_head(0), PER_HEAD),
    (lambda: omp.per_head("8"), PER_HEAD),
    (lambda: omp.per_head({"q": False}), PER_HEAD),
    (lambda: omp.describe(PARAMS, omp.per_head), PER_HEAD),
    (lambda: omp.describe([jnp.ones((99, 99))], omp.per_head), PER_HEAD),
    (lambda: omp.per_head({"(": 8}), "'(' in omp.per_head is not a regular expression"),
    (lambda: omp.muonplus(0.1, layer_axes=0), "axes, as {'layers': 0}, got 0"),
    (lambda: omp.muonplus(0.1, layer_axes=["up"]), "layer_axes must map patterns to axes"),
    (lambda: omp.muonplus(0.1, layer_axes="up"), "layer_axes must map patterns to axes"),
    (lambda: omp.muonplus(0.1, layer_axes={"up": "0"}), "layer_axes must map patterns to axes"),
    (
        lambda: omp.muonplus(0.1, layer_axes={"up": (0, 0.5)}),
        "layer_axes must map patterns to axes",
    ),
    (lambda: omp.per_head(layer_axes={"up": True}), "layer_axes must map patterns to axes"),
    (lambda: omp.per_head(layer_axes={"(": 0}), "'(' in layer_axes is not a regular expression"),
    (lambda: omp.describe(PARAMS, layer_axes={"up": 5}), "layer_axes of up/kernel"),
    (
        lambda: omp.describe(PARAMS, layer_axes={"up": 0}),
        "layer_axes makes vectors of up/",
    ),
    (lambda: omp.muonplus(0.1, rules=[("(", None)]), "'(' in rules is not a regular expression"),
    (lambda: omp.muonplus(0.1, rules=[(5, None)]), "5 in rules is not a regular expression"),
    (lambda: omp.muonplus(0.1, rules=[("up", None, True)]), "rules must be a list"),
    (
        lambda: omp.muonplus(0.1, mu_dtype="f32"),
        "mu_dtype must be a floating-point dtype",
    ),
    (lambda: omp.muonplus(0.1, mu_dtype="int4"), "or int8, got 'int4'"),
    (
        lambda: omp.muonplus(0.1, compute_dtype="f32"),
        "compute_dtype must be a floating-p",
    ),
    (lambda: omp.muonplus(0.1, compute_dtype="float16"), "too narrow a range for Gram matrices"),
    (
        lambda: omp.muonplus(0.1, others=optax.lion),
        "others must be a transformation like",
    ),
    (lambda: omp.muonplus(0.1, others="lion"), "got 'lion'"),
    (lambda: omp.optimizer(NorMuon(), 0.1, others=0.1), "others must be a transformation"),
    (lambda: omp.muonplus(0.1, ("a", "b")), "ns_coeffs must be one row"),
    (lambda: omp.muonplus(0.1, [(2.0, -1.5, 0.5), (1.5, -0.5)], 2), "ns_coeffs must be one row"),
    (
        lambda: jax.jit(lambda x: omp.muonplus(0.1, x) and 0)(jnp.ones(3)),
        "ns_coeffs must be one row",
    ),
    (lambda: chain(omp.momentum, omp.orthogonalize), "matrix_chain got <function momentum"),
    (lambda: chain(optax.trace), "matrix_chain got <function trace"),
    (lambda: chain(), "matrix_chain got ()"),
    (
        lambda: chain([omp.momentum(), omp.orthogonalize()]),
        "which is not a link. Pass links one by one",
    ),
    (lambda: chain(omp.momentum(), where=[("up", None)]), "where= takes omp.Matrices"),
    (lambda: omp.optimizer(NorMuon(), 0.1, beta2=0.9), "unexpected keyword argument 'beta2'"),
    (
        lambda: omp.optimizer(NorMuon(), 0.1, adam_learning_rate=0.1),
        "unexpected keyword argument 'adam_",
    ),
    (lambda: chain(omp.scale_by_muonplus(), omp.scale_by_shape()), "a second factor by shape"),
    (
        lambda: chain(NorMuon(), optax.scale(2.0), omp.scale_by_shape()),
        "ScaleByShape after NorMuon",
    ),
    (lambda: chain(NorMuon(), omp.orthogonalize()), "Orthogonalize after NorMuon"),
    *(
        (
            functools.partial(omp.muonplus, 0.1, ns_coeffs=rows, ns_steps=steps),
            "ns_coeffs must bring",
        )
        for rows, steps in [
            ((3.0, 3.0, 3.0), 5),
            ((2.0, float("nan"), 0.5), 5),
            ((100.0, 100.0, 100.0), 5),
            ((5.0, 0.0, 0.0), 5),
            ((0.0, 0.0, 0.0), 5),
            ((-2.0, 1.5, -0.5), 5),
            ((0.1, 0.0), 3),
            ([(2.0, -1.5, 0.5)] * 2 + [(4.0, -1.5, 0.5)], 3),
        ]
    ),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_mistake_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as found:
        call()
    assert len(str(found.value)) < 600


def test_advice_about_injection_is_for_arrays_and_schedules_alone():
    for arguments in ({"learning_rate": "0.02"}, {"beta": 1.5}, {"nesterov": "no"}):
        with pytest.raises(ValueError, match="must be") as found:
            omp.muonplus(**{"learning_rate": 0.1, **arguments})
        assert "inject" not in str(found.value)


def test_rows_that_are_right_stay():
    """Every table, of any number of steps, and rows of one's own that are theirs."""
    for name, table in omp.coefficients.TABLES.items():
        for steps in range(1, 13 if table.repeats_last else len(table.rows) + 1):
            rows = omp.coefficients.for_steps(name, steps).rows
            assert omp.coefficients.for_steps(rows, steps).rows == rows
    for row in ((2.0, -1.5, 0.5), (1.5, -0.5), (1.875, -1.25, 0.375), (3.4445, -4.775, 2.0315)):
        for steps in (1, 5, 100):
            omp.coefficients.for_steps(row, steps)
        jax.eval_shape(lambda n, row=row: omp.muonplus(0.1, row, n) and 0, 5)


def test_rows_are_tried_by_traced_steps_too():
    with pytest.raises(ValueError, match="ns_coeffs must bring"):
        jax.eval_shape(lambda n: omp.muonplus(0.1, (5.0, 0.0), n) and 0, 5)


def test_factors_that_are_right_stay():
    for links in (
        (omp.scale_by_muonplus(shape_scale="none"), omp.scale_by_shape()),
        (omp.scale_by_muonplus(), omp.scale_by_shape(consistent_rms=0.2)),
        (
            omp.scale_by_muonplus(),
            omp.normalize("row", match_frobenius=False),
            omp.scale_by_shape(),
        ),
        (omp.scale_by_muonplus(), jnp.sign, omp.scale_by_shape()),
        (NorMuon(shape_scale="none"), omp.scale_by_shape()),
    ):
        chain(*links)


TORCH = {"layers": [{"up": {"weight": jnp.ones((6, 4))}, "norm": {"weight": jnp.ones(4)}}] * 2}
STACKED = {"layers": {"up": {"weight": jnp.ones((3, 6, 4))}, "pre": {"weight": jnp.ones((3, 4))}}}


def test_layers_that_are_not_stacked_have_no_axis_of_layers():
    with pytest.raises(ValueError, match=r"vectors of layers/\{0..1\}/up/weight \(6, 4\)"):
        omp.muonplus(0.1, layer_axes={"layers": 0}).init(TORCH)
    # Vectors of stacked layers with any name, and what a rule calls vectors.
    omp.muonplus(0.1, layer_axes={"layers": 0}).init(STACKED)
    omp.muonplus(0.1, layer_axes={"up": 0}, rules=[("up", None)]).init(PARAMS)


@pytest.mark.parametrize("act", [jax.nn.relu, "relu"])
def test_a_model_with_functions_is_to_be_filtered(act):
    model = {"up": PARAMS["up"], "act": act}
    for call in (omp.describe, omp.muonplus(0.1).init, omp.scale_by_muonplus().init):
        with pytest.raises(ValueError, match=r"act \(.*eqx\.filter\(model"):
            call(model)
    mlp = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"eqx\.filter\(model"):
        omp.describe(mlp)
    omp.describe(eqx.filter(mlp, eqx.is_inexact_array))


def test_the_papers_matrices_with_any_other_optimizer():
    tx = omp.muonplus(0.1, **omp.PAPER, others=optax.sgd(0.5))
    adam = {"adam_nesterov", "adam_b1", "adam_b2", "adam_weight_decay"}
    plain = {key: value for key, value in omp.PAPER.items() if key not in adam}
    assert len(plain) == len(omp.PAPER) - len(adam)
    params = {**PARAMS, "bias": jnp.ones(6)}
    expected, found = (
        x.update(params, x.init(params), params)[0]
        for x in (omp.muonplus(0.1, **plain, others=optax.sgd(0.5)), tx)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_allclose(found["bias"], -0.5)
    with pytest.raises(ValueError, match="beside others"):
        omp.muonplus(0.1, **{**omp.PAPER, "adam_b1": 0.8}, others=optax.sgd(0.5))


@pytest.mark.several_devices
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("given", [True, False])
def test_state_sharding_names_an_axis_of_a_mesh(devices, given):
    mesh = jax.make_mesh((devices,), ("data",))
    placed = NamedSharding(mesh, P()) if given else None
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="state_sharding='dta' must name axes of the mesh"):
        omp.muonplus(0.1, sharding=placed, state_sharding="dta").init(params)
    tx = omp.muonplus(0.1, sharding=placed, state_sharding="data")
    tx.update(params, tx.init(params), params)
