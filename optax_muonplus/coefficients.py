"""Coefficients of the odd polynomials that Newton-Schulz iterations apply.

:data:`TABLES` holds the published tables; :func:`minimax`, :func:`polar_express` and
:func:`relaxed` compute new ones; :func:`for_steps` gives what a run of a certain number of steps
uses, and :func:`evaluate` what these steps do to a singular value. Coefficients are Python numbers:
they are static, and never become arrays in an optimizer's state.
"""

from optax_muonplus._core.coefficients import TABLES as TABLES
from optax_muonplus._core.coefficients import for_steps as for_steps
from optax_muonplus._core.minimax import evaluate as evaluate
from optax_muonplus._core.minimax import minimax as minimax
from optax_muonplus._core.minimax import polar_express as polar_express
from optax_muonplus._core.minimax import relaxed as relaxed
