"""Measures of imbalance against float64 NumPy, and optimizers that record them as they go."""

import functools
import json

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import scipy.stats
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus import diagnostics
from optax_muonplus.diagnostics import read, recorded, watched
from tests.support import reference

SIDES = ("row", "col")
ALL, DISTANCE = (*diagnostics.MEASURES, "distance"), "polar/distance"
FEW = ("rms", "row_spearman", "row_floor_share")  # compiles in half the time


def gaussian(*shape, seed=0, dtype=np.float32):
    x = np.random.default_rng(seed).normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    return jnp.asarray(x, dtype)


# --- oracles, in float64, of one matrix (out, in) -------------------------------------------------


def squares(x, side):
    x = np.asarray(x)
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    return (np.abs(wide) ** 2).sum(axis=1 if side == "row" else 0)


def variance(x, side):
    s = squares(x, side)
    return np.mean((s - np.sum(s) / len(s)) ** 2)


def ratio(x, side):
    s = np.sqrt(squares(x, side))
    return s.max() / s.min()


def correlation(x, y, side):
    return scipy.stats.spearmanr(squares(x, side), squares(y, side)).statistic


def rms(x):
    return np.sqrt(squares(x, "row").sum() / np.size(x))


def distance(x, of):
    exact = reference.svd_polar(np.asarray(of, np.complex128))
    return np.linalg.norm(np.asarray(x) - exact) / np.linalg.norm(exact)


# --- measures -------------------------------------------------------------------------------------

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "complex64": 1e-5}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 5), (5, 1)], ids=str)
def test_measures_of_one_matrix(shape, dtype):
    """Inputs are what the dtype holds, sums are float32 at least: 2^-24 each, 10^-5 in all."""
    with jax.enable_x64(dtype == "float64"):
        x, y = gaussian(*shape, dtype=dtype), gaussian(*shape, seed=5, dtype=dtype)
        close = functools.partial(np.testing.assert_allclose, rtol=ROUNDING[dtype], atol=1e-7)
        for side in SIDES:
            close(diagnostics.norm_variance(x, side), variance(x, side))
            close(diagnostics.norm_ratio(x, side), ratio(x, side))
            if shape[side == "col"] > 1:
                close(diagnostics.spearman(x, y, side), correlation(x, y, side))
        close(diagnostics.rms(x), rms(x))
        close(diagnostics.polar_distance(y, x), distance(y, x))
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        assert diagnostics.norm_variance(x).dtype == diagnostics.rms(x).dtype == wide


def test_measures_of_stacks_under_jit_and_vmap():
    x, y = gaussian(2, 3, 4, 5), gaussian(2, 3, 4, 5, seed=1)
    one = {
        "variance": lambda x, y: diagnostics.norm_variance(x, "col"),
        "ratio": lambda x, y: diagnostics.norm_ratio(x, "col"),
        "spearman": lambda x, y: diagnostics.spearman(x, y, "col"),
        "floor": lambda x, y: diagnostics.floor_share(x, "col", 3.0),
        "rms": lambda x, y: diagnostics.rms(x),
        "distance": diagnostics.polar_distance,
    }
    for name, function in one.items():
        whole = jax.jit(function)(x, y)
        assert whole.shape == (2, 3)
        mapped = jax.vmap(jax.vmap(function))(x, y)
        alone = np.array([[function(x[i, j], y[i, j]) for j in range(3)] for i in range(2)])
        np.testing.assert_allclose(whole, alone, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(mapped, alone, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1e8])
def test_measures_of_small_and_large_matrices(scale):
    """Squares of 1e-25 vanish in float32; as does their variance, which is 0 and not NaN."""
    x = gaussian(6, 9) * scale
    np.testing.assert_allclose(diagnostics.rms(x), rms(x), rtol=1e-5)
    for side in SIDES:
        np.testing.assert_allclose(diagnostics.norm_ratio(x, side), ratio(x, side), rtol=1e-5)
        given = diagnostics.norm_variance(x, side)
        expected = np.float32(variance(x, side))
        np.testing.assert_allclose(given, expected if expected > 1e-37 else 0, rtol=1e-5)
    tiny = gaussian(6, 9) * 1e-30
    assert diagnostics.spearman(tiny, x) == 1, "the order is that of the norms"
    assert diagnostics.norm_variance(jnp.full((4, 4), 1e30)) == 0, "equal rows, whatever the size"


