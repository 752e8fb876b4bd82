"""Measures of imbalance in the matrices inside of Muon+, and optimizers that record them.

The measures are functions on arrays ``(*batch, out, in)``. :func:`recorded` makes ``muonplus``
measure every matrix at chosen updates and keep the results in its state; :func:`watched` does so
for any transformation. :func:`read` returns the results by parameter path.
"""

from optax_muonplus.diagnostics._imbalance import floor_share as floor_share
from optax_muonplus.diagnostics._imbalance import norm_ratio as norm_ratio
from optax_muonplus.diagnostics._imbalance import norm_variance as norm_variance
from optax_muonplus.diagnostics._imbalance import polar_distance as polar_distance
from optax_muonplus.diagnostics._imbalance import rms as rms
from optax_muonplus.diagnostics._imbalance import spearman as spearman
from optax_muonplus.diagnostics._measures import MEASURES as MEASURES
from optax_muonplus.diagnostics._measures import Measure as Measure
from optax_muonplus.diagnostics._record import Record as Record
from optax_muonplus.diagnostics._record import RecordState as RecordState
from optax_muonplus.diagnostics._record import read as read
from optax_muonplus.diagnostics._recorder import recorded as recorded
from optax_muonplus.diagnostics._recorder import watched as watched
from optax_muonplus.matrices import Side as Side
