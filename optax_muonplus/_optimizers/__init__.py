"""Muon+ and Muon for whole models, the table of parameters, and the change of optimizers."""

from optax_muonplus._optimizers.describe import describe as describe
from optax_muonplus._optimizers.muon import muon as muon
from optax_muonplus._optimizers.muonplus import muonplus as muonplus
from optax_muonplus._optimizers.take_over import take_over as take_over
from optax_muonplus._optimizers.take_over_report import TakenOver as TakenOver
