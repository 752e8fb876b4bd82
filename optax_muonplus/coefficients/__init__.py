"""Coefficients of the odd polynomials that Newton-Schulz iterations apply.

:data:`TABLES` holds the published tables; :func:`minimax`, :func:`polar_express` and
:func:`relaxed` compute new ones; :func:`for_steps` gives what a run of a certain number of steps
uses, and :func:`evaluate` what these steps do to a singular value. Coefficients are Python numbers:
they are static, and never become arrays in an optimizer's state.
"""

from optax_muonplus.coefficients._minimax import evaluate as evaluate
from optax_muonplus.coefficients._minimax import minimax as minimax
from optax_muonplus.coefficients._minimax import polar_express as polar_express
from optax_muonplus.coefficients._minimax import relaxed as relaxed
from optax_muonplus.method import TABLES as TABLES
from optax_muonplus.method import for_steps as for_steps
