"""Moving from `optax.contrib.muon` changes one name: the same keywords, the same updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp

STEPS = 3
# What optax.contrib.muon always does.
AS_OPTAX = {"shape_scale": "max", "bias_correction": True, "polar": "newton_schulz"}

SHAPES = {
    "square": (16, 16),
    "query": (20, 3, 4),  # wide: 20 in, 12 out
    "experts": (2, 12, 20),  # tall: 12 in, 20 out
    "bias": (7,),
}
DIMS = {
    "square": MuonDimensionNumbers(),
    "query": MuonDimensionNumbers(0, (1, 2)),
    "experts": MuonDimensionNumbers(-2, -1),
    "bias": None,
}
MATRICES = ("square", "query", "experts")


def random_trees(seed, names=MATRICES, dtype=np.float32):
    """Parameters, and Gaussian gradients with one leading axis for the steps."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.normal(size=shape)
        return (x + 1j * rng.normal(size=shape) if dtype == np.complex64 else x).astype(dtype)

    params = {k: draw(*SHAPES[k]) for k in names}
    return params, {k: draw(STEPS, *SHAPES[k]) for k in names}


def updates_of(tx, params, grads):
    """Updates of every step; the parameters move, so that decay is seen to compound."""

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), updates

    return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), grads)[1])()


def assert_parity(params, grads, tolerance=1e-5, ours=None, learning_rate=0.02, **options):
    """Equal to a fraction `tolerance` of each leaf's largest entry, at every step."""
    options = {"eps": 1e-8, **options}
    options.setdefault("muon_weight_dimension_numbers", {k: DIMS[k] for k in params})
    expected = updates_of(optax.contrib.muon(learning_rate, **options), params, grads)
    tx = omp.muonplus(learning_rate, norm="none", **{**AS_OPTAX, **options, **(ours or {})})
    actual = updates_of(tx, params, grads)
    for key, want in expected.items():
        error = np.abs(actual[key] - want).max() / np.abs(want).max()
        assert error <= tolerance, f"{key}: {error:.2e}"


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"ns_coeffs": "dion", "consistent_rms": 0.2},
        {"ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 8, "nesterov": False},
        # An eps that is felt; Optax adds it under "frobenius" and "spectral" only.
        {"ns_coeffs": "standard", "ns_steps": 3, "beta": 0.8, "eps": 0.5},
        {"preconditioning": "spectral", "eps": 0.5},
        {"preconditioning": "schatten"},
        {"preconditioning": "aol"},
    ],
    ids=str,
)
def test_same_keywords_same_updates(options):
    # Square matrices are a case of their own for the norms of the pre-normalization only.
    names = MATRICES if "preconditioning" in options else ("query", "experts")
    assert_parity(*random_trees(0, names), **options)


@pytest.mark.parametrize(
    ("names", "tolerance", "options"),
    [
        # bfloat16 keeps 8 bits. Optax rounds beta and beta * M to it too, which stay float32 here.
        (("query", "experts"), 2e-2, {"mu_dtype": "bfloat16"}),
        # Optax sums the dual norm over a leaf's batch axes too.
        (("square", "query"), 1e-5, {"adaptive": True}),
        (MATRICES, 1e-4, {"ours": {"polar": "auto"}}),
    ],
    ids=["bfloat16", "adaptive", "auto"],
)
def test_options_that_differ_by_rounding_or_on_some_leaves(names, tolerance, options):
    assert_parity(*random_trees(7, names), tolerance=tolerance, **options)


@pytest.mark.parametrize("nesterov", [True, False])
def test_whole_optimizer_with_schedules_decay_mask_and_adamw(nesterov):
    """Schedules, a tree as decay mask, and the AdamW group, to which Optax applies Nesterov too."""
    assert_parity(
        *random_trees(3, SHAPES),
        learning_rate=optax.linear_schedule(0.1, 0.01, STEPS),
        adam_learning_rate=optax.linear_schedule(0.2, 0.01, STEPS),
        weight_decay=0.1,
        weight_decay_mask={"square": False, "query": True, "experts": True, "bias": True},
        nesterov=nesterov,
        eps=1e-8,
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps_root=1e-4,
        adam_weight_decay=0.3,
        ours={"adam_nesterov": nesterov},
    )


