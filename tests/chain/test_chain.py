"""Chains of links: what all of them get, what is refused, states, and what becomes of functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus._chain import chain
from optax_muonplus._chain.program import functions_of
from optax_muonplus._leaves.layout import MatrixLayout
from optax_muonplus._leaves.record import MUON, LeafInfo, ResolvedTree
from optax_muonplus.contrib import NorMuon
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import DualNorm, Momentum, run_plain
from tests.support import trees

OTHER_WAY = {"dense": {"kernel": omp.MuonDimensionNumbers(1, 0), "bias": None}}


def tree(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "dense": {
            "kernel": rng.normal(size=(12, 20)).astype(dtype),
            "bias": rng.normal(size=20).astype(dtype),
        }
    }


def first_update(tx, **kwargs):
    params, grads = tree(0), tree(1)
    return tx.update(grads, tx.init(params), params, **kwargs)[0]["dense"]


FREE_ROWS = Normalize("row", match_frobenius=False)


def parts():
    return Momentum(), Orthogonalize(), FREE_ROWS, ScaleByShape("none")


def variant(dims=None, rate=1.0, decay=0.0):
    where = omp.Matrices(weight_dimension_numbers=dims)
    others = optax.nadamw(0.1, weight_decay=0.0)
    return omp.optimizer(omp.matrix_chain(*parts()), rate, decay, others=others, where=where)


def test_dimension_numbers_reach_all_links_of_an_optimizer():
    for dims in (None, OTHER_WAY):
        expected = omp.muonplus(
            1.0,
            norm="row",
            match_frobenius=False,
            shape_scale="none",
            adam_learning_rate=0.1,
            muon_weight_dimension_numbers=dims,
        )
        found, wanted = first_update(variant(dims)), first_update(expected)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    # Rows of W have norm 1: for the kernel of Flax over axis 0, and here over axis 1.
    np.testing.assert_allclose(np.linalg.norm(found["kernel"], axis=1), 1, rtol=1e-5)


def test_links_say_who_is_a_matrix():
    where = omp.Matrices(weight_dimension_numbers=OTHER_WAY)
    link = omp.normalize("row", match_frobenius=False, where=where)
    tx = optax.partition(
        {"muon": optax.chain(omp.momentum(), link), "adam": optax.adamw(0.1)}, link.labels
    )
    assert omp.partition_labels(tree(0), link) == link.labels(tree(0))
    updates = first_update(tx)
    np.testing.assert_allclose(np.linalg.norm(updates["kernel"], axis=1), 1, rtol=1e-5)


def test_labels_by_rules_that_no_link_has_are_refused():
    """Links would read the matrices by the default rules: another update, without a word."""
    where = omp.Matrices(rules=[("kernel", omp.MuonDimensionNumbers(1, 0))])
    links = omp.matrix_chain(omp.momentum(), omp.normalize("row"))
    tx = optax.partition({"muon": links, "adam": optax.adamw(0.1)}, where.labels)
    with pytest.raises(ValueError, match=r"kernel in another way.*chain\.labels"):
        tx.init(tree(0))
    with pytest.raises(ValueError, match="kernel in another way"):
        omp.partition_labels(tree(0), where)
    # Whatever the links are, they read what is left in the same way.
    assert omp.Matrices(rules=[("kernel", None)]).labels(tree(0))["dense"]["kernel"] == "adam"
    other = omp.Matrices(weight_dimension_numbers=OTHER_WAY)
    link = omp.normalize("row", where=other)
    with pytest.raises(ValueError, match="Got two different where="):
        omp.matrix_chain(omp.momentum(), link, where=where)
    assert omp.matrix_chain(omp.momentum(), link).where is other
    assert omp.optimizer(omp.matrix_chain(omp.momentum(), link), 0.1).where is other


def test_a_chain_is_its_links_one_after_the_other():
    """With functions, links and values of this library, and transformations of Optax."""
    matrices = {"kernel": tree(0)["dense"]["kernel"]}
    grads = {"kernel": tree(1)["dense"]["kernel"]}
    chains = (
        omp.matrix_chain(omp.momentum(), Orthogonalize(), jnp.tanh, optax.scale(2.0)),
        optax.chain(
            omp.momentum(),
            omp.orthogonalize(),
            omp.matrix_chain(jnp.tanh),
            optax.scale(2.0),
        ),
    )
    one, other = (tx.update(grads, tx.init(matrices))[0]["kernel"] for tx in chains)
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_link_with_a_state_sees_what_was_not_rounded():
    """The polar factor in float32 of bfloat16 gradients; updates are bfloat16 again."""
    seen = []

    class Spy:
        def init(self, params, leaves):
            return optax.EmptyState()

        def update(self, updates, state, params, leaves):
            seen.append(updates["kernel"].dtype)
            return updates, state

    tx = omp.matrix_chain(omp.momentum(), omp.orthogonalize(), Spy(), omp.scale_by_shape())
    grads = {"kernel": jnp.ones((4, 8), jnp.bfloat16)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert seen == [jnp.float32]
    assert updates["kernel"].dtype == jnp.bfloat16


def test_a_chain_of_optax_links_alone_rounds_nothing():
    widened = optax.stateless(lambda updates, _: jax.tree.map(jnp.float32, updates))
    tx = omp.matrix_chain(widened, optax.scale(0.5))
    grads = {"kernel": jnp.ones((4, 8), jnp.bfloat16)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["kernel"].dtype == jnp.float32


def test_decay_and_rate_of_a_chain():
    params = tree(0)["dense"]["kernel"]
    moved = first_update(variant(rate=0.25))["kernel"]
    np.testing.assert_allclose(moved, first_update(variant())["kernel"] * 0.25, rtol=1e-6)
    expected = moved - 0.125 * params
    found = first_update(variant(rate=0.25, decay=0.5))["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


class EveryLeaf:
    """A reader for which every leaf is a matrix (in, out)."""

    def read(self, tree):
        arrays, structure = jax.tree.flatten(tree)
        layouts = [MatrixLayout.of(x.shape, omp.MuonDimensionNumbers()) for x in arrays]
        pairs = enumerate(zip(arrays, layouts, strict=True))
        leaves = [LeafInfo(i, (str(i),), x.shape, x.dtype, layout) for i, (x, layout) in pairs]
        labels = structure.unflatten([MUON] * len(leaves))
        return ResolvedTree(leaves, arrays, structure.unflatten, labels)

    def place(self, state, tree):
        return state


@pytest.mark.parametrize("links", [parts(), (NorMuon(),)], ids=["functions", "a rule"])
def test_a_chain_reads_and_runs_by_what_it_is_given(links):
    """In the frame; the public chain passes the one that reads by rules, and what runs fast."""
    grads, seen = {"kernel": tree(1)["dense"]["kernel"]}, []

    def run(program, *where):
        seen.append(program)
        return run_plain(program, *where)

    own = chain.matrix_chain(*links, where=EveryLeaf(), run=run)
    public = omp.matrix_chain(*links)
    found, expected = (tx.update(grads, tx.init(grads))[0]["kernel"] for tx in (own, public))
    assert len(seen) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def steps_of(*parts):
    (link,) = omp.matrix_chain(*parts).chain.links
    return functions_of(link.functions)


def first_step(*before_scale):
    polar_factor = Orthogonalize(compute_dtype="bfloat16")
    parts = [Momentum(), polar_factor, Normalize(), *before_scale, ScaleByShape()]
    return steps_of(*parts)[0]


def test_matrices_may_be_rounded_early_unless_a_step_needs_them_exactly():
    """The dual norm is an inner product with the momentum itself."""
    assert first_step().input_dtype == jnp.bfloat16
    assert first_step(DualNorm()).input_dtype is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [((), ("row", False)), (("col",), ("col", False)), (("none", True), ("none", True))],
)
def test_the_factor_by_shape_knows_the_normalization_before_it_unless_it_is_told(given, expected):
    factor = ScaleByShape("none", 0.2, *given)
    scale = steps_of(Orthogonalize(), Normalize("row", match_frobenius=True), factor)[-1]
    assert (scale.norm, scale.match_frobenius) == expected


def test_an_adaptive_step_has_the_size_of_the_corrected_momentum():
    """Which at the first step is the gradient, with whatever decay.

    In float64: in float32 either of the two is off by 6e-6 for entries up to 10, which is five
    roundings of these, and they agree to 1e-6 or not by the order that a version of XLA adds in.
    """
    options = {"adaptive": True, "nesterov": False}
    corrected = omp.scale_by_muonplus(beta=0.9, bias_correction=True, **options)
    memoryless = omp.scale_by_muonplus(beta=0.0, **options)
    with jax.enable_x64(True):
        grads = {"kernel": trees.random_tree([(4, 6)], dtype=jnp.float64)[0]}
        found, expected = (trees.first_update(tx, grads) for tx in (corrected, memoryless))
        np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-12)


def test_a_function_of_each_entry_works_on_matrices_as_they_are_stored():
    class Halved(omp.matrices.Elementwise):
        def __call__(self, x):
            return x / 2

    tx = omp.matrix_chain(Halved())
    params = {"up": {"kernel": jnp.ones((4, 6))}}  # (in, out)
    program = jax.make_jaxpr(lambda grads: tx.update(grads, tx.init(params), params))(params)
    assert "transpose[" not in str(program)


def test_fields_of_matrices_are_keywords_too():
    params = {"a": {"kernel": tree(0)["dense"]["kernel"]}}
    rules = [("a/", omp.MuonDimensionNumbers(1, 0))]

    def update(link):
        return link.update(params, link.init(params), params)[0]["a"]["kernel"]

    wanted = update(omp.scale_by_muonplus(where=omp.Matrices(rules)))
    links = (omp.momentum(), omp.orthogonalize(), omp.normalize(), omp.scale_by_shape())
    for link in (omp.scale_by_muonplus(rules=rules), omp.matrix_chain(*links, rules=rules)):
        np.testing.assert_array_equal(update(link), wanted)
    with pytest.raises(ValueError, match=r"Got rules beside where=\. Give them"):
        omp.orthogonalize(where=omp.Matrices(), rules=rules)


@pytest.mark.parametrize("as_field", [True, False])
@pytest.mark.parametrize("make", [omp.scale_by_muonplus, omp.optimizer])
def test_matrices_pass_through_injected_hyperparameters(make, as_field):
    """``inject_hyperparams`` hands on what ``**fields`` collect under that name."""
    params = {"a": {"kernel": tree(0)["dense"]["kernel"]}}
    rules = [("a/", omp.MuonDimensionNumbers(1, 0))]
    options = {"rules": rules} if as_field else {"where": omp.Matrices(rules)}
    if make is omp.optimizer:
        options |= {"rule": omp.contrib.NorMuon(), "learning_rate": 0.1}

    def update(tx):
        return tx.update(params, tx.init(params), params)[0]["a"]["kernel"]

    injected = update(optax.inject_hyperparams(make)(**options))
    np.testing.assert_allclose(injected, update(make(**options)), rtol=1e-5)
    del options["rules" if as_field else "where"]
    assert np.abs(injected - update(make(**options))).max() > 1e-3


def test_fields_of_a_users_link_are_theirs():
    """A link says what it may have by its class, and not by the names of its fields."""

    @dataclasses.dataclass
    class Tripled:
        run: int = 3
        learning_rate: float = 0.5
        momentum: float = 0.9

        def init(self, params, leaves):
            return optax.EmptyState()

        def update(self, updates, state, params, leaves):
            return jax.tree.map(lambda x: self.run * x, updates), state

    grads = {"kernel": tree(0)["dense"]["kernel"]}
    tx = omp.optimizer(omp.matrix_chain(omp.momentum(0.0, nesterov=False), Tripled()), 0.1)
    found, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(found["kernel"], -0.3 * grads["kernel"], rtol=1e-6)
