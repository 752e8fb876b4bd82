"""Bad input of the theory is named, and its public names are documented."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import theory


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: theory.expected_variance_shift([]), r"at least one; got shape \(0,\)"),
        (lambda: theory.pairwise_variance_shift(0.5), r"at least one; got shape \(\)"),
        (lambda: theory.expected_variance_shift([0.5, 1.2]), "from 0.5 to 1.2. Divide them"),
        (lambda: theory.simulate_variance_shift([-0.1, 0.3]), "from -0.1 to 0.3"),
        (lambda: theory.expected_variance_shift([np.nan]), r"singular values in \[0, 1\]"),
        (lambda: theory.expected_variance_shift([0.5] * 3, size=2), "size=2 rows cannot have 3"),
        (lambda: theory.expected_variance_shift([0.5], size=1.5), "size must be an integer"),
        (lambda: theory.simulate_variance_shift([[0.5]]), r"one spectrum \(r,\), got shape \(1, 1"),
        (lambda: theory.simulate_variance_shift([0.5], samples=1), "samples must be at least 2"),
        (lambda: theory.phi(0.5, "jorden"), "Unknown ns_coeffs 'jorden'. Known names: jordan"),
        (lambda: theory.step_regions("you", 7), "too few for ns_steps=7"),
        (lambda: theory.composed_regions("you", 0), "ns_steps must be an integer of at least 1"),
        (lambda: theory.composed_regions(upper=0), "upper must be positive and finite, got 0"),
        (lambda: theory.step_regions(upper=np.nan), "upper must be positive and finite, got nan"),
        (lambda: jax.jit(lambda n: theory.g(0.5, "jordan", n))(2), "is traced, but .* NumPy"),
    ],
)
def test_bad_input_of_the_scalar_theory_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


VECTORS = {"norm": {"scale": jnp.ones(3)}, "dense": {"kernel": jnp.ones((2, 3))}}


def total(params):
    return sum(jnp.sum(jnp.square(jnp.abs(x))) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "loss, params, arguments, message",
    [
        (total, VECTORS, {"side": "rows"}, "Unknown side 'rows'. Known: row, col"),
        (total, VECTORS, {"iterations": 0}, "iterations must be an integer of at least 1, got 0"),
        (total, VECTORS, {"blocks": 0}, "blocks must be an integer of at least 1"),
        (total, VECTORS, {"blocks_at_once": 2.5}, "blocks_at_once must be an integer"),
        (
            total,
            VECTORS,
            {"only": "attn"},
            "only='attn' matches no matrix. The nearest .* dense/kernel",
        ),
        (
            total,
            VECTORS,
            {"only": ["dense", "scale"]},
            "only='scale' matches norm/scale, which are not matrices",
        ),
        (total, VECTORS, {"only": []}, "chooses no matrix"),
        (total, {"scale": jnp.ones(3)}, {}, r"no matrix, .* among scale \(3,\)"),
        (total, {}, {}, "No matrix is among the parameters: there are none"),
        (total, {"conv": jnp.ones((2, 3, 4))}, {}, "No rule says how .* conv"),
        (
            total,
            VECTORS,
            {"weight_dimension_numbers": {"norm": omp.MuonDimensionNumbers(0, 1), "dense": None}},
            r"shape \(3,\) is not a matrix",
        ),
        (total, {"w": jnp.ones((2, 2), jnp.complex64)}, {}, r"real floating-point .* w \(complex"),
        (total, {"w": jnp.ones((2, 2), jnp.int32)}, {}, r"real floating-point .* w \(int32"),
        (lambda p: p["dense"]["kernel"], VECTORS, {}, "must be one real number, got Shape"),
        (lambda p: (total(p), 1.0), VECTORS, {}, "return nothing beside the loss"),
    ],
)
def test_bad_input_of_the_curvature_is_named(loss, params, arguments, message):
    with pytest.raises(ValueError, match=message):
        theory.block_curvatures(loss, params, key=jax.random.key(0), **arguments)


def test_updates_must_be_there_and_have_the_shapes_of_their_parameters():
    curvatures = theory.block_curvatures(total, VECTORS, key=jax.random.key(0))
    with pytest.raises(ValueError, match="No updates for dense/kernel: there are norm/scale"):
        theory.weighted_curvature(curvatures, {"norm": {"scale": jnp.ones(3)}})
    turned = {"dense": {"kernel": jnp.ones((3, 2))}}
    with pytest.raises(ValueError, match=r"dense/kernel has \(3, 2\), its parameter \(2, 3\)"):
        theory.weighted_curvature(curvatures, turned)
    with pytest.raises(ValueError, match="Shapes of gradients"):
        theory.descent_bound(curvatures, turned, VECTORS)


def test_every_public_name_is_documented_and_listed():
    public = {name for name in vars(theory) if not name.startswith("_")}
    for name in public:
        assert inspect.getdoc(getattr(theory, name)), name
    functions = {name for name in public if inspect.isfunction(getattr(theory, name))}
    for name in functions:
        assert f"`{name}`" in theory.__doc__, name