def test_equal_norms_share_their_rank():
    """Small integers: the sums are exact, so that ties are ties."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.integers(0, 2, (2, 9, 4)).astype(np.float32)
        assert len(set(squares(x, "row"))) < 9
        given = diagnostics.spearman(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_allclose(given, correlation(x, y, "row"), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_where_measures_are_not_defined(dtype):
    """NaN for rank correlations of equal norms, under jit too; no exception anywhere."""
    x, ones = gaussian(4, 6, dtype=dtype), jnp.ones((4, 6), dtype)
    zero = 0 * ones
    spearman = jax.jit(diagnostics.spearman)
    undefined = [(x, ones), (ones, x), (zero, x), (x[:1], x[:1]), (x * jnp.nan, x)]
    undefined.append((x, x.at[2, 1].set(jnp.inf)))
    assert all(np.isnan(spearman(*pair)) for pair in undefined)
    for side in SIDES:
        assert diagnostics.norm_variance(zero, side) == 0
        assert diagnostics.norm_variance(ones, side) == 0
        assert diagnostics.norm_ratio(ones, side) == 1
        assert np.isnan(diagnostics.norm_ratio(zero, side))
        assert diagnostics.floor_share(zero, side) == 1
        assert diagnostics.floor_share(zero, side, 0.0) == 1
    assert diagnostics.norm_ratio(x.at[1].set(0)) == np.inf
    assert diagnostics.norm_ratio(x.at[1].set(0), "col") < np.inf
    assert diagnostics.rms(zero) == diagnostics.polar_distance(zero, zero) == 0
    assert diagnostics.polar_distance(ones, zero) == np.inf


def test_share_of_rows_at_the_floor():
    """Rows of squared norm 4, 1 and 0, columns of 2, 2 and 1: at the floor means not above it."""
    x = jnp.asarray([[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    for floor, rows, cols in [(0.5, 1, 0), (1.0, 2, 3), (1.5, 2, 3), (2.0, 2, 4)]:
        assert diagnostics.floor_share(x, "row", floor) == np.float32(rows / 3)
        assert diagnostics.floor_share(x, "col", floor) == cols / 4


def test_measures_have_the_symmetries_of_matrices():
    """Transposed: the other side. Rows in another order: the same. Twice: a power of it."""
    x, y = gaussian(6, 9), gaussian(6, 9, seed=1)
    order = np.random.default_rng(0).permutation(6)
    other = {"row": "col", "col": "row"}
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    for side in SIDES:
        functions = [
            (lambda x, y, s: diagnostics.norm_variance(x, s), 16),
            (lambda x, y, s: diagnostics.norm_ratio(x, s), 1),
            (lambda x, y, s: diagnostics.spearman(x, y, s), 1),
            (lambda x, y, s: diagnostics.rms(x), 2),
            (lambda x, y, s: diagnostics.floor_share(x, s, 7.0), None),
        ]
        for function, power in functions:
            close(function(x.T, y.T, other[side]), function(x, y, side))
            close(function(x[order], y[order], side), function(x, y, side))
            if power is not None:
                close(function(2 * x, y, side), power * function(x, y, side))
    assert diagnostics.spearman(x, -3 * x) == 1
    close(diagnostics.polar_distance(y.T, x.T), diagnostics.polar_distance(y, x))
    assert diagnostics.polar_distance(omp.polar.svd(x), x * 1e-10) < 1e-5


def test_errors_of_measures():
    x = gaussian(3, 4)
    with pytest.raises(ValueError, match=r"shape \(3,\).*Leave vectors out"):
        diagnostics.norm_variance(x[:, 0])
    with pytest.raises(ValueError, match="not empty"):
        diagnostics.rms(x[:0])
    with pytest.raises(ValueError, match=r"Unknown side 'column'\. Known: row, col"):
        diagnostics.norm_ratio(x, "column")
    for function in (diagnostics.spearman, diagnostics.polar_distance):
        with pytest.raises(ValueError, match=r"\(3, 4\) and \(4, 3\)"):
            function(x, x.T)


# --- what is recorded -----------------------------------------------------------------------------

RULES = [
    ("scanned", omp.MuonDimensionNumbers(-2, -1)),
    ("fused", omp.MatrixSpec(0, 1, split_sizes=(4, 6, 4))),
    ("experts", omp.MatrixSpec(2, 3, split_sizes=(5, 3), split_axis=3)),
]
DIMS = functools.partial(omp.muon_dimension_numbers, rules=RULES)
SHAPES = {
    "up": {"kernel": (6, 9), "bias": (9,)},
    "up2": {"kernel": (6, 9)},
    "down": {"weight": (6, 9)},
    "query": {"kernel": (6, 2, 4)},
    "scanned": {"kernel": (3, 6, 9)},
    "fused": {"kernel": (6, 14)},
    "experts": {"kernel": (2, 2, 6, 8)},
    "embed": {"embedding": (7, 6)},
    "nothing": None,
}


def tree(seed=0, dtype=np.float32, shapes=SHAPES):
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten(
        [gaussian(*shape, seed=seed * 100 + i, dtype=dtype) for i, shape in enumerate(leaves)]
    )


def matrices(params):
    """By path, the matrices (out, in) of a tree with SHAPES, in the shape that read gives them."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    split = lambda x, *stops: np.split(x, stops)  # noqa: E731
    return {
        "up/kernel": p["up"]["kernel"].T,
        "up2/kernel": p["up2"]["kernel"].T,
        "down/weight": p["down"]["weight"],
        "query/kernel": p["query"]["kernel"].reshape(6, 8).T,
        "scanned/kernel": [x.T for x in p["scanned"]["kernel"]],
        "fused/kernel": split(p["fused"]["kernel"].T, 4, 10),
        "experts/kernel": [[split(x.T, 5) for x in row] for row in p["experts"]["kernel"]],
    }