def test_dimension_numbers_and_mask_as_functions():
    def dims(tree):
        return {k: DIMS[k] for k in tree}

    def mask(tree):
        return jax.tree.map(lambda x: x.ndim == 3, tree)

    assert_parity(
        *random_trees(4, SHAPES),
        nesterov=False,
        muon_weight_dimension_numbers=dims,
        weight_decay=0.1,
        weight_decay_mask=mask,
        ours={"adam_nesterov": False},
    )


def test_dimension_numbers_as_a_prefix_and_by_default():
    params, grads = random_trees(5, ("square",))
    params = {"a": params, "b": {"square": params["square"][:, :10]}, "c": jnp.ones(3)}
    grads = {"a": grads, "b": {"square": grads["square"][:, :, :10]}, "c": jnp.ones((STEPS, 3))}
    for dims in ({"a": MuonDimensionNumbers(1, 0), "b": MuonDimensionNumbers(), "c": None}, None):
        results = [
            updates_of(maker(0.02, muon_weight_dimension_numbers=dims, **options), params, grads)
            for maker, options in [
                (optax.contrib.muon, {}),
                (omp.muon, AS_OPTAX),
            ]
        ]
        for want, got in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def small_model():
    """Parameters, and the loss of a two-layer model that predicts the next of 31 tokens."""
    rng = np.random.default_rng(0)
    shapes = {
        "embed": {"embedding": (31, 12)},
        "up": {"kernel": (24, 40), "bias": (40,)},
        "down": {"kernel": (40, 12), "bias": (12,)},
        "norm": {"scale": (12,)},
        "lm_head": {"kernel": (12, 31)},
    }
    params = jax.tree.map(
        lambda shape: rng.normal(scale=0.3, size=shape), shapes, is_leaf=lambda x: type(x) is tuple
    )
    text = jnp.asarray(np.cumsum(rng.integers(1, 4, size=400)) % 31)

    def loss(params, start):
        tokens = jax.lax.dynamic_slice_in_dim(text, start, 66)
        x = params["embed"]["embedding"][tokens[:-1]]
        x = jnp.concatenate([x[:-1], x[1:]], axis=-1)
        x = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None])
        x = x @ params["down"]["kernel"] + params["down"]["bias"][None]
        x = x * params["norm"]["scale"][None]
        logits = x @ params["lm_head"]["kernel"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[2:]).mean()

    return params, loss


def losses(tx, params, loss, steps=300):
    def step(carry, i):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, (i * 67) % 334)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))[1])()


def test_300_losses_of_a_model_agree_with_optax():
    """Embedding, head, norm and biases are AdamW's in both; in float64, so that rounding that
    grows from step to step stays below what another rule would change."""
    with jax.enable_x64(True):
        params, loss = small_model()
        dims = omp.muon_dimension_numbers(params)
        assert sum(x is not None for x in (dims["up"]["kernel"], dims["down"]["kernel"])) == 2
        given = {
            "learning_rate": optax.cosine_decay_schedule(0.02, 300),
            "weight_decay": 0.1,
            "adam_weight_decay": 0.1,
            "eps": 1e-8,
            "muon_weight_dimension_numbers": dims,
        }
        expected = losses(optax.contrib.muon(**given), params, loss)
        found = losses(omp.muon(**given, **AS_OPTAX), params, loss)
        assert expected[-1] < 0.7 * expected[0]
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        without = losses(omp.muon(**given, **AS_OPTAX, adam_nesterov=False), params, loss)
        assert np.abs(without / expected - 1).max() > 1e-3


def test_the_defaults_keep_the_size_of_updates():
    """So that a rate fits which was tuned for Muon with Optax's factor; AdamW's are Optax's."""
    params, grads = random_trees(8, SHAPES)
    given = {"muon_weight_dimension_numbers": DIMS}
    muon = updates_of(omp.muon(0.02, **given), params, grads)
    found = updates_of(omp.muonplus(0.02, **given), params, grads)
    expected = updates_of(optax.contrib.muon(0.02, **given), params, grads)
    np.testing.assert_allclose(found["bias"], expected["bias"], rtol=1e-5)
    for name in MATRICES:
        sizes = [np.linalg.norm(x[name].reshape(STEPS, -1), axis=1) for x in (found, muon)]
        np.testing.assert_allclose(*sizes, rtol=1e-5)
        assert np.abs(found[name] / muon[name] - 1).max() > 0.01
