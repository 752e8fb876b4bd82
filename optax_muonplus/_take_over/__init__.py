"""Takes the state of one optimizer as the beginning of another's."""

from optax_muonplus._take_over.report import TakenOver as TakenOver
from optax_muonplus._take_over.taking_over import take_over as take_over