def expected_values(moments, norm="col_row", norm_eps=1e-8, steps=5):
    """All measures of one matrix from its momentum, in float64."""
    polar = reference.newton_schulz(moments, steps=steps)
    m, n = moments.shape
    update = reference.norm_dir(polar, norm, norm_eps) * np.sqrt(m / n)
    values = {}
    for stage, x in {"momentum": moments, "polar": polar, "update": update}.items():
        values[f"{stage}/rms"] = rms(x)
        for side in SIDES:
            values[f"{stage}/{side}_variance"] = variance(x, side)
            values[f"{stage}/{side}_ratio"] = ratio(x, side)
    values["polar/distance"] = distance(polar, moments)
    for side in SIDES:
        values[f"polar/{side}_spearman"] = correlation(moments, polar, side)
        values[f"polar/{side}_floor_share"] = np.nan
    turns = () if norm == "none" else norm.split("_")
    for i, side in enumerate(turns):
        x = reference.norm_dir(polar, "_".join(turns[:i]) or "none", norm_eps)
        values[f"polar/{side}_floor_share"] = np.mean(squares(x, side) <= norm_eps)
    return values


def mapped(function, nested):
    """By measure, what ``function`` says of each matrix in nested lists."""
    if not isinstance(nested, list):
        return function(nested)
    each = [mapped(function, x) for x in nested]
    return {name: np.array([values[name] for values in each]) for name in each[0]}


def moments_of(grads, **flags):
    """What the polar step of the last update sees, in float64."""
    buffer = jax.tree.map(lambda g: np.zeros(g.shape), grads[0])
    for t, grad in enumerate(grads, 1):
        both = jax.tree.map(
            lambda m, g, t=t: reference.momentum(m, np.asarray(g, np.float64), t, **flags),
            buffer,
            grad,
        )
        moments, buffer = (jax.tree.map(lambda g, x, i=i: x[i], grad, both) for i in (0, 1))
    return moments


def run(tx, steps=2, dtype=np.float32, shapes=SHAPES):
    """Updates of all steps and the state at the end."""
    params = tree(0, dtype, shapes)
    state, update, updates = jax.jit(tx.init)(params), jax.jit(tx.update), []
    for step in range(1, steps + 1):
        done, state = update(tree(step, dtype, shapes), state, params)
        updates.append(done)
    return updates, state


