"""The table of docs/howto/schedules.md: what its cells read and set, in every wrapper."""

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_muonplus as omp
from tests.support.documents import PAGES
from tests.support.states import filled

PARAMS = {"up": {"kernel": jnp.ones((8, 12)), "bias": jnp.ones(12)}}
RATE = 0.02
inject = functools.partial(optax.inject_hyperparams(omp.muonplus), RATE, polar="svd")


def cells():
    """By row of the table its two cells, and what the code above it defines."""
    _, page = PAGES["howto/schedules.md"].split("## Reading and setting by name")
    rows = re.findall(r"^\| (\w[\w ]+) \| `(.*)` \| `(.*)` \|$", page, re.M)
    (code,) = re.findall(r"```{code-cell}\n(.*?)```", page, re.S)
    defined = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, defined)
    assert output.getvalue() == "rate 0.010\n"
    return {row: codes for row, *codes in rows}, defined


CELLS, DEFINED = cells()


def run(row, state, column=0, **names):
    """The names after a cell was executed, below the page's own definitions."""
    found = {**DEFINED, **names, "state": state}
    exec(CELLS[row][column], found)
    return found


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def multi_steps_inside(learning_rate):
    tx = omp.muonplus(learning_rate, polar="svd")
    return optax.MultiSteps(tx, 2).gradient_transformation()


def train_state():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=clipped(inject()))
    return state.replace(step=jnp.asarray(3))


WRAPPED = {
    "inject": lambda: inject().init(PARAMS),
    "chain(clip, inject)": lambda: clipped(inject()).init(PARAMS),
    "MultiSteps(inject)": lambda: optax.MultiSteps(inject(), 2).init(PARAMS),
    "inject(MultiSteps)": lambda: optax.inject_hyperparams(multi_steps_inside)(RATE).init(PARAMS),
    "partition": lambda: optax.partition(
        {"a": inject(), "b": optax.sgd(0.1)}, {"up": "a", "down": "b"}
    ).init({**PARAMS, "down": jnp.ones((12, 3))}),
    "masked": lambda: optax.masked(inject(), {"up": True}).init(PARAMS),
    "apply_if_finite": lambda: optax.apply_if_finite(inject(), 3).init(PARAMS),
    "lookahead": lambda: optax.lookahead(inject(), 3, 0.5).init(
        optax.LookaheadParams.init_synced(PARAMS)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(inject(), RATE).init(PARAMS),
    "recorded": lambda: omp.contrib.recorded(inject()).init(PARAMS),
    "schedule": lambda: inject(adam_learning_rate=optax.linear_schedule(0.1, 0.0, 9)).init(PARAMS),
    "TrainState": train_state,
    "opt_state": lambda: train_state().opt_state,
}
# What the rows name, found by paths.
PLACES = {
    "rate": r"\.hyperparams\['learning_rate'\]$",
    "momentum": r"(?<!0\])(?<!ScaleByAdamState)\.mu\['up'\]\['kernel'\]$",
    "count": r"\.count$",
}


def places(state, what):
    found = jax.tree.leaves_with_path(state)
    matching = {jax.tree_util.keystr(path): x for path, x in found}
    return {path: x for path, x in matching.items() if re.search(PLACES[what], path)}


@pytest.mark.parametrize("name", WRAPPED)
def test_cells_in_a_wrapper(name):
    state = filled(WRAPPED[name]())
    (rate,) = places(state, "rate").values()
    assert run("read the rate", state)["rate"] is rate
    kernel = run("read the momentum", state)["mu"]["up"]["kernel"]
    assert any(kernel is x for x in jax.tree.leaves(state)) and kernel.shape == (8, 12)
    assert run("read the count", state)["count"] == 7

    new = jax.tree.map(jnp.zeros_like, run("read the momentum", state)["mu"])
    assert changed(state, run("set the momentum", state, mu=new)["state"]) == {id(kernel)}
    after = run("set the rate", state)["state"]
    assert changed(state, after) == {id(rate)}
    assert next(iter(places(after, "rate").values())) == 0.01
    after = run("set all counts", state)["state"]
    counts = places(state, "count")
    assert changed(state, after) == {id(x) for x in counts.values()}
    assert {int(x) for x in places(after, "count").values()} == {1000}
    assert len(counts) >= 2


def changed(before, after):
    """The arrays of a state that are others in another of the same structure."""
    assert jax.tree.structure(before) == jax.tree.structure(after)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return {id(a) for a, b in pairs if a is not b}


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(8, 12, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.MultiSteps(clipped(tx), 1)])
def test_cells_in_an_nnx_optimizer(wrap):
    """What is set there is what the next update uses."""
    model = Model()
    optimizer = nnx.Optimizer(model, wrap(inject()), wrt=nnx.Param)
    run("set the rate", optimizer.opt_state, 1)
    run("set the momentum", optimizer.opt_state, 1, kernel=jnp.full((8, 12), 3.0))
    run("set all counts", optimizer.opt_state, 1)
    before = model.up.kernel[...]
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    assert run("read the rate", optimizer.opt_state, 1)["rate"] == np.float32(0.01)
    kept = run("read the momentum", optimizer.opt_state, 1)["kernel"]
    np.testing.assert_allclose(kept, 0.95 * 3.0, rtol=1e-6)
    assert run("read the count", optimizer.opt_state, 1)["count"] == 1001
    # The polar factor of a matrix of ones has equal entries too; five steps bring it near norm 1.
    moved = np.abs(model.up.kernel[...] - before)
    np.testing.assert_allclose(moved, 0.01 * np.sqrt(12 / 8) / np.sqrt(8 * 12), rtol=0.3)
    np.testing.assert_allclose(moved, moved[0, 0], rtol=1e-3)


