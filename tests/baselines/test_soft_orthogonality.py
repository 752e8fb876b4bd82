"""The term that ORCA adds, against its formula in float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from optax_muonplus.baselines import SoftOrthogonality
from tests.support.baselines import SHAPES, assert_sharded_is_alone, run, trees
from tests.support.reference_baselines import soft_orthogonality_gradient


def orca(strength, rate=0.05, **where):
    link = omp.matrix_chain(omp.scale_by_muonplus(norm="none"), SoftOrthogonality(strength))
    return omp.optimizer(link, rate, **where)


def first_quarter(step):
    return jnp.where(step < 1, 0.5, 0.0)


def test_matrices_are_drawn_to_orthonormal_ones_for_the_first_steps():
    params, grads = trees()
    (first, second, *_), _ = run(orca(first_quarter), params, grads)
    plain, _ = run(omp.optimizer(omp.scale_by_muonplus(norm="none"), 0.05), params, grads[:2])
    for key in SHAPES:
        pull = soft_orthogonality_gradient(params[key].T.astype(float)).T
        expected = plain[0][key] - 0.05 * 0.5 * pull
        # The sums of the term are of the size of |W|^3, about 100 here.
        np.testing.assert_allclose(first[key], expected, rtol=0, atol=2e-5)
        # After that the step is the rule's.
        np.testing.assert_allclose(
            second[key] - first[key], plain[1][key] - plain[0][key], atol=1e-6
        )


@pytest.mark.several_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_get_the_update_of_one_device(kind):
    params, grads = trees(shapes={"up": (16, 32), "down": (32, 16)})
    specs = dict.fromkeys(params, P("fsdp", "tensor"))
    make = functools.partial(orca, first_quarter)
    assert_sharded_is_alone(make, params, grads, specs, kind, (4, 2))


def test_what_it_needs_is_said():
    with pytest.raises(ValueError, match="strength must be a finite number, not negative"):
        SoftOrthogonality(-1.0)
    params, grads = trees(shapes={"up": (4, 6)})
    tx = orca(1.0, muon_weight_dimension_numbers=MuonDimensionNumbers(0, 1))
    with pytest.raises(ValueError, match="SoftOrthogonality needs the parameters"):
        tx.update(grads[0], tx.init(params))