def assert_as_expected(given, expected, path):
    """Newton-Schulz amplifies rounding by its slope at 0, 3.44^5 = 500: 3e-5 of the norms.

    Variances, small differences of squares, see that ten times as large and more.
    """
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        assert np.shape(given[name]) == np.shape(value)
        np.testing.assert_allclose(
            given[name], value, rtol=1e-3, atol=1e-6, err_msg=f"{path} {name}"
        )


def test_recorded_values_are_those_of_the_algorithm():
    """For every layout: (in, out), (out, in), more axes, batches, fused blocks of two sizes."""
    flags = {"nesterov": True, "bias_correction": True}
    made = recorded(omp.muonplus, every=2)  # distances, whose SVD is slow to compile, are below
    _, state = run(made(0.1, weight_decay=0.1, muon_weight_dimension_numbers=DIMS, **flags))
    record = read(state)
    moments = matrices(moments_of([tree(1), tree(2)], **flags))
    assert record.step == 2 and record.values.keys() == moments.keys()
    for path, nested in moments.items():
        expected = mapped(expected_values, nested)
        assert_as_expected(record.values[path] | {DISTANCE: expected[DISTANCE]}, expected, path)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": True, "norm": "row"},
        {"norm": "row_col", "norm_eps": 1.0},
        {"norm": "none", "ns_steps": 3},
    ],
    ids=str,
)
def test_recorded_values_follow_the_arguments(options):
    shapes = {"up": {"kernel": (6, 9)}}
    tx = recorded(omp.scale_by_muonplus, every=2, measures=ALL)(**options)
    _, state = run(tx, shapes=shapes)
    grads = [tree(step, shapes=shapes) for step in (1, 2)]
    moments = moments_of(grads, nesterov=options.get("nesterov", False))["up"]["kernel"].T
    rest = {word: options[word] for word in ("norm", "norm_eps") if word in options}
    expected = expected_values(moments, steps=options.get("ns_steps", 5), **rest)
    assert_as_expected(read(state).values["up/kernel"], expected, "up/kernel")


def test_a_kernel_is_measured_as_its_transpose_stored_the_other_way():
    tx = recorded(omp.scale_by_muonplus, every=1)()
    x = gaussian(9, 6)
    grads = {"a": {"weight": x}, "b": {"kernel": x.T}}
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    one, other = read(state).values.values()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-10, err_msg=name)


def test_rows_of_dead_units_are_counted():
    """A unit without gradient: a zero row of the polar factor, infinitely smaller than others."""
    grads = {"dense": {"kernel": gaussian(6, 8).at[:, :2].set(0)}}
    tx = recorded(omp.scale_by_muonplus, every=1)()
    values = read(jax.jit(tx.update)(grads, tx.init(grads))[1]).values["dense/kernel"]
    assert values["polar/row_floor_share"] == 0.25
    assert values["polar/col_floor_share"] == 0
    assert values["update/row_ratio"] == np.inf


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_recorded_update_is_the_one_that_is_made(adaptive):
    """Its root mean square is that of what `scale_by_muonplus` hands on."""
    grads = {"dense": {"kernel": gaussian(6, 8)}}
    tx = recorded(omp.scale_by_muonplus, every=1)(consistent_rms=0.2, adaptive=adaptive)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    given = read(state).values["dense/kernel"]["update/rms"]
    np.testing.assert_allclose(given, rms(updates["dense"]["kernel"]), rtol=1e-5)


def test_muonplus_takes_the_variance_away():
    """To a millionth of Muon's in the last normalized direction, in all shapes.

    Squared norms are 1 to some 1e-7 there, so that their variance is 1e-14; Muon's is 1e-3. Both
    are multiplied by (out/in)^2.
    """
    shapes = {"square": (64, 64), "tall": (64, 256), "wide": (256, 64)}
    grads = tree(shapes=shapes)

    def after(factory, **options):
        tx = recorded(factory, every=1, measures=("row_variance", "col_variance"))(0.1, **options)
        return read(jax.jit(tx.update)(grads, tx.init(grads), grads)[1]).values

    muon = after(omp.muon)
    for norm in ("col_row", "row_col", "row", "col"):
        muonplus = after(omp.muonplus, norm=norm)
        word = f"update/{norm.split('_')[-1]}_variance"
        for path, values in muonplus.items():
            assert muon[path][word] > 1e-5, (path, norm)
            assert values[word] <= 1e-6 * muon[path][word], (path, norm)


