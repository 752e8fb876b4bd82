"""The paper's theory, for any coefficients and for a user's own model.

- Which eigenvalues Newton-Schulz steps drive apart (section 2.1): the maps :func:`phi`, :func:`g`
  and :func:`g_prime`, the regions where ``|g'|`` is above and below 1, each step by itself
  (:func:`step_regions`) and all together (:func:`composed_regions`), and :func:`corollary_delta`.
- What that does to the variance of row norms (Lemma 1): :func:`expected_variance_shift` in closed
  form, :func:`pairwise_variance_shift` as the lemma has it, with the :func:`mean_value_slope` of a
  pair, and :func:`simulate_variance_shift` over random matrices.
- What imbalance costs (Theorem 1): :func:`block_curvatures` of a loss for rows or columns, the
  :func:`weighted_curvature` of an update, and the :func:`descent_bound` that they make.

How much flatter the rows are that Muon+ steps along, on a model and a batch of one's own::

  from optax_muonplus import theory

  gradients = jax.grad(loss)(params)
  curvatures = theory.block_curvatures(loss, params, "row", key=jax.random.key(0), blocks=16)
  for norm in ("none", "col_row"):
      tx = optax_muonplus.scale_by_muonplus(norm=norm)  # for trees of matrices
      updates, _ = tx.update(gradients, tx.init(params), params)
      bound = theory.descent_bound(curvatures, gradients, updates)

``mean_curvature`` and ``decrease`` of the two bounds can be compared as they are.

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
from optax_muonplus.theory._variance_shift import Estimate as Estimate
from optax_muonplus.theory._variance_shift import expected_variance_shift as expected_variance_shift
from optax_muonplus.theory._variance_shift import mean_value_slope as mean_value_slope
from optax_muonplus.theory._variance_shift import pairwise_variance_shift as pairwise_variance_shift
from optax_muonplus.theory._variance_shift import simulate_variance_shift as simulate_variance_shift
