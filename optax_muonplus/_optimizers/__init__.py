"""Muon+ and Muon for whole models, the table of parameters, and the change of optimizers."""

from optax_muonplus._optimizers.muon_plus import muon as muon
from optax_muonplus._optimizers.muon_plus import muonplus as muonplus
from optax_muonplus._optimizers.rates import learning_rate as learning_rate
from optax_muonplus._optimizers.table import describe as describe
from optax_muonplus._optimizers.take_over import TakenOver as TakenOver
from optax_muonplus._optimizers.take_over import take_over as take_over