def test_what_is_set_is_what_the_next_update_uses():
    """Under jit with donation, which refuses one array in several places."""
    tx = optax.chain(optax.clip_by_global_norm(1e9), optax.MultiSteps(inject(), 1))
    state = jax.tree.map(jnp.copy, tx.init(PARAMS))
    ones = jax.tree.map(jnp.ones_like, run("read the momentum", state)["mu"])
    state = run("set the momentum", state, mu=ones)["state"]
    state = run("set the rate", state)["state"]
    state = run("set all counts", state)["state"]
    structure = jax.tree.structure(state)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, state = jax.jit(tx.update, donate_argnums=1)(zeros, state, PARAMS)
    size = jnp.linalg.norm(updates["up"]["kernel"])
    np.testing.assert_allclose(size, 0.01 * np.sqrt(12 / 8), rtol=0.3)
    assert run("read the count", state)["count"] == 1001
    assert jax.tree.structure(state) == structure


def test_a_count_that_is_not_kept_cannot_be_set_by_mistake():
    """Without the filter Optax writes it in place of None too."""
    tx = omp.momentum(0.5, nesterov=False)
    params = {"w": jnp.ones((2, 2))}
    state = optax.tree.set(tx.init(params), count=1)
    with pytest.raises(ValueError, match="unknown count"):
        tx.update(params, state)


def test_the_rate_of_the_last_update_is_read_by_any_name():
    falling = optax.linear_schedule(0.4, 0.0, 4)
    tx = optax.inject_hyperparams(omp.muonplus)(falling, polar="svd", adam_learning_rate=0.5)
    state = tx.init(PARAMS)
    rates = [float(omp.learning_rate(state))]
    for _ in range(3):
        _, state = tx.update(PARAMS, state, PARAMS)
        rates.append(float(omp.learning_rate(state)))
    np.testing.assert_allclose(rates, [0.4, 0.4, 0.3, 0.2], rtol=1e-6)
    assert omp.learning_rate(state, "adam_learning_rate") == 0.5
    state.hyperparams["learning_rate"] = 0.25  # as scripts set it
    assert omp.learning_rate(state) == 0.25
    of_that_name = optax.inject_hyperparams(omp.muonplus)(0.1, beta=0.5, polar="svd")
    state = of_that_name.init({"norm": {"beta": jnp.ones(3)}})
    assert omp.learning_rate(state, "beta") == 0.5
    complex_bias = {"up": jnp.ones((4, 6)), "bias": jnp.ones(3, jnp.complex64)}
    rate = omp.learning_rate(optax.inject_hyperparams(omp.muonplus)(0.1).init(complex_bias))
    assert rate.dtype == jnp.float32 and rate == jnp.float32(0.1)


def test_no_rate_and_several_are_said():
    with pytest.raises(ValueError, match=r"no learning_rate\. Only optax\.inject_hyperparams"):
        omp.learning_rate(omp.muonplus(0.1).init(PARAMS))
    two = [inject().init(PARAMS), inject().init(PARAMS)]
    with pytest.raises(ValueError, match=r"has several learning_rate, \[0\].*\[1\].*: pass a part"):
        omp.learning_rate(two)