# --- recording changes nothing --------------------------------------------------------------------

OPTIONS = {
    "default": {},
    "nesterov": {"nesterov": True, "bias_correction": True, "weight_decay": 0.1},
    "svd": {"polar": "svd", "norm": "row_col", "match_frobenius": True},
    "own function": {"polar": lambda x: x - x.mean(axis=-1, keepdims=True), "adaptive": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_and_inner_state_are_the_same_bit_for_bit(name):
    dtype = "bfloat16" if name == "nesterov" else "float32"
    parts = ("up", "down", "fused", "nothing")
    shapes = {part: SHAPES[part] for part in parts}
    dims = functools.partial(omp.muon_dimension_numbers, rules=RULES[1:2])
    options = {"learning_rate": 0.1, "muon_weight_dimension_numbers": dims, **OPTIONS[name]}
    plain, plain_state = run(omp.muonplus(**options), 3, dtype, shapes)
    made = recorded(omp.muonplus, every=2, measures=FEW)
    recording, state = run(made(**options), 3, dtype, shapes)
    assert read(state).step == 2
    for one, other in [(plain, recording), (plain_state, state.inner)]:
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_off_is_the_program_without_it():
    params = tree(shapes={"up": {"kernel": (6, 8), "bias": (8,)}})
    for off in (None, 0):
        for factory in (omp.muonplus, functools.partial(omp.muon, beta=0.9)):
            made, plain = recorded(factory, every=off)(0.1), factory(0.1)
            texts = [
                jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
                for tx in (made, plain)
            ]
            assert texts[0] == texts[1]
        link = omp.normalize()
        assert watched(link, every=off) is link


def test_updates_between_cost_a_counter():
    """Nothing is orthogonalized again, and no donated momentum buffer is copied."""
    calls = []

    def polar(x):
        jax.debug.callback(lambda: calls.append(1))
        return x / (1 + jnp.max(jnp.abs(x)))

    shapes = {f"layer_{i}": {"kernel": (12, 12)} for i in range(3)}
    params = tree(shapes=shapes)
    made = {"plain": omp.muonplus(0.1, polar=polar)}
    made["recorded"] = recorded(omp.muonplus, every=2, measures=FEW)(0.1, polar=polar)
    copies, counts = {}, {}
    for name, tx in made.items():
        state = jax.tree.map(jnp.copy, tx.init(params))
        step = jax.jit(tx.update, donate_argnums=1).lower(params, state, params).compile()
        every_time = step.as_text().partition("ENTRY")[2]  # without branches and loops
        copies[name] = every_time.count("f32[12,12]{1,0} copy(")
        counts[name] = []
        for _ in range(3):
            calls.clear()
            _, state = jax.block_until_ready(step(params, state, params))
            jax.effects_barrier()
            counts[name].append(len(calls))
    assert counts == {"plain": [3, 3, 3], "recorded": [3, 6, 3]}
    assert copies["recorded"] == copies["plain"]


# --- when and of what -----------------------------------------------------------------------------


def test_records_are_made_at_chosen_updates():
    shapes = {"dense": {"kernel": (6, 8)}}
    chosen = {"every": (3, [-1, -1, 3, 3, 3, 6]), "first": (lambda t: t < 3, [1, 2, 2, 2, 2, 2])}
    for every, steps in chosen.values():
        tx = recorded(omp.muonplus, every=every, measures=FEW)(0.1)
        grads = tree(shapes=shapes)
        state, update, seen, found = tx.init(grads), jax.jit(tx.update), [], []
        for step in range(6):
            _, state = update(tree(step, shapes=shapes), state, grads)
            seen.append(read(state).step)
            found.append(read(state).values["dense/kernel"]["momentum/rms"])
        assert seen == steps
        for before, after, one, other in zip(seen, seen[1:], found, found[1:], strict=False):
            assert (before == after) == (one == other or (np.isnan(one) and np.isnan(other)))


def test_before_the_first_record_there_is_nan_and_step_minus_one():
    tx = recorded(omp.muonplus, every=10)(0.1, muon_weight_dimension_numbers=DIMS)
    record = read(tx.init(tree()))
    assert record.step == -1
    assert all(np.all(np.isnan(x)) for own in record.values.values() for x in own.values())
    assert record.values["experts/kernel"]["polar/rms"].shape == (2, 2, 2)
    assert record.values["fused/kernel"]["polar/rms"].shape == (3,)


def test_eager_updates_record_as_compiled_ones():
    shapes = {"up": {"kernel": (6, 8)}, "up2": {"kernel": (6, 8)}}
    params = tree(shapes=shapes)
    tx = recorded(omp.muonplus, every=2, measures=FEW)(0.1)
    _, compiled = run(tx, shapes=shapes)
    state = tx.init(params)
    for step in (1, 2):
        _, state = tx.update(tree(step, shapes=shapes), state, params)
    assert_records_close(read(state), read(compiled))


def assert_records_close(one, other, rtol=1e-4):
    assert one.step == other.step and one.values.keys() == other.values.keys()
    for path, values in one.values.items():
        for name, value in values.items():
            np.testing.assert_allclose(
                value, other.values[path][name], rtol, atol=1e-6, err_msg=f"{path} {name}"
            )


def test_only_what_is_asked_for_is_recorded():
    made = recorded(omp.muonplus, every=1, only=["^up", "down/"], measures=["rms"])
    _, state = run(made(0.1, muon_weight_dimension_numbers=DIMS))
    values = read(state).values
    assert list(values) == ["down/weight", "up/kernel", "up2/kernel"]
    assert all(list(own) == ["momentum/rms", "polar/rms", "update/rms"] for own in values.values())
    assert [x.shape for x in jax.tree.leaves(state.values)] == [(3,)] * 3


def test_errors_say_what_to_do():
    params = tree()
    near = r"only='up/kernle' matches no matrix. The nearest paths are up/kernel, up2/kernel"
    not_matrices = r"only='embed' matches embed/embedding, which are not matrices.*AdamW"
    for pattern, message in [("up/kernle", near), ("embed", not_matrices)]:
        tx = recorded(omp.muonplus, only=["up", pattern])(0.1, muon_weight_dimension_numbers=DIMS)
        with pytest.raises(ValueError, match=message):
            tx.init(params)
    with pytest.raises(ValueError, match=r"no matrix, and so no rows .* among bias \(3,\)"):
        recorded(omp.muonplus)(0.1).init({"bias": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"only='\(' must be regular expressions"):
        recorded(omp.muonplus, only="(")
    with pytest.raises(ValueError, match="chooses no matrix"):
        recorded(omp.muonplus, only=[])
    for wrong in ("rms", ["row_varience"]):
        with pytest.raises(ValueError, match=r"must be a sequence of words, of .'row_variance'"):
            recorded(omp.muonplus, measures=wrong, every=None)
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="must be a number of updates, None or 0 for never"):
            recorded(omp.muonplus, every=wrong)
    with pytest.raises(ValueError, match="wants the function that makes the optimizer"):
        recorded(omp.muonplus(0.1))
    with pytest.raises(ValueError, match=r"has no arguments adaptive, .*there is watched"):
        recorded(optax.adamw)
    two = optax.chain(*[recorded(omp.muonplus)(0.1, muon_weight_dimension_numbers=DIMS)] * 2)
    for tx, count in [(two, 2), (optax.sgd(0.1), 0)]:
        with pytest.raises(ValueError, match=f"{count} recorders"):
            read(tx.init(params))


# --- life of a state ------------------------------------------------------------------------------


@pytest.fixture
def small():
    shapes = {"up": {"kernel": (6, 8), "bias": (8,)}, "up2": {"kernel": (6, 8)}}
    tx = recorded(omp.muonplus, every=2, measures=FEW)(0.1)
    return tx, lambda seed: tree(seed, shapes=shapes)


def test_training_goes_on_after_a_restart(tmp_path, small):
    tx, make = small
    update, params = jax.jit(tx.update), make(0)
    state = tx.init(params)
    for step in (1, 2, 3):
        _, state = update(make(step), state, params)
    _, expected = update(make(4), state, params)

    data = flax.serialization.to_bytes(state)
    from_flax = flax.serialization.from_bytes(tx.init(params), data)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(tx.init, params)
        from_orbax = checkpointer.restore(tmp_path / "state", target)
    for restored in (from_flax, from_orbax):
        assert read(restored) == read(state) and read(state).step == 2
        _, new = update(make(4), restored, params)
        assert read(new) == read(expected) and read(new).step == 4


def test_recording_can_begin_and_end_in_the_middle(small):
    tx, make = small
    params, plain = make(0), omp.muonplus(0.1)
    update = jax.jit(plain.update)
    _, before = update(make(1), plain.init(params), params)
    with pytest.raises(ValueError, match=r"tx.init\(params\)._replace\(inner=state\)"):
        tx.update(make(2), before, params)
    _, state = jax.jit(tx.update)(make(2), tx.init(params)._replace(inner=before), params)
    _, expected = update(make(2), before, params)
    jax.tree.map(np.testing.assert_array_equal, state.inner, expected)


def test_buffers_can_be_donated(small):
    tx, make = small

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = make(0)
    state = jax.tree.map(jnp.copy, tx.init(params))
    for i in (1, 2):
        old = jax.tree.leaves((params, state))
        params, state = jax.block_until_ready(step(params, state, make(i)))
        assert all(x.is_deleted() for x in old)
    assert read(state).step == 2


def test_state_keeps_structure_shapes_and_dtypes(small):
    tx, make = small
    params = make(0)
    state = tx.init(params)
    _, new = jax.jit(tx.update)(make(1), state, params)

    def description(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert description(jax.eval_shape(tx.init, params)) == description(state) == description(new)
    _, stacked = jax.lax.scan(lambda s, _: (tx.update(params, s, params)[1], 0.0), state, length=4)
    assert stacked.shape == (4,)


def test_only_the_inner_state_is_mapped_as_parameters_are(small):
    """By optax.tree.map_params, with which trainers place a state on a mesh."""
    tx, make = small
    state = tx.init(make(0))
    marked = optax.tree.map_params(
        tx, lambda x: "as a parameter", state, transform_non_params=lambda x: "elsewhere"
    )
    assert set(jax.tree.leaves(marked._replace(inner=None))) == {"elsewhere"}
    assert jax.tree.leaves(marked.inner).count("as a parameter") == 4


def test_hyperparameters_can_be_injected(small):
    _, make = small
    made = optax.inject_hyperparams(recorded(omp.muonplus, every=1, measures=FEW))
    tx = optax.chain(optax.clip_by_global_norm(1.0), made(learning_rate=0.1, norm_eps=1e-8))
    params = make(0)
    clip, state = jax.jit(tx.init)(params)

    update = jax.jit(tx.update)

    def recorded_with(**numbers):
        new = {k: jnp.asarray(v, state.hyperparams[k].dtype) for k, v in numbers.items()}
        changed = (clip, state._replace(hyperparams={**state.hyperparams, **new}))
        return read(update(params, changed, params)[1]).values["up/kernel"]

    plain, slower = recorded_with(), recorded_with(beta=0.975)
    np.testing.assert_allclose(slower["momentum/rms"], plain["momentum/rms"] / 2, rtol=1e-5)
    assert plain["polar/row_floor_share"] == 0
    assert recorded_with(norm_eps=9.0)["polar/row_floor_share"] == 1


def test_ensembles_under_vmap(small):
    tx, make = small
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[make(seed) for seed in range(3)])
    step = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, g)[1]))
    state = step(stacked, step(stacked, jax.vmap(tx.init)(stacked)))
    with pytest.raises(ValueError, match=r"states of 3 optimizers under jax.vmap"):
        read(state)
    alone, update = tx.init(make(2)), jax.jit(tx.update)
    for _ in range(2):
        _, alone = update(make(2), alone, make(2))
    assert_records_close(read(jax.tree.map(lambda x: x[2], state)), read(alone))


