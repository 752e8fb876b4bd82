"""Rules in the place of AdamW: by paths, AdamH and TokenNorm, against float64 transcriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus.baselines import AdamH, ByPath, TokenNorm
from optax_muonplus.transforms import AdamW
from tests.support import reference_baselines
from tests.support.baselines import assert_sharded_is_alone, run, trees

SHAPES = {
    "wte/embedding": (16, 6),
    "lm_head/kernel": (6, 16),
    "up/kernel": (6, 8),
    "up/bias": (8,),
}
RULES = ByPath({"wte": TokenNorm(weight_decay=0.1), "head/kernel": AdamH(b2=0.8)}, AdamW(0.01))


def optimizer(others=RULES, **where):
    return omp.optimizer(omp.scale_by_muonplus(), 0.05, adamw=others, **where)


def case():
    params, grads = trees(shapes=SHAPES)
    for g in grads:
        g["wte/embedding"][3] = 0  # of a word that is not read
        g["wte/embedding"][5] *= np.float32(1e-25)
    return params, grads


def by_oracle(step, w, state, grads, **options):
    for g in grads:
        update, state = step(w, state, g.astype(float), learning_rate=0.05, **options)
        w = w + update
    return w


def test_each_parameter_has_the_rule_of_its_path():
    params, grads = case()
    seen, state = run(optimizer(), params, grads)
    wide = {key: x.astype(float) for key, x in params.items()}
    table = [g["wte/embedding"] for g in grads]
    expected = {
        "wte/embedding": by_oracle(
            reference_baselines.token_norm_step, wide["wte/embedding"], 0.0, table, weight_decay=0.1
        ),
        "lm_head/kernel": by_oracle(
            reference_baselines.adamh_step,
            wide["lm_head/kernel"],
            None,
            [g["lm_head/kernel"] for g in grads],
            b2=0.8,
        ),
    }
    for key, wanted in expected.items():
        moved = np.linalg.norm(wanted - wide[key])
        assert np.linalg.norm(seen[-1][key] - wanted) <= 1e-5 * moved, key
    plain, _ = run(optimizer(AdamW(0.01)), params, grads)
    for key in ("up/kernel", "up/bias"):
        np.testing.assert_array_equal(seen[-1][key], plain[-1][key])
    # One buffer of the embedding and of the matrix, two of the rest, and counts.
    sizes = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert sizes == 16 * 6 + 6 * 8 + 2 * (6 * 16 + 8)


def test_a_head_by_tokens_is_that_of_its_transpose():
    params, grads = case()
    (seen, *_), _ = run(optimizer(ByPath({"head": TokenNorm(1.0)})), params, grads)
    lengths = np.linalg.norm(seen["lm_head/kernel"] - params["lm_head/kernel"], axis=0)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)


def test_adamh_holds_the_norm_of_each_matrix_of_a_stack():
    rng = np.random.default_rng(0)
    w, g = (jnp.asarray(rng.normal(size=(2, 4, 6)), jnp.float32) for _ in range(2))
    w *= jnp.asarray([[[1.0]], [[30.0]]])
    tx = AdamH(0.1).transformation()

    def step(w, g):
        return tx.update({"head": g}, tx.init({"head": w}), {"head": w})[0]["head"]

    stacked = step(w, g)
    for i in range(2):
        np.testing.assert_allclose(stacked[i], step(w[i], g[i]), rtol=1e-5)


@pytest.mark.several_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_get_the_update_of_one_device(kind):
    cut = {1: P("tensor"), 2: P("fsdp", "tensor")}
    specs = {path: cut[len(shape)] for path, shape in SHAPES.items()}
    assert_sharded_is_alone(optimizer, *case(), specs, kind)


@pytest.mark.several_devices
def test_the_state_is_sharded_over_replicas():
    """ZeRO-1 by the wrapper: of each buffer a device keeps what its replica updates."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    lie = {
        path: NamedSharding(mesh, P(*[None] * (len(x) - 1), "tensor")) for path, x in SHAPES.items()
    }
    params, grads = case()
    plain, _ = run(optimizer(), params, grads)
    own = omp.transforms.state_layout(lie, "data")
    tx = omp.transforms.shard_state(optimizer(sharding=own), lie, "data")
    grads = [jax.device_put(g, lie) for g in grads]
    seen, state = run(tx, jax.device_put(params, lie), grads)
    for path, x in plain[-1].items():
        np.testing.assert_allclose(seen[-1][path], x, rtol=1e-5, atol=1e-6)
    buffers = [x for x in jax.tree.leaves(state) if x.ndim]
    assert len(buffers) == 6
    assert all("data" in str(x.sharding.spec) for x in buffers)


