"""Half precision: of parameters with their state, and of the products of the polar step."""

import jax
import pytest

from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, program
from examples.trainer.training.optimizers import for_platform
from tests.support.trainer import assemble_toy, first_losses


def test_bfloat16_parameters_halve_the_state(text):
    changes = {"compute_dtype": "bfloat16", "scan": True, "accumulate": 2, "batch_size": 16}
    half, mixed = (
        assemble_toy(text, "", 1, param_dtype=dtype, **changes) for dtype in ("bfloat16", "float32")
    )

    def sizes(tree):
        return [x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim]

    state = half.program.abstract
    for part in ("params", "opt_state"):
        expected = sizes(getattr(mixed.program.abstract, part))
        assert sizes(getattr(state, part)) == [size / 2 for size in expected]
    after, _ = jax.eval_shape(
        half.program.train_step, state, optimizers.Rates(0.1, 0.1), *half.loader.batch(0)
    )
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    # Parameters are rounded to 8 bits after each step too; the loss falls by 0.25 in these steps.
    assert first_losses(half) == pytest.approx(first_losses(mixed), abs=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "half"),
    [("normuon", "float16", "f16"), ("muonplus", "auto", None)],
)
def test_products_of_the_polar_step_have_the_dtype_asked_for(name, dtype, half, text):
    rule = OptimizerConfig(name=name, compute_dtype=dtype)
    toy = assemble_toy(text, "", 1, optimizer=rule)
    shapes = jax.eval_shape(toy.init)
    lowered = (
        toy.program.train_step.trace(shapes, optimizers.Rates(0.1, 0.1), *toy.loader.batch(0))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    halves = [line for line in products if "xbf16>" in line or "xf16>" in line]
    # The polar step has 15 products for each of two stacks of shapes; the model has float32.
    assert bool(halves) == (half is not None)
    assert all(f"x{half}>" in line for line in halves)


@pytest.mark.parametrize(
    ("platform", "changes", "dtype"),
    [
        ("cpu", {}, "float32"),
        ("gpu", {}, "bfloat16"),
        ("tpu", {}, "bfloat16"),
        ("gpu", {"polar": "gram"}, "bfloat16"),
        ("gpu", {"polar": "gram", "ns_coeffs": "polar_express"}, "float32"),
        ("cpu", {"compute_dtype": "bfloat16"}, "bfloat16"),
        ("gpu", {"compute_dtype": "float32"}, "float32"),
    ],
)
def test_dtype_of_products_by_platform(platform, changes, dtype):
    assert for_platform(OptimizerConfig(**changes), platform).compute_dtype == dtype


def test_gram_in_half_precision_is_as_the_library_has_it(text):
    """Taken for coefficients with known restarts, and refused by the names of the flags."""
    exact = first_losses(assemble_toy(text, "", 1, optimizer=OptimizerConfig(polar="gram")), 4)
    for dtype in ("float16", "bfloat16"):
        rule = OptimizerConfig(polar="gram", compute_dtype=dtype)
        program.check_settings(RunConfig(optimizer=rule))
    half = first_losses(assemble_toy(text, "", 1, optimizer=rule), 4)
    assert half == pytest.approx(exact, abs=0.02) and half != exact
    rule = OptimizerConfig(polar="gram", compute_dtype="bfloat16", ns_coeffs="polar_express")
    flags = r"\nIn flags: --optimizer.polar,"
    with pytest.raises(UserError, match=r"polar='gram' is less exact [^-]*" + flags):
        program.check_settings(RunConfig(optimizer=rule))