def test_flax_nnx():
    """Whose trees are of variables at init, and of plain arrays at update."""
    model = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    made = recorded(omp.muonplus, every=1, only="kernel", measures=FEW)(0.1)
    optimizer = nnx.Optimizer(model, made, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((2, 6))) ** 2))(model))

    step(model, optimizer)
    record = read(nnx.as_pure(optimizer.opt_state))
    assert record.step == 1 and list(record.values) == ["kernel"]


def test_a_record_is_a_line_of_json():
    made = recorded(omp.muon, every=2, measures=FEW)
    _, state = run(made(0.1, muon_weight_dimension_numbers=DIMS))
    line = json.loads(json.dumps(read(state).as_json(), allow_nan=False))
    values = read(state).values
    assert line["step"] == 2 and line["values"].keys() == values.keys()
    assert line["values"]["up/kernel"]["polar/rms"] == values["up/kernel"]["polar/rms"]
    assert line["values"]["up/kernel"]["polar/row_floor_share"] is None
    experts = line["values"]["experts/kernel"]["polar/rms"]
    np.testing.assert_array_equal(experts, values["experts/kernel"]["polar/rms"])


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["given", "compiler", "explicit"])
def test_shards_give_the_numbers_of_one_device(kind):
    """Eight devices; sums in another order, amplified by the iteration as above."""
    shapes = {
        "up": {"kernel": (16, 32)},
        "up2": {"kernel": (16, 32), "bias": (32,)},
        "fused": {"kernel": (16, 48)},
    }
    rules = [("fused", omp.MatrixSpec(0, 1, split_sizes=(16, 16, 16)))]
    dims = functools.partial(omp.muon_dimension_numbers, rules=rules)
    kinds = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)
    specs = {1: P("b"), 2: P("a", "b")}
    grads = tree(1, shapes=shapes)
    places = jax.tree.map(lambda x: NamedSharding(mesh, specs[x.ndim]), grads)
    spread = jax.tree.map(jax.device_put, grads, places)
    made = recorded(omp.muonplus, every=1, measures=(*FEW, "distance"))
    options = {"learning_rate": 0.1, "muon_weight_dimension_numbers": dims}

    def after_one(tx, grads):
        return jax.jit(tx.update)(grads, jax.jit(tx.init)(grads), grads)

    _, alone = after_one(made(**options), grads)
    given = {"sharding": places} if kind == "given" else {}
    with jax.set_mesh(mesh):
        updates, state = after_one(made(**options, **given), spread)
    for x, place in zip(jax.tree.leaves(updates), jax.tree.leaves(places), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)
    assert_records_close(read(state), read(alone), rtol=1e-3)


