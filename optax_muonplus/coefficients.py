"""Coefficients of the odd polynomials that Newton-Schulz iterations apply.

:data:`TABLES` holds the published tables; :func:`for_steps` returns the rows for a number of steps.
Coefficients are Python numbers, never arrays in an optimizer's state.
"""

from optax_muonplus._core.coefficients import TABLES as TABLES
from optax_muonplus._core.coefficients import for_steps as for_steps