def test_a_state_is_taken_over_by_the_rules_of_paths():
    params, grads = case()
    _, before = run(optimizer(AdamW(0.01)), params, grads)
    _, own = run(optimizer(), params, grads)
    state, report = omp.take_over(before, optimizer().init(params), params)
    anew = "inner_states/adam/inner_state/inner_states/wte/inner_state/0/trace/wte/embedding"
    assert report.started_anew == (f"{anew}: state of a wrapper",)  # TokenNorm's sum
    optimizer().update(grads[0], state, params)
    again, report = omp.take_over(own, optimizer().init(params), params)
    assert not report.started_anew + report.not_used
    jax.tree.map(np.testing.assert_array_equal, again, own)
    _, report = omp.take_over(own, optimizer(AdamW(0.01)).init(params), params)
    assert report.kept == ("up/kernel: momentum",)  # the table has no moments for AdamW's one count


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_updates_keep_the_dtype(dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), case()[0])
    grads = jax.tree.map(lambda x: jnp.full_like(x, 300), params)  # squares are beyond float16
    tx = optimizer()
    updates, _ = tx.update(grads, tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ByPath({"wte": 0.1}), "The rule for 'wte' is 0.1. It has the place of AdamW"),
        (lambda: ByPath({"(": AdamH()}), r"'\(' is no regular expression"),
        (lambda: ByPath({"rest": AdamH()}), r"'rest' is the label of .*Write '\(rest\)'"),
        (lambda: optimizer(ByPath({"head": AdamH()})).init(
            {"head": np.eye(4, dtype=np.float32) * np.ones((2, 1, 1)) * [[[0]], [[1]]]}),
         "head has a matrix of zeros"),
        (lambda: AdamH(b1=1.0), r"b1 must be in \[0, 1\), got 1.0"),
        (lambda: AdamH("fast"), "learning_rate must be a finite number, not negative"),
        (lambda: TokenNorm(beta=-1.0), r"beta must be in \[0, 1\), got -1.0"),
        (lambda: TokenNorm(weight_decay="none"), "weight_decay must be a finite number"),
        (lambda: optimizer(ByPath({"up/kernel": AdamH()})).init(case()[0]),
         "The pattern 'up/kernel' is the first to find none of the parameters that are no"),
        (lambda: optimizer(ByPath({"head": AdamH()})).init(
            {"lm_head": np.zeros((4, 9), np.float32), "up": np.ones((4, 4), np.float32)}),
         "lm_head has a matrix of zeros, whose norm would be kept"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_is_of_parameters_in_a_state_is_found():
    """By ``optax.tree.map_params``, whose placeholder for parameters has no leaves."""
    params, _ = case()
    state = optimizer().init(params)
    marked = optax.tree.map_params(optimizer(), lambda _: "of a parameter", state)
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]
    assert jax.tree.leaves(marked).count("of a parameter") == len(arrays)


def test_a_complex_rate_leaves_updates_of_a_real_table_real():
    """As optax.inject_hyperparams makes all numbers where one parameter is complex."""
    table = jnp.ones((9, 4))
    tx = TokenNorm(jnp.complex64(0.1)).transformation()
    updates, _ = tx.update(table, tx.init(table), table)
    assert updates.dtype == table.dtype


def test_vectors_are_no_tables():
    params, grads = case()
    tx = optimizer(ByPath({"wte|bias": TokenNorm()}))
    with pytest.raises(
        ValueError, match=r"up/bias has the shape \(8,\), and TokenNorm is for tables"
    ):
        tx.update(grads[0], tx.init(params), params)
