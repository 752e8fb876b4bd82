"""Coefficients of the odd polynomials that Newton-Schulz iterations apply.

:data:`TABLES` holds the published tables, and :func:`for_steps` the rows that a run of them uses.
Coefficients are Python numbers: they never become arrays in an optimizer's state.
"""

from optax_muonplus._core.coefficients import TABLES as TABLES
from optax_muonplus._core.coefficients import for_steps as for_steps