# --- watched --------------------------------------------------------------------------------------


def test_links_of_a_chain_are_watched():
    """What goes in and what comes out, and neither is changed."""
    grads = {"dense": {"kernel": gaussian(6, 8)}}
    plain = optax.chain(omp.momentum(0.5), omp.orthogonalize(), omp.normalize("row"))
    chain = optax.chain(
        omp.momentum(0.5),
        watched(omp.orthogonalize(), every=1, measures=ALL, only="dense"),
        omp.normalize("row"),
    )
    step = jax.jit(lambda tx, g: tx.update(g, tx.init(g)), static_argnums=0)
    (updates, state), (expected, _) = step(chain, grads), step(plain, grads)
    np.testing.assert_array_equal(updates["dense"]["kernel"], expected["dense"]["kernel"])
    values = read(state).values["dense/kernel"]
    before = grads["dense"]["kernel"].T / 2
    after = omp.polar.newton_schulz(before)
    for stage, x in {"before": before, "after": after}.items():
        np.testing.assert_allclose(values[f"{stage}/rms"], rms(x), rtol=1e-4)
        for side in SIDES:
            expected = variance(x, side)
            np.testing.assert_allclose(values[f"{stage}/{side}_variance"], expected, rtol=1e-3)
    assert values["after/row_spearman"] == pytest.approx(correlation(before, after, "row"))
    assert values["after/distance"] == pytest.approx(distance(after, before), rel=1e-4)
    assert np.isnan(values["after/row_floor_share"])


def test_other_optimizers_are_watched():
    """Leaves that are not matrices are updated, and not recorded; extra arguments pass through."""
    shapes = {"up": {"kernel": (6, 8), "bias": (8,)}}
    params = tree(shapes=shapes)
    tx = watched(optax.sgd(0.5), every=1, measures=("row_ratio", "rms"))
    updates, state = jax.jit(tx.update)(params, tx.init(params), params, value=1.0)
    np.testing.assert_array_equal(updates["up"]["bias"], -0.5 * params["up"]["bias"])
    assert list(read(state).values) == ["up/kernel"]
    values = read(state).values["up/kernel"]
    assert values["after/rms"] == values["before/rms"] / 2
    assert values["after/row_ratio"] == pytest.approx(values["before/row_ratio"])
