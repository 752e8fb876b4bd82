"""Coefficients of the odd polynomials that Newton-Schulz iterations apply.

The published tables (:data:`TABLES`), the generators of new ones, and :func:`resolve`, which says
what a run of some steps uses. Plain Python numbers throughout: coefficients are static, never
arrays in an optimizer's state.
"""

from optax_muonplus.coefficients._minimax import Row as Row
from optax_muonplus.coefficients._minimax import evaluate as evaluate
from optax_muonplus.coefficients._minimax import minimax as minimax
from optax_muonplus.coefficients._minimax import polar_express as polar_express
from optax_muonplus.coefficients._tables import TABLES as TABLES
from optax_muonplus.coefficients._tables import Coefficients as Coefficients
from optax_muonplus.coefficients._tables import Table as Table
from optax_muonplus.coefficients._tables import resolve as resolve
