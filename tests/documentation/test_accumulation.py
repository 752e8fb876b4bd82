"""Gradient accumulation as `docs/howto/schedules.md` writes it: k gradients, one update."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.documents import PAGES

K = 4
SECTION = re.split(r"^## ", PAGES["howto/schedules.md"], flags=re.M)
(CODE,) = [
    re.findall(r"^```{code-cell}\n(.*?)^```$", section, re.M | re.S)[0]
    for section in SECTION
    if section.startswith("Gradient accumulation\n")
]


@pytest.fixture
def page(capsys):
    """The names of the page, after its three steps."""
    names = {}
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        exec(CODE, names)
        losses = [float(x) for x in re.findall(r"loss (\S+)", capsys.readouterr().out)]
        assert len(losses) == 3 and losses[2] < losses[0]
        yield names


def trees():
    params = {"up": {"kernel": jnp.ones((8, 12)), "bias": jnp.ones(12)}}
    return params, jax.random.normal(jax.random.key(1), (K, 16, 8))


def products(function, *args):
    """Matrix products in the compiled program; those in a loop count once."""
    return jax.jit(function).lower(*args).compile().as_text().count(" dot(")


def executed(jaxpr):
    """Matrix products that a program runs: those in a loop as often as it turns."""
    total = 0
    for equation in jaxpr.eqns:
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        turns = equation.params.get("length", 1)
        total += turns * sum(executed(x) for x in inner if hasattr(x, "eqns"))
        total += equation.primitive.name == "dot_general"
    return total


def test_the_step_has_the_products_of_one_update_and_multi_steps_of_k(page):
    params, batches = trees()
    tx, loss_fn = page["tx"], page["loss_fn"]
    state = tx.init(params)
    update = products(tx.update, params, state, params)
    gradient = products(jax.value_and_grad(loss_fn), params, batches[0])
    assert update > 5 > gradient > 0
    assert products(page["step"], params, state, batches) == gradient + update

    many = optax.MultiSteps(tx, K)
    state = many.init(params)
    assert products(many.update, params, state, params) == update  # in each of k calls

    def run():
        state, grads = many.init(params), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(lambda s, _: (many.update(grads, s, params)[1], None), state, length=K)

    one = executed(jax.make_jaxpr(tx.update)(params, tx.init(params), params).jaxpr)
    assert executed(jax.make_jaxpr(run)().jaxpr) == K * one
    step = jax.make_jaxpr(page["step"])(params, tx.init(params), batches)
    assert executed(step.jaxpr) == K * gradient + one


def test_the_step_two_functions_and_multi_steps_give_the_same_parameters(page):
    params, batches = trees()
    tx, add, apply = page["tx"], jax.jit(page["add"]), jax.jit(page["apply"])
    sums = page["zeros"](params)
    for batch in batches:
        sums = add(sums, batch, params)
    apart, _, loss = apply(params, tx.init(params), sums, K)
    np.testing.assert_allclose(loss, page["loss_fn"](params, batches.reshape(-1, 8)), rtol=1e-5)

    many = optax.MultiSteps(tx, K)
    state, theirs = many.init(params), params
    for batch in batches:
        grads = jax.grad(page["loss_fn"])(params, batch)
        updates, state = many.update(grads, state, params)
        theirs = optax.apply_updates(theirs, updates)

    together, *_ = page["step"](params, tx.init(params), batches)  # donates the parameters
    for other in (apart, theirs):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), together, other)


def test_gradients_of_bfloat16_are_summed_in_float32(page):
    params, batches = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trees())
    sums = page["zeros"](params)
    for batch in batches:
        sums = page["add"](sums, batch, params)
    assert {x.dtype for x in jax.tree.leaves(sums[1])} == {jnp.dtype("float32")}
    grads = [jax.grad(page["loss_fn"])(params, batch)["up"]["kernel"] for batch in batches]
    exact = sum(np.asarray(x, np.float64) for x in grads)
    np.testing.assert_allclose(sums[1]["up"]["kernel"], exact, rtol=1e-6)


def test_accumulation_is_not_recommended_by_multi_steps():
    """A wrapper that calls the optimizer k times is named where its cost is."""
    for name, text in PAGES.items():
        for code in re.findall(r"^```(?:{code-cell}|py)\n(.*?)^```$", text, re.M | re.S):
            assert "MultiSteps" not in code, name
