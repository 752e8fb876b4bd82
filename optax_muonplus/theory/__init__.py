"""The paper's theory, for any coefficients and for a user's own model.

- Section 2.1, which eigenvalues Newton-Schulz steps drive apart: :func:`phi`, :func:`g`,
  :func:`g_prime`, :func:`step_regions`, :func:`composed_regions`, :func:`corollary_delta`.
- Lemma 1, what that does to the variance of row norms: :func:`expected_variance_shift`,
  :func:`pairwise_variance_shift`, :func:`mean_value_slope`, :func:`simulate_variance_shift`.
- Theorem 1, what the curvature of a loss costs an update: :func:`block_curvatures`,
  :func:`weighted_curvature`, :func:`descent_bound`.

This example compares the curvature that updates of Muon and of Muon+ meet, on a model and a batch
of your own::

  from optax_muonplus import theory

  gradients = jax.grad(loss)(params)
  curvatures = theory.block_curvatures(loss, params, "row", key=jax.random.key(0), blocks=16)
  for norm in ("none", "col_row"):
      tx = optax_muonplus.scale_by_muonplus(norm=norm)  # for trees of matrices
      updates, _ = tx.update(gradients, tx.init(params), params)
      bound = theory.descent_bound(curvatures, gradients, updates)

The fields ``mean_curvature`` and ``decrease`` of the two bounds do not depend on the size of the
updates, so that they can be compared.

Source: Zhang et al., Muon+, arXiv:2602.21545.
"""

from optax_muonplus.theory._amplification import Regions as Regions
from optax_muonplus.theory._amplification import composed_regions as composed_regions
from optax_muonplus.theory._amplification import corollary_delta as corollary_delta
from optax_muonplus.theory._amplification import g as g
from optax_muonplus.theory._amplification import g_prime as g_prime
from optax_muonplus.theory._amplification import phi as phi
from optax_muonplus.theory._amplification import step_regions as step_regions
from optax_muonplus.theory._curvature import BlockCurvature as BlockCurvature
from optax_muonplus.theory._curvature import block_curvatures as block_curvatures
from optax_muonplus.theory._descent import DescentBound as DescentBound
from optax_muonplus.theory._descent import descent_bound as descent_bound
from optax_muonplus.theory._descent import weighted_curvature as weighted_curvature
from optax_muonplus.theory._simulation import Estimate as Estimate
from optax_muonplus.theory._simulation import simulate_variance_shift as simulate_variance_shift
from optax_muonplus.theory._variance_shift import expected_variance_shift as expected_variance_shift
from optax_muonplus.theory._variance_shift import mean_value_slope as mean_value_slope
from optax_muonplus.theory._variance_shift import pairwise_variance_shift as pairwise_variance_shift
